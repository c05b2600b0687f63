"""`import_checkpoint` and `export_checkpoint`: a foreign checkpoint to a run directory, and a run to a checkpoint."""

import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from dantinox.config import Config, UserError, build_config
from dantinox.config.model import ARCHITECTURE
from dantinox.files import quote, read_json, read_text, wrap_os_errors
from dantinox.interop.gguf import export_gguf, source_from_gguf
from dantinox.interop.gguf_file import open_gguf
from dantinox.interop.hf_config import hf_config_to_settings
from dantinox.interop.hf_folder import MAX_JSON_BYTES, TYPES, download_repository, open_folder, write_folder
from dantinox.interop.hf_weights import from_hf, to_hf
from dantinox.interop.packaged_checkpoints import PACKAGED, find_packaged_checkpoint
from dantinox.interop.source import ExportBundle, LazyArrays, Source
from dantinox.interop.v0 import parameters, read_v0
from dantinox.model.parameters import abstract_model
from dantinox.run import (
    RunDirectory,
    load_run_config,
    load_weights,
    open_run,
    save_config,
    save_tokenizer,
    save_weights,
    write_file,
)
from dantinox.text import Tokenizer
from dantinox.text.chat_template import MAX_TEMPLATE_BYTES
from dantinox.text.tokenizer import ROLES

DTYPES = ("auto", "float32", "bfloat16")
FORMATS = {"hf": tuple(TYPES), "gguf": (*TYPES, "q8_0")}  # with the types that each can have
# The sampling settings that a generation_config.json may hold.
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
# The settings of `generation` for a model with a chat template whose checkpoint gives none.
INSTRUCT = {"temperature": 0.7, "top_p": 0.9, "min_p": 0.05, "max_new_tokens": 512}


class Imported(NamedTuple):
    """An imported checkpoint.

    Attributes:
      run: the run directory that was written.
      source: the folder or file that was read.
      family: the model family, as `model_type` of transformers.
      tensors: how many tensors the checkpoint has.
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
    """Writes a run directory from a checkpoint. Nothing is written before everything has been read and checked.

    Args:
      source: a folder of transformers, a .gguf file, a run directory of DantinoX 0, owner/model of Hugging Face's hub, or
        the name of a checkpoint in a package (`interop.packaged_checkpoints.PACKAGED`: "smollm2").
      dtype: the type in which matrices are stored: float32, bfloat16, or bfloat16 where the checkpoint has that (`auto`).
      max_context: longest sequence in tokens; None: the checkpoint's, with longrope its original one.
      note: gets one line before a download, and one that says what of the checkpoint is left out.

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
        return Imported(run, path, "DantinoX 0", arrays)
    if not path.exists() and str(source) in PACKAGED:
        check_new(Path(run_dir))
        path = find_packaged_checkpoint(str(source), note)
    found = (
        source_from_gguf(open_gguf(path))
        if path.suffix == ".gguf"
        else open_folder(path if path.exists() else download_repository(str(source)))
    )
    run = import_run(found, run_dir, dtype, max_context)
    if found.skipped is not None:
        note(found.skipped)
    return Imported(run, found.path, found.config["model_type"], len(found.tensors))


def import_run(source: Source, run_dir: str | Path, dtype: str = "auto", max_context: int | None = None) -> RunDirectory:
    """Makes a run directory of an open checkpoint; the other arguments and the errors are those of `import_checkpoint`."""
    tokenizer = Tokenizer(source.tokenizer, str(source.path))
    where = "config.json" if source.format == "hf" else str(source.path)
    rows = source.config.get("vocab_size")
    if type(rows) is not int or rows < 1:
        raise UserError(f"{where} has vocab_size: {quote(rows)}, expected a number of at least 1")
    origin, template = json.dumps(_origin(source), indent=1, ensure_ascii=False) + "\n", source.chat_template or ""
    try:
        size = len(template.encode())
        origin.encode()
    except UnicodeEncodeError:
        raise UserError(f"{source.path} has a text with a lone surrogate, which is no character") from None
    if size > MAX_TEMPLATE_BYTES:
        raise UserError(f"{source.path} has a chat template of {size} bytes, at most {MAX_TEMPLATE_BYTES} are read")
    path, settings = Path(run_dir), hf_config_to_settings(source.config, max_context)
    vocabulary = _vocabulary_settings(tokenizer, rows, path, where)
    settings |= vocabulary | {"model": settings["model"] | vocabulary["model"]}
    settings["generation"] = _sampling_defaults(source, settings["model"])
    config = build_config(settings, source=where)
    arrays = from_hf(source.config, config.architecture(tokenizer.vocab_size), source.tensors, dtype)
    with _staged_directory(path) as folder:
        run = RunDirectory(folder)
        save_weights(run.weights, arrays)
        save_tokenizer(run, source.tokenizer, _roles(source, tokenizer))
        if source.chat_template is not None:
            write_file(run.path, run.chat_template.name, source.chat_template)
        write_file(run.path, run.origin.name, origin)
        save_config(run, config)
    return RunDirectory(path)


def _sampling_defaults(source: Source, model: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of `generation` that the checkpoint gives, else `INSTRUCT` for a model with a chat template."""
    given = {key: source.generation_config.get(key) for key in SAMPLING if source.generation_config.get("do_sample")}
    given = {key: value for key, value in given.items() if value is not None}
    if given or source.chat_template is None:
        return given
    room = model.get("max_context", Config().model.max_context) // 2
    return INSTRUCT | {"max_new_tokens": max(1, min(INSTRUCT["max_new_tokens"], room))}


def import_v0(folder: Path, run_dir: str | Path, dtype: str, max_context: int | None) -> tuple[RunDirectory, int]:
    """Makes a run of one of DantinoX 0, and counts its arrays; arguments and errors are those of `import_checkpoint`."""
    found = read_v0(folder)
    tokenizer = Tokenizer(found.tokenizer, f"{folder}/tokenizer.json")
    settings: dict[str, Any] = found.settings | _vocabulary_settings(tokenizer, found.rows, Path(run_dir), found.weights)
    settings["model"] = found.settings["model"] | settings["model"]
    if max_context is not None:
        settings["model"]["max_context"] = max_context
    config = build_config(settings, source="config.yaml")
    arrays = parameters(found, config.architecture(tokenizer.vocab_size), dtype)
    with _staged_directory(Path(run_dir)) as place:
        run = RunDirectory(place)
        save_weights(run.weights, arrays)
        save_tokenizer(run, found.tokenizer)
        save_config(run, config)
    return RunDirectory(run_dir), len(arrays)


def _vocabulary_settings(tokenizer: Tokenizer, rows: int, run_dir: Path, where: str) -> dict[str, dict[str, Any]]:
    """The settings of a model with so many rows of embeddings, of which some may be of no token."""
    if tokenizer.vocab_size > rows:
        raise UserError(
            f"the tokenizer has ids up to {tokenizer.vocab_size - 1}, {where} has vocab_size: {rows}: it is another's"
        )
    padded = {"padded_vocab_size": rows} if rows > tokenizer.vocab_size else {}
    return {"model": padded, "tokenizer": {"tokenizer_type": "file", "tokenizer_path": str(run_dir / "tokenizer.json")}}


def check_new(path: Path) -> None:
    """Raises a `UserError` where `path` is a file or a folder that is not empty."""
    with wrap_os_errors(f"cannot make {path}"):
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise UserError(f"{path} is there already and not empty: choose another place")


@contextmanager
def _staged_directory(path: Path) -> Iterator[Path]:
    """A folder to fill, which is at `path` at the end, and nowhere after an error."""
    check_new(path)
    with wrap_os_errors(f"cannot make {path}"):
        path.absolute().parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.absolute().parent))
    try:
        yield folder
        mask = os.umask(0)
        os.umask(mask)
        folder.chmod(0o777 & ~mask)
        os.replace(folder, path)
    except OSError as error:
        raise UserError(f"cannot make {path}: {error.strerror}") from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _roles(source: Source, tokenizer: Tokenizer) -> dict[str, Any]:
    """What the tokens of a checkpoint are for, in one place: names, and nothing that its own files only hint at."""
    given, ids_of = source.tokenizer_config, {**source.config, **source.generation_config}

    def name(index: Any) -> str | None:
        return tokenizer.core.id_to_token(index) if type(index) is int and 0 <= index < tokenizer.vocab_size else None

    roles: dict[str, Any] = {}
    for role in ROLES:
        token = given.get(role)
        token = token.get("content") if isinstance(token, dict) else token
        if tokenizer.token_to_id(token) is None:
            ids = ids_of.get(f"{role}_id")
            token = name(ids[0] if isinstance(ids, list) and ids else ids)
        roles[role] = token
    stops = ids_of.get("eos_token_id")
    names = [name(index) for index in (stops if isinstance(stops, list) else [stops])]
    others = names if any(names) else [roles["eos_token"]]
    roles["stop_tokens"] = [stop for stop in others if stop is not None]
    adds = given.get("add_bos_token")
    if not isinstance(adds, bool):
        begun = tokenizer.core.encode("a").ids
        adds = bool(begun) and begun[0] == tokenizer.token_to_id(roles["bos_token"])
    return roles | {"add_bos_token": adds}


def _origin(source: Source) -> dict[str, Any]:
    """What of a checkpoint a run does not hold, to give it back."""
    usual = Counter(tensor.dtype for tensor in source.tensors.tensors.values()).most_common(1)[0][0]
    others = {name: tensor.dtype for name, tensor in source.tensors.tensors.items() if tensor.dtype != usual}
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
        return export_hf(run_dir, dest, kind)["model_type"]
    if Path(dest).exists():
        raise UserError(f"{dest} is there already: choose another name")
    bundle = export_bundle(run_dir)
    export_gguf(
        dest, bundle.config, bundle.hf_config, bundle.tensors, bundle.tokenizer, kind=kind or "f32",
        chat_template=bundle.chat_template, name=Path(run_dir).absolute().name,
    )  # fmt: skip
    return str(bundle.hf_config["model_type"])


def export_bundle(run_dir: str | Path) -> ExportBundle:
    """What an export of a run has to say: of an imported one what its checkpoint said.

    Raises:
      UserError: the run is damaged, or no family of transformers can say its architecture.
    """
    run = open_run(run_dir)
    if run.weights_or_adapter != run.weights:
        raise UserError(f"{run.path} holds adapters alone: `dantinox merge-lora` makes a run of them that can be exported")
    config, tokenizer = load_run_config(run), Tokenizer.load(run.tokenizer)
    shapes = abstract_model(config.architecture(tokenizer.vocab_size))[1]
    weights = load_weights(run.weights, shapes)
    origin = _origin_of(run, config, tokenizer.vocab_size)
    like = None if origin is None else origin["config"]
    hf_config, tensors = to_hf(config, tokenizer.vocab_size, weights, like)
    template = read_text(run.chat_template, MAX_JSON_BYTES) if run.chat_template.is_file() else None
    if origin is None:
        dtypes = {name: tensor.dtype for name, tensor in tensors.tensors.items()}
        ids = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id, "pad_token_id": tokenizer.pad_id}
        hf_config |= ids | {"dtype": Counter(dtypes.values()).most_common(1)[0][0]}
        stops = list(tokenizer.stop_ids)
        generation = {key: value for key, value in ids.items() if value is not None}
        generation |= {"eos_token_id": stops} if len(stops) > 1 else {}
        return ExportBundle(
            config, hf_config, generation, _tokenizer_config(tokenizer, config), tensors, dtypes, tokenizer, template
        )
    if origin["copy_of_table"] and "lm_head.weight" not in tensors:
        table = next(iter(tensors))
        kinds = {**tensors.tensors, "lm_head.weight": tensors.tensors[table]}
        made = tensors
        tensors = LazyArrays(kinds, lambda name: made[table if name == "lm_head.weight" else name])
    dtypes = {name: origin["other_dtypes"].get(name, origin["dtype"]) for name in tensors}
    # Without one of its own, transformers takes the vocabulary for one of the family's usual kind.
    own = origin["tokenizer_config"] if origin["format"] == "hf" else {}
    files = origin["generation_config"], own or _tokenizer_config(tokenizer, config)
    return ExportBundle(config, hf_config, *files, tensors, dtypes, tokenizer, template)


def _origin_of(run: RunDirectory, config: Config, vocab_size: int) -> dict[str, Any] | None:
    """What the checkpoint of an imported run said, where it still is this very model."""
    if not run.origin.is_file():
        return None
    run.check(run.origin)
    origin = read_json(run.origin, MAX_JSON_BYTES)
    said = hf_config_to_settings(origin["config"], config.model.max_context)
    other = config.architecture(vocab_size)
    one = build_config(said).architecture(other.vocab_size)
    return origin if all(getattr(one, name) == getattr(other, name) for name in ARCHITECTURE) else None


def _tokenizer_config(tokenizer: Tokenizer, config: Config) -> dict[str, Any]:
    names: Mapping[str, str] = tokenizer.template_variables
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.model.max_context,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": tokenizer.add_bos,
        **{role: names.get(role) for role in ROLES},
    }


def export_hf(run_dir: str | Path, dest: str | Path, kind: str | None = None) -> dict[str, Any]:
    """Writes a run as a folder of transformers; an imported one as it was.

    Args:
      kind: f32, f16 or bf16 for all tensors; None: as the checkpoint had them, or as the run has.

    Returns:
      Its `config.json`.

    Raises:
      UserError: no family can say the run, a number does not fit, or something is in the way.
    """
    bundle = export_bundle(run_dir)
    if kind is not None:
        said = {key: TYPES[kind] for key in ("dtype", "torch_dtype") if bundle.hf_config.get(key) is not None}
        bundle = bundle._replace(hf_config=bundle.hf_config | said, dtypes=dict.fromkeys(bundle.dtypes, TYPES[kind]))
    with _staged_directory(Path(dest)) as folder:
        write_folder(folder, bundle)
    return bundle.hf_config
