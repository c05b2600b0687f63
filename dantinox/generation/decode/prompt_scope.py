"""`PromptScope`: what the keys and values of a prompt depend on besides its tokens, and
`PromptScopes`, those of a batch.
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
      adapter: the slot of the adapter that had this name when the scope was resolved, see
        `PromptScopes.is_current`.
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


class PromptScopes:
    """The scopes of the prompts of a batch, and what the programs read for them.

    Attributes:
      adapters: the adapters that prompts may use; None: the programs support no adapters.
    """

    def __init__(self, adapters: AdapterSlots | None = None):
        self.adapters = adapters

    @property
    def change_weights(self) -> bool:
        """Whether prompts with different scopes may have different weights."""
        return self.adapters is not None

    def resolve(self, scope: PromptScope) -> PromptScope:
        """Returns the scope of a new prompt, with the slot of its adapter.

        Raises:
          UserError: no adapter has this name.
        """
        if self.adapters is not None:
            return scope._replace(adapter=self.adapters.get(scope.lora))
        if scope.lora is not None:
            raise unknown_adapter(scope.lora, ())
        return scope

    def is_current(self, scope: PromptScope) -> bool:
        """Returns whether the adapter of a scope still has its name; it may have been unloaded, or
        replaced by another one.
        """
        if scope.lora is None:
            return True
        return self.adapters is not None and self.adapters.names.get(scope.lora) == scope.adapter

    def features(self, scopes: Sequence[PromptScope]) -> Features:
        """Returns the features of rows with these scopes."""
        if self.adapters is None:
            return ()
        return (AdapterRows(np.asarray([scope.adapter.number for scope in scopes], np.int32)),)

    @property
    def constants(self) -> Constants:
        """The constants that these features read: the matrices of all adapters of the batch."""
        return {} if self.adapters is None else {"adapters": self.adapters.stacks}
