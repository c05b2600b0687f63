"""`process_logits`: named sampling steps applied to rows of logits, for experiments and comparisons."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, create_model

from dantinox.config import Config, GenerationSection, UserError
from dantinox.config.sampling_steps import SETTINGS, STEPS, Biases, Sequences, Tokens, bounds
from dantinox.files import quote
from dantinox.sampling.chain import run_step
from dantinox.sampling.params import SamplingParams
from dantinox.sampling.state import init_state
from dantinox.sampling.steps import LARGEST, sanitize
from dantinox.sampling.window import Context

PADDING = 128  # one compiled step serves all vocabularies and texts up to the next multiple
_DEFAULTS = Config()


def process_logits(
    logits_BV: Any,
    steps: Sequence[Mapping[str, Any]],
    prompt: Sequence[Sequence[int]] | None = None,
    output: Sequence[Sequence[int]] | None = None,
) -> Array:
    """Runs steps over rows in the order given, with the code of decoding.

    Args:
      logits_BV: logits; NaN and +inf are repaired once, on entry.
      steps: mappings of `name` and the step's parameters, for example `{"name": "top_p", "p": 0.9}`.
        In `logit_bias.values` null stands for -inf; `xtc` takes its draw `u`, mirostat its bound `mu`.
      prompt: token ids per row that came before the output; None: none.
      output: token ids per row generated so far; None: none.

    Returns:
      float32 logits [B, V]; -inf where a token is removed.

    Raises:
      UserError: the logits are not a matrix of numbers, a step or parameter is unknown, a value is out of range, an id is
        outside of the vocabulary, or prompt or output have another number of rows.
    """
    logits_BV = _check_logits(logits_BV)
    B, V = logits_BV.shape
    if isinstance(steps, str | Mapping) or not isinstance(steps, Sequence):
        raise UserError(f"steps must be a list of mappings of name and parameters, got {steps!r}")
    checked = [_check_step(step, V) for step in steps]
    texts = zip(_check_texts("prompt", prompt, B, V), _check_texts("output", output, B, V), strict=True)
    padded_BV = np.pad(logits_BV, ((0, 0), (0, -V % PADDING)), constant_values=-np.inf)
    for row_V, (prompt_ids, output_ids) in zip(padded_BV, texts, strict=True):
        changed_V = _SANITIZE(row_V)[0]
        length, counts_V = len(prompt_ids) + len(output_ids), np.bincount(np.asarray(output_ids, int), minlength=len(row_V))
        text_1S = np.zeros((1, -(-max(length, 1) // PADDING) * PADDING), np.int32)
        text_1S[0, :length] = prompt_ids + output_ids
        for name, params, known in checked:
            changed_V = _run_row(name, changed_V, params, text_1S, length, len(output_ids), counts_V, **known)
        row_V[:] = changed_V
    return jnp.asarray(padded_BV[:, :V])


_SANITIZE = jax.jit(sanitize)


@partial(jax.jit, static_argnames=("name", "m"))
def _run_row(
    name: str, x_V: Array, params: SamplingParams, text_1S: Array, length: Array, n_generated: Array, counts_V: Array,
    mu: Array | None = None, **known: Any,
) -> Array:  # fmt: skip
    """One step over one row; arrays are padded, and `known` goes to the step's function as it is."""
    valid_1S = jnp.arange(text_1S.shape[1])[None] < length
    params_1 = jax.tree.map(lambda leaf: leaf[None], params)
    state_1 = init_state(params_1, text_1S, valid_1S, x_V.shape[0], text_1S.shape[1])
    state = jax.tree.map(lambda leaf_1: leaf_1[0], state_1)
    fields = {"n_generated": n_generated, "count": counts_V, "mu": mu}  # the count is of the output alone
    return run_step(name, x_V, Context(params, replace(state, **fields)), **known)


def _check_logits(logits_BV: Any) -> np.ndarray:
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


def _check_texts(where: str, rows: Any, B: int, V: int) -> list[list[int]]:
    """The token ids of every row; None: none."""
    lists: list[list[int]] = _validate(where, _parameter_type(Sequences, V), [[]] * B if rows is None else rows)
    if len(lists) != B:
        raise UserError(f"{where} must be one list of token ids per row of logits, {B}, got {len(lists)}")
    return lists


def _check_step(given: Any, V: int) -> tuple[str, SamplingParams, dict[str, Any]]:
    """A step's name, its parameters as those of one row, and the arguments that decoding computes itself."""
    if not isinstance(given, Mapping):
        raise UserError(f"a sampling step must be a mapping of name and parameters, got {given!r}")
    name = given.get("name")
    if not isinstance(name, str) or name not in STEPS:
        raise UserError(f"unknown sampling step {quote(name)}: the steps are {', '.join(STEPS)}")
    parameters = {str(key): value for key, value in given.items() if key != "name" and value is not None}
    values = dict(_validate(name, _step_model(name, V), parameters))
    step = STEPS[name]
    settings = {key: values[parameter] for parameter, key in step.arguments.items()}
    if name == "dry":
        settings |= {"dry_range": values["range"], "dry_breakers": values["breakers"]}
    elif name == "dynamic_temperature" and values["low"] > values["high"]:
        raise UserError(f"dynamic_temperature.low must be at most high, got {values['low']} and {values['high']}")
    elif name.startswith("mirostat"):
        settings["mirostat"] = int(name[-1])
    elif "values" in values:
        settings[name] = _biases(name, values[next(iter(step.given))], values["values"])
    elif "sequences" in values:
        settings[name] = [words for words in values["sequences"] if words]
    elif "ids" in values:
        settings[name] = values["ids"]
        if name == "allowed_tokens" and not values["ids"]:
            raise UserError("allowed_tokens.ids must hold at least one token id, got none")
    config = _DEFAULTS.model_copy(update={"generation": GenerationSection(seed=0, **settings)})
    stops, protected = values.get("stop_ids", ()), values.get("protected_ids", ())
    params = SamplingParams.build(config, stop_ids=stops, protected_ids=protected, extra_steps=[name])
    known: dict[str, Any] = {key: np.float32(values[key]) for key in ("u", "mu") if key in values}
    known |= {"m": values["m"]} if "m" in values else {}
    known |= {"size": np.int32(V)} if "size" in step.reads else {}
    return name, jax.tree.map(lambda leaf_1: np.asarray(leaf_1)[0], params), known


def _biases(name: str, tokens: list[Any], values: list[float | None]) -> Any:
    """The setting of `logit_bias` or `sequence_bias` from lists of equal length; None bans."""
    if len(tokens) != len(values):
        raise UserError(f"{name} needs one value for each of its {len(tokens)} entries, got {len(values)} values")
    pairs = [(token, -np.inf if value is None else value) for token, value in zip(tokens, values, strict=True)]
    if name == "sequence_bias":
        return [pair for pair in pairs if pair[0]]
    sums: dict[str, float] = {}  # float64: the sum of large values for one id must not become infinite and ban it
    for token, value in pairs:
        sums[str(token)] = sums.get(str(token), 0.0) + value
    return sums


@cache
def _step_model(name: str, V: int) -> type[BaseModel]:
    """The parameters of a step with their types, ranges and defaults, from the table of steps."""
    step = STEPS[name]
    switches = [parameter for parameter, key in step.arguments.items() if key in step.on]
    fields: dict[str, Any] = {parameter: SETTINGS[key][:2] for parameter, key in step.arguments.items()} | step.given
    for parameter, (kind, default) in fields.items():
        needed = default is None or switches == [parameter]
        fields[parameter] = _parameter_type(kind, V), ... if needed else default
    return create_model(name, __config__=ConfigDict(extra="forbid", strict=True), **fields)


def _parameter_type(kind: Any, V: int) -> Any:
    """The type of a parameter: floats within float32, integers beyond int32 as its ends, token ids within the vocabulary."""
    if kind == Tokens:
        return list[Annotated[int, Field(ge=0, lt=V)]]
    if kind == Sequences:
        return list[_parameter_type(Tokens, V)]  # type: ignore[misc]
    if kind == Biases:
        return list[Annotated[float, Field(le=LARGEST)] | None]
    found = bounds(kind)
    if found is None:
        return kind
    low, high, integer = found
    if integer:
        least = [Field(ge=low)] if low > -np.inf else []
        return Annotated[int, *least, AfterValidator(lambda value: min(max(value, -(2**31)), 2**31 - 1))]
    return Annotated[float, Field(ge=max(low, -LARGEST), le=min(high, LARGEST))]


def _to_lists(value: Any) -> Any:
    """Arrays and other sequences as lists, anything else as it is."""
    if isinstance(value, np.ndarray | np.generic | Array):
        return value.tolist()
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_to_lists(part) for part in value]
    return {key: _to_lists(part) for key, part in value.items()} if isinstance(value, Mapping) else value


def _validate(where: str, kind: Any, value: Any) -> Any:
    """A value of its kind, arrays taken for lists; or the error of the first thing that is wrong in it."""
    try:
        return TypeAdapter(kind).validate_python(_to_lists(value), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, (where, *first["loc"])))
        problem = f"{first['msg'].replace('Input should', 'must')}, got {quote(first['input'])}"
        known = {"missing": "is a required parameter", "extra_forbidden": "is not a parameter of this step"}
        raise UserError(f"{place} {known.get(first['type'], problem)}") from None
