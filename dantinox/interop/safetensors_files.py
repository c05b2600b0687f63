"""The safetensors files of a checkpoint: one, or several shards with an index."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dantinox.files import UserError, atomic_write, on_one_line, read_json, shown, staged
from dantinox.run.safetensors_file import SafetensorsFile, Tensor, safetensors_pieces

MAX_INDEX_BYTES = 64 << 20
ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD_BYTES = 5 << 30


class TensorFiles:
    """The tensors of a checkpoint in one or several files.

    Attributes:
      tensors: shape and type of each by its name.
    """

    def __init__(self, folder: Path):
        """Opens `model.safetensors`, or what its index names, in a folder.

        Raises:
          UserError: there is neither, one of them is damaged, or they do not hold what the index says.
        """
        self.tensors: dict[str, Tensor] = {}
        self._files: dict[str, SafetensorsFile] = {}
        for name, expected in _files(folder).items():
            file = SafetensorsFile(folder / name)
            if missing := expected - file.tensors.keys():
                raise UserError(f"{folder / name} lacks {on_one_line(min(missing))}, which {INDEX} says it holds")
            if twice := self.tensors.keys() & file.tensors.keys():
                raise UserError(f"{on_one_line(min(twice))} stands in two files of {folder}")
            self.tensors |= file.tensors
            self._files |= dict.fromkeys(file.tensors, file)

    def read(self, name: str) -> np.ndarray:
        """A copy of a tensor."""
        return self._files[name].read(name)


def _files(folder: Path) -> dict[str, set[str]]:
    """The files of a checkpoint, with the names that its index says they hold."""
    index = folder / INDEX
    if (folder / ONE_FILE).is_file():
        return {ONE_FILE: set()}
    if not index.is_file():
        pickles = sorted(path.name for path in folder.glob("*.bin")) + sorted(path.name for path in folder.glob("*.pt*"))
        if pickles:
            raise UserError(
                f"{folder} holds its weights as {pickles[0]}, a pickle, which can run any code and is not read: convert it to "
                "safetensors where you trust it, in transformers by from_pretrained(…).save_pretrained(…)"
            )
        raise UserError(f"{folder} has no {ONE_FILE} and no {INDEX}")
    places = read_json(index, MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise UserError(f"{index} must have an object under weight_map, got {shown(places)}")
    files: dict[str, set[str]] = {}
    for name, file in places.items():
        if not isinstance(file, str) or not file.endswith(".safetensors") or Path(file).name != file:
            raise UserError(f"{index} places {on_one_line(name)} in {shown(file)}, which is no safetensors file beside it")
        files.setdefault(file, set()).add(name)
    return files


def write_tensors(folder: Path, arrays: Mapping[str, np.ndarray], tensors: Mapping[str, Tensor]) -> None:
    """Writes `model.safetensors`, or above `SHARD_BYTES` several files and their index.

    Args:
      arrays: asked for one after the other, in their order.
      tensors: shape and type of each of them.

    Raises:
      UserError: a file cannot be written.
    """
    shards: list[dict[str, Tensor]] = [{}]
    held = 0
    for name in arrays:
        if shards[-1] and held + tensors[name].nbytes > SHARD_BYTES:
            shards.append({})
            held = 0
        shards[-1][name] = tensors[name]
        held += tensors[name].nbytes
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors" if len(shards) > 1 else ONE_FILE
        with staged(folder / file, safetensors_pieces(arrays, shard)):
            places |= dict.fromkeys(shard, file)
    if len(shards) > 1:
        index: dict[str, Any] = {"metadata": {"total_size": sum(tensors[name].nbytes for name in arrays)}, "weight_map": places}
        atomic_write(folder / INDEX, json.dumps(index, indent=2))
