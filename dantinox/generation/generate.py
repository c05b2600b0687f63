"""Token ids in, token ids out."""

import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dantinox.config import Config, KVSection, UserError, overlay
from dantinox.generation.cache_plan import head_order, measured_or_uniform, plan_cache
from dantinox.generation.loop import Session, clamp_to_context, slots_needed
from dantinox.generation.weights import with_head_order
from dantinox.model import Transformer
from dantinox.run import KVCalibration, load_kv_calibration, load_router_calibration
from dantinox.sampling import SamplingParams
from dantinox.sampling.params import ScoreFn


def generate(
    model: Transformer,
    input_ids: Any,
    max_generations: int = 150,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    greedy: bool = False,
    seed: int | None = None,
    use_cache: bool = True,
    prompt_lengths: Any = None,
    eos_ids: Sequence[int] = (),
    min_tokens: int = 0,
    pad_id: int = 0,
    n: int = 1,
    logprobs: int | None = None,
    return_info: bool = False,
    score_fn: ScoreFn | None = None,
    show_candidates: bool = False,
    router_calibration: str | Path | Mapping[str, float] | None = None,
    **settings: Any,
) -> Any:
    """Continues token sequences.

    Args:
      input_ids: prompts `[B, T]`, right-padded where they differ in length.
      max_generations: new tokens per row; less where `max_context` ends, with a warning. 0 returns the input.
      prompt_lengths: `[B]`, the tokens of each row that count; None: all T.
      seed: of the draws, the same for every row; None takes a fresh one from the operating system.
      eos_ids: ids that end a row (the id itself is kept).
      n: samples per prompt; their rows follow each other.
      logprobs: alternatives to report per token with `return_info`; None reports none.
      temperature, top_k, top_p, min_p, repetition_penalty, greedy, min_tokens: as the keys of the `generation` section.
      score_fn, show_candidates: as of `LoadedModel.generate`.
      router_calibration: what `dantinox calibrate --what router` measured on this model, for `router_preset="calibrated"`: its
        file, or the numbers by name.
      settings: any other key of it or of `router` that says how a token is chosen; tokens are named by id. And the keys of `kv`
        (`kv_budget` and so on); what was measured on the heads is read from the file `kv_calibration` names.

    Returns:
      int32 `[B · n, T + max_generations]`, or as many new tokens as the context has room for: each row's prompt, its
      continuation right behind it, then `pad_id`. With `return_info` also a dict: `lengths` (prompt and continuation),
      `reasons` (`eos` or `length`), `seed`, `seconds`, and `info`, a `StepInfo` or None.

    Raises:
      UserError: ids outside the vocabulary, an empty or overlong prompt, a parameter out of range.
    """
    tokens_BT, lengths_B = _checked_prompts(model, input_ids, prompt_lengths)
    _check_whole("max_generations", max_generations, 0)
    _check_whole("n", n, 1)
    B, V = len(tokens_BT), model.config.vocab_size
    if logprobs is not None:
        _check_whole("logprobs", logprobs, 0, V)
    if show_candidates and (logprobs is None or not return_info):
        raise UserError("show_candidates reports with each token: give logprobs and return_info too")
    kv_keys = {name: settings.pop(name) for name in [*settings] if name.startswith("kv_")}
    kv, calibration = _kv(model, kv_keys, use_cache)
    model = with_head_order(model, head_order(model.config, kv, calibration))
    eos_ids = _integers("eos_ids", eos_ids, 1).tolist() if len(np.atleast_1d(eos_ids)) else []
    row = settings | dict(
        greedy=greedy, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, min_tokens=min_tokens,
        repetition_penalty=repetition_penalty, seed=secrets.randbits(32) if seed is None else seed,
    )  # fmt: skip
    params = SamplingParams.build(
        row, batch=B * n, stop_ids=eos_ids, protected_ids=eos_ids, sample_index=[*range(n)] * B, vocab_size=V,
        measured=_router_numbers(router_calibration, settings), score_fn=score_fn, show_candidates=show_candidates,
    )  # fmt: skip
    limits_B = clamp_to_context(lengths_B, np.full(B, max_generations), model.config.max_context)
    lengths_N, new = np.repeat(lengths_B, n), int(limits_B.max())
    out = _with_room(np.repeat(tokens_BT, n, axis=0), lengths_N, new, pad_id)
    start, infos = time.perf_counter(), []
    if new > 0:
        session = Session(
            model, tokens_BT, lengths_B, params, limits_B=np.repeat(limits_B, n), eos_ids=[eos_ids] * (B * n),
            samples=n, use_cache=use_cache, report=logprobs if return_info else None,
            plan=plan_cache(model.config, kv, slots_needed(lengths_B, limits_B), calibration),
        )  # fmt: skip
        for chunk in session.run(ahead=True):
            for b, count in enumerate(chunk.counts):
                out[b, lengths_N[b] : lengths_N[b] + count] = chunk.tokens[b, :count]
            lengths_N += chunk.counts
            infos.append(chunk.info)
    seconds = time.perf_counter() - start
    info = jax.tree.map(lambda *parts: np.concatenate(parts, axis=1), *infos) if infos else None
    ended_N = np.isin(out[np.arange(B * n), lengths_N - 1], eos_ids) & (new > 0)
    reasons = ["eos" if ended else "length" for ended in ended_N]
    found = {"lengths": lengths_N, "reasons": reasons, "seed": row["seed"], "seconds": seconds, "info": info}
    return (out, found) if return_info else out


def _with_room(prompts_NT: np.ndarray, lengths_N: np.ndarray, new: int, pad_id: int) -> np.ndarray:
    """The prompts with `new` columns more; whatever is not prompt is `pad_id`."""
    known_NT = np.where(np.arange(prompts_NT.shape[1]) < lengths_N[:, None], prompts_NT, pad_id)
    return np.pad(known_NT, ((0, 0), (0, new)), constant_values=pad_id).astype(np.int32)


def _kv(model: Transformer, given: dict[str, Any], use_cache: bool) -> tuple[KVSection, KVCalibration | None]:
    """The settings of the cache, and what was measured on the heads where they read it."""
    kv = overlay(Config(), {"use_cache": use_cache} | given).kv
    if not kv.compresses or not kv.reads_calibration:
        return kv, None
    if kv.calibration is not None:
        return kv, load_kv_calibration(kv.calibration, model.config, None)
    if "kv_signal" in given or kv.decays_by_entropy:
        raise UserError("kv.signal and kv.decay read what was measured on the model's heads: name its file by kv_calibration")
    remedy = "name the file of what was measured on them by kv_calibration, or give kv_signal uniform"
    return measured_or_uniform(kv, None, remedy), None


def _router_numbers(source: Any, settings: Mapping[str, Any]) -> Mapping[str, float] | None:
    """What was measured for the router, from a file or as it is."""
    if source is None:
        return None
    if settings.get("router_preset") != "calibrated":
        raise UserError("router_calibration has no effect unless router_preset is calibrated")
    return source if isinstance(source, Mapping) else load_router_calibration(source)


def _integers(name: str, given: Any, axes: int) -> np.ndarray:
    """`given` as a non-empty array of integers with so many axes."""
    try:
        array = np.asarray(given)
    except ValueError:  # rows of different length
        array = np.empty(0)
    if array.ndim != axes or not np.issubdtype(array.dtype, np.integer) or array.size == 0:
        kind = "rows of one length" if axes == 2 else "a list"
        raise UserError(f"{name} must be integers in {kind}, at least one, got {str(given)[:60]}")
    return array


def _check_whole(name: str, given: Any, low: int, high: int = 2**31 - 1) -> None:
    if isinstance(given, bool) or not isinstance(given, (int, np.integer)) or not low <= given <= high:
        allowed = f"an integer ≥ {low}" if high == 2**31 - 1 else f"an integer in [{low}, {high}]"
        raise UserError(f"{name} must be {allowed}, got {given!r}")


def _checked_prompts(model: Transformer, input_ids: Any, prompt_lengths: Any) -> tuple[np.ndarray, np.ndarray]:
    tokens_BT = _integers("input_ids", input_ids, 2)
    B, T = tokens_BT.shape
    lengths_B = np.full(B, T) if prompt_lengths is None else _integers("prompt_lengths", prompt_lengths, 1)
    if lengths_B.shape != (B,) or not ((lengths_B >= 1) & (lengths_B <= T)).all():
        raise UserError(f"prompt_lengths must be {B} integers in [1, {T}], got {lengths_B.tolist()}")
    ids = tokens_BT[np.arange(T) < lengths_B[:, None]]
    V = model.config.vocab_size
    if ids.min() < 0 or ids.max() >= V:
        raise UserError(f"input_ids must be in [0, {V}), got {ids.min() if ids.min() < 0 else ids.max()}")
    return tokens_BT.astype(np.int32), lengths_B.astype(np.int32)
