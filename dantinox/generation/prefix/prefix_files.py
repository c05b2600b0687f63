"""Writes the blocks of a prefix cache to a folder, and restores them when the next server starts.

The folder holds one safetensors file and a manifest with its SHA-256. The file has the keys and
values of all blocks, their tokens, and a fingerprint. Blocks are restored only if the fingerprint
is equal, because keys from another model, program or machine may differ in their last bits, or
altogether.
"""

import hashlib
import json
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dantinox import __version__
from dantinox.files import UserError
from dantinox.generation.prefix.block_pool import Pool
from dantinox.generation.prefix.prefix_tree import StoredBlock
from dantinox.kernels.native_library import SOURCE
from dantinox.machine import cpu_name
from dantinox.run.manifest import MANIFEST, check_files, write_file
from dantinox.run.safetensors_file import SafetensorsFile, Tensor, safetensors_pieces

BLOCKS_FILE = "prefix_cache.safetensors"
FORMAT = "1"

log = logging.getLogger("dantinox.generation")


class BlockRows(NamedTuple):
    """The blocks of a pool on the host: the blocks, each after its parent, and their rows in each
    leaf of the pool.

    The places of the blocks are row numbers.
    """

    blocks: list[StoredBlock]
    rows: list[np.ndarray]


def fingerprint(programs: Iterable[str], weights: Sequence[jax.Array], probe: str) -> str:
    """Returns a text that is equal only for servers whose prefill computes equal bits.

    Args:
      programs: the lowered programs that compute keys.
      weights: all weights of the model and of its draft model.
      probe: a checksum of the keys of a fixed sequence.
    """
    facts = [
        FORMAT,
        probe,
        *programs,
        *_versions(),
        jax.default_backend(),
        jax.devices()[0].device_kind,
        cpu_name(),
    ]
    facts.append(hashlib.sha256(SOURCE.read_bytes()).hexdigest())  # of the native kernels
    facts += [f"{leaf.shape} {leaf.dtype} {_checksum(leaf).tolist()}" for leaf in weights]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()


def _versions() -> list[str]:
    return [f"dantinox {__version__}", f"jax {jax.__version__}", f"jaxlib {jax.lib.__version__}"]


@jax.jit
def _checksum(leaf: jax.Array) -> jax.Array:
    """Returns two sums of the bits of an array modulo 2³², each with its own weight for every
    element.
    """
    unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[leaf.dtype.itemsize]
    bits = jax.lax.bitcast_convert_type(leaf.reshape(-1), unsigned).astype(jnp.uint32)
    index = jnp.arange(len(bits), dtype=jnp.uint32)
    weights = [(index * jnp.uint32(factor)) | 1 for factor in (0x9E3779B1, 0x85EBCA77)]
    return jnp.stack([jnp.sum(bits * weight, dtype=jnp.uint32) for weight in weights])


def write_blocks(folder: Path, found: BlockRows, fingerprint: str) -> None:
    """Replaces the file in a folder atomically.

    Raises:
      UserError: the file cannot be written; the old file is then unchanged.
    """
    blocks = found.blocks
    salts = sorted({block.salt for block in found.blocks})
    size = len(blocks[0].tokens) if blocks else 0
    arrays = {
        "parents": np.array([block.parent for block in blocks], np.int32),
        "salts": np.array([salts.index(block.salt) for block in blocks], np.int32),
        "tokens": np.array([block.tokens for block in blocks], np.int32).reshape(len(blocks), size),
    }
    arrays |= {f"leaf{number:05}": rows for number, rows in enumerate(found.rows)}
    tensors = {name: Tensor(array.shape, array.dtype.name) for name, array in arrays.items()}
    metadata = {"fingerprint": fingerprint, "salts": json.dumps(salts)}
    write_file(folder, BLOCKS_FILE, safetensors_pieces(arrays, tensors, metadata))


def read_blocks(folder: Path, pool: Pool, fingerprint: str, size: int) -> BlockRows | None:
    """Reads the blocks that a server with the same fingerprint has written, at most as many as the
    pool has.

    Returns None if there are none. If the file is damaged, or was written with another model,
    program or machine, it also logs one warning.
    """
    path = folder / BLOCKS_FILE
    if not path.exists() and not (folder / MANIFEST).exists():
        return None
    try:
        check_files(folder, [BLOCKS_FILE])
        file = SafetensorsFile(path)
        if file.metadata.get("fingerprint") != fingerprint:
            raise UserError(
                f"{path} was written with another model, other settings, or on another machine"
            )
        return _parse(file, jax.tree.leaves(pool), size)
    except UserError as error:
        log.warning("the saved prefix cache is ignored: %s", error)
    except (KeyError, ValueError, IndexError):
        log.warning("the saved prefix cache is ignored: %s has no valid blocks", path)
    return None


def _parse(file: SafetensorsFile, leaves: Sequence[jax.Array], size: int) -> BlockRows:
    parents, roots, tokens = (file.read(name).tolist() for name in ("parents", "salts", "tokens"))
    salts = json.loads(file.metadata["salts"])
    names = [f"leaf{number:05}" for number in range(len(leaves))]
    for name, leaf in zip(names, leaves, strict=True):
        if file.tensors[name] != Tensor((len(tokens), *leaf.shape[1:]), leaf.dtype.name):
            raise ValueError(name)
    if any(parent >= row for row, parent in enumerate(parents)) or any(
        len(one) != size for one in tokens
    ):
        raise ValueError("parents")
    columns = zip(range(leaves[0].shape[0]), parents, roots, tokens, strict=False)
    blocks = [
        StoredBlock(row, parent, str(salts[root]), tuple(one)) for row, parent, root, one in columns
    ]
    return BlockRows(blocks, [file.read(name)[: len(blocks)] for name in names])
