"""`dantinox import | export`: their flags, what they call, what they print."""

import argparse
from pathlib import Path

from dantinox.config import UserError
from dantinox.config.flags import Parser


def import_flags(command: Parser) -> None:
    source = "a folder of transformers, a .gguf file, a run directory of DantinoX 0, or owner/model of Hugging Face's hub"
    command.add_argument("source", metavar="SRC", help=source)
    command.add_argument("--run_dir", type=Path, required=True, help="the run directory to make")
    dtype = "how matrices are kept (default: auto, bfloat16 where the checkpoint has that, else float32)"
    command.add_argument("--dtype", choices=["auto", "float32", "bfloat16"], default="auto", help=dtype)
    context = "longest sequence in tokens (default: the checkpoint's; with longrope its original one)"
    command.add_argument("--max_context", type=int, metavar="N", help=context)


def import_(options: argparse.Namespace) -> int:
    from dantinox.interop.checkpoints import import_checkpoint

    run, family, tensors = import_checkpoint(options.source, options.run_dir, options.dtype, options.max_context)
    print(f"{family}: {tensors} tensors, all of them, in {run.path}")
    return 0


def export_flags(command: Parser) -> None:
    command.add_argument("places", metavar="PLACE", nargs="+", type=Path, help="RUN and DEST: the folder or .gguf file to make")
    command.add_argument("--run_dir", type=Path, metavar="RUN", help="another way to give RUN")
    command.add_argument("--format", choices=["hf", "gguf"], help="a folder of transformers, or a GGUF file (default: by DEST)")
    kind = "type of the numbers; q8_0 is GGUF's (default: hf: as they are; gguf: f32)"
    command.add_argument("--type", choices=["f32", "f16", "bf16", "q8_0"], help=kind)


def export(options: argparse.Namespace) -> int:
    places = [*options.places] if options.run_dir is None else [options.run_dir, *options.places]
    if len(places) != 2:
        raise UserError(f"export needs a run directory and a destination, got {' and '.join(map(str, places))}")
    run_dir, dest = places
    named = "gguf" if dest.suffix == ".gguf" else "hf"
    if options.format not in (None, named):
        what = "a .gguf file" if options.format == "gguf" else "a folder, whose name does not end in .gguf"
        raise UserError(f"--format {options.format} makes {what}: DEST cannot be {dest}")
    from dantinox.interop.checkpoints import export_checkpoint

    print(f"{dest}: {export_checkpoint(run_dir, dest, named, options.type)}")
    return 0
