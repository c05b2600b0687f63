// Products of rows with packed weights on a CPU: y[R, O] = x[R, I] · w[O, I]ᵀ, as a custom call of XLA.
//
// Weights are float32, bfloat16, int8, or blocks of ggml's quantized types, and are converted to float32 as they are read.
// Element i of a row is added to lane i mod LANES of a float32 accumulator, in the order of i, and the lanes are added in a fixed
// tree. So a result depends neither on the number of threads nor on other rows.
//
// The file is compiled once per instruction set (AVX2, AVX-512, AVX-512 with BF16, or NEON); `native_library.py` chooses one at run time.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <type_traits>
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#include "xla/ffi/api/ffi.h"

namespace {
namespace ffi = xla::ffi;

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif
typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint8_t Bytes __attribute__((vector_size(LANES)));
typedef int8_t SignedBytes __attribute__((vector_size(LANES)));
typedef uint8_t Bytes16 __attribute__((vector_size(16)));
typedef uint8_t Bytes32 __attribute__((vector_size(32)));
typedef uint8_t Codes __attribute__((vector_size(4 * LANES)));  // LANES groups of four bytes
typedef int8_t SignedCodes __attribute__((vector_size(4 * LANES)));
typedef int16_t Shorts __attribute__((vector_size(8 * LANES)));
typedef uint16_t CodePairs __attribute__((vector_size(4 * LANES)));
typedef uint16_t Words __attribute__((vector_size(2 * LANES)));
#define INLINE inline __attribute__((always_inline))

template <class T> INLINE T load(const void* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}
// GCC would widen each byte separately in `__builtin_convertvector`, so x86 uses intrinsics.
INLINE Ints load_bytes(const uint8_t* from) {
#if defined(__AVX512F__)
  return (Ints)_mm512_cvtepu8_epi32(load<__m128i>(from));
#elif defined(__AVX2__)
  return (Ints)_mm256_cvtepu8_epi32(_mm_loadu_si64(from));
#else
  return __builtin_convertvector(load<Bytes>(from), Ints);
#endif
}
INLINE Ints load_signed(const uint8_t* from) {
#if defined(__AVX512F__)
  return (Ints)_mm512_cvtepi8_epi32(load<__m128i>(from));
#elif defined(__AVX2__)
  return (Ints)_mm256_cvtepi8_epi32(_mm_loadu_si64(from));
#else
  return __builtin_convertvector(load<SignedBytes>(from), Ints);
#endif
}
// Keeps a value in a register. Otherwise GCC would load it again for every product.
template <class T> INLINE T in_register(T value) {
#if defined(__x86_64__)
  asm("" : "+v"(value));
#endif
  return value;
}
INLINE Floats to_floats(Ints values) { return __builtin_convertvector(values, Floats); }
INLINE Ints lane_numbers() {
  Ints numbers;
  for (int i = 0; i < LANES; ++i) numbers[i] = i;
  return numbers;
}

// Converts a float16. Without an instruction for it, the exponent is moved to that of a float32; subnormal numbers, NaN and Inf are
// separate cases.
INLINE float half(const uint8_t* from) {
#if defined(__F16C__)
  return _cvtsh_ss(load<uint16_t>(from));
#elif defined(__aarch64__)
  return static_cast<float>(load<__fp16>(from));
#else
  uint16_t bits = load<uint16_t>(from);
  uint32_t sign = (bits & 0x8000u) << 16, rest = bits & 0x7fffu, word = (rest << 13) + 0x38000000u;
  if (rest >= 0x7c00u) word += 0x38000000u;
  float value = load<float>(&word);
  if (rest < 0x400u) value = static_cast<float>(rest) * 0x1p-24f;
  return load<uint32_t>(&sign) ? -value : value;
#endif
}

// Each format reads a block of VALUES weights in BYTES bytes. A block consists of groups of GROUP weights. After `open(block)` and
// `select(group)`, `get(s)` returns the LANES weights from element s · LANES of the group.
struct Float32 {
  static constexpr int VALUES = 32, BYTES = 128, GROUP = 32;
  const uint8_t* at;
  INLINE void open(const uint8_t* block) { at = block; }
  INLINE void select(int) {}
  INLINE Floats get(int s) const { return load<Floats>(at + 4 * LANES * s); }
};

struct BFloat16 {
  static constexpr int VALUES = 32, BYTES = 64, GROUP = 32;
  const uint8_t* at;
  INLINE void open(const uint8_t* block) { at = block; }
  INLINE void select(int) {}
  INLINE Floats get(int s) const { return (Floats)(__builtin_convertvector(load<Words>(at + 2 * LANES * s), Ints) << 16); }
};

struct Int8 {
  static constexpr int VALUES = 32, BYTES = 32, GROUP = 32;
  const uint8_t* at;
  INLINE void open(const uint8_t* block) { at = block; }
  INLINE void select(int) {}
  INLINE Floats get(int s) const { return to_floats(load_signed(at + LANES * s)); }
};

struct Q8_0 {
  static constexpr int VALUES = 32, BYTES = 34, GROUP = 32;
  const uint8_t* at;
  float scale;
  INLINE void open(const uint8_t* block) { at = block + 2, scale = half(block); }
  INLINE void select(int) {}
  INLINE Floats get(int s) const { return to_floats(load_signed(at + LANES * s)) * scale; }
};

// Returns element s · LANES of a group whose first half is in the low four bits of `SIZE` bytes, the second half in the high bits.
template <int SIZE> INLINE Ints nibbles(const uint8_t* at, int s) {
  Ints bytes = load_bytes(at + s * LANES % SIZE);
  return s * LANES < SIZE ? bytes & 15 : bytes >> 4;
}

// Converts the 4-bit integers q of `nibbles` to scale · q + offset. AVX-512 looks the values up in a table of 16 floats.
struct Linear4 {
#if defined(__AVX512F__)
  Floats table;
  INLINE void set(float scale, float offset) { table = to_floats(lane_numbers()) * scale + offset; }
  template <int SIZE> INLINE Floats get(const uint8_t* at, int s) const {
    Ints bytes = load_bytes(at + s * LANES % SIZE);  // the lookup ignores all but the low four bits
    return (Floats)_mm512_permutexvar_ps((__m512i)(s * LANES < SIZE ? bytes : bytes >> 4), (__m512)table);
  }
#else
  float factor, constant;
  INLINE void set(float scale, float offset) { factor = scale, constant = offset; }
  template <int SIZE> INLINE Floats get(const uint8_t* at, int s) const {
    return to_floats(nibbles<SIZE>(at, s)) * factor + constant;
  }
#endif
};

template <int SIZE> struct Nibbles {  // scale, minimum, 4-bit values: Q4_1 and INT4
  static constexpr int VALUES = SIZE, BYTES = 4 + SIZE / 2, GROUP = SIZE;
  const uint8_t* at;
  Linear4 values;
  INLINE void open(const uint8_t* block) { at = block + 4, values.set(half(block), half(block + 2)); }
  INLINE void select(int) {}
  INLINE Floats get(int s) const { return values.get<SIZE / 2>(at, s); }
};

struct Q4_0 {
  static constexpr int VALUES = 32, BYTES = 18, GROUP = 32;
  const uint8_t* at;
  Linear4 values;
  INLINE void open(const uint8_t* block) {
    float scale = half(block);
    at = block + 2, values.set(scale, -8 * scale);
  }
  INLINE void select(int) {}
  INLINE Floats get(int s) const { return values.get<16>(at, s); }
};

// Returns the fifth bits of LANES values from element s · LANES, in bit 4. Bit i of `bits` belongs to element i.
INLINE Ints fifth_bits(uint32_t bits, int s) {
  Ints word = Ints{} + static_cast<int32_t>(bits >> (s * LANES));
  return ((word >> lane_numbers()) & 1) << 4;
}

struct Q5_0 {
  static constexpr int VALUES = 32, BYTES = 22, GROUP = 32;
  const uint8_t* at;
  float scale;
  uint32_t bits;
  INLINE void open(const uint8_t* block) { at = block + 6, scale = half(block), bits = load<uint32_t>(block + 2); }
  INLINE void select(int) {}
  INLINE Floats get(int s) const { return to_floats((nibbles<16>(at, s) | fifth_bits(bits, s)) - 16) * scale; }
};

struct Q5_1 {
  static constexpr int VALUES = 32, BYTES = 24, GROUP = 32;
  const uint8_t* at;
  float scale, minimum;
  uint32_t bits;
  INLINE void open(const uint8_t* block) {
    at = block + 8, scale = half(block), minimum = half(block + 2), bits = load<uint32_t>(block + 4);
  }
  INLINE void select(int) {}
  INLINE Floats get(int s) const { return to_floats(nibbles<16>(at, s) | fifth_bits(bits, s)) * scale + minimum; }
};

// Reads the 6-bit scales and minima of the eight groups of a Q4_K or Q5_K block. The offset of a group is its negative minimum.
struct Scales {
  float scale[8], offset[8];
  INLINE void open(const uint8_t* block) {
    uint32_t low = load<uint32_t>(block + 4), high = load<uint32_t>(block + 8), rest = load<uint32_t>(block + 12);
    uint32_t words[4] = {low & 0x3f3f3f3fu, (rest & 0x0f0f0f0fu) | ((low >> 2) & 0x30303030u), high & 0x3f3f3f3fu,
                         ((rest >> 4) & 0x0f0f0f0fu) | ((high >> 2) & 0x30303030u)};
    uint8_t codes[16];
    float d = half(block), m = half(block + 2), values[16];
    std::memcpy(codes, words, 16);
    for (int i = 0; i < 16; i += LANES) {
      Floats factor = lane_numbers() + i < 8 ? Floats{} + d : Floats{} - m;
      Floats part = to_floats(load_bytes(codes + i)) * factor;
      std::memcpy(values + i, &part, sizeof part);
    }
    std::memcpy(scale, values, 32), std::memcpy(offset, values + 8, 32);
  }
};

struct Q4_K {
  static constexpr int VALUES = 256, BYTES = 144, GROUP = 64;
  Scales scales;
  const uint8_t *start, *at;
  Linear4 values[2];
  INLINE void open(const uint8_t* block) { scales.open(block), start = block + 16; }
  INLINE void select(int group) {
    at = start + 32 * group;
    for (int i = 0; i < 2; ++i) values[i].set(scales.scale[2 * group + i], scales.offset[2 * group + i]);
  }
  INLINE Floats get(int s) const { return values[s * LANES / 32].get<32>(at, s); }
};

struct Q5_K {
  static constexpr int VALUES = 256, BYTES = 176, GROUP = 64;
  Scales scales;
  const uint8_t *start, *low, *high;
  int shift;
  float scale[2], offset[2];
  INLINE void open(const uint8_t* block) { scales.open(block), start = block + 48, high = block + 16; }
  INLINE void select(int group) {
    low = start + 32 * group, shift = 2 * group;
    for (int i = 0; i < 2; ++i) scale[i] = scales.scale[2 * group + i], offset[i] = scales.offset[2 * group + i];
  }
  INLINE Floats get(int s) const {
    int part = s * LANES / 32;
    Ints fifth = ((load_bytes(high + s * LANES % 32) >> (shift + part)) & 1) << 4;
    return to_floats(nibbles<32>(low, s) | fifth) * scale[part] + offset[part];
  }
};

struct Q6_K {
  static constexpr int VALUES = 256, BYTES = 210, GROUP = 128;
  const uint8_t* start;
  uint8_t codes[128];  // signed
  const float* scale;
  float scales[16];
  INLINE void open(const uint8_t* block) {
    start = block;
    for (int i = 0; i < 16; i += LANES) {
      const Floats part = to_floats(load_signed(block + 192 + i)) * half(block + 208);
      std::memcpy(scales + i, &part, sizeof part);
    }
  }
  INLINE void select(int group) {
    const Bytes32 bits = load<Bytes32>(start + 128 + 32 * group);
    for (int i = 0; i < 4; ++i) {
      const Bytes32 low = load<Bytes32>(start + 64 * group + i % 2 * 32);
      const Bytes32 part = ((i < 2 ? low & 15 : low >> 4) | ((bits >> 2 * i & 3) << 4)) - 32;
      std::memcpy(codes + 32 * i, &part, sizeof part);
    }
    scale = scales + 8 * group;
  }
  INLINE Floats get(int s) const { return to_floats(load_signed(codes + s * LANES)) * scale[s * LANES / 16]; }
};

// Blocks of ternary weights: a weight is (code − 1) · scale with a code of 2 bits. Code 3 gives 2 · scale, as in ggml. `codes` writes
// the codes of a block in the order of the weights.
constexpr int TERNARY = 256, CODE_VECTORS = TERNARY / (4 * LANES);
constexpr int TERNARY_CHUNK = 96;  // blocks of bytes of the rows that stay in the first-level cache

// Reads 128 codes from 32 bytes: code i is in the bits from 2 · (i / 32) of byte i mod 32.
INLINE void unpack_codes(const uint8_t* at, Codes* to) {
#if defined(__AVX512F__)
  const __m512i both = _mm512_broadcast_i64x4(load<__m256i>(at));
  for (int i = 0; i < 2; ++i) {
    const __m512i shifts = _mm512_inserti64x4(_mm512_set1_epi16(4 * i), _mm256_set1_epi16(4 * i + 2), 1);
    to[i] = (Codes)_mm512_srlv_epi16(both, shifts) & 3;
  }
#else
  for (int i = 0; i < 128; i += 4 * LANES) to[i / (4 * LANES)] = (Codes)(load<CodePairs>(at + i % 32) >> 2 * (i / 32)) & 3;
#endif
}

// Converts 256 codes to floats.
template <class F> struct TernaryFloats {
  static constexpr int VALUES = TERNARY, GROUP = 128;
  uint8_t values[TERNARY];
  const uint8_t* at;
  float scale;
  INLINE void open(const uint8_t* block) {
    Codes codes[CODE_VECTORS];
    F::codes(block, codes);
    std::memcpy(values, codes, TERNARY), scale = F::scale_of(block);
  }
  INLINE void select(int group) { at = values + 128 * group; }
  INLINE Floats get(int s) const { return to_floats(load_bytes(at + s * LANES) - 1) * scale; }
};

struct TQ2_0 : TernaryFloats<TQ2_0> {
  static constexpr int BYTES = 66;
  static INLINE float scale_of(const uint8_t* block) { return half(block + 64); }
  static INLINE void codes(const uint8_t* block, Codes* to) {
    unpack_codes(block, to), unpack_codes(block + 32, to + CODE_VECTORS / 2);
  }
};

// Five codes are the digits of a number in base 3. A byte is that number as a fraction of 243, so a multiplication by 3 moves the next
// digit in front of the point, and two comparisons read a digit.
struct TQ1_0 : TernaryFloats<TQ1_0> {
  static constexpr int BYTES = 54;
  static INLINE float scale_of(const uint8_t* block) { return half(block + 52); }
  static INLINE void codes(const uint8_t* block, Codes* to) {
    Bytes32 first[5], fractions[8];
    Bytes16 rest[6];
    first[0] = load<Bytes32>(block), rest[0] = load<Bytes16>(block + 32);
    for (int i = 1; i < 5; ++i) {
      first[i] = first[i - 1] + first[i - 1] + first[i - 1];
      rest[i] = rest[i - 1] + rest[i - 1] + rest[i - 1];
    }
    typedef uint32_t Four __attribute__((vector_size(16)));
    rest[5] = (Bytes16)(Four{} + load<uint32_t>(block + 48)) * Bytes16{1, 1, 1, 1, 3, 3, 3, 3, 9, 9, 9, 9, 27, 27, 27, 27};
    std::memcpy(fractions, first, sizeof first);
    for (int i = 0; i < 3; ++i) fractions[5 + i] = join(rest[2 * i], rest[2 * i + 1]);
#if defined(__AVX512F__)
    for (int i = 0; i < 4; ++i)
      to[i] = (Codes)_mm512_inserti64x4(_mm512_castsi256_si512((__m256i)fractions[2 * i]), (__m256i)fractions[2 * i + 1], 1);
#else
    std::memcpy(to, fractions, TERNARY);
#endif
    for (int i = 0; i < CODE_VECTORS; ++i) to[i] = -(Codes)(to[i] > 85) - (Codes)(to[i] > 170);
  }
  static INLINE Bytes32 join(Bytes16 low, Bytes16 high) {
#if defined(__AVX2__)
    return (Bytes32)_mm256_set_m128i((__m128i)high, (__m128i)low);
#else
    Bytes32 both;
    std::memcpy(&both, &low, 16), std::memcpy(reinterpret_cast<uint8_t*>(&both) + 16, &high, 16);
    return both;
#endif
  }
};

struct Ternary {  // codes without scales
  static constexpr int BYTES = 64;
  static INLINE float scale_of(const uint8_t*) { return 1; }
  static INLINE void codes(const uint8_t* block, Codes* to) { TQ2_0::codes(block, to); }
};

// Adds lanes i and i + LANES / 2, and so on.
INLINE float add_lanes(Floats values) {
#if defined(__AVX512F__)
  __m256 eight = _mm256_add_ps(_mm512_castps512_ps256((__m512)values), _mm512_extractf32x8_ps((__m512)values, 1));
#elif defined(__AVX2__)
  __m256 eight = (__m256)values;
#endif
#if defined(__AVX2__)
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
#else
  return (values[0] + values[2]) + (values[1] + values[3]);
#endif
}

constexpr int64_t DIRECT_ROWS = 16;     // with more rows, weights are converted once and stored, instead of once per group of rows
constexpr int64_t SCRATCH = 96 * 1024;  // bytes of converted weights that stay in a core's cache
constexpr int64_t MAX_OUTPUTS = 24;     // outputs that are computed together: a multiple of every tile
constexpr int64_t PREFETCH = 4096;      // bytes

// Rows are packed in groups of R = 8, 4, 2 or 1: LANES values of each row of the group in turn, filled with zeros to a multiple of
// ALIGNED values. Products run over at most CHUNK values of a group at a time, so that they stay in the first-level cache.
constexpr int64_t ALIGNED = 32, CHUNK = 8192;
// Returns the values of a packed row of I values.
int64_t aligned(int64_t I) { return (I + ALIGNED - 1) / ALIGNED * ALIGNED; }
int64_t group_size(int64_t rows) { return rows >= 8 ? 8 : rows >= 4 ? 4 : rows >= 2 ? 2 : 1; }

// Packs one group of rows.
template <class T> void pack(const T* x, int64_t rows, int64_t I, T* to) {
  constexpr int64_t STEP = 4 * LANES / sizeof(T);
  for (int64_t i = 0; i < aligned(I); i += STEP)
    for (int64_t r = 0; r < rows; ++r, to += STEP) {
      const int64_t count = std::clamp<int64_t>(I - i, 0, STEP);
      if (count < STEP) std::memset(to, 0, STEP * sizeof(T));
      std::memcpy(to, x + r * I + i, count * sizeof(T));
    }
}

// Adds the products of R packed rows with O outputs, over `blocks` blocks of weights, to `sums`. Prefetches the weights of a later
// tile, at least PREFETCH bytes ahead.
template <class F, int R, int O>
void tile(const float* x, const uint8_t* w, int64_t stride, int64_t blocks, Floats (*sums)[O]) {
  const int64_t tile_bytes = O * stride, ahead = (PREFETCH + tile_bytes - 1) / std::max<int64_t>(tile_bytes, 1) * tile_bytes;
  Floats local[R][O];
  F formats[O];
  std::memcpy(local, sums, sizeof local);
  for (int64_t b = 0; b < blocks; ++b) {
    for (int o = 0; o < O; ++o) {
      const uint8_t* at = w + o * stride + b * F::BYTES;
      for (int line = 0; line < F::BYTES; line += 64) __builtin_prefetch(at + ahead + line);
      formats[o].open(at);
    }
    for (int group = 0; group < F::VALUES / F::GROUP; ++group) {
      for (int o = 0; o < O; ++o) formats[o].select(group);
#pragma GCC unroll 32
      for (int s = 0; s < F::GROUP / LANES; ++s, x += R * LANES) {
        Floats weights[O];
        for (int o = 0; o < O; ++o) weights[o] = formats[o].get(s);
        for (int r = 0; r < R; ++r) {
          Floats inputs = in_register(load<Floats>(x + r * LANES));
          for (int o = 0; o < O; ++o) local[r][o] += inputs * weights[o];
        }
      }
    }
  }
  std::memcpy(sums, local, sizeof local);
}

// Returns the outputs of a tile for a number of rows: as many sums as the registers hold.
constexpr int tile_outputs(int rows) { return LANES == 16 ? (rows == 8 ? 3 : 4) : rows <= 2 ? 4 : rows == 4 ? 2 : 1; }

// Writes the products of a group of R rows with `count` outputs to y. `stride` is the bytes of a row of weights, `outputs` the length of a
// row of y.
template <class F, int R, int O>
void outputs_of(const float* x, int64_t I, const uint8_t* w, int64_t stride, float* y, int64_t outputs, int64_t count) {
  const int64_t tiles = count / O;
  Floats sums[MAX_OUTPUTS / O][R][O] = {};
  for (int64_t start = 0; start < I; start += CHUNK / R) {
    const int64_t size = std::min(CHUNK / R, I - start), blocks = size / F::VALUES, done = start + blocks * F::VALUES;
    const int64_t rest = size % F::VALUES;  // not 0 only in formats without scales
    for (int64_t t = 0; t < tiles; ++t) {
      const uint8_t* at = w + t * O * stride;
      tile<F, R, O>(x + start * R, at + start / F::VALUES * F::BYTES, stride, blocks, sums[t]);
      if (!rest) continue;
      uint8_t padded[2 * O][F::BYTES] = {};
      for (int o = 0; o < O; ++o) std::memcpy(padded[o], at + o * stride + done / F::VALUES * F::BYTES, rest * (F::BYTES / F::VALUES));
      tile<F, R, O>(x + done * R, padded[0], F::BYTES, 1, sums[t]);
    }
  }
  for (int64_t t = 0; t < tiles; ++t)
    for (int r = 0; r < R; ++r)
      for (int o = 0; o < O; ++o) y[r * outputs + t * O + o] = add_lanes(sums[t][r][o]);
  if constexpr (O > 1)
    if (const int64_t first = tiles * O; first < count)
      outputs_of<F, R, 1>(x, I, w + first * stride, stride, y + first, outputs, count - first);
}

// Writes the products of any number of packed rows with `count` outputs to y, one group of rows after the other.
template <class F>
void rows_of(const float* x, int64_t rows, int64_t I, const uint8_t* w, int64_t stride, float* y, int64_t outputs, int64_t count) {
  for (int64_t size; rows; rows -= size, x += size * aligned(I), y += size * outputs) {
    size = group_size(rows);
    if (size == 8) outputs_of<F, 8, tile_outputs(8)>(x, I, w, stride, y, outputs, count);
    if (size == 4) outputs_of<F, 4, tile_outputs(4)>(x, I, w, stride, y, outputs, count);
    if (size == 2) outputs_of<F, 2, tile_outputs(2)>(x, I, w, stride, y, outputs, count);
    if (size == 1) outputs_of<F, 1, tile_outputs(1)>(x, I, w, stride, y, outputs, count);
  }
}

// Converts a row of I weights to float32.
template <class F> void expand(const uint8_t* w, int64_t I, float* to) {
  F format;
  for (int64_t b = 0; b < I / F::VALUES; ++b) {
    format.open(w + b * F::BYTES);
    for (int group = 0; group < F::VALUES / F::GROUP; ++group) {
      format.select(group);
      for (int s = 0; s < F::GROUP / LANES; ++s, to += LANES) {
        Floats values = format.get(s);
        std::memcpy(to, &values, sizeof values);
      }
    }
  }
}

// Returns how many outputs are computed together, given the bytes of a row of weights: a multiple of 12, and so of every tile.
int64_t outputs_at_once(int64_t row_bytes) {
  return std::clamp<int64_t>(SCRATCH / std::max<int64_t>(row_bytes, 1) / 12 * 12, 12, MAX_OUTPUTS);
}

// An array that starts at a cache line, so that no vector of it crosses one. Null if there is no memory.
struct Free {
  void operator()(void* array) const { std::free(array); }
};
template <class T> using Array = std::unique_ptr<T[], Free>;
template <class T> Array<T> make_array(int64_t count) {
  return Array<T>(static_cast<T*>(std::aligned_alloc(64, (count * sizeof(T) + 63) / 64 * 64)));
}

// The operands of one call.
struct Call {
  const void* x;
  int64_t rows, I;
  const uint8_t* w;
  float* y;
  int64_t outputs;
};

// Returns the bytes of a row of I weights. Only formats without scales have rows that end inside a block.
template <class F> int64_t row_size(int64_t I) { return I / F::VALUES * F::BYTES + I % F::VALUES * (F::BYTES / F::VALUES); }

// `compute` and `compute_bf16` multiply all rows with the weights of the outputs from `lo` to `hi`. They return whether there was enough
// memory; `compute` also works without memory for converted weights.
template <class F> bool compute(const Call& call, int64_t lo, int64_t hi) {
  const float* x = static_cast<const float*>(call.x);
  const int64_t stride = row_size<F>(call.I);
  const bool direct = std::is_same_v<F, Float32> || call.rows <= DIRECT_ROWS || call.I % F::VALUES;
  const int64_t step = outputs_at_once(direct ? stride : 4 * call.I);
  const Array<float> scratch = make_array<float>(direct ? 0 : step * call.I);
  for (int64_t o = lo; o < hi; o += step) {
    const int64_t count = std::min(step, hi - o);
    if (direct || !scratch) {  // without memory, the weights are converted for every group of rows
      rows_of<F>(x, call.rows, call.I, call.w + o * stride, stride, call.y + o, call.outputs, count);
      continue;
    }
    for (int64_t i = 0; i < count; ++i) expand<F>(call.w + (o + i) * stride, call.I, scratch.get() + i * call.I);
    const uint8_t* weights = reinterpret_cast<const uint8_t*>(scratch.get());
    rows_of<Float32>(x, call.rows, call.I, weights, 4 * call.I, call.y + o, call.outputs, count);
  }
  return true;
}

#if defined(__AVX512BF16__)
// The products of bfloat16 pairs with float32 sums. I is a multiple of ALIGNED.
template <int R, int O> void bf16_outputs(const uint16_t* x, int64_t I, const uint16_t* w, float* y, int64_t outputs, int64_t count) {
  int64_t o = 0;
  for (; o + O <= count; o += O) {
    Floats sums[R][O] = {};
    for (int64_t i = 0; i < I; i += 32) {
      __m512bh weights[O];
      for (int k = 0; k < O; ++k) weights[k] = load<__m512bh>(w + (o + k) * I + i);
      for (int r = 0; r < R; ++r) {
        __m512bh inputs = in_register(load<__m512bh>(x + R * i + 32 * r));
        for (int k = 0; k < O; ++k) sums[r][k] = (Floats)_mm512_dpbf16_ps((__m512)sums[r][k], inputs, weights[k]);
      }
    }
    for (int r = 0; r < R; ++r)
      for (int k = 0; k < O; ++k) y[r * outputs + o + k] = add_lanes(sums[r][k]);
  }
  if constexpr (O > 1)
    if (o < count) bf16_outputs<R, 1>(x, I, w + o * I, y + o, outputs, count - o);
}

template <class F> bool compute_bf16(const Call& call, int64_t lo, int64_t hi) {
  const uint16_t* x = static_cast<const uint16_t*>(call.x);
  const int64_t I = call.I, stride = row_size<F>(I), step = outputs_at_once(2 * I);
  const Array<float> row = make_array<float>(std::is_same_v<F, BFloat16> ? 0 : I);
  const Array<uint16_t> scratch = make_array<uint16_t>(std::is_same_v<F, BFloat16> ? 0 : step * I);
  if (!std::is_same_v<F, BFloat16> && I && (!row || !scratch)) return false;
  for (int64_t o = lo; o < hi; o += step) {
    const int64_t count = std::min(step, hi - o);
    const uint16_t* weights = reinterpret_cast<const uint16_t*>(call.w + o * stride);
    if (!std::is_same_v<F, BFloat16>) {
      for (int64_t k = 0; k < count; ++k) {
        expand<F>(call.w + (o + k) * stride, I, row.get());
        for (int64_t i = 0; i < I; i += 32) {
          __m512bh pair = _mm512_cvtne2ps_pbh((__m512)load<Floats>(row.get() + i + 16), (__m512)load<Floats>(row.get() + i));
          std::memcpy(scratch.get() + k * I + i, &pair, sizeof pair);
        }
      }
      weights = scratch.get();
    }
    for (int64_t r = 0, size; r < call.rows; r += size) {
      size = group_size(call.rows - r);
      float* y = call.y + r * call.outputs + o;
      if (size == 8) bf16_outputs<8, 3>(x + r * I, I, weights, y, call.outputs, count);
      if (size == 4) bf16_outputs<4, 4>(x + r * I, I, weights, y, call.outputs, count);
      if (size == 2) bf16_outputs<2, 4>(x + r * I, I, weights, y, call.outputs, count);
      if (size == 1) bf16_outputs<1, 4>(x + r * I, I, weights, y, call.outputs, count);
    }
  }
  return true;
}
#else
template <class F> bool compute_bf16(const Call&, int64_t, int64_t) { return false; }
#endif

// Products with ternary weights in integers. Codes (0, 1, 2) are multiplied with signed bytes, and the sum of the bytes is subtracted.
//
// A row in int8 has one byte per value, and its products are exact. A row in float32 has DIGITS = 3 bytes per value: the values of
// a block are rounded to multiples of 2⁻²² of a power of two above the largest one, and a multiple is p₀ + 256 p₁ + 65536 p₂. Sums over a
// block are exact, and are added to float32 sums in the order of the blocks.

// Returns the sum of code · byte over a block, as one partial sum per lane.
INLINE Ints dot_block(const Codes* codes, const int8_t* x) {
#if defined(__AVX512VNNI__)
  __m512i sums = _mm512_setzero_si512();
  for (int i = 0; i < CODE_VECTORS; ++i) sums = _mm512_dpbusd_epi32(sums, (__m512i)codes[i], load<__m512i>(x + 64 * i));
  return (Ints)sums;
#elif defined(__AVX512F__)
  __m512i sums = _mm512_setzero_si512();  // 16-bit sums of 8 products of at most 3 · 128
  for (int i = 0; i < CODE_VECTORS; ++i) sums = _mm512_add_epi16(sums, _mm512_maddubs_epi16((__m512i)codes[i], load<__m512i>(x + 64 * i)));
  return (Ints)_mm512_madd_epi16(sums, _mm512_set1_epi16(1));
#elif defined(__AVX2__)
  __m256i sums = _mm256_setzero_si256();  // 16-bit sums of 16 products
  for (int i = 0; i < CODE_VECTORS; ++i) sums = _mm256_add_epi16(sums, _mm256_maddubs_epi16((__m256i)codes[i], load<__m256i>(x + 32 * i)));
  return (Ints)_mm256_madd_epi16(sums, _mm256_set1_epi16(1));
#else
  Shorts sums = {};  // sums of 16 products
  for (int i = 0; i < CODE_VECTORS; ++i)
    sums += __builtin_convertvector(codes[i], Shorts) * __builtin_convertvector(load<SignedCodes>(x + 16 * i), Shorts);
  Ints parts = {};
  for (int i = 0; i < 16; ++i) parts[i % 4] += sums[i];
  return parts;
#endif
}

// Rows as bytes. For each block: DIGITS · 256 bytes; the sum of its values, negated, in the lanes of `dot_block`; and its scale.
template <int DIGITS> struct ByteRows {
  int64_t blocks;
  Array<int8_t> bytes;
  Array<Ints> sums;
  Array<float> scales;
  ByteRows(int64_t rows, int64_t blocks)
      : blocks(blocks),
        bytes(make_array<int8_t>(rows * blocks * DIGITS * TERNARY)),
        sums(make_array<Ints>(rows * blocks)),
        scales(make_array<float>(rows * blocks)) {}
  INLINE const int8_t* block(int64_t row, int64_t b) const { return bytes.get() + (row * blocks + b) * DIGITS * TERNARY; }

  // Returns Σ code · value of a block.
  static INLINE Ints products(const Codes* codes, const int8_t* x) {
    Ints total = dot_block(codes, x);
    for (int digit = 1; digit < DIGITS; ++digit) total += dot_block(codes, x + digit * TERNARY) << 8 * digit;
    return total;
  }

  void add_sums(int64_t row, int64_t b) {
    Codes ones[CODE_VECTORS];
    std::memset(ones, 1, sizeof ones);
    sums[row * blocks + b] = -products(ones, block(row, b));
  }
};

// Writes a row in int8, with zeros behind its last value.
void write_bytes(const int8_t* x, int64_t I, int64_t row, ByteRows<1>& to) {
  for (int64_t b = 0; b < to.blocks; ++b) {
    int8_t* bytes = to.bytes.get() + (row * to.blocks + b) * TERNARY;
    const int64_t count = std::min<int64_t>(I - b * TERNARY, TERNARY);
    std::memset(bytes, 0, TERNARY), std::memcpy(bytes, x + b * TERNARY, count);
    to.add_sums(row, b);
  }
}

// Writes a row in float32, which consists of whole blocks. A block with NaN or Inf gets the scale NaN.
void write_bytes(const float* x, int64_t, int64_t row, ByteRows<3>& to) {
  for (int64_t b = 0; b < to.blocks; ++b, x += TERNARY) {
    Ints largest = {};
    for (int i = 0; i < TERNARY; i += LANES) {
      const Ints size = load<Ints>(x + i) & 0x7fffffff;  // ordered as the absolute values; NaN and Inf are the largest
      largest = size > largest ? size : largest;
    }
    int32_t top = 22 << 23;  // with a smaller exponent, that of the factor or of the scale would be out of range
    for (int i = 0; i < LANES; ++i) top = std::max(top, largest[i]);
    const int32_t exponent = top >> 23;  // every |x| < 2^(exponent − 126)
    const bool finite = exponent < 255;
    const int32_t scale_bits = finite ? (exponent - 21) << 23 : 0x7fc00000, factor_bits = (275 - exponent) << 23;
    to.scales[row * to.blocks + b] = load<float>(&scale_bits);
    const float factor = finite ? load<float>(&factor_bits) : 0;
    int8_t* bytes = to.bytes.get() + (row * to.blocks + b) * 3 * TERNARY;
    for (int i = 0; i < TERNARY; i += LANES) {
      constexpr float ROUND = 3 << 22;  // adding it rounds a number up to 2²² in size to an integer
      Ints rest = (Ints)(load<Floats>(x + i) * factor + ROUND) - (Ints)(Floats{} + ROUND);
      for (int digit = 0; digit < 3; ++digit) {
        const SignedBytes low = __builtin_convertvector(rest, SignedBytes);
        std::memcpy(bytes + digit * TERNARY + i, &low, sizeof low);
        rest = (rest - (rest << 24 >> 24)) >> 8;
      }
    }
    to.add_sums(row, b);
  }
}

template <int DIGITS> using TernarySums = std::conditional_t<DIGITS == 1, Ints, Floats>;

// Adds the products of R rows from `row` with O outputs, over the blocks from `start` to `stop`, to `sums`.
template <class F, int DIGITS, int R, int O>
void ternary_tile(const ByteRows<DIGITS>& x, int64_t row, int64_t start, int64_t stop, const uint8_t* w, int64_t stride,
                  TernarySums<DIGITS> (*sums)[O]) {
  const int64_t tile_bytes = O * stride, ahead = (PREFETCH + tile_bytes - 1) / std::max<int64_t>(tile_bytes, 1) * tile_bytes;
  TernarySums<DIGITS> local[R][O];
  std::memcpy(local, sums, sizeof local);
  for (int64_t b = start; b < stop; ++b) {
    Codes codes[O][CODE_VECTORS];
    float scales[O];
    for (int o = 0; o < O; ++o) {
      const uint8_t* at = w + o * stride + b * F::BYTES;
      __builtin_prefetch(at + ahead);
      F::codes(at, codes[o]), scales[o] = F::scale_of(at);
    }
    for (int r = 0; r < R; ++r) {
      const Ints negative = x.sums[(row + r) * x.blocks + b];
      for (int o = 0; o < O; ++o) {
        const Ints total = x.products(codes[o], x.block(row + r, b)) + negative;
        if constexpr (DIGITS == 1) local[r][o] += total;
        else local[r][o] += to_floats(total) * (scales[o] * x.scales[(row + r) * x.blocks + b]);
      }
    }
  }
  std::memcpy(sums, local, sizeof local);
}

INLINE int32_t add_lanes(Ints values) {
  int32_t total = 0;
  for (int i = 0; i < LANES; ++i) total += values[i];
  return total;
}

constexpr int ternary_outputs(int rows) { return LANES == 16 ? (rows == 1 ? 4 : 2) : 1; }

template <class F, int DIGITS, int R, int O, class Y>
void ternary_rows(const ByteRows<DIGITS>& x, int64_t row, const uint8_t* w, int64_t stride, Y* y, int64_t outputs, int64_t count) {
  const int64_t tiles = count / O, chunk = std::max(1, TERNARY_CHUNK / (R * DIGITS));
  TernarySums<DIGITS> sums[MAX_OUTPUTS / O][R][O] = {};
  for (int64_t b = 0; b < x.blocks; b += chunk)
    for (int64_t t = 0; t < tiles; ++t)
      ternary_tile<F, DIGITS, R, O>(x, row, b, std::min(b + chunk, x.blocks), w + t * O * stride, stride, sums[t]);
  for (int64_t t = 0; t < tiles; ++t)
    for (int r = 0; r < R; ++r)
      for (int o = 0; o < O; ++o) y[r * outputs + t * O + o] = add_lanes(sums[t][r][o]);
  if constexpr (O > 1)
    if (const int64_t first = tiles * O; first < count)
      ternary_rows<F, DIGITS, R, 1>(x, row, w + first * stride, stride, y + first, outputs, count - first);
}

// The threads that share the work of a call with the thread that makes it. XLA's own pool puts an idle thread to sleep, and waking
// it can take longer than a small product. These threads wait actively for SPIN_TIME after each job, and give up their cores to any
// other thread that needs one. They sleep until the next job after that.
class Workers {
 public:
  static Workers& get() {
    static Workers* const workers = new Workers;  // never destroyed: its threads run until the process ends
    return *workers;
  }

  // Calls `run(context, block)` for all blocks. Each thread that is free claims a block from a counter, the calling thread included.
  // So no call waits for a thread that has not started. If another call is using the threads, this one runs alone.
  void run_all(int64_t threads, int64_t blocks, void (*run)(void*, int64_t), void* context) {
    std::unique_lock<std::mutex> busy(busy_, std::try_to_lock);
    if (!busy || threads < 2) {
      for (int64_t block = 0; block < blocks; ++block) run(context, block);
      return;
    }
    try {
      for (; started_ < threads - 1; ++started_) std::thread([this] { serve(); }).detach();
    } catch (const std::system_error&) {  // no more threads are allowed: the calling thread does the rest
    }
    run_ = run, context_ = context, done_.store(0);
    jobs_.store(static_cast<uint64_t>(blocks));
    if (sleeping_.load()) {
      std::lock_guard<std::mutex> lock(sleep_);
      wake_.notify_all();
    }
    work();
    for (int spins = 0; done_.load(std::memory_order_acquire) < blocks; ++spins) pause(spins);
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr auto SPIN_TIME = std::chrono::milliseconds(2);
  static constexpr int SPINS = 200;

  static void pause(int spins) {
    if (spins % SPINS == SPINS - 1) std::this_thread::yield();
#if defined(__x86_64__)
    _mm_pause();
#endif
  }

  void work() {
    for (uint64_t left = jobs_.load(std::memory_order_acquire); left;) {
      if (!jobs_.compare_exchange_weak(left, left - 1, std::memory_order_acq_rel)) continue;
      run_(context_, static_cast<int64_t>(left - 1));
      done_.fetch_add(1, std::memory_order_release);
      left = jobs_.load(std::memory_order_acquire);
    }
  }

  [[noreturn]] void serve() {
    for (Clock::time_point idle = Clock::now();;) {
      for (int spins = 0; !jobs_.load(std::memory_order_acquire); ++spins) {
        pause(spins);
        if (spins % SPINS || Clock::now() - idle < SPIN_TIME) continue;
        std::unique_lock<std::mutex> lock(sleep_);
        ++sleeping_;
        wake_.wait(lock, [this] { return jobs_.load() != 0; });
        --sleeping_;
      }
      work();
      idle = Clock::now();
    }
  }

  std::mutex busy_, sleep_;
  std::condition_variable wake_;
  int64_t started_ = 0;
  std::atomic<int64_t> sleeping_{0}, done_{0};
  std::atomic<uint64_t> jobs_{0};  // blocks that nobody has claimed
  void (*run_)(void*, int64_t) = nullptr;
  void* context_ = nullptr;
};

// Runs `function(lo, hi)` on blocks of [0, count), each with a multiple of MAX_OUTPUTS items except the last. `bytes` is the size of the
// work, in bytes of weights that take as long to read: it limits the number of blocks.
template <class Function> void run_blocks(ffi::ThreadPool& pool, int64_t count, int64_t bytes, Function function) {
  constexpr int64_t MIN_BLOCK_BYTES = 1 << 15, BLOCKS_PER_THREAD = 8;
  const int64_t threads = std::max<int64_t>(pool.num_threads(), 1);
  const int64_t wanted = std::clamp<int64_t>(bytes / MIN_BLOCK_BYTES, 1, threads * BLOCKS_PER_THREAD);
  struct Job {
    Function function;
    int64_t count, size;
  } job{function, count, ((count + wanted - 1) / wanted + MAX_OUTPUTS - 1) / MAX_OUTPUTS * MAX_OUTPUTS};
  const int64_t blocks = (count + job.size - 1) / job.size;
  auto run = [](void* context, int64_t block) {
    const Job& job = *static_cast<Job*>(context);
    job.function(block * job.size, std::min(job.count, (block + 1) * job.size));
  };
  if (blocks == 1) return run(&job, 0);
  Workers::get().run_all(threads, blocks, run, &job);
}

// Returns the packed rows, or null if there is no memory.
template <class T> Array<T> pack_rows(ffi::ThreadPool& pool, const T* x, int64_t rows, int64_t I) {
  Array<T> packed = make_array<T>(rows * aligned(I));
  T* to = packed.get();
  if (to) run_blocks(pool, rows, rows * I * sizeof(T) / 8, [=](int64_t lo, int64_t hi) {
      for (int64_t size; lo < hi; lo += size) {
        size = group_size(std::min(rows, hi) - lo);
        pack(x + lo * I, size, I, to + lo * aligned(I));
      }
    });
  return packed;
}

template <class F, class T> ffi::Error multiply(ffi::ThreadPool& pool, Call call, const T* x, int64_t row_bytes) {
  const bool plain = std::is_same_v<F, Float32> || std::is_same_v<F, BFloat16> || std::is_same_v<F, Int8>;
  const bool bf16 = sizeof(T) == 2;
  if ((!plain && call.I % F::VALUES) || row_bytes != row_size<F>(call.I) || (bf16 && call.I % ALIGNED))
    return ffi::Error::InvalidArgument("the rows of the weights have a wrong size");
  Array<T> packed;
  call.x = x;
  if (call.rows > 1 || call.I % ALIGNED) {
    packed = pack_rows(pool, x, call.rows, call.I);
    if (!packed) return ffi::Error(ffi::ErrorCode::kResourceExhausted, "no memory for the packed rows");
    call.x = packed.get();
  }
  const int64_t work = std::max(row_bytes, call.rows * call.I / 2) * call.outputs;
  std::atomic<bool> complete{true};
  run_blocks(pool, call.outputs, work, [call, &complete](int64_t lo, int64_t hi) {
    if (!(bf16 ? compute_bf16<F> : compute<F>)(call, lo, hi)) complete = false;
  });
  if (!complete) return ffi::Error(ffi::ErrorCode::kResourceExhausted, "no memory for the converted weights");
  return ffi::Error::Success();
}

// Multiplies rows with ternary weights: int8 rows (DIGITS = 1) with codes to int32, float32 rows (DIGITS = 3) with blocks to float32.
template <class F, int DIGITS, class T, class Y>
ffi::Error multiply_ternary(ffi::ThreadPool& pool, const Call& call, const T* x, int64_t row_bytes, Y* y) {
  const int64_t blocks = (call.I + TERNARY - 1) / TERNARY, rows = call.rows, outputs = call.outputs;
  if (row_bytes != blocks * F::BYTES || (DIGITS > 1 && call.I % TERNARY))
    return ffi::Error::InvalidArgument("the rows of the weights have a wrong size");
  ByteRows<DIGITS> bytes(rows, blocks);
  if (!bytes.bytes || !bytes.sums || !bytes.scales) return ffi::Error(ffi::ErrorCode::kResourceExhausted, "no memory for the rows");
  run_blocks(pool, rows, rows * call.I / 8, [&, x](int64_t lo, int64_t hi) {
    for (int64_t row = lo; row < hi; ++row) write_bytes(x + row * call.I, call.I, row, bytes);
  });
  const int64_t work = std::max(row_bytes, rows * call.I * DIGITS / 8) * outputs, step = outputs_at_once(row_bytes);
  run_blocks(pool, outputs, work, [&, y, w = call.w](int64_t lo, int64_t hi) {
    for (int64_t o = lo; o < hi; o += step) {
      const int64_t count = std::min(step, hi - o);
      const uint8_t* at = w + o * row_bytes;
      for (int64_t row = 0, size; row < rows; row += size) {
        size = group_size(rows - row);
        Y* to = y + row * outputs + o;
        if (size == 8) ternary_rows<F, DIGITS, 8, ternary_outputs(8)>(bytes, row, at, row_bytes, to, outputs, count);
        if (size == 4) ternary_rows<F, DIGITS, 4, ternary_outputs(4)>(bytes, row, at, row_bytes, to, outputs, count);
        if (size == 2) ternary_rows<F, DIGITS, 2, ternary_outputs(2)>(bytes, row, at, row_bytes, to, outputs, count);
        if (size == 1) ternary_rows<F, DIGITS, 1, ternary_outputs(1)>(bytes, row, at, row_bytes, to, outputs, count);
      }
    }
  });
  return ffi::Error::Success();
}

// bfloat16 rows are multiplied with weights in bfloat16, as for the other formats.
template <class F, class T> ffi::Error multiply_blocks(ffi::ThreadPool& pool, const Call& call, const T* x, int64_t row_bytes) {
  if constexpr (sizeof(T) == 2) return multiply<F>(pool, call, x, row_bytes);
  else return multiply_ternary<F, 3>(pool, call, x, row_bytes, call.y);
}

// The numbers of the formats are those of `block_formats.py` and `packed_matmul.py`. 14 is that of `Ternary`, see `Matmul`.
template <class T> ffi::Error multiply_format(ffi::ThreadPool& pool, const Call& call, const T* x, int64_t row_bytes, int64_t format) {
  switch (format) {
    case 0: return multiply<Float32>(pool, call, x, row_bytes);
    case 1: return multiply<BFloat16>(pool, call, x, row_bytes);
    case 2: return multiply<Int8>(pool, call, x, row_bytes);
    case 3: return multiply<Q8_0>(pool, call, x, row_bytes);
    case 4: return multiply<Q4_0>(pool, call, x, row_bytes);
    case 5: return multiply<Nibbles<32>>(pool, call, x, row_bytes);
    case 6: return multiply<Q5_0>(pool, call, x, row_bytes);
    case 7: return multiply<Q5_1>(pool, call, x, row_bytes);
    case 8: return multiply<Q4_K>(pool, call, x, row_bytes);
    case 9: return multiply<Q5_K>(pool, call, x, row_bytes);
    case 10: return multiply<Q6_K>(pool, call, x, row_bytes);
    case 11: return multiply<Nibbles<64>>(pool, call, x, row_bytes);
    case 12: return multiply_blocks<TQ1_0>(pool, call, x, row_bytes);
    case 13: return multiply_blocks<TQ2_0>(pool, call, x, row_bytes);
  }
  return ffi::Error::InvalidArgument("unknown format");
}

ffi::Error Matmul(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer w, ffi::Result<ffi::AnyBuffer> y, int64_t format) {
  auto in = x.dimensions(), weights = w.dimensions(), out = y->dimensions();
  const bool bf16 = x.element_type() == ffi::BF16, int8 = format == 14;
  if (in.size() != 2 || weights.size() != 2 || out.size() != 2 || out[0] != in[0] || out[1] != weights[0] ||
      (int8 ? x.element_type() != ffi::S8 : x.element_type() != ffi::F32 && !bf16) ||
      y->element_type() != (int8 ? ffi::S32 : ffi::F32))
    return ffi::Error::InvalidArgument("expected x [R, I], w [O, bytes] and y [R, O] in the dtypes of the format");
#if !defined(__AVX512BF16__)
  if (bf16) return ffi::Error(ffi::ErrorCode::kUnimplemented, "this CPU has no bfloat16 products");
#endif
  Call call{nullptr, in[0], in[1], static_cast<const uint8_t*>(w.untyped_data()), static_cast<float*>(y->untyped_data()), weights[0]};
  if (!call.rows || !call.outputs) return ffi::Error::Success();
  const int64_t row_bytes = static_cast<int64_t>(w.size_bytes()) / call.outputs;
  if (int8) {
    const int8_t* bytes = static_cast<const int8_t*>(x.untyped_data());
    return multiply_ternary<Ternary, 1>(pool, call, bytes, row_bytes, static_cast<int32_t*>(y->untyped_data()));
  }
  if (bf16) return multiply_format(pool, call, static_cast<const uint16_t*>(x.untyped_data()), row_bytes, format);
  return multiply_format(pool, call, static_cast<const float*>(x.untyped_data()), row_bytes, format);
}

// Converts the weights of consecutive blocks to float32.
template <class F> ffi::Error unpack_blocks(ffi::ThreadPool& pool, const uint8_t* w, int64_t blocks, float* y) {
  run_blocks(pool, blocks, blocks * F::VALUES * sizeof(float), [=](int64_t lo, int64_t hi) {
    F format;
    float* to = y + lo * F::VALUES;
    for (int64_t b = lo; b < hi; ++b) {
      format.open(w + b * F::BYTES);
      for (int group = 0; group < F::VALUES / F::GROUP; ++group) {
        format.select(group);
#pragma GCC unroll 32
        for (int s = 0; s < F::GROUP / LANES; ++s, to += LANES) {
          const Floats weights = format.get(s);
          std::memcpy(to, &weights, sizeof weights);
        }
      }
    }
  });
  return ffi::Error::Success();
}

template <class F> ffi::Error unpack_format(ffi::ThreadPool& pool, ffi::AnyBuffer w, ffi::AnyBuffer y) {
  const int64_t blocks = static_cast<int64_t>(w.size_bytes()) / F::BYTES;
  if (blocks * F::BYTES != static_cast<int64_t>(w.size_bytes()) || blocks * F::VALUES != static_cast<int64_t>(y.element_count()))
    return ffi::Error::InvalidArgument("the weights do not consist of whole blocks, or the result has a wrong size");
  if (!blocks) return ffi::Error::Success();
  return unpack_blocks<F>(pool, static_cast<const uint8_t*>(w.untyped_data()), blocks, static_cast<float*>(y.untyped_data()));
}

// Converts packed weights w [..., bytes] to y [..., values] in float32. The value of `after` is not read: the weights of a layer are
// converted after it has been computed.
ffi::Error Unpack(ffi::ThreadPool pool, ffi::AnyBuffer w, ffi::AnyBuffer after, ffi::Result<ffi::AnyBuffer> y, int64_t format) {
  if (w.element_type() != ffi::U8 || y->element_type() != ffi::F32)
    return ffi::Error::InvalidArgument("expected w in uint8 and y in float32");
  switch (format) {
    case 3: return unpack_format<Q8_0>(pool, w, *y);
    case 4: return unpack_format<Q4_0>(pool, w, *y);
    case 5: return unpack_format<Nibbles<32>>(pool, w, *y);
    case 6: return unpack_format<Q5_0>(pool, w, *y);
    case 7: return unpack_format<Q5_1>(pool, w, *y);
    case 8: return unpack_format<Q4_K>(pool, w, *y);
    case 9: return unpack_format<Q5_K>(pool, w, *y);
    case 10: return unpack_format<Q6_K>(pool, w, *y);
    case 11: return unpack_format<Nibbles<64>>(pool, w, *y);
    case 12: return unpack_format<TQ1_0>(pool, w, *y);
    case 13: return unpack_format<TQ2_0>(pool, w, *y);
  }
  return ffi::Error::InvalidArgument("unknown format");
}
}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(dantinox_unpack, Unpack,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int64_t>("format"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(dantinox_matmul, Matmul,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int64_t>("format"));
