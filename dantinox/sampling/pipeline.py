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
from dantinox.sampling.steps import LARGEST

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
      UserError: the logits are no table of numbers, a step or parameter has a wrong name, a value is out of range, an id is
        no token, or prompt or output have another number of rows.
    """
    logits_BV = _numbers(logits_BV)
    B, V = logits_BV.shape
    if isinstance(steps, str | Mapping) or not isinstance(steps, Sequence):
        raise UserError(f"steps must be a list of mappings of name and parameters, got {steps!r}")
    checked = [(step["name"], numbers) for step, numbers in ((step, _checked(step, V)) for step in steps)]
    texts = map(Text, _texts("prompt", prompt, B, V), _texts("output", output, B, V))
    padded_BV = np.pad(logits_BV, ((0, 0), (0, -V % PADDING)), constant_values=-np.inf)
    for row_V, text in zip(padded_BV, texts, strict=True):
        changed_V = _SANITISE(row_V)[0]
        for name, numbers in checked:
            changed_V = _run(name, changed_V, numbers, text, V)
        row_V[:] = changed_V
    return jnp.asarray(padded_BV[:, :V])


_SANITISE = jax.jit(filters.sanitise)
_REPEATS = jax.jit(history.repeat_lengths)
_LONGEST = jax.jit(history.longest_repeats, static_argnames="vocab_size")


def _compiled(name: str) -> Callable[..., Array]:
    step = getattr(history if hasattr(history, name) else filters, name)
    words = [key for key in ("rule", "ties", "m") if key in inspect.signature(step).parameters]
    return jax.jit(step, static_argnames=words)


_COMPILED = {name: _compiled(name) for name in ("ban", *PARAMETERS) if name != "banned_tokens"}


def _run(name: str, row_V: Array, numbers: dict[str, Any], text: Text, size: int) -> Array:
    """One step over one padded row, with what it reads of the text; `size` is the vocabulary without the padding."""
    run = partial(_COMPILED.get(name, _COMPILED["ban"]), row_V)
    V = row_V.shape[0]
    match name:
        case "logit_bias":
            bias_V = np.zeros(V)  # float64: the sum of large values for one id must not become infinite and ban it
            np.add.at(bias_V, numbers["ids"], numbers["values"])
            return run(np.where(bias_V == -np.inf, bias_V, np.clip(bias_V, -LARGEST, LARGEST)).astype(np.float32))
        case "allowed_tokens" | "banned_tokens":
            return run(_padded(numbers["ids"]))
        case "bad_words":
            sequences = [words for words in numbers["sequences"] if len(words)]
            return run(_padded(text.all), np.int32(len(text.all)), *history.word_arrays(sequences))
        case "no_repeat_ngram":
            said = _padded(text.all), np.int32(len(text.all))
            return run(*said, _REPEATS(*said), numbers["n"])
        case "min_tokens":
            return run(numbers["n"], _padded(numbers["stop_ids"]), np.int32(len(text.output)))
        case "repetition_penalty":
            distance_V = np.full(V, -1, np.int32)
            distance_V[text.all] = len(text.all) - 1 - np.arange(len(text.all))  # the last of equal places wins
            return run(distance_V, numbers["penalty"], numbers["range"], numbers["slope"])
        case "presence_frequency_penalty":
            return run(np.bincount(text.output, minlength=V).astype(np.int32), numbers["presence"], numbers["frequency"])
        case "dry":
            said = _padded(text.all), np.int32(len(text.all))
            breaker_S = np.isin(said[0], numbers["breakers"])
            repeated_V = _LONGEST(*said, _REPEATS(*said), breaker_S, numbers["range"], vocab_size=V)
            return run(repeated_V, numbers["multiplier"], numbers["base"], numbers["allowed_length"])
        case "xtc":
            chances = [numbers[key] for key in ("threshold", "probability", "u")]
            return run(*chances, np.isin(np.arange(V), numbers["protected_ids"]))
        case "tail_free" | "mirostat_v1":
            numbers = numbers | ({"m": int(numbers["m"])} if "m" in numbers else {})
            return run(**numbers, size=np.int32(size))
    return run(**numbers)


def _padded(ids: Sequence[int], fill: int = -1) -> np.ndarray:
    """Ids as int32 with `fill` up to a multiple of the padding, at least one."""
    out_S = np.full(-(-max(len(ids), 1) // PADDING) * PADDING, fill, np.int32)
    out_S[: len(ids)] = ids
    return out_S


def _numbers(logits_BV: Any) -> np.ndarray:
    """The logits as float32; what is beyond its range becomes infinite."""
    try:
        array = np.asarray(logits_BV)
        what = f"shape {array.shape} of {array.dtype}"
    except ValueError:
        array, what = np.empty(0), "rows of different length"
    real = jnp.issubdtype(array.dtype, np.integer) or jnp.issubdtype(array.dtype, np.floating)
    if array.ndim != 2 or array.shape[1] == 0 or not real:
        raise UserError(f"logits must be numbers [B, V] with V at least 1, got {what}")
    with np.errstate(over="ignore"):
        return array.astype(np.float32)


def _texts(where: str, rows: Any, B: int, V: int) -> list[list[int]]:
    """The token ids of every row; None: none."""
    rows = [[]] * B if rows is None else _unpacked(rows)
    if not isinstance(rows, Sequence) or len(rows) != B:
        got = len(rows) if isinstance(rows, Sequence) else repr(rows)
        raise UserError(f"{where} must be one list of token ids per row of logits, {B}, got {got}")
    return [_ids(f"{where}[{b}]", row, V) for b, row in enumerate(rows)]


def _checked(step: Any, V: int) -> dict[str, Any]:
    """The parameters of a step, complete and in range."""
    if not isinstance(step, Mapping):
        raise UserError(f"a sampling step must be a mapping of name and parameters, got {step!r}")
    name = step.get("name")
    if not isinstance(name, str) or name not in PARAMETERS:
        raise UserError(f"no sampling step is called {name}: they are {', '.join(PARAMETERS)}")
    declared = PARAMETERS[name]
    for key in step:
        if key != "name" and key not in declared:
            raise UserError(f"the sampling step {name} has no parameter {key}: it has {', '.join(declared)}")
    numbers = {key: _value(f"{name}.{key}", step, key, kind, V) for key, kind in declared.items()}
    if name == "allowed_tokens" and not numbers["ids"]:
        raise UserError("allowed_tokens.ids must hold at least one token id, got none")
    if name == "logit_bias" and len(numbers["ids"]) != len(numbers["values"]):
        raise UserError(f"logit_bias needs one value per id, got {len(numbers['ids'])} ids, {len(numbers['values'])} values")
    if name == "dynamic_temperature" and numbers["low"] > numbers["high"]:
        raise UserError(f"dynamic_temperature.low must be at most high, got {numbers['low']} and {numbers['high']}")
    return numbers


def _value(where: str, step: Mapping[str, Any], key: str, kind: Parameter, V: int) -> Any:
    value = step.get(key, kind.words[0] if isinstance(kind, Choice) else kind.default)
    if value is None:
        raise UserError(f"the sampling step {step['name']} needs the parameter {key}")
    match kind:
        case Choice(words):
            if not isinstance(value, str) or value not in words:
                raise UserError(f"{where} must be one of {', '.join(words)}, got {value!r}")
            return value
        case Number():
            return _number(where, value, kind)
    if key == "sequences":
        return [_ids(f"{where}[{i}]", words, V) for i, words in enumerate(_list(where, value))]
    if key == "values":
        banned = (None, -math.inf)
        return [-math.inf if v in banned else _number(f"{where}[{i}]", v, ANY) for i, v in enumerate(_list(where, value))]
    return _ids(where, value, V)


def _number(where: str, value: Any, kind: Number) -> np.number:
    """A number of its kind: a float32, or an int32 that stands for all integers beyond it."""
    low, high, _, integer = kind
    if integer and _is_integer(value) and low <= value <= high:
        return np.int32(min(max(value, -(2**31)), 2**31 - 1))
    low, high = (low, high) if integer else (max(low, -LARGEST), min(high, LARGEST))
    if not integer and (_is_integer(value) or isinstance(value, float | np.floating)) and low <= value <= high:
        return np.float32(value)
    raise UserError(f"{where} must be {'an integer' if integer else 'a number'} in [{low:g}, {high:g}], got {value!r}")


def _ids(where: str, value: Any, V: int) -> list[int]:
    ids = _list(where, value)
    for token in ids:
        if not _is_integer(token) or not 0 <= token < V:
            raise UserError(f"{where} must hold token ids in [0, {V}), got {token!r}")
    return ids


def _list(where: str, value: Any) -> list[Any]:
    value = _unpacked(value)
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise UserError(f"{where} must be a list, got {value!r}")
    return list(value)


def _unpacked(value: Any) -> Any:
    """Arrays as lists, anything else as it is."""
    return value.tolist() if isinstance(value, np.ndarray | Array) else value


def _is_integer(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)
