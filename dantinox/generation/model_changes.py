"""`ModelChanges`: new weights and adapters, which a step of the engine applies between two
programs.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple

from dantinox.config import UserError
from dantinox.generation.decode.adapter_slots import AdapterSlots
from dantinox.generation.decode.prompt_scope import PromptScope
from dantinox.generation.decode.split_model import SplitModel
from dantinox.generation.slot_batch import SlotBatch
from dantinox.model.row_adapters import Stacks
from dantinox.run.peft_folder import LoraAdapter


class NewAdapter(NamedTuple):
    """An adapter that the next step copies to the device; `copied` is set afterwards."""

    name: str
    digest: bytes
    arrays: Stacks
    copied: "Future[None]"


class ModelChanges:
    """Weights and adapters that have been prepared, and wait for the next step of an engine.

    Any thread may call `replace_weights`, `load_adapter`, `fail_waiting` and `unload_adapter`. Only
    the thread of `Engine.step` may call `add_waiting` and `install_weights`.
    """

    def __init__(
        self,
        batch: SlotBatch,
        lock: threading.RLock,
        scopes_in_use: Callable[[], list[PromptScope]],
    ):
        """Creates an empty set of changes.

        Args:
          lock: the lock of the engine.
          scopes_in_use: returns the scopes of all requests; called with the lock held.
        """
        self._batch = batch
        self._lock = lock
        self._scopes_in_use = scopes_in_use
        self._weights: tuple[SplitModel, Future[None]] | None = None
        self._new_adapters: list[NewAdapter] = []

    @property
    def has_weights(self) -> bool:
        """Whether new weights wait for the end of the running requests."""
        return self._weights is not None

    @property
    def _adapters(self) -> AdapterSlots:
        adapters = self._batch.scopes.adapters
        if adapters is None:
            raise UserError("this server has no place for adapters: start it with room for them")
        return adapters

    def replace_weights(self, weights: SplitModel) -> "Future[None]":
        """Replaces the weights as soon as no request holds a slot. Until then, requests that wait
        are not admitted.

        Args:
          weights: the result of `SlotBatch.prepare_weights`.

        Returns:
          A future that ends when the weights have been replaced; the next step may do so.
        """
        replaced = Future[None]()
        with self._lock:
            self._weights = weights, replaced
        return replaced

    def load_adapter(self, name: str, adapter: LoraAdapter) -> "Future[None]":
        """Makes an adapter available to later requests.

        Returns:
          A future that ends when the next step has copied the matrices. It raises a UserError if
          the name is invalid or in use, or if no place is free: the place of a removed adapter is
          free when the last of its requests has ended.

        Raises:
          UserError: the batch has no place for adapters, or the rank is too large.
        """
        new = NewAdapter(name, adapter.digest, self._adapters.arrays(name, adapter), Future())
        with self._lock:
            self._new_adapters.append(new)
        return new.copied

    def fail_waiting(self, error: Exception) -> None:
        """Ends the futures of `load_adapter` and `replace_weights`, if no further step will apply
        the changes.
        """
        with self._lock:
            weights = self._weights
            self._weights = None
        futures = [new.copied for new in self._take_adapters()]
        if weights is not None:
            futures.append(weights[1])
        for future in futures:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)

    def unload_adapter(self, name: str) -> None:
        """Removes an adapter. The requests that use it continue.

        Raises:
          UserError: no adapter has this name.
        """
        with self._lock:
            self._adapters.remove(name)

    def _take_adapters(self) -> list[NewAdapter]:
        with self._lock:
            new = self._new_adapters
            self._new_adapters = []
        return new

    # --- only the thread of `Engine.step`

    def add_waiting(self) -> None:
        """Copies the new adapters to the device."""
        for name, digest, arrays, copied in self._take_adapters():
            if not copied.set_running_or_notify_cancel():
                continue
            try:
                with self._lock:
                    number = self._adapters.free_number(
                        name, [scope.adapter.number for scope in self._scopes_in_use()]
                    )
                self._adapters.insert(name, number, digest, arrays)
                copied.set_result(None)
            except Exception as error:
                copied.set_exception(error)

    def install_weights(self, is_busy: bool) -> bool:
        """Replaces the weights if new ones wait and no request uses the old ones.

        Args:
          is_busy: whether a request holds a slot, or a program is running.

        Returns:
          Whether the batch has the newest weights.
        """
        with self._lock:
            new = self._weights
            if new is None:
                return True
            if is_busy:
                return False
            self._weights = None
        weights, replaced = new
        if replaced.set_running_or_notify_cancel():
            try:
                self._batch.replace_weights(weights)
            except BaseException as error:
                replaced.set_exception(error)
                raise
            replaced.set_result(None)
        return True
