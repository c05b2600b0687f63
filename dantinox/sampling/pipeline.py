"""Steps by name: lists of `{"name": …, parameters…}` run over rows, for experiments and for comparing with other samplers."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dantinox.config import UserError
from dantinox.sampling import history
from dantinox.sampling import steps as filters

KOBOLD_CODES = ("top_k", "top_a", "top_p", "tail_free", "typical", "temperature", "repetition_penalty")
PADDING = 128  # one compiled step serves all vocabularies and histories up to the next multiple


class Number(NamedTuple):
    """A parameter of a step: its range, and its default when it has one."""

    low: float = -math.inf
    high: float = math.inf
    default: float | None = None
    integer: bool = False


class Choice(NamedTuple):
    """A parameter that is one of a few words; the first is the default."""

    words: tuple[str, ...]


class Ids(NamedTuple):
    """A parameter that is a list, by default `default`."""

    default: tuple[int, ...] | None = None


Parameter = Number | Choice | Ids
TIES, RULE = Choice(("first", "all")), Choice(("inclusive", "exclusive"))
POSITIVE, ANY = Number(float(np.finfo(np.float32).tiny)), Number()
SHARE, COUNT = Number(0, 1), Number(integer=True)

PARAMETERS: dict[str, dict[str, Parameter]] = {
    "logit_bias": {"ids": Ids(), "values": Ids()},
    "allowed_tokens": {"ids": Ids()},
    "banned_tokens": {"ids": Ids()},
    "bad_words": {"sequences": Ids()},
    "no_repeat_ngram": {"n": COUNT},
    "min_tokens": {"n": COUNT, "stop_ids": Ids()},
    "repetition_penalty": {"penalty": POSITIVE, "range": Number(0, default=0, integer=True), "slope": Number(0, default=0)},
    "presence_frequency_penalty": {"presence": Number(default=0), "frequency": Number(default=0)},
    "dry": {
        "multiplier": Number(0),
        "base": Number(1, default=1.75),
        "allowed_length": Number(1, default=2, integer=True),
        "range": Number(0, default=0, integer=True),
        "breakers": Ids(()),
    },
    "temperature": {"t": Number(0)},
    "dynamic_temperature": {"low": Number(0), "high": Number(0), "exponent": Number(0, default=1)},
    "smoothing": {"factor": Number(0), "curve": Number(1, 3, default=1)},
    "top_k": {"k": COUNT, "ties": TIES},
    "top_p": {"p": SHARE, "rule": RULE, "ties": TIES},
    "min_p": {"p": SHARE},
    "top_a": {"a": Number(0)},
    "tail_free": {"z": SHARE},
    "typical": {"p": SHARE, "ties": TIES},
    "epsilon_cutoff": {"eps": Number(0, 1)},
    "eta_cutoff": {"eps": Number(0, 1)},
    "top_n_sigma": {"n": ANY},
    "xtc": {"threshold": Number(0, 0.5), "probability": SHARE, "u": SHARE, "protected_ids": Ids(())},
    "mirostat_v1": {"mu": ANY, "m": Number(1, default=100, integer=True)},
    "mirostat_v2": {"mu": ANY},
}


class Text(NamedTuple):
    """What one row said so far."""

    prompt: list[int]
    output: list[int]

    @property
    def all(self) -> list[int]:
        return self.prompt + self.output


def process_logits(
    logits_BV: Any,
    steps: Sequence[Mapping[str, Any]],
    prompt: Sequence[Sequence[int]] | None = None,
    output: Sequence[Sequence[int]] | None = None,
) -> Array:
    """Runs steps over rows in the order given.

    Args:
      logits_BV: logits; NaN and +inf are repaired once, on entry.
      steps: mappings of `name` and the step's parameters, for example `{"name": "top_p", "p": 0.9}`.
        In `logit_bias.values` null stands for -inf; `xtc` brings its draw `u`, mirostat its `mu`.
      prompt: token ids per row that came before the output; None: none.
      output: token ids per row generated so far; None: none.

    Returns:
      float32 logits [B, V]; -inf where a token is removed.

    Raises:
      UserError: a step or parameter has a wrong name, a value is out of range, or an id is no token.
    """
    logits_BV = np.asarray(logits_BV).astype(np.float32)
    B, V = logits_BV.shape
    checked = [(str(step.get("name")), _checked(step, V)) for step in steps]
    padded_BV = np.pad(logits_BV, ((0, 0), (0, -V % PADDING)), constant_values=-np.inf)
    rows = []
    for b in range(B):
        text = Text(*([int(t) for t in source[b]] if source is not None else [] for source in (prompt, output)))
        if any(not 0 <= token < V for token in text.all):
            raise UserError(f"prompt and output must hold token ids in [0, {V}), got {text.all}")
        row_V = _SANITISE(padded_BV[b])[0]
        for name, numbers in checked:
            row_V = _run(name, row_V, numbers, text, V)
        rows.append(np.asarray(row_V)[:V])
    return jnp.asarray(np.stack(rows))


def kobold_order(codes: Sequence[int]) -> tuple[str, ...]:
    """The step names of a KoboldAI `sampler_order`; a list of the six older codes gets the repetition penalty put first.

    Raises:
      ValueError: the codes are no permutation of 0…5 or 0…6.
    """
    codes = list(codes)
    if sorted(codes) == list(range(6)):
        codes = [6, *codes]
    if sorted(codes) != list(range(7)):
        raise ValueError(f"a Kobold sampler order must be a permutation of 0…5 or 0…6, got {codes}")
    return tuple(KOBOLD_CODES[code] for code in codes)


_SANITISE = jax.jit(filters.sanitise)


def _compiled(name: str) -> Callable[..., Array]:
    step = getattr(history if hasattr(history, name) else filters, name)
    words = [key for key in ("rule", "ties", "m") if key in inspect.signature(step).parameters]
    return jax.jit(step, static_argnames=words)


_COMPILED = {name: _compiled(name) for name in ("ban", *PARAMETERS) if name not in ("banned_tokens", "bad_words")}


def _run(name: str, row_V: Array, numbers: dict[str, Any], text: Text, size: int) -> Array:
    """One step over one padded row, with what it reads of the text; `size` is the vocabulary without the padding."""
    run = partial(_COMPILED.get(name, _COMPILED["ban"]), row_V)
    V = row_V.shape[0]
    match name:
        case "logit_bias":
            bias_V = np.zeros(V, np.float32)
            np.add.at(bias_V, numbers["ids"], [-np.inf if v is None else v for v in numbers["values"]])
            return run(bias_V)
        case "allowed_tokens" | "banned_tokens":
            return run(_padded(numbers["ids"]))
        case "bad_words":
            return run(_padded(history.bad_word_ids(numbers["sequences"], text.all)))
        case "no_repeat_ngram":
            return run(_padded(text.all), np.int32(len(text.all)), numbers["n"])
        case "min_tokens":
            return run(numbers["n"], _padded(numbers["stop_ids"]), np.int32(len(text.output)))
        case "repetition_penalty":
            distance_V = np.full(V, -1, np.int32)
            distance_V[text.all] = len(text.all) - 1 - np.arange(len(text.all))  # the last of equal places wins
            return run(distance_V, numbers["penalty"], numbers["range"], numbers["slope"])
        case "presence_frequency_penalty":
            return run(np.bincount(text.output, minlength=V).astype(np.int32), numbers["presence"], numbers["frequency"])
        case "dry":
            plain = [numbers[key] for key in ("multiplier", "base", "allowed_length", "range")]
            return run(_padded(text.all), np.int32(len(text.all)), *plain, _padded(numbers["breakers"]))
        case "xtc":
            protected = numbers["protected_ids"]
            chances = [numbers[key] for key in ("threshold", "probability", "u")]
            return run(*chances, _padded(protected, V))
        case "tail_free" | "mirostat_v1":
            numbers = numbers | ({"m": int(numbers["m"])} if "m" in numbers else {})
            return run(**numbers, size=np.int32(size))
    return run(**numbers)


def _padded(ids: Sequence[int], fill: int = -1) -> np.ndarray:
    """Ids as int32 with `fill` up to a multiple of the padding, at least one."""
    out_S = np.full(-(-max(len(ids), 1) // PADDING) * PADDING, fill, np.int32)
    out_S[: len(ids)] = ids
    return out_S


def _checked(step: Mapping[str, Any], V: int) -> dict[str, Any]:
    """The parameters of a step, complete and in range."""
    name = step.get("name")
    if name not in PARAMETERS:
        raise UserError(f"no sampling step is called {name}: they are {', '.join(PARAMETERS)}")
    declared = PARAMETERS[name]
    for key in step:
        if key != "name" and key not in declared:
            raise UserError(f"the sampling step {name} has no parameter {key}: it has {', '.join(declared)}")
    numbers = {key: _value(f"{name}.{key}", step, key, kind) for key, kind in declared.items()}
    for key in ("ids", "stop_ids", "protected_ids"):
        if any(not 0 <= i < V for i in numbers.get(key, ())):
            raise UserError(f"{name}.{key} must hold token ids in [0, {V}), got {numbers[key]}")
    if name == "allowed_tokens" and len(numbers["ids"]) == 0:
        raise UserError("allowed_tokens.ids must hold at least one token id, got none")
    if name == "logit_bias" and len(numbers["ids"]) != len(numbers["values"]):
        raise UserError(f"logit_bias needs one value per id, got {len(numbers['ids'])} ids, {len(numbers['values'])} values")
    if name == "dynamic_temperature" and numbers["low"] > numbers["high"]:
        raise UserError(f"dynamic_temperature.low must be at most high, got {numbers['low']} and {numbers['high']}")
    return numbers


def _value(where: str, step: Mapping[str, Any], key: str, kind: Parameter) -> Any:
    default = kind.words[0] if isinstance(kind, Choice) else kind.default
    value = step.get(key, default)
    if value is None:
        raise UserError(f"the sampling step {step['name']} needs the parameter {key}")
    match kind:
        case Choice(words):
            if value not in words:
                raise UserError(f"{where} must be one of {', '.join(words)}, got {value!r}")
        case Ids():
            if isinstance(value, str) or not isinstance(value, Sequence | np.ndarray):
                raise UserError(f"{where} must be a list, got {value!r}")
        case Number(low, high, _, integer):
            plain = isinstance(value, int | np.integer if integer else int | float | np.number) and not isinstance(value, bool)
            if not plain or not math.isfinite(value) or not low <= value <= high:
                kind_words = "an integer" if integer else "a number"
                raise UserError(f"{where} must be {kind_words} in [{low:g}, {high:g}], got {value!r}")
            return np.int32(np.clip(value, -(2**31), 2**31 - 1)) if integer else np.float32(value)
    return value
