# Every target can be repeated. PYTHON=python3.12 selects the interpreter, VENV=… the environment.
VENV ?= .venv
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$p" && break; done)
PY := $(VENV)/bin/python
# Behind a proxy that inspects TLS, only the certificates of the system are valid. pip also uses these.
export UV_SYSTEM_CERTS ?= 1
# Tests start many processes, and each would compile the sources again.
unexport PYTHONDONTWRITEBYTECODE
DEMO_RUN := runs/demo_$(shell date +%Y%m%d_%H%M%S)

# `make benchmarks` runs each benchmark with sizes that finish in seconds. The files that benchmarks share or start are left out.
BENCHMARKS := $(filter-out benchmarks/common.py benchmarks/gguf_peer.py,$(wildcard benchmarks/*.py))

.PHONY: help benchmarks docs docs-linkcheck demo speedrun test test-all test-isa release-check mutants test-browser serve-test aot aot-tests faults parity real tokenizers kernels sanitize accelerator-kit accelerator-check accelerator-rehearsal lint schema models clean

help:
	@echo "make demo          train a small model on the Python sources of this machine, then generate with it (about 2 minutes on two cores)"
	@echo "make speedrun      go from text to a small chat model, and write a report (about 15 minutes on two cores)"
	@echo "make test          the tests (about 7 minutes on two cores)"
	@echo "make test-all      also the slow tests (about half an hour)"
	@echo "make test-isa      the tests with XLA and the native kernels limited to older instruction sets of x86 CPUs"
	@echo "make release-check all checks of a release, and a table of their results (hours)"
	@echo "make mutants       the share of small edits of the package that make test finds, of those that make test-all finds (hours)"
	@echo "make test-browser  the web pages in chromium"
	@echo "make serve-test    common clients, 20,000 fuzzed requests, 1,000 seeded requests in a mixed batch, 5,500 idle and slow connections, half an hour of mixed load"
	@echo "make aot           the programs, compiled for an H100 and a TPU without these devices (about 3 minutes)"
	@echo "make faults        runs killed at 25 moments, more than 200 damaged files (about 15 minutes)"
	@echo "make parity        logits of every model family compared with transformers, which it installs with torch"
	@echo "make real          a published model, SmolLM2-135M-Instruct, compared with recorded results of transformers and llama.cpp (about 3 minutes)"
	@echo "make tokenizers    token ids of every vocabulary compared with llama.cpp, on 20,000 lines"
	@echo "make kernels       build the wheel dantinox-kernels into dist: the native kernels, compiled for this architecture (about 1 minute)"
	@echo "make sanitize      the native kernels with the sanitizers of GCC, on Linux (about 10 minutes)"
	@echo "make benchmarks    every benchmark once with --smoke, to check that it works (about 2 minutes)"
	@echo "make accelerator-check      the project on the accelerator of this machine, and what is good (FLAGS=\"--minutes 8\")"
	@echo "make accelerator-kit        a folder with which a machine without a network runs this check"
	@echo "make docs          build this site into docs/_build/html; check its links, and run the code of its pages"
	@echo "make lint          ruff and mypy"
	@echo "make schema        rewrite configs/schema.json and the typed keywords from the settings"
	@echo "make models        rewrite the table of docs/models.md from the families"
	@echo "make clean         remove caches and build products, not runs"

# The time limit shortens the training on slow machines. The samples of the training and the last command share programs.
demo: $(VENV)/.plot
	@echo "training a model of 0.9 million parameters, in about a minute and a half on two cores"
	$(PY) train.py --config configs/quickstart.yaml --max_minutes 0.75 --run_dir $(DEMO_RUN)
	@echo "generating text after a prompt"
	$(PY) generate.py --run_dir $(DEMO_RUN) --prompt "    def __init__(self, "

# DEPTH=12 sets the size, TOKENS_PER_PARAMETER=20 the length, SPEEDRUN_DATA=… the text or dataset, PRICE=… the price per hour.
# Repeat the command to continue. SPEEDRUN_DIR=… is for another model.
speedrun: DEPTH ?= 4
speedrun: SPEEDRUN_DIR ?= runs/speedrun
speedrun: $(VENV)/.plot $(if $(filter huggingface:%,$(SPEEDRUN_DATA)),$(VENV)/.hf)
	$(PY) -m dantinox speedrun --depth $(DEPTH) --run_dir $(SPEEDRUN_DIR) \
		$(if $(SPEEDRUN_DATA),--data "$(SPEEDRUN_DATA)") $(if $(TOKENS_PER_PARAMETER),--tokens_per_parameter $(TOKENS_PER_PARAMETER)) \
		$(if $(PRICE),--price $(PRICE)) $(SPEEDRUN_FLAGS)

# The markers of `make test-all`. `make test` is plain `pytest`: the same tests except slow ones. `make mutants` compares the two.
ALL := not browser and not aot and not faults and not real

# TESTS="tests/serve tests/text" selects tests. A test that hangs ends the run with the stack of every thread.
PYTEST = $(PY) -m pytest -n 2 --dist loadfile -o faulthandler_timeout=300 -o faulthandler_exit_on_timeout=true
test: $(VENV)/.dev
	$(PYTEST) $(TESTS)

test-all: $(VENV)/.dev
	$(PYTEST) -m "$(ALL)" $(TESTS)

# The tests once for each instruction set of XLA; the native kernels are limited to the same set.
ISA ?= SSE4_2 AVX2 AVX512
KERNELS_SSE4_2 := off
KERNELS_AVX2 := avx2
KERNELS_AVX512 := avx512
test-isa: $(addprefix test-isa-,$(ISA))

test-isa-%: $(VENV)/.dev
	@if [ $* = AVX512 ] && ! grep -qw avx512vl /proc/cpuinfo; then echo "$*: this CPU does not have it"; exit; fi; \
		echo "XLA with $*, native kernels: $(KERNELS_$*)"; \
		XLA_FLAGS="--xla_cpu_max_isa=$*" DANTINOX_KERNELS=$(KERNELS_$*) $(PYTEST) $(TESTS)

# All checks of a release, in a table. CHECKS="faults aot" selects checks.
release-check: $(VENV)/.dev
	$(PY) -m tests.release_check $(CHECKS)

# RESUME=--resume continues an interrupted run.
mutants: MUTANTS ?= 400
mutants: SEED ?= 0
mutants: $(VENV)/.dev
	$(PY) -m tests.mutate --map $(RESUME)
	$(PY) -m tests.mutate --mutants $(MUTANTS) --seed $(SEED) $(RESUME)

test-browser: $(VENV)/.browser
	$(PY) -m pytest -m browser $(or $(PAGES),tests/report tests/serve)

# MINUTES=0 skips the long tests of mixed batches and random schemas, the flood of connections and the soak test.
serve-test: FUZZ ?= 20000
serve-test: MINUTES ?= 30
serve-test: $(VENV)/.dev $(VENV)/.clients
	FUZZ=$(FUZZ) $(PY) -m pytest tests/serve/test_clients.py tests/serve/test_fuzz.py
	[ $(MINUTES) = 0 ] || $(PY) -m tests.serve.mixed_batch 1000
	[ $(MINUTES) = 0 ] || $(PY) -m tests.serve.tool_schemas 500
	[ $(MINUTES) = 0 ] || $(PY) -m tests.serve.flood
	[ $(MINUTES) = 0 ] || $(PY) -m tests.serve.soak $(MINUTES)

# NVIDIA's plugin prints errors in every command on a machine without its driver, so it has a separate environment.
aot:
	$(MAKE) VENV=$(VENV)-aot aot-tests

aot-tests: $(VENV)/.dev $(VENV)/.aot
	JAX_PLATFORMS=cpu $(PY) -m pytest -n 2 --dist loadgroup -m aot $(AOT) tests/lab

parity: $(VENV)/.dev $(VENV)/.parity
	$(PY) -m tests.interop.quantized_live
	TORCH_COMPILE_DISABLE=1 $(PY) -m tests.interop.bitnet_live
	$(PY) -m tests.interop.parity $(PARITY)

# The other tests disable optimizations of the compiler. With a model of this size they save more time than they need.
# PUBLISHED="-k server" selects tests.
real: $(VENV)/.dev $(VENV)/.smollm2
	OPTIMIZE_PROGRAMS=1 $(PY) -m pytest -m real $(PUBLISHED) tests/published

tokenizers: $(VENV)/.dev $(VENV)/.tokenizers
	$(PY) -m tests.interop.tokenizers_live $(TOKENIZERS)

kernels: $(VENV)/.dev
	$(PY) -m dantinox.kernels.build_wheel dist

sanitize: $(VENV)/.dev
	$(PY) -m tests.kernels.sanitize

faults: $(VENV)/.dev
	$(PY) -m pytest -s -m faults tests/faults

# FLAGS="--smoke" uses tiny sizes, --help lists the options.
accelerator-check: $(VENV)/.dev
	$(PY) benchmarks/accelerator $(FLAGS)

KIT ?= build/accelerator-kit
accelerator-kit: $(VENV)/.dev
	$(PY) benchmarks/accelerator/kit.py $(SIZES) $(KIT)

# The kit with tiny sizes, without a network where `unshare` may close it, and with the oldest JAX that Python 3.12 may have.
IMAGE := $(VENV)-image
PYTHON312 ?= python3.12
accelerator-rehearsal: SIZES = --smoke
accelerator-rehearsal: accelerator-kit $(IMAGE)/.image
	rm -rf $(KIT)/results $(KIT)/site
	closed=$$(unshare -rn true 2>/dev/null && echo unshare -rn || true); \
	PIP_NO_INDEX=1 PYTHON=$(abspath $(IMAGE))/bin/python SITE=$(KIT)/site $$closed sh $(KIT)/start.sh --smoke --minutes 10 --out $(KIT)/results

$(IMAGE)/.image: benchmarks/accelerator/image.py
	$(PYTHON312) -m venv $(IMAGE)
	$(IMAGE)/bin/python -m pip install --quiet $$($(IMAGE)/bin/python benchmarks/accelerator/image.py --oldest)
	touch $@

# make -j2 benchmarks runs two at a time: enough to check that they work, useless for timing.
benchmarks: $(BENCHMARKS:=.smoke)

%.py.smoke: $(VENV)/.dev
	@echo "$*.py --smoke"
	@PYTHONPATH=. XLA_FLAGS="--xla_backend_optimization_level=0" $(PY) $*.py --smoke > $(VENV)/$(notdir $*).log 2>&1 || { cat $(VENV)/$(notdir $*).log; exit 1; }

# All warnings are errors. `docs-linkcheck` needs a network. NOTEBOOKS="first_model serving" executes only these notebooks.
docs: $(VENV)/.docs
	NOTEBOOKS="$(NOTEBOOKS)" $(PY) -m sphinx -W --keep-going -q -b html docs docs/_build/html
	$(PY) docs/check_links.py docs/_build/html
	$(PY) docs/check_code.py

docs-linkcheck: $(VENV)/.docs
	$(PY) -m sphinx -q -b linkcheck docs docs/_build/linkcheck

lint: $(VENV)/.dev
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

schema: $(VENV)/.dev
	$(PY) -m dantinox.config.generated_files

models: $(VENV)/.dev
	$(PY) -m dantinox.interop.model_table docs/models.md

clean:
	rm -rf build dist *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache docs/_build docs/reference
	find dantinox tests -name __pycache__ -type d -exec rm -rf {} +

# The stamp of an extra: reinstalled when the dependencies change. uv installs several times faster than pip, and finds versions
# that fit together in seconds where pip may search for minutes.
$(VENV)/.%: pyproject.toml | $(VENV)/bin/uv
	@echo "installing DantinoX with the extra $* into $(VENV): seconds, after a download of 200 MB or more"
	$(VENV)/bin/uv pip install --python $(PY) --editable ".[$*]"
	@touch $@

$(VENV)/bin/uv: | $(PY)
	$(PY) -m pip install --quiet uv

$(PY):
	@test -n "$(PYTHON)" || { echo "DantinoX needs Python 3.11 or newer: none found (make PYTHON=/path/to/python3)"; exit 1; }
	@echo "creating the environment $(VENV)"
	$(PYTHON) -m venv $(VENV)
