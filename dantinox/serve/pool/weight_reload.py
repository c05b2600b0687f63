"""Reload of the weights of a run directory into a running engine."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import jax
from flax import nnx

from dantinox.config import UserError
from dantinox.files import wrap_os_errors
from dantinox.generation.api.loaded_model import load
from dantinox.programs import available_bytes, tree_bytes
from dantinox.run import open_run
from dantinox.serve.async_engine import AsyncEngine


def weight_reloader(engine: AsyncEngine, run_dir: Path) -> Callable[[], Awaitable[bool]]:
    """Returns a function that loads the weights of a run again if their file has changed, and
    returns whether it has.

    The new weights are loaded beside the old ones. The function raises a UserError if the run
    cannot be loaded, has another architecture or tokenizer, or does not fit into the free memory;
    the engine then keeps the old weights.
    """
    loaded = _file_state(run_dir)

    async def reload() -> bool:
        nonlocal loaded
        found = await asyncio.to_thread(_file_state, run_dir)
        if found == loaded:
            return False
        needed = tree_bytes(nnx.state(engine.run.model))
        free = available_bytes(jax.devices()[0])
        if free is not None and needed > free:
            raise UserError(
                f"the new weights need {needed / 1e9:.1f} GB beside the old ones, but"
                f" {free / 1e9:.1f} GB are free"
            )
        await engine.replace_weights(await asyncio.to_thread(load, run_dir))
        loaded = found
        return True

    return reload


def _file_state(run_dir: Path) -> tuple[int, ...]:
    """Returns numbers that change when the file of the weights is replaced or written."""
    path = open_run(run_dir, check=False).weights_or_adapter
    with wrap_os_errors(f"cannot read the weights {path}"):
        state = path.stat()
    return state.st_ino, state.st_size, state.st_mtime_ns
