"""`SamplingParams`: the numeric sampling settings of every row as arrays, and the static list of
steps.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypedDict, get_args

import jax
import numpy as np
from jax import Array

from dantinox.config import Config, GenerationSection, UserError, build_config
from dantinox.config.generation_settings import (
    GREEDY_BELOW,
    ROUTED_STEPS,
    active_steps,
    section_order,
)
from dantinox.config.router_settings import RouterSection
from dantinox.config.sampling_steps import (
    EDIT_STEPS,
    LAST_STEPS,
    NUMBER_BOUNDS,
    PENALTY_STEPS,
    SETTINGS,
    STEPS,
    Biases,
    Breakers,
    Scope,
    SequenceBiases,
    Sequences,
    StepSettings,
    Tokens,
    WatermarkKeys,
    is_digits,
)  # fmt: skip
from dantinox.sampling.clarify_text import ClarifyText
from dantinox.sampling.entropy_router import Metrics, RouterConfig
from dantinox.sampling.history import sequence_arrays
from dantinox.sampling.logit_processor import LogitProcessor, check_logit_processor
from dantinox.sampling.loops import LoopRules
from dantinox.sampling.order import ORDERABLE, order_array

# Step arguments that are strings instead of numbers, such as `ties`. They select the code that is
# compiled.
CHOICE_SETTINGS = tuple(
    dict.fromkeys(
        key
        for step in STEPS.values()
        for key in step.arguments.values()
        if key not in NUMBER_BOUNDS
    )
)
# Settings that determine the compiled program, so they must be equal in all rows of a batch.
BATCH_SETTINGS = ("strategy", "preset", "sampler_order", *CHOICE_SETTINGS)
SETTING_NAMES = tuple(
    key
    for key in GenerationSection.model_fields
    if key in {*SETTINGS, *BATCH_SETTINGS, "greedy", "seed"} or key.startswith("loop_")
)
LARGEST_INT = 2**31 - 1
FLOATS = np.finfo(np.float32)

Row = Mapping[str, Any]


class ProgramOptions(TypedDict, total=False):
    """Arguments of `SamplingParams.build` that determine the compiled program."""

    score_fn: "ScoreFn | None"
    show_candidates: bool
    extra_steps: Sequence[str] | None
    dynamic_order: bool
    logit_processor: LogitProcessor | None


# (candidates [N], ln p under the model [N], metrics of the row) -> scores [N]; the first candidate
# with the largest score wins
ScoreFn = Callable[[Array, Array, Metrics], Array]


@partial(
    jax.tree_util.register_dataclass,
    data_fields=(
        "numbers",
        "enabled",
        "tables",
        "seed",
        "sample_index",
        "router",
        "report_rows",
        "allowed_bits",
        "order",
        "loops",
        "clarify_text",
    ),
    meta_fields=(
        "plan",
        "stochastic",
        "choices",
        "uses_attention",
        "score_fn",
        "candidates",
        "skip_inactive_steps",
        "report",
        "logit_processor",
    ),
)
@dataclass(frozen=True)
class SamplingParams:
    """The sampling parameters of a batch: numbers as arrays [B, …], and static fields that
    determine what is compiled.

    A temperature below 1e-5 makes a row greedy: it gets the most likely token after edits and
    penalties, the lowest id on ties.

    Attributes:
      numbers: maps each numeric setting of the plan's steps, and the temperature, to [B] float32 or
        int32.
      enabled: maps each step of the plan to the rows that enable it, [B] bool. A greedy row enables
        only edits and penalties.
      tables: maps a name to token ids or to their values (such as biases), [B, K]; unused ids are
        −1.
      seed, sample_index: [B], the seeds of the random draws.
      plan: the steps that some row enables, in the order in which they run.
      stochastic: whether some row draws at random. If False, the program contains no random draw.
      choices: pairs (setting, value) of `CHOICE_SETTINGS`, such as `ties` and `top_p_rule`. With
        `order`, the choices are in `numbers` instead.
      router: the numbers of the entropy router, [B] each. For every token, the router replaces the
        numbers of the steps in `ROUTED_STEPS`. None: no router is compiled.
      uses_attention: whether the router reads attention metrics, which the model then has to
        return.
      score_fn: scores the candidates, which are then drawn explicitly. None: the most likely
        candidate wins. The distribution of the winner has a closed form, so no candidates need to
        be drawn.
      candidates: maximum number of router candidates to draw; 0 if they are neither scored nor
        reported.
      skip_inactive_steps: whether the program skips, at run time, the steps that no row enables;
        useful if many different rows share the plan.
      report: the number of alternatives to report with each token. None: no report.
      report_rows: [B] bool, the rows that need a report. If there are none, no report is computed.
        None: all rows.
      allowed_bits: [B, ⌈V/32⌉] uint32, the mask of tokens that a row may produce next: bit i mod 32
        of word ⌊i/32⌋ for token i. The mask overrides all steps. None: all tokens are allowed, and
        the program contains no mask.
      order: [B, N] int32, for every row its own order of the steps that follow the edits, as
        indices into `order.ORDERABLE`, padded with −1. None: all rows use the order of the plan,
        for which the program is compiled.
      logit_processor: a function that edits the logits before all steps; part of the program. None:
        no such function.
      loops: the rules of loop detection; None: no row detects loops.
      clarify_text: the texts that the router inserts; None: no row has one.
    """

    numbers: dict[str, Array]
    enabled: dict[str, Array]
    tables: dict[str, Array]
    seed: Array
    sample_index: Array
    plan: tuple[str, ...]
    stochastic: bool
    choices: tuple[tuple[str, str], ...] = ()
    router: RouterConfig | None = None
    uses_attention: bool = False
    score_fn: ScoreFn | None = None
    candidates: int = 0
    skip_inactive_steps: bool = False
    report: int | None = None
    report_rows: Array | None = None
    allowed_bits: Array | None = None
    order: Array | None = None
    logit_processor: LogitProcessor | None = None
    loops: LoopRules | None = None
    clarify_text: ClarifyText | None = None

    @classmethod
    def build(
        cls,
        rows: Row | Config | Sequence[Row | Config],
        *,
        batch: int | None = None,
        stop_ids: Sequence[int] = (),
        protected_ids: Sequence[int] = (),
        clarify_ids: Sequence[Sequence[int]] | None = None,
        sample_index: Sequence[int] | int = 0,
        vocab_size: int | None = None,
        measured: Mapping[str, float] | None = None,
        score_fn: ScoreFn | None = None,
        show_candidates: bool = False,
        extra_steps: Sequence[str] | None = None,
        dynamic_order: bool = False,
        logit_processor: LogitProcessor | None = None,
    ) -> "SamplingParams":
        """Builds the parameters of a batch from settings named like the keys of `generation` and
        `router`.

        Tokens are given by id. Missing keys have their defaults.

        Args:
          rows: one mapping or config for all rows of `batch`, or one for each row.
          batch: the number of rows B. None: the number of entries of `rows`.
          stop_ids: ids that `min_tokens` bans in addition to the row's own `stop_token_ids`, such
            as the EOS token.
          protected_ids: ids that `xtc` must not remove, such as the EOS token and the line break.
          clarify_ids: the tokens of `router.clarify_text` of each row, empty for a row without a
            text. None: no row has one.
          sample_index: the index of a row among the samples of its prompt; part of the random key,
            like the seed.
          vocab_size: if given, ids outside the vocabulary raise an error.
          measured: the calibration of the model, for rows with `router_preset: calibrated`.
          score_fn: draws the router's candidates and chooses the one with the highest score; part
            of the program.
          show_candidates: reports the router's candidates with each token. The tokens do not
            change.
          extra_steps: steps that the program contains even if no row enables them, so that rows
            that enable these steps can later use the same program. The program then always contains
            a random draw too.
          dynamic_order: builds one program that contains all steps and reads their order from an
            array, so that rows may differ in `preset`, `sampler_order`, `ties` and `top_p_rule`.
            Not possible with the entropy router.
          logit_processor: edits the logits of every row before all steps; part of the program.

        Raises:
          UserError: a name is unknown, a value is out of range, rows differ in a setting that must
            be equal, or a row draws without a seed.
        """
        configs = _check_rows(rows, batch, vocab_size)
        if logit_processor is not None:
            check_logit_processor(logit_processor)
        _check_batch(configs, dynamic_order, scores=score_fn is not None, shows=show_candidates)
        _check_clarify_ids(configs, clarify_ids, vocab_size)
        sections = [config.generation for config in configs]
        first = sections[0]
        has_router = first.strategy == "entropy"
        if dynamic_order:
            extra_steps = (*EDIT_STEPS, *ORDERABLE, *LAST_STEPS)
        stops = [
            sorted({*map(int, stop_ids), *token_ids(section, "stop_token_ids")})
            for section in sections
        ]
        enabled_by_row = [
            enabled_steps(section, bool(ids)) for section, ids in zip(sections, stops, strict=True)
        ]
        stochastic = extra_steps is not None or any(not is_greedy(section) for section in sections)
        contained = {*(extra_steps or ())}.union(*enabled_by_row)
        if _needs_temperature(sections, enabled_by_row, stochastic):
            contained.add("temperature")
        order = (*ORDERABLE, *LAST_STEPS) if dynamic_order else section_order(first)
        plan = tuple(name for name in (*EDIT_STEPS, *order) if name in contained)
        settings = {
            "temperature",
            *(key for name in plan for key in STEPS[name].settings),
        } & NUMBER_BOUNDS.keys()
        choices = _choice_values(sections) if dynamic_order else {}
        tables = _build_tables(sections, plan)
        if "min_tokens" in plan:
            tables["stop_ids"] = _pad(stops, -1)
        if "xtc" in plan:
            tables["protected_ids"] = _pad([sorted({*map(int, protected_ids)})] * len(sections), -1)
        arrays: dict[str, Any] = {
            "numbers": {key: _setting_values(key, sections) for key in sorted(settings)} | choices,
            "enabled": {name: np.asarray([name in on for on in enabled_by_row]) for name in plan},
            "tables": tables,
            "seed": np.asarray([section.seed or 0 for section in sections], np.uint32),
            "sample_index": np.broadcast_to(np.asarray(sample_index, np.int32), (len(sections),)),
            "order": (
                np.stack([order_array(section_order(section)) for section in sections])
                if dynamic_order
                else None
            ),
            "loops": LoopRules.build(sections, always=extra_steps is not None),
            "router": _stack_routers(configs, measured) if has_router else None,
            "clarify_text": ClarifyText.build(clarify_ids or ()) if has_router else None,
        }
        return cls(
            # One call, because separate `jnp.asarray` calls take several times as long.
            **jax.device_put(arrays),
            plan=plan,
            stochastic=stochastic,
            choices=(
                ()
                if dynamic_order
                else tuple((key, getattr(first, key)) for key in CHOICE_SETTINGS)
            ),
            uses_attention=has_router and configs[0].router.use_attention,
            score_fn=score_fn,
            candidates=(
                max(c.router.candidates for c in configs)
                if score_fn is not None or show_candidates
                else 0
            ),
            skip_inactive_steps=extra_steps is not None,
            logit_processor=logit_processor,
        )

    @property
    def batch(self) -> int:
        """The number of rows."""
        return self.seed.shape[0]

    @property
    def temperature(self) -> Array:
        """The temperature of each row [B]; below 1e-5 in greedy rows."""
        return self.numbers["temperature"]


def _check_rows(
    rows: Row | Config | Sequence[Row | Config], batch: int | None, vocab_size: int | None
) -> list[Config]:
    """Returns the settings of every row; the arguments are those of `SamplingParams.build`."""
    if isinstance(rows, (Mapping, Config)):
        rows = [rows] * (1 if batch is None else batch)
    if batch is not None and len(rows) != batch:
        raise UserError(
            f"sampling parameters must be one set or one per row: got {len(rows)} sets for {batch}"
            " rows"
        )
    if not rows:
        raise UserError("sampling parameters need at least one row")
    return [_check_row(row, vocab_size) for row in rows]


def _check_batch(
    configs: Sequence[Config], dynamic_order: bool, *, scores: bool, shows: bool
) -> None:
    """Checks that the rows can share a program.

    Args:
      scores, shows: whether the program has a `score_fn`, and whether it reports the candidates.
    """
    sections = [config.generation for config in configs]
    for name in ("strategy",) if dynamic_order else BATCH_SETTINGS:
        if len({getattr(section, name) for section in sections}) > 1:
            raise _error(f"generation.{name}", "must be the same for all rows of a batch")
    has_router = sections[0].strategy == "entropy"
    if dynamic_order and has_router:
        raise UserError(
            "generation.strategy entropy has a fixed order: build it without dynamic_order"
        )
    if has_router and len({config.router.use_attention for config in configs}) > 1:
        raise _error("router.use_attention", "must be the same for all rows of a batch")
    for name, given in (("score_fn chooses among", scores), ("show_candidates shows", shows)):
        if given and not has_router:
            raise UserError(
                f"{name} the candidates of the entropy router: set generation.strategy to entropy"
            )


def _check_clarify_ids(
    configs: Sequence[Config], clarify_ids: Sequence[Sequence[int]] | None, vocab_size: int | None
) -> None:
    key = "router.clarify_text"
    if clarify_ids is None:
        has_router = configs[0].generation.strategy == "entropy"
        if has_router and any(config.router.clarify_text is not None for config in configs):
            raise _error(key, "needs a tokenizer: pass its token ids as clarify_ids")
        return
    if len(clarify_ids) != len(configs):
        raise _error(
            key, f"needs one list of token ids per row, got {len(clarify_ids)} for {len(configs)}"
        )
    for ids in clarify_ids:
        if any(not 0 <= token < (vocab_size or 1 << 31) for token in ids):
            raise _error(key, f"must have token ids in [0, {vocab_size}), got {list(ids)}")


def _needs_temperature(
    sections: Sequence[GenerationSection], enabled_by_row: Sequence[set[str]], stochastic: bool
) -> bool:
    """Returns whether a program contains the temperature step even if no row enables it.

    Every program that draws contains it. A new temperature, the most frequent change of a setting,
    then needs no compilation. The factor of the temperature in a loop needs the step too.
    """
    is_dynamic = any("dynamic_temperature" in on for on in enabled_by_row)
    has_factor = any(section.loop_temperature_factor != 1 for section in sections)
    return (stochastic and not is_dynamic) or has_factor


def _choice_values(sections: Sequence[GenerationSection]) -> dict[str, np.ndarray]:
    """Returns for each of the `CHOICE_SETTINGS` the rows that have its second option."""
    second = {
        key: get_args(StepSettings.model_fields[key].annotation)[1] for key in CHOICE_SETTINGS
    }
    return {
        key: np.asarray([getattr(s, key) == option for s in sections])
        for key, option in second.items()
    }


def _stack_routers(configs: Sequence[Config], measured: Mapping[str, float] | None) -> RouterConfig:
    """Returns the numbers of the entropy router of all rows, [B] each."""
    routers = [
        RouterConfig.build(
            config.router,
            measured,
            **{key: getattr(config.generation, key) for key in ROUTED_STEPS},
        )
        for config in configs
    ]
    stacked: RouterConfig = jax.tree.map(lambda *numbers: np.stack(numbers), *routers)
    return stacked


def _check_row(row: Row | Config, vocab_size: int | None) -> Config:
    """Returns the settings of one row, validated by their sections, and checks its token ids."""
    if isinstance(row, Config):
        config = row
    else:
        settings = {
            name: value.item() if isinstance(value, np.generic) else value
            for name, value in row.items()
        }
        router = {
            name: settings.pop(name) for name in [*settings] if name in RouterSection.model_fields
        }
        changed = {f"generation.{name}": value for name, value in settings.items()}
        changed |= {f"router.{name}": value for name, value in router.items()}
        config = build_config({}, changed, origin="")
        unused = [name for name in settings if name not in SETTING_NAMES]
        if unused:
            raise _error(
                f"generation.{unused[0]}",
                f"is not a sampling parameter; these are: {', '.join(SETTING_NAMES)}",
            )
    if config.generation.seed is None and not is_greedy(config.generation):
        raise _error(
            "generation.seed", "must be an integer if tokens are drawn at random, got null"
        )
    _check_tokens(config.generation, vocab_size)
    token = config.router.clarify_token
    if vocab_size is not None and str(token).isdecimal() and int(str(token)) >= vocab_size:
        raise _error(
            "router.clarify_token", f"must be a token id in [0, {vocab_size}), got {token}"
        )
    return config


def _error(key: str, problem: str) -> UserError:
    return UserError(f"{key} {problem}", key=key)


def is_greedy(section: GenerationSection) -> bool:
    """Returns whether a row with these settings takes the most likely token."""
    # The same comparison as in the compiled program.
    return section.greedy or bool(
        np.float32(min(section.temperature, 1.0)) < np.float32(GREEDY_BELOW)
    )


def enabled_steps(section: GenerationSection, has_stop_ids: bool) -> set[str]:
    """Returns the steps that have an effect in this row. In a greedy row, only edits and penalties
    have an effect.
    """
    on = active_steps(section) - (set() if has_stop_ids else {"min_tokens"})
    if section.strategy == "entropy":
        return {*on, *ROUTED_STEPS}
    return set(on & {*EDIT_STEPS, *PENALTY_STEPS} if is_greedy(section) else on)


def _setting_values(key: str, sections: Sequence[GenerationSection]) -> np.ndarray:
    """Returns one setting of all rows; values outside float32 or int32 become the nearest valid
    number.
    """
    off = {"top_k": 0, "top_p": 1.0}  # only these settings may be None
    values = [
        off[key] if getattr(section, key) is None else getattr(section, key) for section in sections
    ]
    if key == "temperature":
        values = [
            0.0 if is_greedy(section) else value
            for section, value in zip(sections, values, strict=True)
        ]
    low, _, integer = NUMBER_BOUNDS[key]
    if integer:
        return np.asarray([max(-1, min(value, LARGEST_INT)) for value in values], np.int32)
    return np.clip(np.asarray(values, np.float64), max(low, float(FLOATS.min)), FLOATS.max).astype(
        np.float32
    )


def token_ids(section: GenerationSection, key: str) -> list[int]:
    """Returns the ids of a list of tokens.

    Raises:
      UserError: an entry is text, which only a tokenizer can resolve.
    """
    tokens = list(getattr(section, key))
    text = next(
        (t for t in tokens if isinstance(t, str) and not (is_digits(t) and key != "dry_breakers")),
        None,
    )
    if text is not None:
        raise _error(
            f"generation.{key}", f"must hold token ids if there is no tokenizer, got {text!r}"
        )
    return [int(token) for token in tokens]


def _check_tokens(section: GenerationSection, vocab_size: int | None) -> None:
    on = active_steps(section)
    lists = {"stop_token_ids": token_ids(section, "stop_token_ids")}
    keys = [key for name, step in STEPS.items() if name in on for key in step.indirect]
    for key in keys:
        if SETTINGS[key].kind in (Tokens, Biases, Breakers):
            lists[key] = token_ids(section, key)
        elif SETTINGS[key].kind in (Sequences, SequenceBiases):
            lists[key] = [token for words, _ in _sequences(section, key) for token in words]
    for key, ids in lists.items():
        if vocab_size is not None and any(i >= vocab_size for i in ids):
            raise _error(
                f"generation.{key}", f"must hold token ids in [0, {vocab_size}), got {max(ids)}"
            )
    banned = {*lists.get("banned_tokens", ())}
    banned |= {int(token) for token, bias in section.logit_bias.items() if bias == -np.inf}
    for key in ("bad_words", "sequence_bias"):
        pairs = _sequences(section, key)
        banned |= {words[0] for words, bias in pairs if len(words) == 1 and bias == -np.inf}
    allowed = set(lists.get("allowed_tokens", ()))
    if (allowed and allowed <= banned) or len(banned) == vocab_size:
        raise UserError(
            "generation.allowed_tokens, banned_tokens, logit_bias, sequence_bias, bad_words:"
            " together they allow no token",
            key="generation.allowed_tokens",
        )


def _sequences(section: GenerationSection, key: str) -> list[tuple[tuple[int, ...], float]]:
    """Returns sequences of ids with the bias of their last token, -inf if it is banned."""
    entries = getattr(section, key)
    pairs = (
        entries if SETTINGS[key].kind == SequenceBiases else [(words, -np.inf) for words in entries]
    )
    if any(isinstance(words, str) for words, _ in pairs):
        raise _error(f"generation.{key}", "must hold lists of token ids if there is no tokenizer")
    return list(pairs)


def _build_tables(
    sections: Sequence[GenerationSection], plan: Sequence[str]
) -> dict[str, np.ndarray]:
    """Builds the token lists that the steps of the plan read, one array row per section."""
    tables: dict[str, np.ndarray] = {}
    for name in plan:
        on = [name in active_steps(section) for section in sections] if STEPS[name].indirect else []
        for key in STEPS[name].indirect:
            tables |= _setting_tables(key, sections, on)
    return tables


def _setting_tables(
    key: str, sections: Sequence[GenerationSection], on: Sequence[bool]
) -> dict[str, np.ndarray]:
    """Returns the tables of a setting.

    They are `KEY`, the ids; `KEY_by`, their biases; and `KEY_before`, the ids before the last ones
    of sequences.

    Args:
      on: the rows in which the step that reads the setting is active.
    """
    kind = SETTINGS[key].kind
    if kind == Scope:
        return {key: np.asarray([[getattr(section, key) == "all"] for section in sections])}
    if kind in (Sequences, SequenceBiases):
        rows = [_sequences(section, key) for section in sections]
        count = next_power_of_two(max(map(len, rows)))
        longest = next_power_of_two(
            max((len(words) for row in rows for words, _ in row), default=1)
        )
        arrays = [sequence_arrays([words for words, _ in row], count, longest) for row in rows]
        before, last = (np.stack(part) for part in zip(*arrays, strict=True))
        biases = _pad([_clip_biases(bias for _, bias in row) for row in rows], 0.0)
        return {f"{key}_before": before, key: last, f"{key}_by": biases}
    tables: dict[str, np.ndarray] = {}
    if kind == WatermarkKeys:
        tables[key] = _pad(
            [getattr(s, key) if is_on else () for s, is_on in zip(sections, on, strict=True)], -1
        )
    if kind in (Tokens, Biases, Breakers):
        tables[key] = _pad(
            [token_ids(s, key) if is_on else [] for s, is_on in zip(sections, on, strict=True)], -1
        )
    if kind == Biases:
        tables[f"{key}_by"] = _pad(
            [_clip_biases(getattr(section, key).values()) for section in sections], 0.0
        )
    return tables


def _clip_biases(biases: Iterable[float]) -> list[float]:
    """Clips biases to finite float32 numbers, so that only -inf bans a token."""
    return [
        bias if bias == -np.inf else float(np.clip(bias, FLOATS.min, FLOATS.max)) for bias in biases
    ]


def _pad(rows: Sequence[Sequence[float]], fill: float) -> np.ndarray:
    """Pads rows to one array whose width is a power of two, so that few programs serve all
    lists.
    """
    width = next_power_of_two(max(map(len, rows)))
    padded_BK = np.full((len(rows), width), fill, np.int32 if fill == -1 else np.float32)
    for padded_K, row in zip(padded_BK, rows, strict=True):
        padded_K[: len(row)] = row
    return padded_BK


def next_power_of_two(length: int, minimum: int = 1) -> int:
    """Returns the smallest power of two that is at least `length`, or `minimum` if that is
    larger.
    """
    return max(minimum, 1 << max(length - 1, 0).bit_length())
