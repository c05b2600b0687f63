"""Checkpoints of other programs as run directories and back, whatever their format: what `dantinox import | export` do."""

from pathlib import Path
from typing import NamedTuple

from dantinox.config import UserError
from dantinox.interop.gguf import export_gguf, open_source
from dantinox.interop.hf_folder import TYPES, fetch, open_folder
from dantinox.interop.runs import export_hf, import_run, import_v0, leaving
from dantinox.run import RunDirectory

DTYPES = ("auto", "float32", "bfloat16")
FORMATS = {"hf": tuple(TYPES), "gguf": (*TYPES, "q8_0")}  # with the types that each can have


class Imported(NamedTuple):
    """A run that was made of a checkpoint: its family as transformers calls it, and how many tensors it is of."""

    run: RunDirectory
    family: str
    tensors: int


def import_checkpoint(source: str | Path, run_dir: str | Path, dtype: str = "auto", max_context: int | None = None) -> Imported:
    """Makes a run directory of a checkpoint; nothing stands there before all of it does.

    Args:
      source: a folder of transformers, a .gguf file, a run directory of DantinoX 0, or owner/model of Hugging Face's hub.
      dtype: how matrices are kept: float32, bfloat16, or bfloat16 where the checkpoint has that (`auto`).
      max_context: longest sequence in tokens; None: the checkpoint's, with longrope its original one.

    Raises:
      UserError: the checkpoint cannot be had exactly, or something is in the way; the sentence names it.
    """
    if dtype not in DTYPES:
        raise UserError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype}")
    if max_context is not None and max_context < 1:
        raise UserError(f"max_context must be at least 1, got {max_context}")
    path = Path(source)
    if (path / "config.yaml").is_file() and not (path / "config.json").exists():
        if RunDirectory(path).manifest.is_file():
            raise UserError(f"{path} is a run directory of this version already: use it as it is")
        run, arrays = import_v0(path, run_dir, dtype, max_context)
        return Imported(run, "DantinoX 0", arrays)
    found = open_source(path) if path.suffix == ".gguf" else open_folder(path if path.exists() else fetch(str(source)))
    run = import_run(found, run_dir, dtype, max_context)
    return Imported(run, found.config["model_type"], len(found.tensors))


def export_checkpoint(run_dir: str | Path, dest: str | Path, format: str, kind: str | None = None) -> str:
    """Writes a run as a checkpoint of another program.

    Args:
      dest: the folder (`hf`), or the file (`gguf`).
      format: `hf`, a folder of transformers, or `gguf`, a file of llama.cpp.
      kind: type of the numbers, f32, f16 or bf16, of GGUF also q8_0; None: as they are in a folder, f32 in a GGUF.

    Returns:
      The family, as transformers calls it.

    Raises:
      UserError: the format cannot say the run, or something is in the way; the sentence names it.
    """
    if format not in FORMATS:
        raise UserError(f"format must be one of {', '.join(FORMATS)}, got {format}")
    if kind is not None and kind not in FORMATS[format]:
        others = [name for name, kinds in FORMATS.items() if kind in kinds]
        belongs = f" (it belongs to {', '.join(others)})" if others else ""
        raise UserError(f"the type of format {format} must be one of {', '.join(FORMATS[format])}, got {kind}{belongs}")
    if format == "hf":
        family: str = export_hf(run_dir, dest, kind)["model_type"]
        return family
    left = leaving(run_dir)
    export_gguf(
        dest, left.config, left.hf_config, left.tensors, left.tokenizer, kind=kind or "f32",
        chat_template=left.chat_template, name=Path(run_dir).absolute().name,
    )  # fmt: skip
    return str(left.hf_config["model_type"])
