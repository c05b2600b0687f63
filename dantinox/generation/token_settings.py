"""Converts settings that name tokens by text (banned words, biases, DRY breakers, stop tokens,
clarify text) to token ids.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Unpack

from dantinox.config import Config, GenerationSection, UserError, with_generation
from dantinox.config.generation_settings import active_steps
from dantinox.config.sampling_steps import SETTINGS, STEPS
from dantinox.config.token_lists import (
    Biases,
    Breakers,
    SequenceBiases,
    Sequences,
    Tokens,
    is_digits,
)
from dantinox.sampling import ProgramOptions, SamplingParams
from dantinox.text import Tokenizer


def sampling_params(
    tokenizer: Tokenizer,
    configs: Sequence[Config],
    sample_index: Sequence[int] | int = 0,
    vocab_size: int | None = None,
    measured: Mapping[str, float] | None = None,
    **more: Unpack[ProgramOptions],
) -> SamplingParams:
    """Returns the sampling parameters of a batch with one `Config` per row; converts tokens that
    are named by text to ids.

    Args:
      vocab_size: the number of logits, if it is larger than the vocabulary of the tokenizer.
      measured: the thresholds from a calibration of the router.
      more: options of the compiled program, passed to `SamplingParams.build`.

    Raises:
      UserError: a text is not a single token, or an id is not in the vocabulary.
    """
    rows = [_resolve_config(config, tokenizer) for config in configs]
    protected_ids = list(tokenizer.stop_ids)
    if any("xtc" in active_steps(row.generation) for row in rows):
        protected_ids += _newline_ids(tokenizer)
    return SamplingParams.build(
        rows,
        stop_ids=tokenizer.stop_ids,
        clarify_ids=[clarify_ids(tokenizer, config) for config in configs],
        protected_ids=protected_ids,
        sample_index=sample_index,
        vocab_size=vocab_size or tokenizer.vocab_size,
        measured=measured,
        **more,
    )


def stop_token_ids(tokenizer: Tokenizer, section: GenerationSection) -> tuple[int, ...]:
    """Returns the ids that end a sequence, in addition to the EOS tokens."""
    return _token_ids(tokenizer, section, "stop_token_ids")


def end_ids(tokenizer: Tokenizer, section: GenerationSection) -> list[int]:
    """Returns the ids that end a sequence, with the EOS tokens unless the settings ignore them."""
    ids = stop_token_ids(tokenizer, section)
    return [*ids] if section.ignore_eos else [*ids, *tokenizer.stop_ids]


def clarify_ids(tokenizer: Tokenizer, config: Config) -> list[int]:
    """Returns the tokens of `router.clarify_text`, without a BOS token; empty without a text or
    without the router.

    Raises:
      UserError: the tokenizer cannot encode the text, or encodes it to nothing.
    """
    text = config.router.clarify_text
    if text is None or config.generation.strategy != "entropy":
        return []
    key = "router.clarify_text"
    ids = _encode(tokenizer, text, key)
    if not ids:
        raise UserError(
            f"{key} must be a text of at least one token, got {text!r}", key=key, value=text
        )
    return ids


def with_default_seed(config: Config, seed: int) -> Config:
    """Returns the settings, with `seed` filled in if they have none."""
    if config.generation.seed is not None:
        return config
    return with_generation(config, seed=seed)


def _resolve_config(config: Config, tokenizer: Tokenizer) -> Config:
    """Returns the settings with token ids in place of texts."""
    changes: dict[str, Any] = {"generation": resolve_token_ids(config.generation, tokenizer)}
    if config.router.clarify_token is not None:
        token = _token_id(tokenizer, config.router.clarify_token, "router.clarify_token")
        changes["router"] = config.router.model_copy(update={"clarify_token": token})
    return config.model_copy(update=changes)


def resolve_token_ids(section: GenerationSection, tokenizer: Tokenizer) -> GenerationSection:
    """Returns the settings with token ids in place of texts."""
    resolved: dict[str, Any] = {"stop_token_ids": stop_token_ids(tokenizer, section)}
    for key, setting in SETTINGS.items():
        value = getattr(section, key)
        if setting.kind == Tokens:
            resolved[key] = _token_ids(tokenizer, section, key)
        elif setting.kind == Biases:
            resolved[key] = _resolve_biases(tokenizer, value, f"generation.{key}")
        elif setting.kind == Sequences:
            resolved[key] = tuple(
                ids for word in value for ids in _token_sequences(tokenizer, word, key)
            )
        elif setting.kind == SequenceBiases:
            resolved[key] = tuple(
                (ids, bias)
                for word, bias in value
                for ids in _token_sequences(tokenizer, word, key)
            )
        elif setting.kind == Breakers:
            is_active = any(key in STEPS[name].indirect for name in active_steps(section))
            resolved[key] = tokens_containing(tokenizer, tuple(value)) if is_active else ()
    return section.model_copy(update=resolved)


def _resolve_biases(
    tokenizer: Tokenizer, biases: Mapping[str, float], key: str
) -> dict[str, float]:
    """Returns the sums of the biases by token id; several texts may stand for the same token."""
    sums: dict[str, float] = {}
    for token, bias in biases.items():
        token_id = str(_token_id(tokenizer, token, key))
        sums[token_id] = sums.get(token_id, 0.0) + bias
    return sums


def _token_ids(tokenizer: Tokenizer, section: GenerationSection, key: str) -> tuple[int, ...]:
    return tuple(
        _token_id(tokenizer, token, f"generation.{key}") for token in getattr(section, key)
    )


def _token_id(tokenizer: Tokenizer, token: int | str, key: str) -> int:
    """Returns the id of a token; `token` is the id (an integer or a string of digits) or the text
    of the token.
    """
    if isinstance(token, int) or is_digits(token):
        return int(token)
    ids = _encode(tokenizer, token, key)
    if len(ids) == 1:
        return ids[0]
    # A tokenizer that adds a space in front of every text encodes a single symbol as two tokens:
    # search the vocabulary for it.
    matches = [i for i, text in enumerate(_vocabulary(tokenizer)) if text == token]
    if len(matches) != 1:
        raise UserError(
            f"{key} must hold token ids or texts of one token: {token!r} is {len(ids)} tokens",
            key=key,
            value=token,
        )
    return matches[0]


def _encode(tokenizer: Tokenizer, text: str, key: str) -> list[int]:
    try:
        return tokenizer.encode(text)
    except UserError as error:  # a character is not in the vocabulary
        raise UserError(f"{key}: {error}", key=key, value=text) from None


def _token_sequences(
    tokenizer: Tokenizer, word: str | tuple[int, ...], key: str
) -> list[tuple[int, ...]]:
    """Returns the tokens of a text, and those of the text with a space in front, unless these end
    with the tokens of the text.

    Token ids are returned unchanged, as the only sequence.
    """
    if not isinstance(word, str):
        return [word]
    plain = tuple(_encode(tokenizer, word, f"generation.{key}"))
    if not plain:
        raise UserError(
            f"generation.{key} must hold texts of at least one token, got {word!r}",
            key=f"generation.{key}",
        )
    try:
        spaced = tuple(tokenizer.encode(" " + word))
    except UserError:  # the vocabulary has no space
        return [plain]
    return [plain] if spaced[-len(plain) :] == plain else [plain, spaced]


@lru_cache(maxsize=16)
def tokens_containing(tokenizer: Tokenizer, breakers: tuple[str | int, ...]) -> tuple[int, ...]:
    """Returns the ids in `breakers` and the ids of all tokens that contain one of the texts in
    `breakers`, ascending.

    Every substring of every token is looked up in the set of texts, so the time does not depend on
    the number of texts.
    """
    ids = {token for token in breakers if isinstance(token, int)}
    texts = {text for text in breakers if isinstance(text, str)}
    lengths = sorted({len(text) for text in texts})
    for token, token_text in enumerate(_vocabulary(tokenizer)):
        if any(
            token_text[i : i + length] in texts
            for length in lengths
            for i in range(len(token_text) - length + 1)
        ):
            ids.add(token)
    return tuple(sorted(ids))


@lru_cache(maxsize=2)
def _vocabulary(tokenizer: Tokenizer) -> list[str]:
    return [tokenizer.decode([token]) for token in range(tokenizer.vocab_size)]


def _newline_ids(tokenizer: Tokenizer) -> list[int]:
    """Returns the id of the line break, or no id if it is not a single token."""
    try:
        return [_token_id(tokenizer, "\n", "")]
    except UserError:
        return []
