"""`SamplingParams`: the sampling numbers of every row as arrays, and the static plan of steps."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypedDict, get_args

import jax
import numpy as np
from jax import Array

from dantinox.config import Config, GenerationSection, UserError, build_config
from dantinox.config.generation_settings import GREEDY_BELOW, ROUTED, order_of, steps_on
from dantinox.config.router_settings import RouterSection
from dantinox.config.sampling_steps import (
    EDITS,
    NUMBERS,
    PENALTIES,
    SETTINGS,
    STEPS,
    Biases,
    Breakers,
    Scope,
    SequenceBiases,
    Sequences,
    Tokens,
    is_digits,
)  # fmt: skip
from dantinox.sampling.entropy_router import Metrics, RouterConfig
from dantinox.sampling.history import sequence_arrays
from dantinox.sampling.order import ORDERABLE, order_array

# Settings that choose among programs: arguments of steps that are words.
CHOICE_SETTINGS = tuple(dict.fromkeys(key for step in STEPS.values() for key in step.arguments.values() if key not in NUMBERS))
# What decides on a program is the same for all rows of a batch.
BATCH_SETTINGS = ("strategy", "preset", "sampler_order", *CHOICE_SETTINGS)
SETTING_NAMES = tuple(key for key in GenerationSection.model_fields if key in {*SETTINGS, *BATCH_SETTINGS, "greedy", "seed"})
LARGEST_INT = 2**31 - 1
FLOATS = np.finfo(np.float32)

Row = Mapping[str, Any]


class ProgramOptions(TypedDict, total=False):
    """Arguments of `SamplingParams.build` that decide on the compiled program."""

    score_fn: "ScoreFn | None"
    show_candidates: bool
    extra_steps: Sequence[str] | None
    dynamic_order: bool


# (candidates [N], ln p under the model [N], metrics of the row) -> scores [N]; the largest wins, the first of equal ones
ScoreFn = Callable[[Array, Array, Metrics], Array]


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("numbers", "enabled", "tables", "seed", "sample_index", "router", "report_rows", "allowed_bits", "order"),
    meta_fields=("plan", "stochastic", "choices", "uses_attention", "score_fn", "candidates", "skip_inactive_steps"),
)
@dataclass(frozen=True)
class SamplingParams:
    """The sampling numbers of a batch: arrays of shape [B, …], and the static plan that decides what is compiled.

    A temperature below 1e-5 makes a row greedy: the most likely token after the edits and penalties, the lowest id on ties.

    Attributes:
      numbers: setting → [B], float32 or int32: those of the plan's steps, and the temperature.
      on: step of the plan → [B] bool, the rows that have it on; a greedy row has edits and penalties alone.
      tables: lists of token ids and what belongs to them, [B, K], −1 in unused places.
      seed, sample_index: [B], of the draws.
      plan: the steps that some row has on, in the order they run.
      draws: whether some row draws at random; False compiles no draw at all.
      words: (setting, value) of the steps' settings that are words, `ties` and `top_p_rule`; with `order` in `numbers`.
      router: the entropy router's numbers, [B] each; it sets the numbers of the `ROUTED` steps anew for every token. None: no
        router, and nothing of it is compiled.
      attends: whether the router reads attention metrics, which the model then has to report.
      score_fn: chooses among candidates that are really drawn; None: the likeliest is taken, whose distribution needs no draws.
      candidates: of the router that are drawn at most; 0 where nobody wants to see them.
      reports: [B] bool, the rows that a report is wanted of, where not of all; nothing is computed while there is none.
      allowed: [B, ⌈V/32⌉] uint32, bit i mod 32 of word ⌊i/32⌋ for every token i that a row may have next, which wins over all
        steps; all bits set for a row that may have any. None: all rows may, and nothing of it is compiled.
      order: [B, N] int32, for every row its own order of the steps behind the edits, as indices into `order.ORDERABLE`, −1 in
        unused places. None: the plan's order for all rows, which the program is made for.
      skip_inactive_steps: leave out a step that no row has on when the program runs, which pays where a plan is for many.
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
    report_rows: Array | None = None
    allowed_bits: Array | None = None
    order: Array | None = None

    @classmethod
    def build(
        cls,
        rows: Row | Config | Sequence[Row | Config],
        *,
        batch: int | None = None,
        stop_ids: Sequence[int] = (),
        protected_ids: Sequence[int] = (),
        sample_index: Sequence[int] | int = 0,
        vocab_size: int | None = None,
        measured: Mapping[str, float] | None = None,
        score_fn: ScoreFn | None = None,
        show_candidates: bool = False,
        extra_steps: Sequence[str] | None = None,
        dynamic_order: bool = False,
    ) -> "SamplingParams":
        """Parameters of a batch from plain numbers named as the keys of `generation` and `router`; tokens are given by id.

        Args:
          rows: one mapping (or config) for every row of `batch`, or one for each. Absent keys have their defaults.
          stop_ids: what `min_tokens` keeps from being generated besides the row's own `stop_token_ids`: the end token.
          protected_ids: what `xtc` must not remove: the end token, the line break.
          sample_index: which sample of its prompt a row is; part of the random key, as the seed is.
          vocab_size: if given, ids outside of it are refused.
          measured: the calibration of the model, for rows with `router_preset: calibrated`.
          score_fn: the router's candidates are drawn, and the one that scores highest is taken; part of the program.
          show_candidates: report the router's candidates with each token; the tokens stay the same.
          extra_steps: steps that the program contains even if no row enables them; the program then also draws. Other rows that
            enable these steps can later use the same program.
          dynamic_order: one program with all steps for all orders, which it reads from an array: rows may differ in `preset`,
            `sampler_order`, `ties` and `top_p_rule`. The entropy router has an order of its own.

        Raises:
          UserError: an unknown name, a value out of range, rows in different order, or a row that draws without a seed.
        """
        if isinstance(rows, (Mapping, Config)):
            rows = [rows] * (1 if batch is None else batch)
        if batch is not None and len(rows) != batch:
            raise UserError(f"sampling parameters must be one set or one per row: got {len(rows)} sets for {batch} rows")
        configs = [_check_row(row, vocab_size) for row in rows]
        if not configs:
            raise UserError("sampling parameters need at least one row")
        sections = [config.generation for config in configs]
        for name in ("strategy",) if dynamic_order else BATCH_SETTINGS:
            if len({getattr(section, name) for section in sections}) > 1:
                raise _error(f"generation.{name}", "must be the same for all rows of a batch")
        first = sections[0]
        if dynamic_order:
            if first.strategy == "entropy":
                raise UserError("generation.strategy entropy has an order of its own: build it without dynamic_order")
            extra_steps = (*EDITS, *ORDERABLE)
        uses_attention = {config.router.use_attention for config in configs if first.strategy == "entropy"}
        if len(uses_attention) > 1:
            raise _error("router.use_attention", "must be the same for all rows of a batch")
        for name, given in (("score_fn chooses among", score_fn is not None), ("show_candidates shows", show_candidates)):
            if given and first.strategy != "entropy":
                raise UserError(f"{name} the candidates of the entropy router: set generation.strategy to entropy")
        stops = [sorted({*map(int, stop_ids), *token_ids(section, "stop_token_ids")}) for section in sections]
        on_rows = [_enabled_steps(section, bool(ids)) for section, ids in zip(sections, stops, strict=True)]
        stochastic = extra_steps is not None or any(not _is_greedy(section) for section in sections)
        # The number changed most is always part of a program that draws, so that no value of it compiles anything.
        always = {"temperature"} if stochastic and not any("dynamic_temperature" in on for on in on_rows) else set()
        always |= {*(extra_steps or ())}
        plan = tuple(
            name
            for name in (*EDITS, *(ORDERABLE if dynamic_order else order_of(first)))
            if name in always or any(name in on for on in on_rows)
        )
        settings = {"temperature", *(key for name in plan for key in STEPS[name].settings)} & NUMBERS.keys()
        tables = _build_tables(sections, plan)
        if "min_tokens" in plan:
            tables["stop_ids"] = _pad(stops, -1)
        if "xtc" in plan:
            tables["protected_ids"] = _pad([sorted({*map(int, protected_ids)})] * len(sections), -1)
        words = {key: get_args(SETTINGS[key].kind) for key in CHOICE_SETTINGS} if dynamic_order else {}
        choices = {
            key: np.asarray([getattr(section, key) == values[1] for section in sections]) for key, values in words.items()
        }
        routers = [
            RouterConfig.build(config.router, measured, **{key: getattr(config.generation, key) for key in ROUTED})
            for config in configs
            if first.strategy == "entropy"
        ]
        arrays: dict[str, Any] = {
            "numbers": {key: _setting_values(key, sections) for key in sorted(settings)} | choices,
            "enabled": {name: np.asarray([name in on for on in on_rows]) for name in plan},
            "tables": tables,
            "seed": np.asarray([section.seed or 0 for section in sections], np.uint32),
            "sample_index": np.broadcast_to(np.asarray(sample_index, np.int32), (len(sections),)),
            "order": np.stack([order_array(order_of(section)) for section in sections]) if dynamic_order else None,
            "router": jax.tree.map(lambda *numbers: np.stack(numbers), *routers) if routers else None,
        }
        return cls(
            **jax.device_put(arrays),  # together: `jnp.asarray` of each takes several times as long
            plan=plan,
            stochastic=stochastic,
            choices=() if dynamic_order else tuple((key, getattr(first, key)) for key in CHOICE_SETTINGS),
            uses_attention=True in uses_attention,
            score_fn=score_fn,
            candidates=max(c.router.candidates for c in configs) if score_fn is not None or show_candidates else 0,
            skip_inactive_steps=extra_steps is not None,
        )

    @property
    def batch(self) -> int:
        """The number of rows."""
        return self.seed.shape[0]

    @property
    def temperature(self) -> Array:
        """[B], below 1e-5 in greedy rows."""
        return self.numbers["temperature"]


def _check_row(row: Row | Config, vocab_size: int | None) -> Config:
    """The settings of one row, checked by the declarations of their sections, and its token ids."""
    if isinstance(row, Config):
        config = row
    else:
        given = {name: value.item() if isinstance(value, np.generic) else value for name, value in row.items()}
        router = {name: given.pop(name) for name in [*given] if name in RouterSection.model_fields}
        changed = {f"generation.{name}": value for name, value in given.items()}
        changed |= {f"router.{name}": value for name, value in router.items()}
        config = build_config({}, changed, origin="")
        unused = [name for name in given if name not in SETTING_NAMES]
        if unused:
            raise _error(f"generation.{unused[0]}", f"is no sampling parameter: they are {', '.join(SETTING_NAMES)}")
    if config.generation.seed is None and not _is_greedy(config.generation):
        raise _error("generation.seed", "must be an integer when tokens are drawn at random, got null")
    _check_tokens(config.generation, vocab_size)
    token = config.router.clarify_token
    if vocab_size is not None and str(token).isdecimal() and int(str(token)) >= vocab_size:
        raise _error("router.clarify_token", f"must be a token id in [0, {vocab_size}), got {token}")
    return config


def _error(key: str, problem: str) -> UserError:
    return UserError(f"{key} {problem}", key=key)


def _is_greedy(section: GenerationSection) -> bool:
    # Compared as the compiled program does.
    return section.greedy or bool(np.float32(min(section.temperature, 1.0)) < np.float32(GREEDY_BELOW))


def _enabled_steps(section: GenerationSection, stops: bool) -> set[str]:
    """The steps that change something in this row; a greedy row ignores all that come after the penalties."""
    on = steps_on(section) - (set() if stops else {"min_tokens"})
    if section.strategy == "entropy":
        return {*on, *ROUTED}
    return set(on & {*EDITS, *PENALTIES} if _is_greedy(section) else on)


def _setting_values(key: str, sections: Sequence[GenerationSection]) -> np.ndarray:
    """One setting of all rows; what float32 or int32 cannot hold becomes the nearest number that they can."""
    off = {"top_k": 0, "top_p": 1.0}
    values = [off[key] if getattr(section, key) is None else getattr(section, key) for section in sections]
    if key == "temperature":
        values = [0.0 if _is_greedy(section) else value for section, value in zip(sections, values, strict=True)]
    low, _, integer = NUMBERS[key]
    if integer:
        return np.asarray([max(-1, min(value, LARGEST_INT)) for value in values], np.int32)
    return np.clip(np.asarray(values, np.float64), max(low, float(FLOATS.min)), FLOATS.max).astype(np.float32)


def token_ids(section: GenerationSection, key: str) -> list[int]:
    """The ids of a list of tokens, or an error where it holds text, which takes a tokenizer to read."""
    tokens = list(getattr(section, key))
    text = next((t for t in tokens if isinstance(t, str) and not (is_digits(t) and key != "dry_breakers")), None)
    if text is not None:
        raise _error(f"generation.{key}", f"must hold token ids where there is no tokenizer, got {text!r}")
    return [int(token) for token in tokens]


def _check_tokens(section: GenerationSection, vocab_size: int | None) -> None:
    on = steps_on(section)
    lists = {"stop_token_ids": token_ids(section, "stop_token_ids")}
    for key in (key for name, step in STEPS.items() if name in on for key in step.beside):
        if SETTINGS[key].kind in (Tokens, Biases, Breakers):
            lists[key] = token_ids(section, key)
        elif SETTINGS[key].kind in (Sequences, SequenceBiases):
            lists[key] = [token for words, _ in _sequences(section, key) for token in words]
    for key, ids in lists.items():
        if vocab_size is not None and any(i >= vocab_size for i in ids):
            raise _error(f"generation.{key}", f"must hold token ids in [0, {vocab_size}), got {max(ids)}")
    banned = {*lists.get("banned_tokens", ())}
    banned |= {int(token) for token, bias in section.logit_bias.items() if bias == -np.inf}
    banned |= {words[0] for key in ("bad_words", "sequence_bias") for words, bias in _sequences(section, key)
               if len(words) == 1 and bias == -np.inf}  # fmt: skip
    allowed = set(lists.get("allowed_tokens", ()))
    if (allowed and allowed <= banned) or len(banned) == vocab_size:
        raise UserError(
            "generation.allowed_tokens, banned_tokens, logit_bias, sequence_bias, bad_words: together they leave no token",
            key="generation.allowed_tokens",
        )


def _sequences(section: GenerationSection, key: str) -> list[tuple[tuple[int, ...], float]]:
    """Sequences of ids with the bias of their last token, -inf for one that is banned."""
    found = getattr(section, key)
    pairs = found if SETTINGS[key].kind == SequenceBiases else [(words, -np.inf) for words in found]
    if any(isinstance(words, str) for words, _ in pairs):
        raise _error(f"generation.{key}", "must hold lists of token ids where there is no tokenizer")
    return list(pairs)


def _build_tables(sections: Sequence[GenerationSection], plan: Sequence[str]) -> dict[str, np.ndarray]:
    """The lists that the plan's steps read, one row of an array for each section: by setting, a bias beside its tokens."""
    tables: dict[str, np.ndarray] = {}
    for name, key, kind in ((step, key, SETTINGS[key].kind) for step in plan for key in STEPS[step].beside):
        on = [name in steps_on(section) for section in sections]
        if kind in (Tokens, Biases, Breakers):
            tables[key] = _pad([token_ids(s, key) if is_on else [] for s, is_on in zip(sections, on, strict=True)], -1)
        if kind == Biases:
            tables[f"{key}_by"] = _pad([_clip_biases(getattr(section, key).values()) for section in sections], 0.0)
        if kind in (Sequences, SequenceBiases):
            rows = [_sequences(section, key) for section in sections]
            count, longest = max(map(len, rows)), max((len(words) for row in rows for words, _ in row), default=1)
            arrays = [
                sequence_arrays([words for words, _ in row], _next_power_of_two(count), _next_power_of_two(longest))
                for row in rows
            ]
            tables[f"{key}_before"], tables[key] = (np.stack(part) for part in zip(*arrays, strict=True))
            tables[f"{key}_by"] = _pad([_clip_biases(bias for _, bias in row) for row in rows], 0.0)
        if kind == Scope:
            tables[key] = np.asarray([[getattr(section, key) == "all"] for section in sections])
    return tables


def _clip_biases(biases: Iterable[float]) -> list[float]:
    """The biases within the finite floats, so that -inf alone bans."""
    return [bias if bias == -np.inf else float(np.clip(bias, FLOATS.min, FLOATS.max)) for bias in biases]


def _pad(rows: Sequence[Sequence[float]], fill: float) -> np.ndarray:
    """Rows of different length as one array, its width a power of two so that few programs serve all lists."""
    width = _next_power_of_two(max(map(len, rows)))
    return np.asarray([[*row, *[fill] * (width - len(row))] for row in rows], np.int32 if fill == -1 else np.float32)


def _next_power_of_two(length: int) -> int:
    return 1 << max(length - 1, 0).bit_length()
