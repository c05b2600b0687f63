"""Fixtures for tests of several packages: a run directory to generate from."""

import ctypes
import gc
import os
import signal
import sys
from pathlib import Path

import hypothesis
import numpy as np
import pytest

# No test depends on the speed of the machine.
hypothesis.settings.register_profile(
    "untimed", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("untimed")

# The tests spend most of their time compiling small programs that run a few times, which takes half
# as long without optimization. The options are set in the environment before jax is loaded, so they
# also apply to the processes that tests start. `make real` sets OPTIMIZE_PROGRAMS.
FAST_TO_COMPILE = {
    "xla_backend_optimization_level": "0",
    "xla_cpu_parallel_codegen_split_count": "1",
}
OPTIMIZED = {}
if sys.version_info < (3, 12):  # the jaxlib of newer Python versions has only one fusion emitter
    FAST_TO_COMPILE["xla_cpu_use_fusion_emitters"], OPTIMIZED["xla_cpu_use_fusion_emitters"] = (
        "false",
        True,
    )
# All processes of a run share the compiled programs, and so does the next run.
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".pytest_cache" / "programs")
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
FLAGS = {} if "OPTIMIZE_PROGRAMS" in os.environ else FAST_TO_COMPILE
os.environ["XLA_FLAGS"] = " ".join(
    [*(f"--{name}={value}" for name, value in FLAGS.items()), os.environ.get("XLA_FLAGS", "")]
)

# Tracing creates millions of objects. With the default thresholds, garbage collection takes an
# eighth of the time.
gc.set_threshold(100_000, 50, 50)

CIRCLE = "aè€😀b\nc"  # thirteen different bytes, in characters of one to four bytes

PROCESS = Path("/proc/self")
MAX_MAPS, MAX_PAGES = 40_000, (1 << 30) // os.sysconf("SC_PAGE_SIZE")


def pytest_collection_finish(session):
    """Excludes modules and tests from garbage collection, which would examine them each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def release_programs():
    """Drops compiled programs after a file that leaves 1 GiB or many memory maps: Linux allows
    65,530 maps per process.
    """
    yield
    if "jax" not in sys.modules or not PROCESS.exists():
        return
    pages = int((PROCESS / "statm").read_text().split()[1])
    if pages > MAX_PAGES or (PROCESS / "maps").read_bytes().count(b"\n") > MAX_MAPS:
        sys.modules["jax"].clear_caches()
        gc.collect()
        if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
            libc.malloc_trim(0)


@pytest.fixture(scope="session")
def optimized():
    """Compiles a lowered program to one with the memory use and the HLO text that it has outside of
    the tests.

    Only its machine code is not optimized.
    """
    return lambda lowered: lowered.compile(compiler_options=OPTIMIZED)


@pytest.fixture
def interruptible():
    """Lets this process and its children receive signals that are ignored in a background job of a
    shell (SIGINT) or under `nohup` (SIGHUP).
    """
    handlers = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def run_dir(tmp_path_factory):
    """A run whose greedy text repeats the bytes of `CIRCLE`, whatever byte comes first."""
    return make_run(tmp_path_factory.mktemp("runs") / "circle")


@pytest.fixture(scope="session")
def ending_run_dir(tmp_path_factory):
    """The same, but "c" leads to the EOS token."""
    return make_run(tmp_path_factory.mktemp("runs") / "ending", end=True)


def make_run(path, end=False):
    """Writes a run directory with a vocabulary of bytes and a model in which the last byte decides
    the next one.
    """
    from dantinox.config import TokenizerSection, build_config
    from dantinox.model.parameters import abstract_model
    from dantinox.run import create_run, save_config, save_tokenizer, save_weights
    from dantinox.text import train_tokenizer

    run = create_run(path)
    tokenizer = train_tokenizer(TokenizerSection(tokenizer_type="byte"), lambda: iter(()))
    size = {
        "dim": 32,
        "n_heads": 4,
        "kv_heads": 2,
        "num_blocks": 2,
        "hidden_dim": 32,
        "max_context": 128,
    }
    model = size | {"weight_tying": False, "dtype": "float32"}
    config = build_config({"model": model, "tokenizer": {"tokenizer_type": "byte"}})
    V = tokenizer.vocab_size
    random = np.random.default_rng(0)
    weights = {
        name: (
            0.02 * random.standard_normal(leaf.shape)
            if len(leaf.shape) > 1
            else np.ones(leaf.shape)
        )  # ones: of the norms
        for name, leaf in abstract_model(config.architecture(V))[1].items()
    }
    embed_VD = random.standard_normal((V, 32))
    weights["embed"] = embed_VD = embed_VD / np.linalg.norm(embed_VD, axis=1, keepdims=True)
    ids = tokenizer.encode(CIRCLE)
    successors = dict(zip(ids, [*ids[1:], tokenizer.eos_id if end else ids[0]], strict=True))
    for token, successor in successors.items():
        weights["head/kernel"][:, successor] += 2 * embed_VD[token]
    save_config(run, config)
    save_weights(run.weights, weights)
    save_tokenizer(run, tokenizer.to_json())
    return run.path


@pytest.fixture(scope="session")
def float16():
    """Skips a test if XLA cannot compile the conversion of float16, as on x86 CPUs before 2012,
    which have no F16C.
    """
    import jax
    import jax.numpy as jnp

    try:
        jax.jit(lambda x: x.astype(jnp.float32))(np.zeros(2, np.float16))
    except jax.errors.JaxRuntimeError as error:
        pytest.skip(f"XLA does not convert float16: {str(error)[:80]}")
