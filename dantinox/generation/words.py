"""Tokens that a person names by their text: banned words, biased tokens, breakers, what XTC must spare."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from dantinox.config import Config, GenerationSection, UserError
from dantinox.config.generation import is_digits, steps_on
from dantinox.sampling import SamplingParams
from dantinox.sampling.params import ScoreFn
from dantinox.text import Tokenizer


def sampling_params(
    tokenizer: Tokenizer,
    configs: Sequence[Config],
    sample_index: Sequence[int] | int = 0,
    measured: Mapping[str, float] | None = None,
    score_fn: ScoreFn | None = None,
) -> SamplingParams:
    """The sampling parameters of rows with these settings, tokens given by their text looked up.

    Args:
      measured, score_fn: as of `SamplingParams.build`.

    Raises:
      UserError: a text is not one token, or an id is none of the vocabulary.
    """
    rows = [_with_ids(config, tokenizer) for config in configs]
    eos = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    return SamplingParams.build(
        rows,
        stop_ids=eos,
        protected_ids=[*eos, *(_line_break(tokenizer) if any("xtc" in steps_on(row.generation) for row in rows) else [])],
        sample_index=sample_index,
        vocab_size=tokenizer.vocab_size,
        measured=measured,
        score_fn=score_fn,
    )


def seeded(config: Config, seed: int) -> Config:
    """The same settings, with this seed where they have none."""
    if config.generation.seed is not None:
        return config
    return config.model_copy(update={"generation": config.generation.model_copy(update={"seed": seed})})


def _with_ids(config: Config, tokenizer: Tokenizer) -> Config:
    found: dict[str, Any] = {"generation": with_ids(config.generation, tokenizer)}
    if config.router.clarify_token is not None:
        token = _token(tokenizer, config.router.clarify_token, "router.clarify_token")
        found["router"] = config.router.model_copy(update={"clarify_token": token})
    return config.model_copy(update=found)


def with_ids(section: GenerationSection, tokenizer: Tokenizer) -> GenerationSection:
    """The same settings with token ids in the place of texts."""
    named = {
        key: [_token(tokenizer, token, f"generation.{key}") for token in getattr(section, key)]
        for key in ("allowed_tokens", "banned_tokens")
    }
    bias: dict[int, float] = {}
    for token, value in section.logit_bias.items():
        token_id = _token(tokenizer, token, "generation.logit_bias")
        bias[token_id] = bias.get(token_id, 0.0) + value
    words = [sequence for word in section.bad_words for sequence in _spellings(tokenizer, word)]
    breakers = _containing(tokenizer, section.dry_breakers) if "dry" in steps_on(section) else []
    return section.model_copy(update=named | {"logit_bias": bias, "bad_words": tuple(words), "dry_breakers": tuple(breakers)})


def _token(tokenizer: Tokenizer, token: int | str, key: str) -> int:
    """The id of a token that is named by its id, digits being an id too, or by its text."""
    if isinstance(token, int) or is_digits(token):
        return int(token)
    ids = _spelt(tokenizer, token, key)
    if len(ids) == 1:
        return ids[0]
    # Where a space is put in front of every text, a sign alone is two tokens and yet in the vocabulary.
    same = [i for i, text in enumerate(_vocabulary(tokenizer)) if text == token]
    if len(same) != 1:
        raise UserError(f"{key} must hold token ids or texts of one token: {token!r} is {len(ids)} tokens")
    return same[0]


def _spelt(tokenizer: Tokenizer, text: str, key: str) -> list[int]:
    try:
        return tokenizer.encode(text)
    except UserError as error:  # a character the vocabulary lacks
        raise UserError(f"{key}: {error}") from None


def _spellings(tokenizer: Tokenizer, word: str | tuple[int, ...]) -> list[tuple[int, ...]]:
    """A text as tokens, and as it is spelt behind a space where that is not the same with one more token before it."""
    if not isinstance(word, str):
        return [word]
    plain = tuple(_spelt(tokenizer, word, "generation.bad_words"))
    if not plain:
        raise UserError(f"generation.bad_words must hold texts of at least one token, got {word!r}")
    try:
        spaced = tuple(tokenizer.encode(" " + word))
    except UserError:  # the vocabulary has no space
        return [plain]
    return [plain] if spaced[-len(plain) :] == plain else [plain, spaced]


def _containing(tokenizer: Tokenizer, breakers: Sequence[str | int]) -> list[int]:
    """The ids given, and those of every token that has one of the texts in it."""
    texts = [text for text in breakers if isinstance(text, str)]
    ids = {token for token in breakers if isinstance(token, int)}
    ids |= {i for i, spelt in enumerate(_vocabulary(tokenizer)) if any(text in spelt for text in texts)}
    return sorted(ids)


@lru_cache(maxsize=2)
def _vocabulary(tokenizer: Tokenizer) -> list[str]:
    return [tokenizer.decode([token]) for token in range(tokenizer.vocab_size)]


def _line_break(tokenizer: Tokenizer) -> list[int]:
    try:
        return [_token(tokenizer, "\n", "")]
    except UserError:  # the vocabulary has none of one token
        return []
