"""`Feature`: a part of decoding that only some batches use, such as guidance or adapters.

A feature is a module of its own. Its arrays are in `DecodeState.features`, and the compiled program
contains the features of its batch and no others. Large arrays that all rows share, such as the
matrices of adapters, are `Constants`, an argument that the programs do not return.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, TypeVar

import jax

from dantinox.model import Transformer

Constants = Mapping[str, Any]  # by a name that the feature chooses


class Feature:
    """The base class of features. A subclass is a frozen dataclass and a pytree whose arrays have
    one entry per row, `[B, …]`.

    A program calls the methods while it is traced. Those of this class change nothing.
    """

    def attach(self, model: Transformer, constants: Constants) -> Transformer:
        """Returns the model that computes the rows."""
        return model

    def logits(self, logits_BV: jax.Array) -> jax.Array:
        """Returns the logits that the sampling steps read."""
        return logits_BV

    def from_main_rows(self, x_B: jax.Array) -> jax.Array:
        """Returns for each row the value of the row that it follows, or its own if it follows
        none.
        """
        return x_B

    def after(self, token_B: jax.Array, position_B: jax.Array, active_B: jax.Array) -> Self:
        """Returns the feature after the active rows have got a token at a position."""
        return self

    def started(self, tokens_1S: jax.Array, length: jax.Array, generated: jax.Array) -> Self:
        """Returns the feature of one row that starts, perhaps again, after these tokens.

        Args:
          tokens_1S: the prompt and the generated tokens, padded; `length` of them are valid, and
            the last `generated` of these are generated.
        """
        return self

    @property
    def counts(self) -> dict[str, jax.Array]:
        """Numbers `[B]` by name, counted since the start of each row."""
        return {}


F = TypeVar("F", bound=Feature)
Features = tuple[Feature, ...]


def attach(features: Features, model: Transformer, constants: Constants) -> Transformer:
    """Returns the model that computes the rows of these features."""
    for feature in features:
        model = feature.attach(model, constants)
    return model


def find(features: Sequence[Feature], kind: type[F]) -> F:
    """Returns the feature of a class; the batch must have it."""
    return next(feature for feature in features if isinstance(feature, kind))


def with_feature(features: Features, new: Feature) -> Features:
    """Returns the features with `new` in place of the feature of its class."""
    return tuple(new if type(feature) is type(new) else feature for feature in features)


@partial(jax.tree_util.register_dataclass, data_fields=["tokens_BS"], meta_fields=[])
@dataclass(frozen=True)
class RowTokens(Feature):
    """All tokens of each row so far, `[B, S]`, for decoding that reads them: without a cache, or
    with drafts from the text.
    """

    tokens_BS: Any

    def after(self, token_B: jax.Array, position_B: jax.Array, active_B: jax.Array) -> "RowTokens":
        B, S = self.tokens_BS.shape
        index_B = jax.numpy.where(active_B, position_B, S)
        return RowTokens(self.tokens_BS.at[jax.numpy.arange(B), index_B].set(token_B, mode="drop"))

    def started(self, tokens_1S: jax.Array, length: jax.Array, generated: jax.Array) -> "RowTokens":
        return RowTokens(tokens_1S)
