"""Reload of the keys and the weights of a running server, after SIGHUP or `POST /admin/reload`."""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable

from dantinox.config import UserError
from dantinox.serve.errors import JSON
from dantinox.serve.operations.api_keys import ApiKeys, read_keys
from dantinox.serve.operations.background import run_in_thread

log = logging.getLogger("dantinox.serve")

ReloadWeights = Callable[[], Awaitable[bool]]


class Reloader:
    """Rereads the file of the keys, and then the weights. After an error the server keeps all it
    had before.

    Attributes:
      counts: number of reloads by their result, `success` or `failure`.
    """

    def __init__(self, keys: ApiKeys | None = None, reload_weights: ReloadWeights | None = None):
        """Initializes the reloader.

        Args:
          keys: the keys of the server. Keys that do not come from a file stay.
          reload_weights: loads the weights if they have changed, and returns whether they have.
        """
        self._keys = keys or ApiKeys()
        self._reload_weights = reload_weights
        self._lock = asyncio.Lock()
        self.counts = Counter[str]()

    async def run(self) -> dict[str, JSON]:
        """Reloads once; a second call waits for the first one. Returns the number of keys, and
        whether the weights are new.

        A reload that has begun continues if this call is cancelled, so that a lost connection does
        not leave it half done.

        Raises:
          UserError: a file cannot be used. Neither the keys nor the weights have changed.
        """
        task = asyncio.ensure_future(self._run())
        # The error is logged already.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(task)

    async def _run(self) -> dict[str, JSON]:
        async with self._lock:
            try:
                keys = (
                    None
                    if self._keys.path is None
                    else await run_in_thread(read_keys, self._keys.path)
                )
                new_weights = self._reload_weights is not None and await self._reload_weights()
            except Exception as error:
                self.counts["failure"] += 1
                if isinstance(error, UserError):
                    log.error("the reload failed, and the server continues as before: %s", error)
                raise
            if keys is not None:
                self._keys.replace(keys)
            self.counts["success"] += 1
            log.info(
                "reloaded: %d keys, weights %s",
                len(self._keys),
                "replaced" if new_weights else "unchanged",
            )
            return {"keys": len(self._keys), "new_weights": new_weights}

    async def run_after_signal(self) -> None:
        """Reloads once; the log has the result."""
        try:
            await self.run()
        except UserError:
            return
        except Exception:
            log.exception("the reload failed, and the server continues as before")
