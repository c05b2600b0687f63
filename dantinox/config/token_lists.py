"""The types of settings that hold tokens: lists of ids and texts, sequences, and biases."""

import math
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from dantinox.config.base import CountOrZero, as_tuple


def is_digits(text: str) -> bool:
    """Whether a string consists of ASCII digits, like a token id or a step code."""
    return text.isascii() and text.isdecimal()


def _as_biases(value: object) -> Any:
    """Converts `token=value` strings or a mapping to a mapping. Null becomes -inf, because JSON has
    no infinity.
    """
    pairs = _pairs(value)
    if pairs is None or not all(isinstance(token, str | int) for token, _ in pairs):
        return value
    return {str(token): bias for token, bias in pairs}


def _as_sequence_biases(value: object) -> Any:
    """Converts strings, pairs or a mapping to pairs of a sequence (string or token ids) and its
    bias.
    """
    pairs = _pairs(value)
    return (
        tuple((_as_sequence(words), bias) for words, bias in pairs) if pairs is not None else value
    )


def _pairs(value: object) -> list[tuple[Any, Any]] | None:
    """Converts a mapping, `name=bias` strings or pairs to (name, bias) pairs, with -inf for null;
    other types to None.
    """
    if isinstance(value, list | tuple):
        parts = [
            _split_at_last_equals_sign(item) if isinstance(item, str) else item for item in value
        ]
        if any(
            not isinstance(pair, list | tuple) or len(pair) != 2 or pair[0] == "" for pair in parts
        ):
            return None
        pairs = [(name, _number(bias)) for name, bias in parts]
    elif isinstance(value, Mapping):
        pairs = [*value.items()]
    else:
        return None
    return [(name, -math.inf if bias is None else bias) for name, bias in pairs]


def _split_at_last_equals_sign(text: str) -> tuple[str, str]:
    """Returns the parts of `name=bias`; the name is empty if there is no equals sign, and may
    itself contain one.
    """
    name, _, bias = text.rpartition("=")
    return name, bias


def _number(bias: Any) -> Any:
    """Converts a string to a number if it is one; the validation of the type reports other
    strings.
    """
    try:
        return float(bias) if isinstance(bias, str) else bias
    except ValueError:
        return bias


def _as_sequences(value: object) -> Any:
    """Converts a list of strings and token-id lists to a tuple."""
    items = as_tuple(value)
    return tuple(map(_as_sequence, items)) if isinstance(items, tuple) else items


def _as_sequence(item: Any) -> Any:
    """Converts a list of token ids to a tuple. A string stays a string."""
    return tuple(item) if isinstance(item, list) else item


Text = Annotated[str, Field(min_length=1)]
Bias = Annotated[float, Field(lt=math.inf)]
Sequence = Text | Annotated[tuple[CountOrZero, ...], Field(min_length=1)]
# Types of settings that are lists.
Tokens = Annotated[tuple[CountOrZero | Text, ...], BeforeValidator(as_tuple)]
Breakers = Annotated[tuple[str | CountOrZero, ...], BeforeValidator(as_tuple)]
Biases = Annotated[dict[str, Bias], BeforeValidator(_as_biases)]
Sequences = Annotated[tuple[Sequence, ...], BeforeValidator(_as_sequences)]
SequenceBiases = Annotated[tuple[tuple[Sequence, Bias], ...], BeforeValidator(_as_sequence_biases)]
