"""Builds the tokenizer and the token store of a config, or opens those on disk if they are up to date."""

import fcntl
import hashlib
import itertools
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dantinox.config import Config
from dantinox.files import UserError, atomic_write, wrap_os_errors
from dantinox.text.chat_template import ChatTemplate
from dantinox.text.conversation_store import ConversationStore
from dantinox.text.conversations import RECORD_FORMS, Conversations, Encoded, ReadExamples, conversation_examples, store_options
from dantinox.text.corpus import Corpus, Extent, split_text
from dantinox.text.hub import fetch_datasets
from dantinox.text.prompt_store import PromptStore, prompt_examples, read_records
from dantinox.text.token_store import Counts, TokenStore
from dantinox.text.tokenizer import Tokenizer, UnknownCharacter
from dantinox.text.vocabulary import train_tokenizer

FORMAT = 2
ENCODING = 2  # raised if the same corpus and settings give other tokens; a run that has older tokens still opens them
HEADER = "tokens.json"
CHUNK_CHARACTERS = 1 << 16  # encoded by one core at a time
BATCH_CHARACTERS = 4 << 20  # encoded between two calls of `progress`
MAX_HEADER_BYTES = 1 << 16

Header = dict[str, Any]
Progress = Callable[..., None]  # (activity, units done, total units[, name of the unit if not characters])


class TextChunk(NamedTuple):
    """A chunk of text from one document.

    Attributes:
      part: 0 for training, 1 for validation.
      document: (index of the corpus, index of the document in it).
    """

    part: int
    document: tuple[int, int]
    text: str


class _CorpusPlan(NamedTuple):
    """The corpora to encode, their extents, and for each corpus the character at which validation begins."""

    corpora: tuple[Corpus, ...]
    extents: tuple[Extent, ...]
    val_starts: tuple[int, ...]

    @property
    def characters(self) -> int:
        return sum(extent.characters for extent in self.extents)

    def chunks(self) -> Iterator[TextChunk]:
        """Yields all text, training before validation. If several corpora are split, they are read once per part."""
        split_corpora = sum(0 < start < extent.characters for start, extent in zip(self.val_starts, self.extents, strict=True))
        for parts in [(0,), (1,)] if split_corpora > 1 else [(0, 1)]:
            for number, (corpus, extent, val_start) in enumerate(zip(self.corpora, self.extents, self.val_starts, strict=True)):
                position = 0
                for document, text in corpus.read_text(extent.digest):
                    split = min(max(val_start - position, 0), len(text))
                    position += len(text)
                    if split and 0 in parts:
                        yield TextChunk(0, (number, document), text[:split])
                    if split < len(text) and 1 in parts:
                        yield TextChunk(1, (number, document), text[split:])


def prepare_data(
    config: Config,
    directory: str | Path,
    tokenizer: Tokenizer | None = None,
    progress: Progress | None = None,
    chat_template: str = "plain",
) -> tuple[Tokenizer, TokenStore]:
    """Returns the tokenizer and the token store of the corpus that the settings name.

    Existing tokens in `directory` are reused if corpus, tokenizer and options are unchanged; otherwise they are rebuilt. The
    last `data.val_fraction` of the characters is for validation. The corpus is split at the document end closest to that point,
    or at exactly that point if no document end is near it. BPE is trained on the training part; a character vocabulary
    covers both parts.

    Args:
      directory: where the token files are.
      tokenizer: the tokenizer to use. None: train or load the one that the settings describe.
      progress: called with (activity, units done, total units), where units are characters or conversations.
      chat_template: the template of conversations if `data.chat_template` is null: the name of a built-in one, or a file.

    Raises:
      UserError: there is no corpus, it is invalid or too small, or the directory cannot be written.
    """
    directory, objective = Path(directory), config.data_objective
    with fetch_datasets(config.data, directory, all_fields=objective != "next_token") as data:
        config = config.model_copy(update={"data": data})
        if objective == "next_token":
            plan = _make_plan(config)
            tokenizer = tokenizer or _make_tokenizer(config, plan, progress)
            digests: Sequence[str] = [extent.digest for extent in plan.extents]
            options: dict[str, Any] = {"text_field": data.text_field, "val_fraction": data.val_fraction}
            options["around"] = [list(tokenizer.ids_before_text), list(tokenizer.ids_after_document)]
            encode = partial(_encode_corpus, plan, tokenizer, progress)
        else:
            if tokenizer is None:
                if config.tokenizer.tokenizer_type not in ("byte", "file"):
                    raise UserError(
                        f"training.objective: {objective} does not train a tokenizer: set training.init_from to a trained run, "
                        "or tokenizer.tokenizer_type to file"
                    )
                tokenizer = train_tokenizer(config.tokenizer, lambda: iter(()))
            chat = ChatTemplate.from_name(data.chat_template or chat_template, tokenizer)
            found = Conversations.scan(_corpora(config), data)
            digests, options = found.digests, store_options(chat, objective, data)
            examples: ReadExamples = partial(conversation_examples, template=chat, objective=objective)
            if objective == "grpo":
                examples = partial(prompt_examples, template=chat)
            encode = partial(found.encode, examples, progress)
        if data.mixture:
            options |= {"sources": len(data.mixture)}
        options["encoding"] = ENCODING
        wanted = {"format": FORMAT, "sources": list(digests), "tokenizer": tokenizer.fingerprint, "options": options}
        header = _read_header(directory, wanted) or _build_store(encode, tokenizer, directory, wanted)
        return tokenizer, _open_store(directory, header, config, tokenizer)


def vocabulary_size(config: Config) -> int:
    """Returns the vocabulary size that the settings describe. Only a character vocabulary requires reading the corpus.

    For BPE it is `tokenizer.vocab_size`, although a small corpus can result in fewer tokens.

    Raises:
      UserError: the tokenizer or the corpus cannot be read.
    """
    if config.tokenizer.tokenizer_type == "bpe":
        return config.tokenizer.vocab_size
    if config.tokenizer.tokenizer_type != "char":
        return train_tokenizer(config.tokenizer, lambda: iter(())).vocab_size
    with tempfile.TemporaryDirectory(prefix="dantinox-") as directory, fetch_datasets(config.data, Path(directory)) as data:
        plan = _make_plan(config.model_copy(update={"data": data}))
        return train_tokenizer(config.tokenizer, lambda: (chunk.text for chunk in plan.chunks())).vocab_size


def open_store(config: Config, directory: str | Path, tokenizer: Tokenizer) -> TokenStore | None:
    """Opens the tokens that `prepare_data` wrote to `directory`, without reading the corpus; None if there are none."""
    header = _read_header(Path(directory), {"format": FORMAT, "tokenizer": tokenizer.fingerprint})
    return None if header is None else _open_store(Path(directory), header, config, tokenizer)


def corpus_changed(config: Config, directory: str | Path) -> bool:
    """Returns whether the corpus exists on this machine and differs from the corpus of the tokens in `directory`."""
    if config.data.dataset_source != "local":
        return False
    try:
        sources = [corpus.digest() for corpus in _corpora(config)]
    except UserError:  # the corpus does not exist
        return False
    return _read_header(Path(directory), {"sources": sources}) is None


def _corpora(config: Config) -> tuple[Corpus, ...]:
    """Opens the corpus, or all corpora of a mixture, and the separate validation corpus if there is one."""
    data = config.data
    if data.path is None:
        raise UserError("no training text: set data.path in the config, or pass --data_path")
    paths = data.path if data.mixture and isinstance(data.path, tuple) else (data.path,)
    return tuple(Corpus.open(path, data.text_field) for path in (*paths, data.val_path) if path is not None)


def _make_plan(config: Config) -> _CorpusPlan:
    corpora = _corpora(config)
    extents = tuple(corpus.scan() for corpus in corpora)
    if config.data.val_path is not None:
        return _CorpusPlan(corpora, extents, (*(extent.characters for extent in extents[:-1]), 0))
    return _CorpusPlan(corpora, extents, tuple(_find_val_start(extent, config.data.val_fraction) for extent in extents))


def _find_val_start(extent: Extent, val_fraction: float) -> int:
    """Returns the character at which validation begins.

    It is the document end closest to the fraction, or the fraction itself if the smaller part would otherwise differ from its
    size by more than a half.
    """
    total = extent.characters
    target = total * (1 - val_fraction)
    differences = np.abs(extent.ends[:-1] - target)
    if len(differences) and differences.min() <= min(target, total - target) / 2:
        return int(extent.ends[differences.argmin()])
    return min(max(int(target), 1), total - 1) if total > 1 else int(target)


def _make_tokenizer(config: Config, plan: _CorpusPlan, progress: Progress | None) -> Tokenizer:
    parts = (0,) if config.tokenizer.tokenizer_type == "bpe" else (0, 1)

    def documents() -> Iterator[str]:
        done = 0
        for text in (chunk.text for chunk in plan.chunks() if chunk.part in parts):
            done += len(text)
            if progress:
                progress("training the tokenizer", done, plan.characters)
            yield text

    return train_tokenizer(config.tokenizer, documents)


def _split_chunks(plan: _CorpusPlan, tokenizer: Tokenizer) -> Iterator[TextChunk]:
    """Splits the text into chunks to encode.

    Only the chunks for our own BPE are small, because its tokens do not depend on the split.
    """
    size = CHUNK_CHARACTERS if tokenizer.kind == "bpe" else BATCH_CHARACTERS
    return (TextChunk(part, document, text) for part, document, long in plan.chunks() for text in split_text(long, size))


def _batch_chunks(chunks: Iterable[TextChunk]) -> Iterator[list[TextChunk]]:
    batch: list[TextChunk] = []
    size = 0
    for chunk in chunks:
        batch.append(chunk)
        size += len(chunk.text)
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _build_store(encode: Callable[[], Iterator[Encoded]], tokenizer: Tokenizer, directory: Path, wanted: Header) -> Header:
    """Encodes everything into a file named by the hash of its content, then writes the header that refers to it."""
    with wrap_os_errors(f"cannot write the tokens in {directory}"):
        directory.mkdir(parents=True, exist_ok=True)
        with open(directory / ".lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel releases it when the process ends
            return _read_header(directory, wanted) or _write_store(encode, tokenizer, directory, wanted)


def _write_store(encode: Callable[[], Iterator[Encoded]], tokenizer: Tokenizer, directory: Path, wanted: Header) -> Header:
    dtype = "<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4"
    for leftover in directory.glob(".tokens*"):  # files of a killed build; this process holds the lock
        leftover.unlink()
    tokens_file, marks_file, records_file = (directory / f".tokens{suffix}.tmp" for suffix in ("", ".marks", ".records"))
    digest, counts = hashlib.sha256(), np.zeros((2, len(Counts._fields)), np.int64)
    sources = [0] * len(wanted["sources"])  # training tokens per source
    try:
        with open(tokens_file, "wb") as file, open(marks_file, "wb") as marks_out, open(records_file, "wb") as records_out:
            for part, source, ids, added, marks, record in encode():
                data = ids.astype(dtype).tobytes()
                file.write(data)
                digest.update(data)
                if marks is not None:
                    marks_out.write(marks.tobytes())
                    digest.update(marks.tobytes())
                if record is not None:
                    records_out.write(record + b"\n")
                    digest.update(record)
                counts[part] += added
                sources[source] += len(ids) if part == 0 else 0
            for output in (file, marks_out, records_out):
                output.flush()
                os.fsync(output.fileno())
        train, val = (Counts(*numbers)._asdict() for numbers in counts.tolist())
        stem = f"tokens-{digest.hexdigest()[:16]}"
        header = wanted | {"file": f"{stem}.bin", "dtype": dtype, "train": train, "val": val}
        if "objective" in wanted["options"]:
            header["marks"] = f"{stem}.marks"
            os.replace(marks_file, directory / header["marks"])
        if records_file.stat().st_size:
            header |= {"records": f"{stem}.records", "records_bytes": records_file.stat().st_size}
            os.replace(records_file, directory / header["records"])
        os.replace(tokens_file, directory / header["file"])
    finally:
        for path in (tokens_file, marks_file, records_file):
            path.unlink(missing_ok=True)
    if "sources" in wanted["options"]:
        header["mixture"] = sources[: wanted["options"]["sources"]]
    atomic_write(directory / HEADER, json.dumps(header, indent=1))
    for old in directory.glob("tokens-*"):
        if old.stem != stem:
            old.unlink()
    return header


def _encode_corpus(plan: _CorpusPlan, tokenizer: Tokenizer, progress: Progress | None) -> Iterator[Encoded]:
    """Yields the tokens of texts; BOS and EOS tokens are separate items."""
    begin, end = (np.array(ids, np.int32) for ids in (tokenizer.ids_before_text, tokenizer.ids_after_document))
    part, document, done = 0, (-1, 0), 0
    for batch in _batch_chunks(_split_chunks(plan, tokenizer)):
        texts = [chunk.text for chunk in batch]
        try:
            parts = [list(group) for _, group in itertools.groupby(batch, lambda chunk: chunk.part)]
            by_part = (tokenizer.encode_batch([chunk.text for chunk in part], dropout=part[0].part == 0) for part in parts)
            encoded = [ids for part in by_part for ids in part]
        except UnknownCharacter as error:  # report the position in the corpus instead of the batch
            raise UnknownCharacter(error.character, done + "".join(texts).index(error.character)) from None
        for chunk, ids in zip(batch, encoded, strict=True):
            is_new = chunk.document != document
            if is_new and done:
                yield Encoded(part, document[0], end, Counts(len(end), 0, 0, 0))
            if is_new:
                yield Encoded(chunk.part, chunk.document[0], begin, Counts(len(begin), 0, 0, 0))
            starts = is_new or chunk.part != part
            added = Counts(len(ids), starts, len(chunk.text), len(chunk.text.encode()))
            yield Encoded(chunk.part, chunk.document[0], ids, added)
            part, document, done = chunk.part, chunk.document, done + len(chunk.text)
        if progress:
            progress("encoding the corpus", done, plan.characters)
    yield Encoded(part, document[0], end, Counts(len(end), 0, 0, 0))


def _read_header(directory: Path, wanted: Header) -> Header | None:
    """Returns the header in a directory if it has the wanted values and its files have the right size, else None."""
    try:
        with open(directory / HEADER, "rb") as file:
            header = json.loads(file.read(MAX_HEADER_BYTES))
        tokens = Counts(**header["train"]).tokens + Counts(**header["val"]).tokens
        path = directory / Path(header["file"]).name
        valid = header["dtype"] in ("<u2", "<u4") and path.stat().st_size == tokens * np.dtype(header["dtype"]).itemsize
        valid = valid and sum(header.get("mixture", [])) in (0, header["train"]["tokens"])
        if "marks" in header:
            marks = directory / Path(header["marks"]).name
            valid = valid and marks.name == header["marks"] and marks.stat().st_size == tokens
        if "records" in header:
            records = directory / Path(header["records"]).name
            valid = valid and records.name == header["records"] and records.stat().st_size == header["records_bytes"]
        return header if valid and header | wanted | {"file": path.name} == header else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _open_store(directory: Path, header: Header, config: Config, tokenizer: Tokenizer) -> TokenStore:
    train, val = Counts(**header["train"]), Counts(**header["val"])
    path = directory / header["file"]
    # An empty file cannot be memory-mapped.
    tokens = np.memmap(path, header["dtype"], mode="r") if train.tokens + val.tokens else np.empty(0, header["dtype"])
    shared: dict[str, Any] = {
        "batch_size": config.training.batch_size,
        "sequence_length": config.model.max_context,
        "seed": config.training.seed,
        "pad_id": tokenizer.pad_id,
        "counts": (train, val),
        "mixture": list(zip(header["mixture"], config.data.mixture, strict=True)) if config.data.mixture else (),
    }
    if "marks" in header:
        marks = np.memmap(directory / header["marks"], np.uint8, mode="r")
        if "records" in header:
            records = read_records(directory / header["records"])
            t, answer = config.training, config.generation.max_new_tokens
            sizes = {"batch_size": t.batch_size, "context": config.model.max_context, "answer_tokens": answer, "seed": t.seed}
            return PromptStore(tokens, marks, records, (train, val), mixture=shared["mixture"], **sizes)
        form = RECORD_FORMS[header["options"]["objective"]]
        return ConversationStore(tokens, marks, name=header["file"], form=form, **shared)
    parts, packing = (tokens[: train.tokens], tokens[train.tokens :]), config.data.packing == "best_fit"
    before, _ = header["options"].get("around", [[tokenizer.bos_id], []])
    return TokenStore(*parts, eos_id=tokenizer.eos_id, bos_id=before[0] if before else None, packing=packing, **shared)
