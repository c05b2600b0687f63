"""`process_logits`: named sampling steps applied to rows of logits, for experiments and
comparisons.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    create_model,
)

from dantinox.config import Config, GenerationSection, UserError
from dantinox.config.sampling_steps import SETTINGS, STEPS, Biases, Sequences, Tokens, number_bounds
from dantinox.files import quote
from dantinox.sampling.chain import run_step
from dantinox.sampling.params import SamplingParams
from dantinox.sampling.state import init_state
from dantinox.sampling.steps import LARGEST, sanitize
from dantinox.sampling.window import Context

# Vocabularies and sequences are padded to a multiple of this, so that one compiled step serves
# several sizes.
PADDING = 128
_DEFAULTS = Config()


def process_logits(
    logits_BV: Any,
    steps: Sequence[Mapping[str, Any]],
    prompt: Sequence[Sequence[int]] | None = None,
    output: Sequence[Sequence[int]] | None = None,
) -> Array:
    """Applies sampling steps to rows of logits in the given order, using the same code as the
    decoder.

    Args:
      logits_BV: logits of any numeric type. NaN and +inf are repaired once, at the start.
      steps: mappings with the `name` of a step and its parameters, such as
        `{"name": "top_p", "p": 0.9}`. In `logit_bias.values`, None means -inf. `xtc` takes the
        uniform random number of its draw as `u`; mirostat takes its bound as `mu`, and `adaptive_p`
        the average probability of earlier tokens as `average`.
      prompt: token ids per row before the output. None: no tokens.
      output: generated token ids per row. None: no tokens.

    Returns:
      float32 logits [B, V]; -inf for removed tokens.

    Raises:
      UserError: the logits are not a matrix of numbers, a step or parameter is unknown, a value is
        out of range, a token id is not in the vocabulary, or `prompt` or `output` does not have one
        entry per row of logits.
    """
    logits_BV = _check_logits(logits_BV)
    B, V = logits_BV.shape
    if isinstance(steps, str | Mapping) or not isinstance(steps, Sequence):
        raise UserError(f"steps must be a list of mappings of name and parameters, got {steps!r}")
    checked = [_check_step(step, V) for step in steps]
    histories = zip(
        _check_histories("prompt", prompt, B, V),
        _check_histories("output", output, B, V),
        strict=True,
    )
    padded_BV = np.pad(logits_BV, ((0, 0), (0, -V % PADDING)), constant_values=-np.inf)
    for row_V, (prompt_ids, output_ids) in zip(padded_BV, histories, strict=True):
        changed_V = _SANITIZE(row_V)[0]
        length = len(prompt_ids) + len(output_ids)
        counts_V = np.bincount(np.asarray(output_ids, int), minlength=len(row_V))
        tokens_1S = np.zeros((1, -(-max(length, 1) // PADDING) * PADDING), np.int32)
        tokens_1S[0, :length] = prompt_ids + output_ids
        in_prompt_V = np.isin(np.arange(len(row_V)), prompt_ids)
        for name, params, overrides in checked:
            changed_V = _run_row(
                name,
                changed_V,
                params,
                tokens_1S,
                length,
                len(output_ids),
                counts_V,
                in_prompt_V,
                **overrides,
            )
        row_V[:] = changed_V
    return jnp.asarray(padded_BV[:, :V])


_SANITIZE = jax.jit(sanitize)


@partial(jax.jit, static_argnames=("name", "m"))
def _run_row(
    name: str, x_V: Array, params: SamplingParams, tokens_1S: Array, length: Array,
    n_generated: Array, counts_V: Array, in_prompt_V: Array, mu: Array | None = None,
    **overrides: Any,
) -> Array:  # fmt: skip
    """Applies one step to one padded row; `overrides` are arguments for the function of the
    step.
    """
    valid_1S = jnp.arange(tokens_1S.shape[1])[None] < length
    params_1 = jax.tree.map(lambda leaf: leaf[None], params)
    state_1 = init_state(params_1, tokens_1S, valid_1S, x_V.shape[0], tokens_1S.shape[1])
    state = jax.tree.map(lambda leaf_1: leaf_1[0], state_1)
    # The state above takes all tokens for the prompt.
    fields = {"n_generated": n_generated, "count": counts_V, "in_prompt": in_prompt_V, "mu": mu}
    return run_step(name, x_V, Context(params, replace(state, **fields)), **overrides)


def _check_logits(logits_BV: Any) -> np.ndarray:
    """Returns the logits as float32; values outside its range become infinite."""
    try:
        array = np.asarray(logits_BV)
        shape = f"shape {array.shape} of {array.dtype}"
    except ValueError:
        array = np.empty(0)
        shape = "rows of different length"
    real = jnp.issubdtype(array.dtype, np.integer) or jnp.issubdtype(array.dtype, np.floating)
    if array.ndim != 2 or array.shape[1] == 0 or not real:
        raise UserError(f"logits must be numbers [B, V] with V at least 1, got {shape}")
    with np.errstate(over="ignore"):
        return array.astype(np.float32)


def _check_histories(where: str, rows: Any, B: int, V: int) -> list[list[int]]:
    """Returns the token ids of every row; None means empty rows."""
    lists: list[list[int]] = _validate(
        where, _parameter_type(Sequences, V), [[]] * B if rows is None else rows
    )
    if len(lists) != B:
        raise UserError(
            f"{where} must be one list of token ids per row of logits, {B} in total, got"
            f" {len(lists)}"
        )
    return lists


def _check_step(given: Any, V: int) -> tuple[str, SamplingParams, dict[str, Any]]:
    """Returns the name of a step, its parameters for one row, and the arguments that the decoder
    would compute itself.
    """
    if not isinstance(given, Mapping):
        raise UserError(f"a sampling step must be a mapping of name and parameters, got {given!r}")
    name = given.get("name")
    if not isinstance(name, str) or name not in STEPS:
        raise UserError(f"unknown sampling step {quote(name)}: the steps are {', '.join(STEPS)}")
    parameters = {
        str(key): value for key, value in given.items() if key != "name" and value is not None
    }
    values = dict(_validate(name, _step_model(name, V), parameters))
    step = STEPS[name]
    config = _DEFAULTS.model_copy(
        update={"generation": GenerationSection(seed=0, **_step_settings(name, values))}
    )
    params = SamplingParams.build(
        config,
        stop_ids=values.get("stop_ids", ()),
        protected_ids=values.get("protected_ids", ()),
        extra_steps=[name],
    )
    overrides: dict[str, Any] = {
        key: np.float32(values[key]) for key in ("u", "mu", "average") if key in values
    }
    overrides |= {"m": values["m"]} if "m" in values else {}
    overrides |= {"size": np.int32(V)} if "size" in step.reads else {}
    return name, jax.tree.map(lambda leaf_1: np.asarray(leaf_1)[0], params), overrides


def _step_settings(name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of `generation` for the parameters of a step."""
    step = STEPS[name]
    settings = {key: values[parameter] for parameter, key in step.arguments.items()}
    if name == "dry":
        settings |= {"dry_range": values["range"], "dry_breakers": values["breakers"]}
    elif name == "dynamic_temperature" and values["low"] > values["high"]:
        raise UserError(
            f"dynamic_temperature.low must be at most high, got {values['low']} and"
            f" {values['high']}"
        )
    elif name.startswith("mirostat"):
        settings["mirostat"] = int(name[-1])
    elif name == "synthid":
        settings["watermark_keys"] = values["layer_keys"]
    elif "values" in values:
        settings[name] = _biases(name, values[next(iter(step.parameters))], values["values"])
    elif "sequences" in values:
        settings[name] = [words for words in values["sequences"] if words]
    elif "ids" in values:
        settings[name] = values["ids"]
        if name == "allowed_tokens" and not values["ids"]:
            raise UserError("allowed_tokens.ids must hold at least one token id")
    return settings


def _biases(name: str, tokens: list[Any], values: list[float | None]) -> Any:
    """Returns the setting of `logit_bias` or `sequence_bias` for two lists of equal length; a value
    of None bans.
    """
    if len(tokens) != len(values):
        raise UserError(
            f"{name} needs one value for each of its {len(tokens)} entries, got {len(values)}"
            " values"
        )
    pairs = [
        (token, -np.inf if value is None else value)
        for token, value in zip(tokens, values, strict=True)
    ]
    if name == "sequence_bias":
        return [pair for pair in pairs if pair[0]]
    sums: dict[
        str, float
    ] = {}  # float64, so that a sum of large values for one id does not overflow and ban it
    for token, value in pairs:
        sums[str(token)] = sums.get(str(token), 0.0) + value
    return sums


@cache
def _step_model(name: str, V: int) -> type[BaseModel]:
    """Returns a pydantic model of the parameters of a step, from the table of steps."""
    step = STEPS[name]
    switches = [parameter for parameter, key in step.arguments.items() if key in step.on]
    fields: dict[str, Any] = {
        parameter: SETTINGS[key][:2] for parameter, key in step.arguments.items()
    } | step.parameters
    for parameter, (kind, default) in fields.items():
        is_required = default is None or switches == [parameter]
        # `...` stands for no default.
        fields[parameter] = (_parameter_type(kind, V), ... if is_required else default)
    return create_model(name, __config__=ConfigDict(extra="forbid", strict=True), **fields)


def _parameter_type(kind: Any, V: int) -> Any:
    """Returns the type of a parameter: floats in the float32 range, integers clipped to int32,
    token ids in the vocabulary.
    """
    if kind == Tokens:
        return list[Annotated[int, Field(ge=0, lt=V)]]
    if kind == Sequences:
        return list[_parameter_type(Tokens, V)]  # type: ignore[misc]
    if kind == Biases:
        return list[Annotated[float, Field(le=LARGEST)] | None]
    bounds = number_bounds(kind)
    if bounds is None:
        return kind
    low, high, integer = bounds
    if integer:
        lower_bound = [Field(ge=low)] if low > -np.inf else []
        return Annotated[
            int, *lower_bound, AfterValidator(lambda value: min(max(value, -(2**31)), 2**31 - 1))
        ]
    return Annotated[float, Field(ge=max(low, -LARGEST), le=min(high, LARGEST))]


def _to_lists(value: Any) -> Any:
    """Converts arrays and other sequences to lists, recursively, and returns anything else
    unchanged.
    """
    if isinstance(value, np.ndarray | np.generic | Array):
        return value.tolist()
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_to_lists(part) for part in value]
    return (
        {key: _to_lists(part) for key, part in value.items()}
        if isinstance(value, Mapping)
        else value
    )


def _validate(where: str, kind: Any, value: Any) -> Any:
    """Validates a value, with arrays accepted as lists; raises a UserError for the first
    problem.
    """
    try:
        return TypeAdapter(kind).validate_python(_to_lists(value), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        path = ".".join(map(str, (where, *first["loc"])))
        problem = f"{first['msg'].replace('Input should', 'must')}, got {quote(first['input'])}"
        messages = {
            "missing": "is a required parameter",
            "extra_forbidden": "is not a parameter of this step",
        }
        raise UserError(f"{path} {messages.get(first['type'], problem)}") from None
