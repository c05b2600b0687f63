"""`import_checkpoint` converts a checkpoint to a run directory; `export_checkpoint` converts a run
to a checkpoint format.
"""

import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from dantinox.config import Config, UserError, build_config
from dantinox.config.model_config import ARCHITECTURE
from dantinox.files import quote, read_json, read_text, wrap_os_errors
from dantinox.interop.gguf.gguf_checkpoint import export_gguf, source_from_gguf
from dantinox.interop.gguf.gguf_file import PLAIN_DTYPES, open_gguf
from dantinox.interop.gguf.quantization_recipes import FILE_TYPES
from dantinox.interop.hf.hf_config import hf_config_to_settings
from dantinox.interop.hf.hf_folder import (
    MAX_JSON_BYTES,
    TYPES,
    download_repository,
    open_folder,
    write_folder,
)
from dantinox.interop.hf.hf_weights import from_hf, to_hf
from dantinox.interop.packaged_checkpoints import PACKAGED, find_packaged_checkpoint
from dantinox.interop.packed_export import StoredRows
from dantinox.interop.packed_import import pack_parameters
from dantinox.interop.source import ExportBundle, LazyArrays, Source
from dantinox.interop.v0 import convert_parameters, read_v0
from dantinox.kernels import FORMATS as KERNEL_FORMATS
from dantinox.model.parameters import abstract_model, widen_arrays
from dantinox.run import (
    RunDirectory,
    load_run_config,
    load_weights,
    open_run,
    packed_arrays,
    save_config,
    save_tokenizer,
    save_weights,
    write_file,
)
from dantinox.text import Tokenizer
from dantinox.text.chat_template import MAX_TEMPLATE_BYTES
from dantinox.text.tokenizer import ROLES

DTYPES = ("auto", "float32", "bfloat16")
FORMATS = {"hf": tuple(TYPES), "gguf": tuple(FILE_TYPES)}  # export formats and their number types
# The sampling keys of generation_config.json.
SAMPLING_KEYS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
# Generation settings for a model that has a chat template and whose checkpoint sets no sampling
# parameters.
INSTRUCT_DEFAULTS = {"temperature": 0.7, "top_p": 0.9, "min_p": 0.05, "max_new_tokens": 512}


class Imported(NamedTuple):
    """An imported checkpoint.

    Attributes:
      run: the run directory that was written.
      source: the folder or file that was read.
      family: the model family, transformers' `model_type`.
      tensors: the number of tensors in the checkpoint.
    """

    run: RunDirectory
    source: Path
    family: str
    tensors: int


def import_checkpoint(
    source: str | Path,
    run_dir: str | Path,
    dtype: str = "auto",
    max_context: int | None = None,
    note: Callable[[str], None] = lambda line: None,
) -> Imported:
    """Writes a run directory from a checkpoint. The directory appears only after the whole
    checkpoint was read and checked.

    Args:
      source: a Hugging Face model folder, a .gguf file, a run directory of DantinoX 0, a repository
        `owner/model` on the Hugging Face Hub, or a key of `interop.packaged_checkpoints.PACKAGED`
        ("smollm2").
      run_dir: the run directory to create.
      dtype: the dtype in which matrices are stored: float32, bfloat16, or `auto`. `auto` keeps
        bfloat16, and keeps the blocks of a quantized GGUF file if their type is a key of
        `dantinox.kernels.FORMATS`. It converts matrices of other quantized types in GGUF to
        bfloat16, and all other dtypes to float32.
      max_context: the longest sequence in tokens; None: the length in the checkpoint, or for
        longrope its original context length.
      note: a function that is called with a one-line message before a download, and if parts of the
        source are not imported.

    Raises:
      UserError: the model cannot be represented exactly, or a file cannot be read or written; the
        message names the cause.

    Example:
      >>> dantinox.export_checkpoint("runs/quickstart", "exported", "hf")
      'llama'
      >>> imported = dantinox.import_checkpoint("exported", "runs/imported")
      >>> imported.family, imported.run.path.name
      ('llama', 'imported')
    """
    if dtype not in DTYPES:
        raise UserError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype}")
    if max_context is not None and max_context < 1:
        raise UserError(f"max_context must be at least 1, got {max_context}")
    path = Path(source)
    sampling: dict[str, float] = {}
    if (path / "config.yaml").is_file() and not (path / "config.json").exists():
        if RunDirectory(path).manifest.is_file():
            raise UserError(
                f"{path} is already a run directory of this version: no import is needed"
            )
        run, count = import_v0(path, run_dir, dtype, max_context)
        return Imported(run, path, "DantinoX 0", count)
    if not path.exists() and str(source) in PACKAGED:
        check_new(Path(run_dir))
        path = find_packaged_checkpoint(str(source), note)
        sampling = dict(PACKAGED[str(source)].sampling)
    if path.suffix == ".gguf":
        checkpoint = source_from_gguf(open_gguf(path))
    else:
        checkpoint = open_folder(path if path.exists() else download_repository(str(source)))
    run = import_run(checkpoint, run_dir, dtype, max_context, sampling, note)
    if checkpoint.skipped is not None:
        note(checkpoint.skipped)
    return Imported(run, checkpoint.path, checkpoint.config["model_type"], len(checkpoint.tensors))


def import_run(
    source: Source,
    run_dir: str | Path,
    dtype: str = "auto",
    max_context: int | None = None,
    sampling: Mapping[str, float] | None = None,
    note: Callable[[str], None] = lambda line: None,
) -> RunDirectory:
    """Writes a run directory from an open checkpoint; the other arguments and errors are those of
    `import_checkpoint`.

    Args:
      sampling: generation settings that override the sampling parameters of the checkpoint.
    """
    tokenizer = Tokenizer(source.tokenizer, str(source.path))
    where = "config.json" if source.format == "hf" else str(source.path)
    rows = source.config.get("vocab_size")
    if type(rows) is not int or rows < 1:
        raise UserError(f"{where} has vocab_size: {quote(rows)}, expected an integer ≥ 1")
    origin = json.dumps(_origin(source), indent=1, ensure_ascii=False) + "\n"
    _check_texts(source, origin)
    path = Path(run_dir)
    settings = hf_config_to_settings(source.config, max_context)
    vocabulary = _vocabulary_settings(tokenizer, rows, path, where)
    settings["model"] |= vocabulary["model"]
    settings["tokenizer"] = vocabulary["tokenizer"]
    settings["generation"] = _sampling_defaults(source, settings["model"]) | dict(sampling or {})
    config = build_config(settings, source=where)
    model = config.architecture(tokenizer.vocab_size)
    arrays = from_hf(source.config, model, source.tensors, dtype)
    if dtype == "auto" and source.blocks is not None:
        arrays, widened = pack_parameters(source, model, arrays)
        if widened:
            types = ", ".join(sorted({kind for kinds in widened.values() for kind in kinds}))
            note(
                f"{len(widened)} matrices are stored as bfloat16 (types {types}): --dtype float32"
                " stores all weights exactly"
            )
    with _staged_directory(path) as folder:
        run = RunDirectory(folder)
        save_weights(run.weights, arrays)
        save_tokenizer(run, source.tokenizer, _roles(source, tokenizer))
        if source.chat_template is not None:
            write_file(run.path, run.chat_template.name, source.chat_template)
        write_file(run.path, run.origin.name, origin)
        save_config(run, config)
    return RunDirectory(path)


def _check_texts(source: Source, origin: str) -> None:
    """Raises a `UserError` if the chat template or `origin.json` cannot be stored."""
    try:
        size = len((source.chat_template or "").encode())
        origin.encode()
    except UnicodeEncodeError:
        raise UserError(
            f"{source.path} has a string with a lone surrogate, which is not valid Unicode"
        ) from None
    if size > MAX_TEMPLATE_BYTES:
        raise UserError(
            f"{source.path} has a chat template of {size} bytes; at most {MAX_TEMPLATE_BYTES}"
            " are allowed"
        )


def _sampling_defaults(source: Source, model_settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns generation settings from the checkpoint, or `INSTRUCT_DEFAULTS` if it has none and
    has a chat template.
    """
    given = source.generation_config
    settings: dict[str, Any] = {}
    if given.get("do_sample"):
        settings = {key: given[key] for key in SAMPLING_KEYS if given.get(key) is not None}
    if settings or source.chat_template is None:
        return settings
    half_context = model_settings.get("max_context", Config().model.max_context) // 2
    return INSTRUCT_DEFAULTS | {
        "max_new_tokens": max(1, min(INSTRUCT_DEFAULTS["max_new_tokens"], half_context))
    }


def import_v0(
    folder: Path, run_dir: str | Path, dtype: str, max_context: int | None
) -> tuple[RunDirectory, int]:
    """Converts a run of DantinoX 0; the arguments and errors are those of `import_checkpoint`.

    Returns:
      The run directory, and the number of arrays.
    """
    old = read_v0(folder)
    tokenizer = Tokenizer(old.tokenizer, f"{folder}/tokenizer.json")
    vocabulary = _vocabulary_settings(tokenizer, old.rows, Path(run_dir), old.weights)
    settings: dict[str, Any] = old.settings | vocabulary
    settings["model"] = old.settings["model"] | vocabulary["model"]
    if max_context is not None:
        settings["model"]["max_context"] = max_context
    config = build_config(settings, source="config.yaml")
    arrays = convert_parameters(old, config.architecture(tokenizer.vocab_size), dtype)
    with _staged_directory(Path(run_dir)) as staging:
        run = RunDirectory(staging)
        save_weights(run.weights, arrays)
        save_tokenizer(run, old.tokenizer)
        save_config(run, config)
    return RunDirectory(run_dir), len(arrays)


def _vocabulary_settings(
    tokenizer: Tokenizer, rows: int, run_dir: Path, where: str
) -> dict[str, dict[str, Any]]:
    """Returns the vocabulary settings of a model. Its embedding has `rows` rows, which may exceed
    the number of tokens.
    """
    if tokenizer.vocab_size > rows:
        raise UserError(
            f"the tokenizer has ids up to {tokenizer.vocab_size - 1}, but {where} has vocab_size:"
            f" {rows}: the tokenizer belongs to another model"
        )
    padded = {"padded_vocab_size": rows} if rows > tokenizer.vocab_size else {}
    return {
        "model": padded,
        "tokenizer": {"tokenizer_type": "file", "tokenizer_path": str(run_dir / "tokenizer.json")},
    }


def check_new(path: Path) -> None:
    """Raises a `UserError` if `path` is a file or a folder that is not empty."""
    with wrap_os_errors(f"cannot create {path}"):
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise UserError(f"{path} already exists and is not empty: choose another path")


@contextmanager
def _staged_directory(path: Path) -> Iterator[Path]:
    """Provides a temporary folder. When the block ends, the folder is moved to `path`; if the block
    raises, it is deleted.
    """
    check_new(path)
    with wrap_os_errors(f"cannot create {path}"):
        path.absolute().parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.absolute().parent))
    try:
        yield folder
        mask = os.umask(0)  # the only way to read the mask is to set it
        os.umask(mask)
        folder.chmod(0o777 & ~mask)
        os.replace(folder, path)
    except OSError as error:
        raise UserError(f"cannot create {path}: {error.strerror}") from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _roles(source: Source, tokenizer: Tokenizer) -> dict[str, Any]:
    """Returns the special tokens of a checkpoint by role (`bos_token`, …), its stop tokens, and
    `add_bos_token`.
    """
    tokenizer_config = source.tokenizer_config
    ids_of = {**source.config, **source.generation_config}

    def token_of(index: Any) -> str | None:
        if type(index) is not int or not 0 <= index < tokenizer.vocab_size:
            return None
        return tokenizer.core.id_to_token(index)

    roles: dict[str, Any] = {}
    for role in ROLES:
        token = tokenizer_config.get(role)
        token = token.get("content") if isinstance(token, dict) else token
        if tokenizer.token_to_id(token) is None:
            ids = ids_of.get(f"{role}_id")
            token = token_of(ids[0] if isinstance(ids, list) and ids else ids)
        roles[role] = token
    stops = ids_of.get("eos_token_id")
    stop_tokens = [token_of(index) for index in (stops if isinstance(stops, list) else [stops])]
    if not any(stop_tokens):
        stop_tokens = [roles["eos_token"]]
    roles["stop_tokens"] = [stop for stop in stop_tokens if stop is not None]
    add_bos = tokenizer_config.get("add_bos_token")
    if not isinstance(add_bos, bool):
        # The ids include the special tokens that the tokenizer itself adds.
        ids = tokenizer.core.encode("a").ids
        add_bos = bool(ids) and ids[0] == tokenizer.token_to_id(roles["bos_token"])
    return roles | {"add_bos_token": add_bos}


def _origin(source: Source) -> dict[str, Any]:
    """Returns the content of `origin.json`: data of the checkpoint that export needs and no other
    file of the run holds.
    """
    usual = Counter(tensor.dtype for tensor in source.tensors.tensors.values()).most_common(1)[0][0]
    others = {
        name: tensor.dtype
        for name, tensor in source.tensors.tensors.items()
        if tensor.dtype != usual
    }
    return {
        "format": source.format,
        "model_type": source.config["model_type"],
        "dtype": usual,
        "other_dtypes": others,
        "copy_of_table": "lm_head.weight" in source.tensors,
        "config": dict(source.config),
        "generation_config": dict(source.generation_config),
        "tokenizer_config": dict(source.tokenizer_config),
    }


def export_checkpoint(
    run_dir: str | Path, dest: str | Path, format: str, kind: str | None = None
) -> str:
    """Writes a run as a Hugging Face or GGUF checkpoint.

    Args:
      run_dir: the run directory.
      dest: the folder (`hf`) or file (`gguf`) to create.
      format: `hf` for a Hugging Face model folder, or `gguf` for a llama.cpp file.
      kind: the number type: f32, f16 or bf16, and for GGUF also a quantized type such as q8_0 or
        q4_k_m (`FORMATS`). None: as in `export_hf` for `hf`; for `gguf` the type of the run's
        quantized blocks, or f32 if it has none.

    Returns:
      The model family, transformers' `model_type`.

    Raises:
      UserError: the format cannot represent the run, or a file cannot be read or written; the
        message names the cause.

    Example:
      >>> dantinox.export_checkpoint("runs/quickstart", "quickstart.gguf", "gguf", "q8_0")
      'llama'
    """
    if format not in FORMATS:
        raise UserError(f"format must be one of {', '.join(FORMATS)}, got {format}")
    if kind is not None and kind not in FORMATS[format]:
        others = [name for name, kinds in FORMATS.items() if kind in kinds]
        belongs = f" (it belongs to {', '.join(others)})" if others else ""
        raise UserError(
            f"the type of format {format} must be one of {', '.join(FORMATS[format])}, got"
            f" {kind}{belongs}"
        )
    if format == "hf":
        return export_hf(run_dir, dest, kind)["model_type"]
    if Path(dest).exists():
        raise UserError(f"{dest} already exists: choose another name")
    bundle = export_bundle(run_dir)
    quantized = kind is None or FILE_TYPES[kind].base not in PLAIN_DTYPES
    packed = packed_arrays(open_run(run_dir).weights) if quantized else {}
    weights = Counter[str]()  # the number of packed weights by format
    for name, array in packed.items():
        block = name.rpartition("/")[2]
        weights[block] += array.nbytes // KERNEL_FORMATS[block].bytes * KERNEL_FORMATS[block].values
    export_gguf(
        dest,
        bundle.config,
        bundle.hf_config,
        bundle.tensors,
        bundle.tokenizer,
        kind=kind,
        packed=weights,
        chat_template=bundle.chat_template,
        name=Path(run_dir).absolute().name,
        find_blocks=StoredRows(packed).find,
    )
    return str(bundle.hf_config["model_type"])


def export_bundle(run_dir: str | Path) -> ExportBundle:
    """Returns a run in the format of transformers. An imported run with an unchanged architecture
    keeps its original files.

    Raises:
      UserError: the run is damaged, or no Transformers class represents its architecture.
    """
    run = open_run(run_dir)
    if run.weights_or_adapter != run.weights:
        raise UserError(
            f"{run.path} contains only adapters: use `dantinox"
            " merge-lora` and export the merged run"
        )
    config = load_run_config(run)
    tokenizer = Tokenizer.load(run.tokenizer)
    model = config.architecture(tokenizer.vocab_size)
    weights = load_weights(
        run.weights, abstract_model(model)[1], widen=partial(widen_arrays, model)
    )
    origin = _origin_of(run, config, tokenizer.vocab_size)
    like = None if origin is None else origin["config"]
    hf_config, tensors = to_hf(config, tokenizer.vocab_size, weights, like)
    tokenizer_config = _tokenizer_config(tokenizer, config)
    if origin is None:
        dtypes = {name: tensor.dtype for name, tensor in tensors.tensors.items()}
        ids = {
            "bos_token_id": tokenizer.bos_id,
            "eos_token_id": tokenizer.eos_id,
            "pad_token_id": tokenizer.pad_id,
        }
        hf_config |= ids | {"dtype": Counter(dtypes.values()).most_common(1)[0][0]}
        generation: dict[str, Any] = {key: value for key, value in ids.items() if value is not None}
        if len(tokenizer.stop_ids) > 1:
            generation["eos_token_id"] = list(tokenizer.stop_ids)
    else:
        if origin["copy_of_table"] and "lm_head.weight" not in tensors:
            tensors = _with_copy_of_table(tensors)
        dtypes = {name: origin["other_dtypes"].get(name, origin["dtype"]) for name in tensors}
        generation = origin["generation_config"]
        # Without a tokenizer_config.json, transformers would load the default tokenizer class of
        # the family.
        if origin["format"] == "hf":
            tokenizer_config = origin["tokenizer_config"] or tokenizer_config
    return ExportBundle(
        config=config,
        hf_config=hf_config,
        generation_config=generation,
        tokenizer_config=tokenizer_config,
        tensors=tensors,
        dtypes=dtypes,
        tokenizer=tokenizer,
        chat_template=(
            read_text(run.chat_template, MAX_JSON_BYTES) if run.chat_template.is_file() else None
        ),
    )


def _with_copy_of_table(tensors: LazyArrays) -> LazyArrays:
    """Returns the tensors with the embeddings also as output layer, as some checkpoints with tied
    embeddings have them.
    """
    table = next(iter(tensors))
    kinds = {**tensors.tensors, "lm_head.weight": tensors.tensors[table]}
    return LazyArrays(kinds, lambda name: tensors[table if name == "lm_head.weight" else name])


def _origin_of(run: RunDirectory, config: Config, vocab_size: int) -> dict[str, Any] | None:
    """Returns the content of `origin.json` if the run was imported and its architecture is
    unchanged, else None.
    """
    if not run.origin.is_file():
        return None
    run.check(run.origin)
    origin = read_json(run.origin, MAX_JSON_BYTES)
    settings = hf_config_to_settings(origin["config"], config.model.max_context)
    model = config.architecture(vocab_size)
    imported = build_config(settings).architecture(model.vocab_size)
    return (
        origin
        if all(getattr(imported, name) == getattr(model, name) for name in ARCHITECTURE)
        else None
    )


def _tokenizer_config(tokenizer: Tokenizer, config: Config) -> dict[str, Any]:
    """Returns the content of `tokenizer_config.json` for a run that was not imported from a
    checkpoint with this file.
    """
    names: Mapping[str, str] = tokenizer.template_variables
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.model.max_context,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": tokenizer.add_bos,
        **{role: names.get(role) for role in ROLES},
    }


def export_hf(run_dir: str | Path, dest: str | Path, kind: str | None = None) -> dict[str, Any]:
    """Writes a run as a Hugging Face model folder.

    Args:
      run_dir: the run directory.
      dest: the folder to create.
      kind: f32, f16 or bf16 for all tensors; None: the dtypes of the imported checkpoint, or those
        of the run if it was not imported.

    Returns:
      The content of `config.json`.

    Raises:
      UserError: no family supports the run, a number is too large for `kind`, or a file cannot be
        read or written.
    """
    bundle = export_bundle(run_dir)
    if kind is not None:
        dtypes = {
            key: TYPES[kind]
            for key in ("dtype", "torch_dtype")
            if bundle.hf_config.get(key) is not None
        }
        bundle = bundle._replace(
            hf_config=bundle.hf_config | dtypes, dtypes=dict.fromkeys(bundle.dtypes, TYPES[kind])
        )
    with _staged_directory(Path(dest)) as folder:
        write_folder(folder, bundle)
    return bundle.hf_config
