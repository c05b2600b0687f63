"""Converts results to JSON: one column per quantity (`--json`), or one record per token (`--trace`,
log-probabilities).
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from dantinox.config import Config
from dantinox.config.router_settings import STRATEGIES, RouterSection
from dantinox.generation.api.result import Result, TokenColumns
from dantinox.report.trace_file import LISTS
from dantinox.sampling import SamplingParams, StepInfo
from dantinox.sampling.entropy_router import ADAPTIVE
from dantinox.text import Tokenizer

DECIMALS = 3  # of the statistics of the heads, which are thousands of numbers per token
# A trace document holds the first three in other fields. The keys of the watermark are secret.
EXCLUDED_SETTINGS = ("seed", "max_new_tokens", "n", "watermark_keys")


def changed_settings(config: Config) -> dict[str, object]:
    """Returns the settings of `generation` and `router` that differ from the defaults, by name,
    ready for JSON.
    """
    return {
        name: value
        for section in (config.generation, config.router)
        for name, value in section.model_dump(mode="json").items()
        if getattr(section, name) != type(section).model_fields[name].default
        and name not in EXCLUDED_SETTINGS
    }


def token_columns(tokenizer: Tokenizer, ids: Sequence[int], steps: StepInfo) -> TokenColumns:
    """Returns the reports of one row, one list per quantity: the `logprobs` of
    `generate.py --json`.
    """

    def texts_of(token_ids: Sequence[int]) -> list[str]:
        return [tokenizer.token_text(token) for token in token_ids]

    top = zip(steps.top_ids.tolist(), steps.top_logprobs.tolist(), strict=True)
    columns: TokenColumns = {
        "tokens": texts_of(ids),
        "logprobs": steps.logprob.tolist(),
        "sampled_logprobs": _finite_or_none(steps.logprob_sampled),
        "ranks": steps.rank.tolist(),
        "survivors": steps.survivors.tolist(),
        "entropy": steps.entropy.tolist(),
        "varentropy": steps.varentropy.tolist(),
        "top": [
            {"ids": top_ids, "tokens": texts_of(top_ids), "logprobs": logprobs}
            for top_ids, logprobs in top
        ],
    }
    drawn = _candidates(steps)
    if drawn is not None:
        columns["candidates"] = [
            {
                "ids": drawn_ids,
                "tokens": texts_of(drawn_ids),
                "logprobs": logprobs,
                "scores": scores,
            }
            for drawn_ids, logprobs, scores in drawn
        ]
    routed: Any = _router_columns(steps)
    return {**columns, **routed}


def trace_document(result: Result, tokenizer: Tokenizer) -> dict[str, object]:
    """Returns the document that `--trace` writes and that `--show_entropy` and `--report` read: a
    sample with token records.

    A record has `id`, `text` (the text that the token added), `entropy` and `varentropy` of the
    distribution of the model (bits, bits²), `survivors`, `rank` (0: the most likely), `logprob`,
    `logprob_sampled` (null: the token has probability 0 in the distribution after all sampling
    steps) and `alternatives`. With the router, a record also has `strategy`, the settings of the
    router, `forced`, the attention metrics if the router uses attention, and `candidates` if
    requested. With `attention_stats`, it has `heads`: the statistics of `AttentionStats`, each as
    one list per layer with one number per head. Candidates are in drawing order; the first
    candidate with the highest score is chosen.

    Args:
      result: a sample that was generated with `logprobs`.
    """
    return {
        "prompt": result.prompt,
        "text": result.text,
        "seed": result.seed,
        "finish_reason": result.finish_reason,
        "strategy": "chain" if result.router is None else "entropy",
        "settings": result.settings,
        "router": result.router,
        "stats": {name: value for name, value in result.stats.items() if name != "cache"},
        "vocab_size": tokenizer.vocab_size,
        "tokens": _records(result, tokenizer) if result.tokens else [],
    }


def _records(result: Result, tokenizer: Tokenizer) -> list[dict[str, object]]:
    """Returns one record per token of a sample."""
    steps = result.steps
    if steps is None:
        raise ValueError("only a sample with log-probabilities can be traced")
    detokenizer = tokenizer.detokenizer()
    detokenizer.push(tokenizer.encode(result.prompt))  # the first new token continues the prompt
    texts = [detokenizer.push([token]) for token in result.tokens]
    texts[-1] += detokenizer.flush()  # text of an incomplete character
    records = token_records(result.tokens, texts, steps, tokenizer)
    if result.attention is None:
        return records
    statistics = {
        name: values_TLH.astype(np.float64).round(DECIMALS).tolist()
        for name, values_TLH in result.attention._asdict().items()
    }
    for n, record in enumerate(records):
        record["heads"] = {name: values[n] for name, values in statistics.items()}
    return records


def token_records(
    ids: Sequence[int],
    texts: Sequence[str],
    steps: StepInfo,
    tokenizer: Tokenizer,
    count: int | None = None,
) -> list[dict[str, object]]:
    """Returns one record per token.

    Args:
      texts: the text that each token added.
      steps: the reports of the tokens, `[tokens, …]` per field.
      count: the number of alternatives to list; None: all.
    """
    scalars = {
        "entropy": steps.entropy.tolist(),
        "varentropy": steps.varentropy.tolist(),
        **_router_columns(steps),
        "survivors": steps.survivors.tolist(),
        "rank": steps.rank.tolist(),
        "logprob": steps.logprob.tolist(),
        "logprob_sampled": _finite_or_none(steps.logprob_sampled),
    }
    alternatives = zip(
        steps.top_ids[:, :count].tolist(),
        steps.top_logprobs[:, :count].tolist(),
        map(_finite_or_none, steps.top_logprobs_sampled[:, :count]),
        strict=True,
    )
    # For each kind and every token: ids, and two lists of numbers in the order of `LISTS`.
    lists = {"alternatives": list(alternatives)}
    drawn = _candidates(steps)
    if drawn is not None:
        lists["candidates"] = drawn
    token_text = lru_cache(None)(tokenizer.token_text)

    def entries(kind: str, n: int) -> list[dict[str, object]]:
        """Returns the alternatives or candidates of token n, with the fields `LISTS[kind]`."""
        found = []
        # `last` is `logprob_sampled` or `score`.
        for token, logprob, last in zip(*lists[kind][n], strict=True):
            found.append(
                dict(zip(LISTS[kind], (token, token_text(token), logprob, last), strict=True))
            )
        return found

    return [
        {"id": token, "text": texts[n]}
        | {name: values[n] for name, values in scalars.items()}
        | {kind: entries(kind, n) for kind in lists}
        for n, token in enumerate(ids)
    ]


def _candidates(steps: StepInfo) -> list[tuple[list[int], list[float], list[float | None]]] | None:
    """Returns ids, ln p and scores of the candidates of every token; None if not requested.

    The lists of a token are empty if the router drew no candidates for it.
    """
    if steps.routed is None or steps.routed.candidates is None:
        return None
    drawn = steps.routed.candidates
    is_adaptive_T = np.asarray(steps.routed.route.strategy) == ADAPTIVE
    is_forced_T = np.asarray(steps.routed.forced)
    # The other entries are unused, or candidates of a row for which the router did not draw.
    real = (drawn.ids >= 0) & (is_adaptive_T & ~is_forced_T)[:, None]
    return [
        (ids[is_real].tolist(), logprobs[is_real].tolist(), _finite_or_none(scores[is_real]))
        for ids, logprobs, scores, is_real in zip(
            drawn.ids, drawn.logprobs, drawn.scores, real, strict=True
        )
    ]


def router_values(params: SamplingParams, row: int) -> dict[str, float | None] | None:
    """Returns the settings of the router for one row, with None for an infinite bound; None without
    a router.
    """
    if params.router is None:
        return None
    names = [name for name in RouterSection.model_fields if hasattr(params.router, name)]
    values = {name: np.asarray(getattr(params.router, name))[row] for name in names}
    # Rounded: 0.1, not the 0.10000000149 of float32.
    numbers = {name: float(str(value)) for name, value in values.items()}
    return {name: None if number == np.inf else number for name, number in numbers.items()}


def _router_columns(steps: StepInfo) -> dict[str, list[object]]:
    """Returns the reports of the router, one list per quantity; empty without a router."""
    if steps.routed is None:
        return {}
    attention, route, forced, _ = steps.routed
    metrics = (
        {}
        if attention is None
        else {name: values.tolist() for name, values in attention._asdict().items()}
    )
    numbers = {name: values.tolist() for name, values in route._asdict().items()}
    return {
        **metrics,
        **numbers,
        "strategy": [STRATEGIES[i] for i in numbers["strategy"]],
        "forced": forced.tolist(),
    }


def _finite_or_none(values: Any) -> list[float | None]:
    """Converts log-probabilities for JSON: −∞ (probability 0) becomes null."""
    return [value if value > -np.inf else None for value in values.tolist()]
