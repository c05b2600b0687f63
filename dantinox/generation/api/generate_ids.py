"""Token ids in, token ids out: `generate` for a bare transformer without a tokenizer."""

import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Unpack, overload

import jax
import numpy as np

from dantinox.config import (
    Config,
    GenerationSection,
    KVSection,
    UserError,
    overlay,
    with_generation,
)
from dantinox.config.request_settings import SamplingSettings
from dantinox.files import quote
from dantinox.generation.api.loaded_model import LoadedModel
from dantinox.generation.api.result import Result
from dantinox.generation.decode.cache_plan import fall_back_to_uniform
from dantinox.generation.decode.prepared_model import HeadOrder, permute_heads
from dantinox.model import Transformer
from dantinox.platform import use_compilation_cache
from dantinox.run import KVCalibration, load_kv_calibration, load_router_calibration
from dantinox.sampling import LogitProcessor, SamplingParams, StepInfo
from dantinox.sampling.params import ScoreFn

DEFAULTS = Config().generation
# These settings need a tokenizer, or they change the weights, which `generate` does not do.
UNSUPPORTED_SETTINGS = (
    "stop", "keep_stop", "token_healing", "json_whitespace", "weights", "matmul_dtype",
    "matmul_kernel", "tensor_parallel",
    "clarify_text",
)  # fmt: skip


Ids = jax.Array | np.ndarray | Sequence[Sequence[int]]


class GenerateIdsOptions(SamplingSettings, total=False):
    """The keyword arguments of `generate` besides `max_new_tokens` and `return_info`."""

    max_generations: int
    prompt_lengths: jax.Array | np.ndarray | Sequence[int] | None
    eos_ids: Sequence[int]
    pad_id: int
    logprobs: int | None
    score_fn: ScoreFn | None
    show_candidates: bool
    logit_processor: LogitProcessor | None
    router_calibration: str | Path | Mapping[str, float] | None
    negative_ids: Sequence[int] | None


@overload
def generate(
    model: Transformer,
    input_ids: Ids,
    max_new_tokens: int = ...,
    *,
    return_info: Literal[False] = ...,
    **options: Unpack[GenerateIdsOptions],
) -> np.ndarray: ...
@overload
def generate(
    model: Transformer,
    input_ids: Ids,
    max_new_tokens: int = ...,
    *,
    return_info: Literal[True],
    **options: Unpack[GenerateIdsOptions],
) -> tuple[np.ndarray, dict[str, object]]: ...
def generate(
    model: Transformer,
    input_ids: Ids,
    max_new_tokens: int = DEFAULTS.max_new_tokens,
    *,
    prompt_lengths: jax.Array | np.ndarray | Sequence[int] | None = None,
    eos_ids: Sequence[int] = (),
    pad_id: int = 0,
    logprobs: int | None = None,
    return_info: bool = False,
    score_fn: ScoreFn | None = None,
    show_candidates: bool = False,
    logit_processor: LogitProcessor | None = None,
    router_calibration: str | Path | Mapping[str, float] | None = None,
    negative_ids: Sequence[int] | None = None,
    **settings: object,
) -> np.ndarray | tuple[np.ndarray, dict[str, object]]:
    """Continues sequences of token ids with a model; no tokenizer is needed.

    Args:
      model: the model; `prepare` can quantize its weights first.
      input_ids: the prompts, as a list of lists of ids or as an array `[B, T]`, right-padded if the
        prompts differ in length.
      max_new_tokens: new tokens per row, at least 0; 0 returns the input. If `max_context` allows
        fewer, a warning says so. A prompt that fills the context is returned unchanged, also with a
        warning. `max_generations` is the former name of this argument.
      prompt_lengths: `[B]`, number of valid tokens of each row; None: all.
      eos_ids: ids that end a row; the result includes them.
      pad_id: id that fills a row after its end.
      logprobs: with `return_info`, the number of alternatives to report per token; None reports
        nothing.
      return_info: also return a dict of statistics.
      score_fn, show_candidates, logit_processor: as for `LoadedModel.generate`.
      router_calibration: for `router_preset="calibrated"`: the file that
        `dantinox calibrate --what router` wrote for this model, or a mapping with the values of
        that file.
      negative_ids: with `guidance_scale`, the tokens of the negative prompt; None: the last token
        of each prompt.
      settings: settings of the sections `generation` (`temperature`, `top_p`, `greedy`, `seed`, `n`
        samples per prompt), `router` and `kv` (`kv_budget` and so on). Settings that name tokens
        must use ids. `kv_calibration` is the path of the file with measurements of the heads.
        Without `seed`, a random seed is used.

    Returns:
      int32 `[B · n, T + new]`. Each row holds the prompt, its continuation, and padding with
      `pad_id`. `new` is `max_new_tokens`, or less if the context is shorter. The `n` samples of a
      prompt are consecutive rows. With `return_info` also a dict: `lengths` (prompt plus
      continuation), `reasons` (`eos`, `loop` or `length`), `seed`, `seconds`, `info`, a `StepInfo`
      `[B · n, new, …]` or None, and `scores`, the scores of beam search `[B · n]` or None.

    Raises:
      UserError: an id is outside the vocabulary, a prompt is empty, or a setting is invalid.

    Example:
      >>> model = dantinox.load("runs/quickstart").model
      >>> prompts = [[97, 98], [99, 100]]
      >>> dantinox.generate(model, prompts, max_new_tokens=4, temperature=0.8, seed=1).shape
      (2, 6)
      >>> settings = {"max_new_tokens": 4, "greedy": True}
      >>> ids, info = dantinox.generate(model, [[97, 98]], **settings, return_info=True)
      >>> info["reasons"]
      ['length']
    """
    use_compilation_cache()
    new_tokens = settings.pop("max_generations", max_new_tokens)
    prompts, T = _parse_prompts(input_ids, prompt_lengths)
    for name in UNSUPPORTED_SETTINGS:
        if name in settings:
            raise UserError(f"{name} has no effect on token ids and a loaded model: remove it")
    if show_candidates and not return_info:
        raise UserError(
            "show_candidates needs a report per token: set logprobs and return_info too"
        )
    eos = _integer_array("eos_ids", eos_ids).tolist() if len(np.atleast_1d(eos_ids)) else []
    config = overlay(Config(), {"max_new_tokens": new_tokens, **settings})
    ids_model = _IdsModel(config, model, eos, router_calibration, "kv_signal" in settings)
    report: dict[str, Any] = {
        "logprobs": logprobs if return_info else None,
        "score_fn": score_fn,
        "show_candidates": show_candidates,
        "logit_processor": logit_processor,
        "negative_ids": (
            None if negative_ids is None else _integer_array("negative_ids", negative_ids).tolist()
        ),
    }
    start = time.perf_counter()
    configs = _prompt_configs(prompts, config, model.config.max_context)
    results = ids_model.complete(
        [ids_model.request(ids, one, **report) for ids, one in zip(prompts, configs, strict=True)]
    )
    seconds = time.perf_counter() - start
    max_new = min(
        config.generation.max_new_tokens, max(0, model.config.max_context - min(map(len, prompts)))
    )
    prompt_of = [ids for ids in prompts for _ in range(config.generation.n)]
    rows = [[*ids, *result.tokens] for ids, result in zip(prompt_of, results, strict=True)]
    out = np.full((len(rows), T + max_new), pad_id, np.int32)
    for out_T, ids in zip(out, rows, strict=True):
        out_T[: len(ids)] = ids
    if not return_info:
        return out
    return out, {
        "lengths": np.array([len(ids) for ids in rows]),
        "seconds": seconds,
        **_statistics(results),
    }


def _prompt_configs(
    prompts: Sequence[tuple[int, ...]], config: Config, context: int
) -> list[Config]:
    """Returns the settings of each prompt: prompts that fill the context get no new tokens, with
    one warning.
    """
    full = [len(ids) >= context for ids in prompts]
    if config.generation.max_new_tokens and any(full):
        which = "every prompt fills" if all(full) else f"{sum(full)} of {len(full)} prompts fill"
        warnings.warn(
            f"{which} the model's context of {context} tokens: nothing is generated there",
            stacklevel=3,
        )
    return [with_generation(config, max_new_tokens=0) if is_full else config for is_full in full]


def _statistics(results: Sequence[Result]) -> dict[str, object]:
    """Returns the entries of the statistics of `generate` that its results hold."""
    has_scores = results[0].score is not None
    return {
        "reasons": [
            "eos" if result.finish_reason == "stop" else result.finish_reason for result in results
        ],
        "seed": results[0].seed,
        "info": _stack_steps([result.steps for result in results]),
        "scores": np.array([result.score for result in results]) if has_scores else None,
    }


class _NoTokenizer:
    """A stand-in for the tokenizer: every token has an empty text, and encoding a text raises an
    error.
    """

    def __init__(self, vocab_size: int, eos_ids: Sequence[int]):
        self.vocab_size = vocab_size
        self.stop_ids = tuple(eos_ids)

    def detokenizer(self, visible_ids: frozenset[int]) -> "_NoTokenizer":
        return self

    def push(self, ids: Sequence[int]) -> str:
        return ""

    def flush(self) -> str:
        return ""

    def decode(self, ids: Sequence[int]) -> str:
        return ""

    token_text = decode

    def encode(self, text: str) -> list[int]:
        raise UserError(f"without a tokenizer, tokens must be token ids, got {text!r}")


class _IdsModel(LoadedModel):
    """A `LoadedModel` of a bare transformer; it does not convert the weights."""

    def __init__(
        self,
        config: Config,
        model: Transformer,
        eos_ids: Sequence[int],
        calibration: str | Path | Mapping[str, float] | None,
        has_signal: bool,
    ):
        """Creates the model; `has_signal` is whether `kv_signal` was given explicitly."""
        if calibration is not None and config.router.router_preset != "calibrated":
            raise UserError("router_calibration has no effect unless router_preset is calibrated")
        super().__init__(config, model, _NoTokenizer(model.config.vocab_size, eos_ids))  # type: ignore[arg-type]
        self._router_calibration = calibration
        self._has_signal = has_signal

    def params(
        self, configs: Sequence[Config], sample_index: Sequence[int] | int = 0, **more: Any
    ) -> SamplingParams:
        measured = self._router_calibration
        if measured is not None and not isinstance(measured, Mapping):
            measured = load_router_calibration(measured)
        eos = self.tokenizer.stop_ids
        return SamplingParams.build(
            configs,
            stop_ids=eos,
            protected_ids=eos,
            sample_index=sample_index,
            vocab_size=self.model.config.vocab_size,
            measured=measured,
            **more,
        )

    def kv(self, config: Config) -> tuple[KVSection, KVCalibration | None]:
        kv = config.kv
        if not kv.compresses or not kv.reads_calibration:
            return kv, None
        if kv.calibration is not None:
            return kv, load_kv_calibration(kv.calibration, self.model.config, None)
        if self._has_signal or kv.decays_by_entropy:
            raise UserError(
                "kv.signal and kv.decay need measurements of the heads of the model: set"
                " kv_calibration to a file of them"
            )
        remedy = (
            "set kv_calibration to the file of the measurements of the"
            " heads, or set kv_signal to uniform"
        )
        return fall_back_to_uniform(kv, None, remedy), None

    def prepared(
        self, generation: GenerationSection, order: HeadOrder | None = None
    ) -> Transformer:
        return permute_heads(self.model, order)


def _stack_steps(steps: Sequence[StepInfo | None]) -> StepInfo | None:
    """Stacks the reports of all rows to `[B, new, …]`, padded with zeros; None without reports."""
    if any(row is None for row in steps):
        return None
    width = max(len(row.logprob) for row in steps if row is not None)

    def stack(*rows: np.ndarray) -> np.ndarray:
        return np.stack([np.pad(x, [(0, width - len(x)), *[(0, 0)] * (x.ndim - 1)]) for x in rows])

    stacked: StepInfo = jax.tree.map(stack, *steps)
    return stacked


def _integer_array(name: str, values: Any) -> np.ndarray:
    """Converts `values` to a non-empty array of integers with one axis."""
    try:
        array = np.asarray(values)
    except ValueError:
        array = np.empty(0)
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer) or array.size == 0:
        raise UserError(f"{name} must be a non-empty list of integers, got {quote(values)}")
    return array


def _parse_prompts(input_ids: Any, prompt_lengths: Any) -> tuple[list[tuple[int, ...]], int]:
    """Returns the prompts without padding, and the length of the longest row.

    Raises:
      UserError: the prompts are not integers, or a length is larger than its row.
    """
    values = (
        input_ids if isinstance(input_ids, list | tuple) else np.atleast_1d(np.asarray(input_ids))
    )
    rows = [_integer_array("each row of input_ids", row) for row in values]
    if not rows:
        raise UserError("input_ids must have at least one row of token ids, got none")
    sizes = [len(row) for row in rows]
    lengths = (
        sizes
        if prompt_lengths is None
        else _integer_array("prompt_lengths", prompt_lengths).tolist()
    )
    if len(lengths) != len(rows) or not all(
        1 <= length <= size for length, size in zip(lengths, sizes, strict=True)
    ):
        raise UserError(
            f"prompt_lengths must be {len(rows)} integers in [1, {max(sizes)}], got"
            f" {quote(lengths)}"
        )
    return [tuple(row[:length].tolist()) for row, length in zip(rows, lengths, strict=True)], max(
        sizes
    )
