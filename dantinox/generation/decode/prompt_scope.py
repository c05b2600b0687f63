"""`PromptScope`: what the keys and values of a prompt depend on besides its tokens.

The functions take the adapters of a batch; None stands for a batch whose programs support no
adapters.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dantinox.generation.decode.adapter_slots import (
    NO_ADAPTER,
    AdapterRows,
    AdapterSlot,
    AdapterSlots,
    unknown_adapter,
)
from dantinox.generation.decode.features import Constants, Features


class PromptScope(NamedTuple):
    """The scope of a prompt. Only prompts with an equal `key` share keys and values in the prefix
    cache.

    Attributes:
      salt: separates the prompts of different users.
      lora: the name of the adapter that computes the prompt; None: the base model.
      adapter: the slot of the adapter that had this name when the scope was found, see
        `is_current`.
    """

    salt: str = ""
    lora: str | None = None
    adapter: AdapterSlot = NO_ADAPTER

    @property
    def key(self) -> str:
        """The salt of the prompt in the prefix cache."""
        return (
            self.salt if self.adapter == NO_ADAPTER else f"{self.salt}\0{self.adapter.digest.hex()}"
        )


NO_SCOPE = PromptScope()


def find_scope(adapters: AdapterSlots | None, salt: str, lora: str | None) -> PromptScope:
    """Returns the scope of a new prompt.

    Raises:
      UserError: no adapter has this name.
    """
    if adapters is None and lora is not None:
        raise unknown_adapter(lora, ())
    return PromptScope(salt, lora, NO_ADAPTER if adapters is None else adapters.get(lora))


def is_current(adapters: AdapterSlots | None, scope: PromptScope) -> bool:
    """Returns whether the adapter of a scope still has its name; it may have been unloaded, or
    replaced by another one.
    """
    if scope.lora is None:
        return True
    return adapters is not None and adapters.names.get(scope.lora) == scope.adapter


def scope_features(adapters: AdapterSlots | None, scopes: Sequence[PromptScope]) -> Features:
    """Returns the features of rows with these scopes."""
    numbers = np.asarray([scope.adapter.number for scope in scopes], np.int32)
    return () if adapters is None else (AdapterRows(numbers),)


def scope_constants(adapters: AdapterSlots | None) -> Constants:
    """Returns the constants that the features of `scope_features` read: the matrices of all
    adapters of the batch.
    """
    return {} if adapters is None else {"adapters": adapters.stacks}
