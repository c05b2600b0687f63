"""The rows about exact results: beside a CPU, alone and in a full batch, and after a resume."""

import json
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from shapes import Measured, Shapes, llama_config, random_model, shapes_of

REFERENCES = Path(__file__).parent / "references.npz"  # written by `--references` on a CPU
SMALL = {
    "model.dim": 256, "model.n_heads": 8, "model.kv_heads": 4, "model.num_blocks": 4,
    "model.hidden_dim": 512, "model.max_context": 64, "model.dtype": "float32",
    "tokenizer.vocab_size": 2048, "model.gradient_checkpointing": False,
}  # fmt: skip
STEPS, ROWS, DRAWS = 20, 64, 16
SAMPLERS: tuple[dict[str, Any], ...] = (
    {}, {"greedy": True}, {"temperature": 0.7}, {"temperature": 1.5}, {"top_k": 1}, {"top_k": 40},
    {"top_p": 0.9}, {"top_p": 0.3}, {"min_p": 0.05}, {"typical": 0.8}, {"tail_free": 0.95},
    {"top_a": 0.2}, {"epsilon_cutoff": 3e-4}, {"eta_cutoff": 3e-4}, {"top_n_sigma": 1.0},
    {"min_k": 2.0}, {"p_less": "plain"}, {"p_less": "norm"}, {"top_h": 0.5}, {"skew": 0.3},
    {"smoothing_factor": 0.2}, {"mirostat": 1}, {"mirostat": 2},
    {"xtc_probability": 1.0, "xtc_threshold": 0.01}, {"dynatemp_low": 0.6, "dynatemp_high": 1.6},
    {"repetition_penalty": 1.3}, {"presence_penalty": 1.0}, {"frequency_penalty": 0.5},
    {"dry_multiplier": 0.8, "dry_breakers": []}, {"adaptive_target": 0.3},
)  # fmt: skip


# --- beside a CPU


def against_cpu(options: Any) -> Measured:
    """Compares logits, losses and sampled tokens with those of a CPU, from the file of references
    or computed here.
    """
    carried = REFERENCES.exists()
    expected = dict(np.load(REFERENCES)) if carried else {}
    if f"{prefix(options.smoke)}logits" not in expected:
        with jax.default_device(jax.devices("cpu")[0]):
            expected, carried = compute(options.smoke, "cpu"), False
    found = compute(options.smoke)
    start = prefix(options.smoke)
    if carried and found[f"{start}digest"] != expected[f"{start}digest"]:
        raise ValueError(
            "this version of NumPy draws other inputs than the one that computed the references"
        )
    figures = {name: float(relative_error(found[start + key], expected[start + key])) for name,
               key in (
        ("logits_error", "logits"), ("losses_error", "losses"),
    )}  # fmt: skip
    equal = found[f"{start}tokens"] == expected[f"{start}tokens"]
    figures |= {"equal_tokens": float(equal.mean()), "tokens": int(equal.size)}
    wrong = sorted({json.dumps(SAMPLERS[row % len(SAMPLERS)]) for row in np.nonzero(~equal)[1]})
    return Measured(
        figures | ({"unequal": "; ".join(wrong)} if wrong else {}) | {"carried": carried}
    )


def relative_error(found: np.ndarray, expected: np.ndarray) -> np.floating:
    """Returns the largest difference, as a part of the largest value."""
    return np.abs(found - expected).max() / np.abs(expected).max()


def prefix(smoke: bool) -> str:
    return "smoke_" if smoke else "full_"


def write_references(path: Path, smoke: bool) -> None:
    """Writes the references of both sizes, or with `smoke` only of the tiny one."""
    arrays = compute(True) | ({} if smoke else compute(False))
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        np.savez_compressed(file, **arrays)


def compute(smoke: bool, platform: str | None = None) -> dict[str, Any]:
    """Computes logits, losses and tokens on the default device, with products in float32.

    Args:
      platform: the platform that the programs are made for; None: that of the machine.
    """
    from dantinox.config import load_config
    from dantinox.model.parameters import abstract_model
    from dantinox.text import Batch
    from dantinox.training.step import TrainStep

    config = load_config("llama_1b", SMALL | {
        "training.steps": STEPS, "training.batch_size": 4, "training.grad_accum": 1,
        "training.warmup_steps": 1, "training.schedule": "constant", "training.lr": 1e-3,
        "model.num_blocks": 1 if smoke else 4,
    })  # fmt: skip
    model = config.architecture(2048) if platform is None else config.architecture(2048, platform)
    random, positions = np.random.default_rng(0), np.broadcast_to(np.arange(64), (2, 64))
    build, shapes = abstract_model(model)
    weights = {
        name: (
            (
                0.05 * random.standard_normal(leaf.shape)
                if len(leaf.shape) > 1
                else np.ones(leaf.shape)
            ).astype(np.float32)
        )
        for name, leaf in shapes.items()
    }
    ids = random.integers(1, 2048, (STEPS, 4, 65)).astype(np.int32)
    start = prefix(smoke)
    with jax.default_matmul_precision("highest"):
        forward = jax.jit(lambda weights, tokens: build(weights)(tokens, positions)[0])
        logits = np.asarray(forward(weights, ids[0, :2, :64]), np.float32)
        training = TrainStep(config, model, STEPS)
        state, losses = training.initial_state(weights), []
        for batch in ids:
            ones = np.ones((4, 64), np.float32)
            state, metrics = training.program(
                state, Batch(batch[:, :-1], batch[:, 1:], np.zeros((4, 64), np.int32), ones), {}, {}
            )
            losses.append(float(metrics.loss))
    tokens, digest = sampled(512 if smoke else 128256)
    return {
        f"{start}logits": logits,
        f"{start}losses": np.array(losses),
        f"{start}tokens": tokens,
        f"{start}digest": digest,
    }


def sampled(vocabulary: int) -> tuple[np.ndarray, int]:
    """Draws tokens with all samplers, as in a server, where one program has them all; returns
    `[DRAWS, ROWS]` and a digest.
    """
    from dantinox.sampling import SamplingParams, init_state, sample

    random = np.random.default_rng(1)
    logits = (2.5 * random.standard_normal((ROWS, vocabulary))).astype(np.float32)
    prompt = random.integers(1, vocabulary, (ROWS, 16)).astype(np.int32)
    program = jax.jit(lambda logits, params, state: sample(logits, params, state)[0])
    found = []
    for seed in range(DRAWS):
        rows = [{"seed": seed, **SAMPLERS[row % len(SAMPLERS)]} for row in range(ROWS)]
        params = SamplingParams.build(
            rows, vocab_size=vocabulary, sample_index=range(ROWS), dynamic_order=True
        )
        state = init_state(
            params, jnp.asarray(prompt), jnp.ones(prompt.shape, bool), vocabulary, 32
        )
        found.append(np.asarray(program(logits, params, state)))
    return np.stack(found), int(np.frombuffer(logits.tobytes(), np.uint32).sum(dtype=np.uint64))


# --- alone and in a full engine


def slot_engine(config: Any, slots: int, shapes: Shapes) -> Any:
    """Returns an engine with a random model and a vocabulary of bytes, whose programs are
    compiled.
    """
    from dantinox.config import TokenizerSection
    from dantinox.config.engine_options import EngineOptions
    from dantinox.generation import LoadedModel
    from dantinox.generation.engine import Engine
    from dantinox.generation.slot_batch import SlotBatch
    from dantinox.text import train_tokenizer

    tokenizer = train_tokenizer(TokenizerSection(tokenizer_type="byte"), lambda: iter(()))
    loaded = LoadedModel(config, random_model(config), tokenizer)
    batch = SlotBatch(loaded, EngineOptions(slots=slots, context=shapes.context))
    batch.compile(config)
    return Engine(loaded, batch, queue=1000, chunk_seconds=None)


def request_of(
    engine: Any, ids: list[int], new: int, logprobs: int | None = None, **settings: Any
) -> Any:
    """Returns a request for `new` tokens after token ids."""
    from dantinox.generation.request import GenerationRequest

    config = engine.model.settings({"max_new_tokens": new, "ignore_eos": True, **settings})
    return GenerationRequest(tuple(ids), config, logprobs)


def finish(engine: Any, jobs: list[Any]) -> list[tuple[list[int], list[float]]]:
    """Runs an engine until all requests have ended; returns their tokens and log-probabilities."""
    tokens: dict[Any, list[int]] = {job: [] for job in jobs}
    logprobs: dict[Any, list[float]] = {job: [] for job in jobs}
    while engine.busy:
        for output in engine.step():
            if output.error is not None:
                raise output.error
            tokens[output.job] += output.ids
            logprobs[output.job] += [] if output.steps is None else output.steps.logprob.tolist()
    return [(tokens[job], logprobs[job]) for job in jobs]


def seeds(options: Any) -> Measured:
    """Compares seeded requests that run alone with the same requests in a full engine."""
    shapes = shapes_of(options.smoke)
    small = {"model.num_blocks": 4} if not options.smoke else {}
    config = llama_config(
        shapes, **{name.replace(".", "__"): value for name, value in small.items()}
    )
    engine = slot_engine(config, 8, shapes)
    random = np.random.default_rng(2)
    requests = []
    for seed in range(shapes.seeds):
        prompt = random.integers(1, 255, int(random.integers(2, shapes.prompt))).tolist()
        settings = {
            name: value
            for name, value in SAMPLERS[seed % len(SAMPLERS)].items()
            if name != "greedy"
        }
        requests.append(request_of(engine, prompt, 8, logprobs=0, seed=seed, **settings))
    alone = [finish(engine, [engine.add(request)])[0] for request in requests]
    together = finish(engine, [engine.add(request) for request in requests])
    tokens = [a[0] == b[0] for a, b in zip(alone, together, strict=True)]
    bits = [a == b for a, b in zip(alone, together, strict=True)]
    return Measured(
        {
            "equal_tokens": float(np.mean(tokens)),
            "equal_bits": float(np.mean(bits)),
            "requests": len(requests),
        }
    )


# --- after a resume


def deterministic(options: Any) -> Measured:
    """Trains 40 steps at once and in two parts with `training.deterministic`, and at once without
    it.
    """
    from dantinox import launch, load_config

    steps = 4 if options.smoke else 40
    small = (
        {"model.dim": 32, "model.hidden_dim": 64, "model.num_blocks": 1}
        if options.smoke
        else {"model.dim": 512}
    )
    with tempfile.TemporaryDirectory() as folder:
        jax.config.update(
            "jax_compilation_cache_dir", str(Path(folder, "programs"))
        )  # the runs share their programs
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        corpus = Path(folder, "corpus.txt")
        corpus.write_text(
            "\n".join(f"{number} times {number} is {number * number}" for number in range(20_000)),
            encoding="utf-8",
        )

        def train(
            name: str, count: int, fixed: bool = True, resume: bool = False
        ) -> tuple[bytes, float]:
            """Returns the weights, and the shortest mean time of the steps between two rows of the
            log.
            """
            config = load_config("quickstart", {
                "data.path": str(corpus), "tokenizer.tokenizer_type": "byte",
                "training.steps": count, "training.max_minutes": None,
                "training.schedule": "constant", "training.warmup_steps": 0,
                "training.checkpoint_every": steps // 2, "training.eval_every": steps,
                "training.sample_every": None, "training.deterministic": fixed,
                "logging.plot": False, "logging.log_every": steps // 4, **small,
            })  # fmt: skip
            run = launch(config, run_dir=Path(folder, name), resume=resume)
            rows = map(
                json.loads,
                Path(folder, name, "metrics.jsonl").read_text(encoding="utf-8").splitlines(),
            )
            return run.weights.read_bytes(), min(
                row["ms_per_step"] for row in rows if "ms_per_step" in row
            )

        whole, ms = train("whole", steps)
        train("parts", steps // 2)
        parts, _ = train("parts", steps, resume=True)
        _, ms_off = train("off", steps, fixed=False)
    return Measured(
        {"equal_bits": float(whole == parts), "ms": ms, "ms_off": ms_off, "slowdown": ms / ms_off}
    )
