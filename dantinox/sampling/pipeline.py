"""Steps by name: lists of `{"name": …, parameters…}` run over rows, for experiments and for comparing with other samplers."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args, get_origin

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dantinox.config import UserError
from dantinox.config.steps import SETTINGS, STEPS, Biases, Bounds, Sequences, Step, Tokens, bounds
from dantinox.sampling.chain import run_step
from dantinox.sampling.history import repeat_lengths, word_arrays
from dantinox.sampling.params import SamplingParams
from dantinox.sampling.state import SamplerState, fields_read
from dantinox.sampling.steps import LARGEST, sanitise
from dantinox.sampling.window import Context

PADDING = 128  # one compiled step serves all vocabularies and histories up to the next multiple
BIAS = Bounds(-math.inf, math.inf, False)


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
    checked = [(step["name"], values) for step, values in ((step, _checked(step, V)) for step in steps)]
    texts = map(Text, _texts("prompt", prompt, B, V), _texts("output", output, B, V))
    padded_BV = np.pad(logits_BV, ((0, 0), (0, -V % PADDING)), constant_values=-np.inf)
    for row_V, text in zip(padded_BV, texts, strict=True):
        changed_V = _SANITISE(row_V)[0]
        for name, values in checked:
            changed_V = _run(name, changed_V, values, text, V)
        row_V[:] = changed_V
    return jnp.asarray(padded_BV[:, :V])


_SANITISE = jax.jit(sanitise)
_REPEATS = jax.jit(repeat_lengths)
_STEP = jax.jit(run_step, static_argnames=("name", "m"))


def _run(name: str, row_V: Array, values: dict[str, Any], text: Text, size: int) -> Array:
    """One step over one padded row; `size` is the vocabulary without the padding."""
    step, V = STEPS[name], row_V.shape[0]
    settings = {key: values[parameter] for parameter, key in step.arguments.items()}
    words = {key: value for key, value in settings.items() if isinstance(value, str)}
    numbers = {key: value for key, value in settings.items() if key not in words}
    if "range" in step.given:
        numbers["dry_range"] = values["range"]
    known: dict[str, Any] = {parameter: values[parameter] for parameter in ("u", "mu", "m") if parameter in values}
    known |= {"size": np.int32(size)} if "size" in step.reads else {}
    on, tables, one = {name: jnp.asarray(True)}, _tables(name, step, values), jnp.asarray(0)
    params = SamplingParams(numbers, on, tables, one, one, (name,), True, tuple(words.items()))
    return _STEP(name, row_V, Context(params, _state(name, text, V, values.get("breakers", ()))), **known)


def _tables(name: str, step: Step, values: dict[str, Any]) -> dict[str, Any]:
    """The lists that a step reads, under the names that decoding has for them."""
    own = step.beside[0] if step.beside else name
    if name == "logit_bias":
        sums: dict[int, float] = {}  # float64: the sum of large values for one id must not become infinite and ban it
        for token, bias in zip(values["ids"], values["values"], strict=True):
            sums[token] = sums.get(token, 0.0) + bias
        return {own: _padded([*sums]), f"{own}_by": _padded([_finite(bias) for bias in sums.values()], 0.0)}
    if "sequences" in values:
        pairs = [*zip(values["sequences"], values.get("values", [0.0] * len(values["sequences"])), strict=True)]
        pairs = [(words, bias) for words, bias in pairs if words]
        before, last = word_arrays([words for words, _ in pairs])
        biases = [*(_finite(bias) for _, bias in pairs), *[0.0] * (len(last) - len(pairs))]
        return {f"{own}_before": before, own: last, f"{own}_by": np.asarray(biases, np.float32)}
    return {
        own if parameter == "ids" else parameter: _padded(values[parameter])
        for parameter in ("ids", "stop_ids", "protected_ids")
        if parameter in step.given
    }


def _finite(bias: float) -> float:
    return bias if bias == -math.inf else max(-LARGEST, min(bias, LARGEST))


def _state(name: str, text: Text, V: int, breakers: Sequence[int]) -> SamplerState:
    """What a step reads of one row's text."""
    asked, said, n = fields_read([name]), text.all, len(text.all)
    fields: dict[str, Any] = {"n_generated": np.int32(len(text.output)), "length": np.int32(n)}
    if "last_seen" in asked:
        fields["last_seen"] = np.full(V, -1, np.int32)
        fields["last_seen"][said] = np.arange(n)  # the last of equal places wins
    if "count" in asked:
        fields["count"] = np.bincount(text.output, minlength=V).astype(np.int32)
    if "text" in asked:
        fields["text"] = _padded(said)
    if "repeats" in asked:
        fields["repeats"] = _REPEATS(fields["text"], n)
    if "breaker" in asked:
        fields["breaker"] = np.isin(fields["text"], breakers)
    return SamplerState(**fields)


def _padded(values: Sequence[float], fill: float = -1) -> np.ndarray:
    """Ids, or biases with a fill of 0.0, as an array filled up to a multiple of the padding, at least one."""
    out_S = np.full(-(-max(len(values), 1) // PADDING) * PADDING, fill, np.int32 if fill == -1 else np.float32)
    out_S[: len(values)] = values
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


def _checked(given: Any, V: int) -> dict[str, Any]:
    """The parameters of a step, complete and in range."""
    if not isinstance(given, Mapping):
        raise UserError(f"a sampling step must be a mapping of name and parameters, got {given!r}")
    name = given.get("name")
    if not isinstance(name, str) or name not in STEPS:
        raise UserError(f"no sampling step is called {name}: they are {', '.join(STEPS)}")
    step = STEPS[name]
    switches = [parameter for parameter, key in step.arguments.items() if key in step.on]
    declared = {parameter: SETTINGS[key][:2] for parameter, key in step.arguments.items()} | step.given
    for key in given:
        if key != "name" and key not in declared:
            raise UserError(f"the sampling step {name} has no parameter {key}: it has {', '.join(declared)}")
    if len(switches) == 1 and given.get(switches[0]) is None:
        raise UserError(f"the sampling step {name} needs the parameter {switches[0]}")
    values = {}
    for key, (kind, default) in declared.items():
        value = default if given.get(key) is None else given[key]
        if value is None:
            raise UserError(f"the sampling step {name} needs the parameter {key}")
        values[key] = _value(f"{name}.{key}", value, kind, V)
    if name == "allowed_tokens" and not values["ids"]:
        raise UserError("allowed_tokens.ids must hold at least one token id, got none")
    owners = "ids" if "ids" in values else "sequences"
    if "values" in values and len(values[owners]) != len(values["values"]):
        got = f"{len(values[owners])} {owners}, {len(values['values'])} values"
        raise UserError(f"{name} needs one value per {'id' if owners == 'ids' else 'sequence'}, got {got}")
    if name == "dynamic_temperature" and values["low"] > values["high"]:
        raise UserError(f"dynamic_temperature.low must be at most high, got {values['low']} and {values['high']}")
    return values


def _value(where: str, value: Any, kind: Any, V: int) -> Any:
    if get_origin(kind) is Literal:
        if not isinstance(value, str) or value not in get_args(kind):
            raise UserError(f"{where} must be one of {', '.join(get_args(kind))}, got {value!r}")
        return value
    if kind == Tokens:
        return _ids(where, value, V)
    if kind == Sequences:
        return [_ids(f"{where}[{i}]", words, V) for i, words in enumerate(_list(where, value))]
    if kind == Biases:
        banned = (None, -math.inf)
        return [
            -math.inf if bias in banned else float(_number(f"{where}[{i}]", bias, BIAS))
            for i, bias in enumerate(_list(where, value))
        ]
    number = _number(where, value, bounds(kind) or BIAS)
    return int(number) if where == "mirostat_v1.m" else number


def _number(where: str, value: Any, kind: Bounds) -> np.number:
    """A number of its kind: a float32, or an int32 that stands for all integers beyond it."""
    low, high, integer = kind
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
