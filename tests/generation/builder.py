"""Small models with random weights, and a slow reference generator that reads the whole sequence
again for every token.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache, partial
from typing import Any
from unittest import mock

import jax
import numpy as np
from flax import nnx

from dantinox.config import ModelConfig, TokenizerSection, build_config
from dantinox.config.engine_options import EngineOptions
from dantinox.generation import LoadedModel
from dantinox.generation.decode import drafts
from dantinox.generation.decode import generate_toks as decode
from dantinox.generation.decode.generate_toks import _generate_toks
from dantinox.generation.decode.slot_programs import decode_slots
from dantinox.generation.slot_batch import SlotBatch
from dantinox.model import Transformer
from dantinox.programs import shared_trace
from dantinox.sampling import chain, process_logits
from dantinox.sampling.draw import draw, row_key
from dantinox.text import Tokenizer, train_tokenizer
from tests.conftest import CIRCLE

# Prompts without a BOS token, so that a prompt has one token per byte.
BYTES = Tokenizer(
    train_tokenizer(TokenizerSection(tokenizer_type="byte"), lambda: iter(())).to_json(),
    roles={"add_bos_token": False},
)

V = 67
# The largest difference between log-probabilities from programs that sum in another order. A
# log-probability of these models is the result of about 2 · 3 sums of 48 products, one of 32, and
# one of V = 259 terms. Each rounding changes a number of at most 32, the largest logit, by up to ε
# / 2 = 2⁻²⁴ of it. N random roundings add up to about √N of one; four times that is never exceeded.
LOGPROB_TOLERANCE = 4 * (2 * 3 * 48 + 32 + 259) ** 0.5 * 2**-24 * 32
BASE = ModelConfig(
    vocab_size=V,
    dim=32,
    n_heads=4,
    kv_heads=2,
    head_size=8,
    num_blocks=2,
    hidden_dim=48,
    max_context=64,
    windows=(None, None),
    dtype="float32",
)


ONE_LAYER = replace(BASE, num_blocks=1, windows=(None,))


def config(**changes: Any) -> ModelConfig:
    """Returns `BASE` with changes; the number of `windows` sets the number of layers."""
    windows = changes.get("windows", BASE.windows)
    return replace(BASE, num_blocks=len(windows), **changes)


@cache
def model(config: ModelConfig = BASE, seed: int = 0) -> Transformer:
    """Returns a model with random weights that are large enough to give varied greedy text."""
    graph, state = nnx.split(nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0))))
    random = np.random.default_rng(seed)

    def filled(path: tuple, leaf: jax.Array) -> np.ndarray:
        name = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)][-1]
        noise = random.standard_normal(leaf.shape)
        if name == "kernel":
            noise *= 2.0 / np.sqrt(np.prod(leaf.shape) / leaf.shape[-1]) * leaf.shape[-1] ** 0.25
        elif name in ("scale", "layer_scalar", "expert_scale"):
            noise = 1 + 0.3 * noise
        return np.asarray(noise, leaf.dtype)

    return nnx.merge(graph, jax.device_put(jax.tree_util.tree_map_with_path(filled, state)))


@cache
def circle(end: bool = False) -> LoadedModel:
    """Returns the model of `run_dir`, or of `ending_run_dir`, with one layer and without files."""
    architecture = config(
        vocab_size=BYTES.vocab_size,
        windows=(None,),
        weight_tying=False,
        hidden_dim=32,
        max_context=128,
    )
    graph, state = nnx.split(model(architecture))
    random = np.random.default_rng(0)
    embed_VD = random.standard_normal((architecture.vocab_size, architecture.dim)).astype(
        np.float32
    )
    embed_VD /= np.linalg.norm(embed_VD, axis=1, keepdims=True)
    head_DV = np.float32(0.02) * random.standard_normal(embed_VD.T.shape).astype(np.float32)
    ids = BYTES.encode(CIRCLE)
    for token, successor in zip(ids, [*ids[1:], BYTES.eos_id if end else ids[0]], strict=True):
        head_DV[:, successor] += 2 * embed_VD[token]
    small = jax.tree.map(
        lambda x: np.float32(0.01) * np.asarray(x) if x.ndim > 1 else np.ones_like(x), state
    )
    made = nnx.merge(graph, jax.device_put(small))
    made.embed, made.head.kernel = (nnx.Param(jax.device_put(x)) for x in (embed_VD, head_DV))
    return LoadedModel(build_config({"model": {"max_context": 128}}), made, BYTES)


def changed(function: Callable[[Transformer], Transformer], model: Transformer) -> Transformer:
    """Returns `function(model)`, computed by one program instead of one per operation and shape."""
    graph, state = nnx.split(model)
    after, _ = nnx.split(nnx.eval_shape(lambda: function(nnx.merge(graph, state))))
    return nnx.merge(
        after, jax.jit(lambda state: nnx.state(function(nnx.merge(graph, state))))(state)
    )


@cache
def _forward(config: ModelConfig) -> Any:
    graph, _ = nnx.split(nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0))))

    @jax.jit
    def run(state, tokens_BT, positions_BT):
        return nnx.merge(graph, state)(tokens_BT, positions_BT)[0]

    return run


def all_logits(model: Transformer, text: list[int]) -> np.ndarray:
    """Returns logits `[T, V]` after every token of a sequence, in one pass without a cache."""
    S = model.config.max_context
    places = np.arange(S)
    tokens = np.zeros((1, S), np.int32)
    tokens[0, : len(text)] = text
    positions = np.where(places < len(text), places, -1)[None]
    return np.asarray(_forward(model.config)(nnx.state(model), tokens, positions))[0, : len(text)]


_draw = jax.jit(lambda logits_V, seed, sample, n: draw(logits_V, row_key(seed, sample, n)))
_uniform = jax.jit(
    lambda seed, sample, n: jax.random.uniform(jax.random.fold_in(row_key(seed, sample, n), 1))
)


EDITS = (
    "no_repeat_ngram",
    "logit_bias",
    "allowed_tokens",
    "banned_tokens",
    "bad_words",
    "min_tokens",
)
PENALTIES = (
    "encoder_repetition_penalty",
    "repetition_penalty",
    "presence_frequency_penalty",
    "dry",
)
ORDER = (
    *PENALTIES, "dynamic_temperature", "temperature", "smoothing", "top_k", "top_p", "min_p",
    "top_a", "tail_free", "typical", "epsilon_cutoff", "eta_cutoff", "top_n_sigma", "min_k",
    "p_less", "p_less_norm", "top_h", "xtc", "skew", "mirostat",
)  # fmt: skip
# step → its parameters in `process_logits`, by the names of the settings; the first of them enables
# the step
PARAMETERS: dict[str, dict[str, str]] = {
    "no_repeat_ngram": {"no_repeat_ngram": "n"},
    "allowed_tokens": {"allowed_tokens": "ids"},
    "banned_tokens": {"banned_tokens": "ids"},
    "bad_words": {"bad_words": "sequences"},
    "repetition_penalty": {"repetition_penalty": "penalty", "repetition_range": "range",
                           "repetition_slope": "slope"},
    "presence_frequency_penalty": {"presence_penalty": "presence",
                                   "frequency_penalty": "frequency"},
    "dry": {
        "dry_multiplier": "multiplier", "dry_base": "base", "dry_allowed_length": "allowed_length",
        "dry_range": "range",
        "dry_breakers": "breakers",
    },
    "dynamic_temperature": {"dynatemp_high": "high", "dynatemp_low": "low",
                            "dynatemp_exponent": "exponent"},
    "temperature": {"temperature": "t"},
    "smoothing": {"smoothing_factor": "factor", "smoothing_curve": "curve"},
    "top_k": {"top_k": "k", "ties": "ties"},
    "top_p": {"top_p": "p", "top_p_rule": "rule", "ties": "ties"},
    "min_p": {"min_p": "p"},
    "top_a": {"top_a": "a"},
    "tail_free": {"tail_free": "z"},
    "typical": {"typical": "p", "ties": "ties"},
    "epsilon_cutoff": {"epsilon_cutoff": "eps"},
    "eta_cutoff": {"eta_cutoff": "eps"},
    "top_n_sigma": {"top_n_sigma": "n"},
    "xtc": {"xtc_probability": "probability", "xtc_threshold": "threshold"},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": "penalty"},
    "min_k": {"min_k": "tau"},
    "top_h": {"top_h": "alpha", "top_h_rule": "rule"},
    "skew": {"skew": "skew"},
}  # fmt: skip


def steps_of(
    settings: dict[str, Any], order: tuple[str, ...], eos: list[int], u: float
) -> list[dict[str, Any]]:
    """Returns the pipeline of the settings, without mirostat, adaptive-p and the watermark."""
    found: list[dict[str, Any]] = []
    for name in (*EDITS, *order):
        if name == "min_tokens" and settings.get("min_tokens") and eos:
            found.append({"name": name, "n": settings["min_tokens"], "stop_ids": eos})
        elif name == "logit_bias" and "logit_bias" in settings:
            bias = settings["logit_bias"]
            found.append({"name": name, "ids": [*map(int, bias)], "values": [*bias.values()]})
        elif name == {"plain": "p_less", "norm": "p_less_norm"}.get(settings.get("p_less", "off")):
            found.append({"name": name})
        elif name in PARAMETERS and next(iter(PARAMETERS[name])) in settings:
            numbers = {
                short: settings[key] for key, short in PARAMETERS[name].items() if key in settings
            }
            found.append(
                {"name": name} | numbers | ({"u": u, "protected_ids": eos} if name == "xtc" else {})
            )
    return found


def slowly(
    model: Transformer,
    prompt: list[int],
    steps: int,
    *,
    seed: int = 0,
    sample: int = 0,
    order: tuple[str, ...] = ORDER,
    matcher: Any = None,
    **settings: Any,
) -> list[int]:
    """Returns the continuation of one prompt. The settings are those of `generate`.

    With a temperature of 0 or with `greedy`, every token is the one with the largest logit. A
    matcher masks the tokens that its constraint does not allow, and ends the text.
    """
    text, eos = list(prompt), list(settings.get("eos_ids", ()))
    greedy = settings.get("greedy", False) or settings.get("temperature", 1.0) == 0
    order = tuple(name for name in order if name in PENALTIES) if greedy else order
    tau, mu = settings.get("mirostat_tau", 5.0), 2 * settings.get("mirostat_tau", 5.0)
    version = 0 if greedy else settings.get("mirostat", 0)
    target, decay = settings.get("adaptive_target", -1.0), settings.get("adaptive_decay", 0.9)
    total, weight = target / (1 - decay), 1 / (1 - decay)
    keys = [] if greedy else settings.get("watermark_keys", [])
    mark = (
        [{"name": "synthid", "layer_keys": keys, "ngram": settings.get("watermark_ngram", 5)}]
        if keys
        else []
    )
    for n in range(steps):
        said = [text[: len(prompt)]], [text[len(prompt) :]]
        u = float(_uniform(np.uint32(seed), sample, n)) if "xtc_probability" in settings else 0.0
        logits_V = all_logits(model, text)[-1]
        if matcher is not None:
            if matcher.done:
                break
            is_allowed_V = np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")[
                : len(logits_V)
            ]
            logits_V = np.where(is_allowed_V, logits_V, -np.inf)
        if steps := steps_of(settings, order, eos, u):
            logits_V = np.asarray(process_logits(logits_V[None], steps, *said))[0]
        if version:
            cut_BV = np.asarray(
                process_logits(logits_V[None], [{"name": f"mirostat_v{version}", "mu": mu}])
            )
            token = int(_draw(cut_BV[0], np.uint32(seed), sample, n))
            exact_V = np.asarray(logits_V, np.float64)
            surprise = np.log2(np.exp(exact_V - exact_V.max()).sum()) - (
                exact_V[token] - exact_V.max()
            ) / np.log(2)
            mu -= settings.get("mirostat_eta", 0.1) * (surprise - tau)
        elif mark or (target >= 0 and not greedy):
            adapt = (
                [{"name": "adaptive_p", "target": target, "average": total / weight}]
                if target >= 0
                else []
            )
            changed_BV = np.asarray(process_logits(logits_V[None], adapt + mark, *said))
            token = int(_draw(changed_BV[0], np.uint32(seed), sample, n))
            weights_V = np.exp(np.float64(logits_V) - np.max(logits_V))
            total, weight = weights_V[token] / weights_V.sum() + decay * total, 1 + decay * weight
        else:
            token = (
                int(np.argmax(logits_V))
                if greedy
                else int(_draw(logits_V, np.uint32(seed), sample, n))
            )
        text.append(token)
        if token in eos:
            break
        if matcher is not None:
            matcher.consume(token)
    return text[len(prompt) :]


def log_softmax(logits_V: Any) -> np.ndarray:
    """Returns the log-probabilities in float64."""
    shifted_V = np.asarray(logits_V, np.float64) - np.max(logits_V)
    return shifted_V - np.log(np.exp(shifted_V).sum())


def guided_logprobs(
    model: Transformer, prompt: list[int], negative: list[int], scale: float, tokens: list[int]
) -> np.ndarray:
    """Returns the log-probabilities after a prompt and new tokens, with classifier-free
    guidance.
    """
    main_V, guide_V = (
        log_softmax(all_logits(model, [*text, *tokens])[-1]) for text in (prompt, negative)
    )
    return log_softmax(guide_V + scale * (main_V - guide_V))


def guided_text(
    model: Transformer,
    prompt: list[int],
    negative: list[int],
    scale: float,
    steps: int,
    seed: int,
    sample: int = 0,
) -> tuple[list[int], list[float]]:
    """Returns the tokens that are drawn with guidance, and the log-probability of each."""
    tokens: list[int] = []
    logprobs: list[float] = []
    for n in range(steps):
        logprob_V = guided_logprobs(model, prompt, negative, scale, tokens)
        tokens.append(int(_draw(np.float32(logprob_V), np.uint32(seed), sample, n)))
        logprobs.append(logprob_V[tokens[-1]])
    return tokens, logprobs


def prompts(*lengths: int, seed: int = 1) -> list[list[int]]:
    """Returns random prompts of these lengths."""
    random = np.random.default_rng(seed)
    return [random.integers(0, V, length).tolist() for length in lengths]


def padded(rows: list[list[int]], fill: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """Returns the rows as one array, right-padded with an ordinary token, and their lengths."""
    lengths = np.array([len(row) for row in rows])
    out = np.full((len(rows), lengths.max()), fill, np.int32)
    for row, text in zip(out, rows, strict=True):
        row[: len(text)] = text
    return out, lengths


# The sampling steps of a program that is compiled inside `few_steps`.
FEW_STEPS = {
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "mirostat_v2",
    "logit_bias",
    "allowed_tokens",
}


def make_slots(
    run: Any, count: int | None, context: int, config: Any = None, **options: Any
) -> SlotBatch:
    """Returns a batch with this number of slots."""
    return SlotBatch(run, EngineOptions(count, context, **options), config)


@contextmanager
def few_steps() -> Iterator[None]:
    """Compiles the programs of servers with `FEW_STEPS` only, which takes a third of the time;
    other steps do nothing.
    """
    apply = chain._apply_step

    def apply_few(name: str, x_BN: jax.Array, *rest: Any) -> jax.Array:
        return apply(name, x_BN, *rest) if name in FEW_STEPS else x_BN

    sample_step = shared_trace()(
        partial(decode.sample_step.__wrapped__)
    )  # a new function, whose traces are its own
    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(chain, "_apply_step", apply_few))
        for module in (decode, drafts):  # both call it
            patches.enter_context(mock.patch.object(module, "sample_step", sample_step))
        yield
    for function in (decode_slots, _generate_toks.jitted_fn):
        function.clear_cache()  # later programs have all steps


@cache
def byte_model(context: int = 192, **changes: Any) -> LoadedModel:
    """Returns a loaded model with the vocabulary of bytes."""
    return loaded_model(BYTES, context, **changes)


def loaded_model(tokenizer: Any, context: int, **changes: Any) -> LoadedModel:
    """Returns a loaded model with the vocabulary of a tokenizer."""
    architecture = config(vocab_size=tokenizer.vocab_size, max_context=context, **changes)
    return LoadedModel(
        build_config({"model": {"max_context": context}}), model(architecture), tokenizer
    )


_compiled: dict[
    Any, dict[Any, Any]
] = {}  # (architecture, sizes, settings) → programs with few steps


def compile_few_steps(slots: SlotBatch, echo: bool = False) -> SlotBatch:
    """Compiles a batch with few sampling steps. Batches of equal shapes in a process share the
    programs.
    """
    config = slots._config
    key = (
        slots.plan.architecture,
        slots.count,
        slots.context,
        slots.plan.stepper,
        repr((config.generation, config.kv)),
    )
    slots._programs |= _compiled.get(key, {})
    if all(one in slots._programs for one in slots._keys(slots.program_key(config), echo)):
        slots.compile(config, echo)
    else:
        with few_steps():
            slots.compile(config, echo)
        _compiled[key] = dict(slots._programs)
    return slots


@cache
def slot_batch(
    windows: tuple[int | None, ...], steps: str = "few"
) -> tuple[LoadedModel, SlotBatch]:
    """Returns a model and a compiled batch of three slots with few or all sampling steps. The
    caller resets the batch.
    """
    run = byte_model(windows=windows)
    slots = make_slots(run, 3, run.model.config.max_context)
    if steps == "few":
        return run, compile_few_steps(slots)
    slots.compile(run.config)
    return run, slots
