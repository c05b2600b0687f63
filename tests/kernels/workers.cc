// Calls the worker threads of the native kernels from several threads, and checks that each block runs once. See `sanitize.py`.
#include "matmul.cc"

#include <cstdio>
#include <vector>

int main() {
  constexpr int64_t CALLERS = 3, CALLS = 2000, MAX_BLOCKS = 33;
  std::atomic<int64_t> errors{0};
  std::vector<std::thread> callers;
  for (int64_t caller = 0; caller < CALLERS; ++caller)
    callers.emplace_back([caller, &errors] {
      for (int64_t call = 0; call < CALLS; ++call) {
        const int64_t blocks = 2 + (call * 7 + caller) % (MAX_BLOCKS - 1);
        std::vector<int64_t> counts(blocks);
        auto run = [](void* context, int64_t block) { ++(*static_cast<std::vector<int64_t>*>(context))[block]; };
        Workers::get().run_all(2 + call % 3, blocks, run, &counts);
        for (int64_t count : counts) errors += count != 1;
        if (call % 100 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(5));  // the threads sleep after 2 ms
      }
    });
  for (std::thread& caller : callers) caller.join();
  std::printf("%lld calls, %lld errors\n", static_cast<long long>(CALLERS * CALLS), static_cast<long long>(errors.load()));
  std::fflush(stdout);
  std::_Exit(errors != 0 ? 1 : 0);
}
