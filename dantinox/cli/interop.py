"""`dantinox import | export`: their flags, what they call, what they print."""

import argparse
from pathlib import Path

from dantinox.config import UserError


def import_flags(command: argparse.ArgumentParser) -> None:
    source = "a folder of transformers, a .gguf file, a run directory of DantinoX 0, or owner/model of Hugging Face's hub"
    command.add_argument("source", metavar="SRC", help=source)
    command.add_argument("--run_dir", type=Path, required=True, help="the run directory to make")
    dtype = "how matrices are kept (default: auto, bfloat16 where the checkpoint has that, else float32)"
    command.add_argument("--dtype", choices=["auto", "float32", "bfloat16"], default="auto", help=dtype)
    context = "longest sequence in tokens (default: the checkpoint's; with longrope its original one)"
    command.add_argument("--max_context", type=int, metavar="N", help=context)


def import_(options: argparse.Namespace) -> int:
    if options.max_context is not None and options.max_context < 1:
        raise UserError(f"--max_context must be at least 1, got {options.max_context}")
    from dantinox.interop.hf_folder import fetch, open_folder
    from dantinox.interop.runs import import_run

    path = Path(options.source)
    if (path / "config.yaml").is_file() and not (path / "config.json").exists():
        return _import_v0(path, options)
    if path.suffix == ".gguf":
        from dantinox.interop.gguf import open_source

        source = open_source(path)
    else:
        source = open_folder(path if path.exists() else fetch(options.source))
    run = import_run(source, options.run_dir, options.dtype, options.max_context)
    print(f"{source.config['model_type']}: {len(source.tensors)} tensors, all of them, in {run.path}")
    return 0


def _import_v0(path: Path, options: argparse.Namespace) -> int:
    from dantinox.interop.runs import import_v0
    from dantinox.run import RunDirectory

    if RunDirectory(path).manifest.is_file():
        raise UserError(f"{path} is a run directory of this version already: use it as it is")
    run = import_v0(path, options.run_dir, options.dtype, options.max_context)
    print(f"DantinoX 0: all arrays of {path} in {run.path}")
    return 0


def export_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument("run_dir", type=Path, help="the run directory")
    command.add_argument("dest", metavar="DEST", type=Path, help="the folder, or the .gguf file, to make")
    command.add_argument("--format", choices=["hf", "gguf"], required=True, help="a folder of transformers, or a GGUF file")
    kind = "type of the numbers; q8_0 is GGUF's (default: hf: as they are; gguf: f32)"
    command.add_argument("--type", choices=["f32", "f16", "bf16", "q8_0"], help=kind)


def export(options: argparse.Namespace) -> int:
    if options.format == "hf":
        if options.type == "q8_0":
            raise UserError("--type q8_0 belongs to --format gguf: give f32, f16 or bf16")
        from dantinox.interop.runs import export_hf

        print(f"{options.dest}: {export_hf(options.run_dir, options.dest, options.type)['model_type']}")
        return 0
    from dantinox.interop.gguf import export_gguf
    from dantinox.interop.runs import leaving

    left = leaving(options.run_dir)
    export_gguf(
        options.dest, left.config, left.hf_config, left.tensors, left.tokenizer, kind=options.type or "f32",
        chat_template=left.chat_template, name=options.run_dir.absolute().name,
    )  # fmt: skip
    print(f"{options.dest}: {left.hf_config['model_type']}")
    return 0
