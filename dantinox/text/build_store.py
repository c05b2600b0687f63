"""Builds the tokenizer and the token store of a config, or opens those on disk if they are up to
date.
"""

import contextlib
import fcntl
import itertools
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dantinox.config import Config
from dantinox.files import UserError, atomic_write, wrap_os_errors
from dantinox.text.chat_template import ChatTemplate
from dantinox.text.conversation_store import ConversationStore
from dantinox.text.conversations import (
    BATCH_EXAMPLES,
    RECORD_FORMS,
    Conversations,
    Encoded,
    conversation_examples,
    encode_conversations,
    store_options,
)
from dantinox.text.corpus import BLOCK_BYTES, Corpus, Extent, split_text
from dantinox.text.hub_datasets import fetch_datasets
from dantinox.text.prompt_store import (
    PromptStore,
    encode_prompt_records,
    prompt_examples,
    read_records,
)
from dantinox.text.store_writer import (
    MARKS,
    RECORDS,
    STATE,
    TOKENIZER,
    TOKENS,
    content_digest,
    remove_partial,
    write_partial,
)
from dantinox.text.token_store import BatchOptions, Counts, SpecialIds, TokenStore
from dantinox.text.tokenizer import Tokenizer, UnknownCharacter
from dantinox.text.tokenizer_training import train_tokenizer

FORMAT = 2
# Raised if the same corpus and settings give other tokens; a run that has older tokens still opens
# them.
ENCODING = 2
HEADER = "tokens.json"
CHUNK_CHARACTERS = 1 << 16  # encoded by one core at a time
BATCH_CHARACTERS = 4 << 20  # encoded between two calls of `progress`
BATCH_CHUNKS = 1 << 14  # the most chunks of one such batch
MAX_HEADER_BYTES = 1 << 16

Header = dict[str, Any]
# A function that maps the number of items to skip to the other ones.
EncodeFrom = Callable[[int], Iterator[Encoded]]
# A function of (activity, units done, total units[, name of the unit if not characters]).
Progress = Callable[..., None]


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
    """The corpora to encode, their extents, and for each corpus the character at which validation
    begins.
    """

    corpora: tuple[Corpus, ...]
    extents: tuple[Extent, ...]
    val_starts: tuple[int, ...]

    @property
    def characters(self) -> int:
        return sum(extent.characters for extent in self.extents)

    def chunks(self) -> Iterator[TextChunk]:
        """Yields all text, training before validation. If several corpora are split, they are read
        once per part.
        """
        split_corpora = sum(
            0 < start < extent.characters
            for start, extent in zip(self.val_starts, self.extents, strict=True)
        )
        for parts in [(0,), (1,)] if split_corpora > 1 else [(0, 1)]:
            for number, (corpus, extent, val_start) in enumerate(
                zip(self.corpora, self.extents, self.val_starts, strict=True)
            ):
                position = 0
                for document, text in corpus.read_text(extent.digest):
                    start = position
                    position = position + len(text)
                    if start < val_start and 0 in parts:
                        yield TextChunk(0, (number, document), text[: val_start - start])
                    if position > val_start and 1 in parts:
                        yield TextChunk(1, (number, document), text[max(val_start - start, 0) :])


def prepare_data(
    config: Config,
    directory: str | Path,
    tokenizer: Tokenizer | None = None,
    progress: Progress | None = None,
    chat_template: str = "plain",
) -> tuple[Tokenizer, TokenStore]:
    """Returns the tokenizer and the token store of the corpus that the settings name.

    Existing tokens in `directory` are reused if corpus, tokenizer and options are unchanged;
    otherwise they are rebuilt. The last `data.val_fraction` of the characters is for validation.
    The corpus is split at the document end closest to that point, or at exactly that point if no
    document end is near it. BPE is trained on the training part; a character vocabulary covers both
    parts.

    Args:
      directory: where the token files are.
      tokenizer: the tokenizer to use. None: train or load the one that the settings describe.
      progress: called with (activity, units done, total units), where units are characters or
        conversations.
      chat_template: the template of conversations if `data.chat_template` is null: the name of a
        built-in one, or a file.

    Raises:
      UserError: there is no corpus, it is invalid or too small, or the directory cannot be written.
    """
    directory = Path(directory)
    objective = config.data_objective
    with fetch_datasets(config.data, directory, all_fields=objective != "next_token") as data:
        config = config.model_copy(update={"data": data})
        if objective == "next_token":
            plan = _make_plan(config)
            tokenizer = tokenizer or _make_tokenizer(config, plan, directory, progress)
            digests: Sequence[str] = [extent.digest for extent in plan.extents]
            options: dict[str, Any] = {
                "text_field": data.text_field,
                "val_fraction": data.val_fraction,
            }
            options["around"] = [
                list(tokenizer.ids_before_text),
                list(tokenizer.ids_after_document),
            ]
            encode: EncodeFrom = partial(_encode_corpus, plan, tokenizer, progress)
        else:
            if tokenizer is None:
                if config.tokenizer.tokenizer_type not in ("byte", "file"):
                    raise UserError(
                        f"training.objective: {objective} does not train a tokenizer: set"
                        " training.init_from to a trained run, or tokenizer.tokenizer_type to file"
                    )
                tokenizer = train_tokenizer(config.tokenizer, lambda: iter(()))
            chat = ChatTemplate.from_name(data.chat_template or chat_template, tokenizer)
            found = Conversations.scan(_corpora(config), data)
            digests = found.digests
            options = store_options(chat, objective, data)
            if objective == "grpo":
                encode = partial(
                    found.encode,
                    prompt_examples,
                    partial(encode_prompt_records, template=chat),
                    progress,
                )
            else:
                examples = partial(conversation_examples, objective=objective)
                encode = partial(
                    found.encode, examples, partial(encode_conversations, template=chat), progress
                )
        if data.mixture:
            options |= {"sources": len(data.mixture)}
        options["encoding"] = ENCODING
        wanted = {
            "format": FORMAT,
            "sources": list(digests),
            "tokenizer": tokenizer.fingerprint,
            "options": options,
        }
        header = _read_header(directory, wanted) or _build_store(
            encode, tokenizer, directory, wanted
        )
        (directory / TOKENIZER).unlink(missing_ok=True)
        return tokenizer, _open_store(directory, header, config, tokenizer)


def vocabulary_size(config: Config) -> int:
    """Returns the vocabulary size that the settings describe. Only a character vocabulary requires
    reading the corpus.

    For BPE it is `tokenizer.vocab_size`, although a small corpus can result in fewer tokens.

    Raises:
      UserError: the tokenizer or the corpus cannot be read.
    """
    if config.tokenizer.tokenizer_type == "bpe":
        return config.tokenizer.vocab_size
    if config.tokenizer.tokenizer_type != "char":
        return train_tokenizer(config.tokenizer, lambda: iter(())).vocab_size
    with (
        tempfile.TemporaryDirectory(prefix="dantinox-") as directory,
        fetch_datasets(config.data, Path(directory)) as data,
    ):
        plan = _make_plan(config.model_copy(update={"data": data}))
        return train_tokenizer(
            config.tokenizer, lambda: (chunk.text for chunk in plan.chunks())
        ).vocab_size


def open_store(config: Config, directory: str | Path, tokenizer: Tokenizer) -> TokenStore | None:
    """Opens the tokens that `prepare_data` wrote to `directory`, without reading the corpus; None
    if there are none.
    """
    header = _read_header(Path(directory), {"format": FORMAT, "tokenizer": tokenizer.fingerprint})
    return None if header is None else _open_store(Path(directory), header, config, tokenizer)


def corpus_changed(config: Config, directory: str | Path) -> bool:
    """Returns whether the corpus exists on this machine and differs from the corpus of the tokens
    in `directory`.
    """
    if config.data.dataset_source != "local":
        return False
    try:
        sources = [corpus.digest() for corpus in _corpora(config)]
    except UserError:  # the corpus does not exist
        return False
    return _read_header(Path(directory), {"sources": sources}) is None


def _corpora(config: Config) -> tuple[Corpus, ...]:
    """Opens the corpus, or all corpora of a mixture, and the separate validation corpus if there is
    one.
    """
    data = config.data
    if data.path is None:
        raise UserError("no training text: set data.path in the config, or pass --data_path")
    paths = data.path if data.mixture and isinstance(data.path, tuple) else (data.path,)
    skip_bad = data.on_bad_file == "skip"
    corpora = tuple(
        Corpus.open(path, data.text_field, skip_bad)
        for path in (*paths, data.val_path)
        if path is not None
    )
    if skip_bad:
        return tuple(
            corpus.without_bad_files(config.data_objective != "next_token") for corpus in corpora
        )
    return corpora


def _make_plan(config: Config) -> _CorpusPlan:
    """Reads the corpora once, and splits them into training and validation."""
    corpora = _corpora(config)
    extents = tuple(corpus.scan() for corpus in corpora)
    if config.data.val_path is not None:
        return _CorpusPlan(corpora, extents, (*(extent.characters for extent in extents[:-1]), 0))
    return _CorpusPlan(
        corpora,
        extents,
        tuple(_find_val_start(extent, config.data.val_fraction) for extent in extents),
    )


def _find_val_start(extent: Extent, val_fraction: float) -> int:
    """Returns the character at which validation begins.

    It is the document end closest to the fraction, or the fraction itself if the smaller part would
    otherwise differ from its size by more than a half.
    """
    total = extent.characters
    target = total * (1 - val_fraction)
    differences = np.abs(extent.ends[:-1] - target)
    if len(differences) and differences.min() <= min(target, total - target) / 2:
        return int(extent.ends[differences.argmin()])
    return min(max(int(target), 1), total - 1) if total > 1 else int(target)


def _make_tokenizer(
    config: Config, plan: _CorpusPlan, directory: Path, progress: Progress | None
) -> Tokenizer:
    """Trains or loads the tokenizer. One that a build trained that was interrupted is used again if
    its inputs are equal.
    """
    is_bpe = config.tokenizer.tokenizer_type == "bpe"

    def documents() -> Iterator[str]:
        done = 0
        for text in (chunk.text for chunk in plan.chunks() if chunk.part == 0 or not is_bpe):
            done += len(text)
            if progress:
                progress("training the tokenizer", done, plan.characters)
            yield text

    if not is_bpe:  # takes no longer than reading the corpus
        return train_tokenizer(config.tokenizer, documents)
    digests = [extent.digest for extent in plan.extents]
    kept = directory / TOKENIZER
    inputs = {
        "sources": digests,
        "val_starts": plan.val_starts,
        "vocab_size": config.tokenizer.vocab_size,
        "encoding": ENCODING,
    }
    written = json.dumps(inputs)
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, UserError):
        saved = json.loads(kept.read_bytes())
        if saved["inputs"] == written:
            return Tokenizer(saved["tokenizer"])
    tokenizer = train_tokenizer(config.tokenizer, documents)
    with wrap_os_errors(f"cannot write the tokens in {directory}"):
        directory.mkdir(parents=True, exist_ok=True)
        atomic_write(kept, json.dumps({"inputs": written, "tokenizer": tokenizer.to_json()}))
    return tokenizer


def _split_chunks(plan: _CorpusPlan, tokenizer: Tokenizer) -> Iterator[TextChunk]:
    """Splits the text into chunks to encode.

    Only the chunks for our own BPE are small, because its tokens do not depend on the split.
    """
    size = CHUNK_CHARACTERS if tokenizer.kind == "bpe" else BATCH_CHARACTERS
    for chunk in plan.chunks():
        if len(chunk.text) <= size:
            yield chunk
        else:
            yield from (
                TextChunk(chunk.part, chunk.document, text) for text in split_text(chunk.text, size)
            )


def _group_chunks(chunks: Iterable[TextChunk]) -> Iterator[list[TextChunk]]:
    """Yields groups of chunks that are encoded together. All chunks of a group are of one part and
    one source.
    """
    group: list[TextChunk] = []
    size = 0
    for chunk in chunks:
        full = size + len(chunk.text) > BATCH_CHARACTERS or len(group) == BATCH_CHUNKS
        if group and (
            full or group[0].part != chunk.part or group[0].document[0] != chunk.document[0]
        ):
            yield group
            group = []
            size = 0
        group.append(chunk)
        size += len(chunk.text)
    if group:
        yield group


def _build_store(
    encode: EncodeFrom, tokenizer: Tokenizer, directory: Path, wanted: Header
) -> Header:
    """Encodes everything into a file named by the hash of its content, then writes the header that
    refers to it.
    """
    with wrap_os_errors(f"cannot write the tokens in {directory}"):
        directory.mkdir(parents=True, exist_ok=True)
        with open(directory / ".lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel releases it when the process ends
            return _read_header(directory, wanted) or _write_store(
                encode, tokenizer, directory, wanted
            )


def _write_store(
    encode: EncodeFrom, tokenizer: Tokenizer, directory: Path, wanted: Header
) -> Header:
    """Writes the files of a store and returns its header; the directory is locked."""
    dtype = "<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4"
    # The sizes determine the items of a partial store.
    inputs = wanted | {
        "sizes": [CHUNK_CHARACTERS, BATCH_CHARACTERS, BATCH_CHUNKS, BLOCK_BYTES, BATCH_EXAMPLES]
    }
    written = write_partial(encode, dtype, directory, inputs, len(wanted["sources"]))
    stem = f"tokens-{content_digest(directory, np.dtype(dtype).itemsize)[:16]}"
    train, val = (Counts(*numbers)._asdict() for numbers in written.counts)
    header = wanted | {"file": f"{stem}.bin", "dtype": dtype, "train": train, "val": val}
    (directory / STATE).unlink()
    if "objective" in wanted["options"]:
        header["marks"] = f"{stem}.marks"
        os.replace(directory / MARKS, directory / header["marks"])
    if written.sizes[2]:
        header |= {"records": f"{stem}.records", "records_bytes": written.sizes[2]}
        os.replace(directory / RECORDS, directory / header["records"])
    os.replace(directory / TOKENS, directory / header["file"])
    if "sources" in wanted["options"]:
        header["mixture"] = written.sources[: wanted["options"]["sources"]]
    atomic_write(directory / HEADER, json.dumps(header, indent=1))
    remove_partial(directory)
    for old in directory.glob("tokens-*"):
        if old.stem != stem:
            old.unlink()
    return header


def _encode_corpus(
    plan: _CorpusPlan, tokenizer: Tokenizer, progress: Progress | None, skip: int = 0
) -> Iterator[Encoded]:
    """Yields the tokens of texts, with BOS and EOS tokens, a group of chunks at a time.

    Args:
      skip: the number of groups at the start that are not encoded.
    """
    begin, end = (
        np.array(ids, np.int32) for ids in (tokenizer.ids_before_text, tokenizer.ids_after_document)
    )
    part = 0
    document = (-1, 0)
    done = 0
    groups = itertools.chain(_group_chunks(_split_chunks(plan, tokenizer)), [[]])
    for number, (group, following) in enumerate(itertools.pairwise(groups)):
        text = "".join(chunk.text for chunk in group)
        if number >= skip:
            try:
                encoded = tokenizer.encode_batch(
                    [chunk.text for chunk in group], dropout=group[0].part == 0
                )
            except UnknownCharacter as error:
                # Report the position in the corpus instead of the group.
                raise UnknownCharacter(
                    error.character, done + text.index(error.character)
                ) from None
            pieces = []
            started = 0
            before = document
            next_documents = [chunk.document for chunk in (*group[1:], *following[:1])]
            for chunk, ids, next_document in itertools.zip_longest(group, encoded, next_documents):
                if chunk.document != before:
                    pieces.append(begin)
                    started += 1
                pieces.append(ids)
                if chunk.document != next_document:
                    pieces.append(end)
                before = chunk.document
            # Counts a document that is split between the parts.
            started += group[0].document == document and group[0].part != part
            ids = np.concatenate(pieces)
            yield Encoded(
                group[0].part,
                group[0].document[0],
                ids,
                Counts(len(ids), started, len(text), len(text.encode())),
            )
        part = group[-1].part
        document = group[-1].document
        done = done + len(text)
        if progress and number >= skip:
            progress("encoding the corpus", done, plan.characters)


def _read_header(directory: Path, wanted: Header) -> Header | None:
    """Returns the header in a directory if it has the wanted values and its files have the right
    size, else None.
    """
    try:
        with open(directory / HEADER, "rb") as file:
            header = json.loads(file.read(MAX_HEADER_BYTES))
        tokens = Counts(**header["train"]).tokens + Counts(**header["val"]).tokens
        path = directory / Path(header["file"]).name
        valid = (
            header["dtype"] in ("<u2", "<u4")
            and path.stat().st_size == tokens * np.dtype(header["dtype"]).itemsize
        )
        valid = valid and sum(header.get("mixture", [])) in (0, header["train"]["tokens"])
        if "marks" in header:
            marks = directory / Path(header["marks"]).name
            valid = valid and marks.name == header["marks"] and marks.stat().st_size == tokens
        if "records" in header:
            records = directory / Path(header["records"]).name
            valid = (
                valid
                and records.name == header["records"]
                and records.stat().st_size == header["records_bytes"]
            )
        valid = valid and all(
            isinstance(number, int) for part in ("train", "val") for number in header[part].values()
        )
        valid = valid and _are_options(header["options"], "marks" in header, "records" in header)
        return header if valid and header | wanted | {"file": path.name} == header else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _are_options(options: Mapping[str, Any], has_marks: bool, has_records: bool) -> bool:
    """Whether the options of a header have the form that `prepare_data` writes."""
    if has_marks:
        return bool(
            options["objective"] == "grpo" if has_records else options["objective"] in RECORD_FORMS
        )
    before, after = options.get("around", [[], []])
    return all(isinstance(token, int) for token in (*before, *after))


def _open_store(
    directory: Path, header: Header, config: Config, tokenizer: Tokenizer
) -> TokenStore:
    """Opens the files that a header describes."""
    train = Counts(**header["train"])
    val = Counts(**header["val"])
    path = directory / header["file"]
    if config.data.mixture and len(header.get("mixture", ())) != len(config.data.mixture):
        raise UserError(
            f"the tokens in {directory} were not built with this"
            " data.mixture: remove them to build them again"
        )
    # An empty file cannot be memory-mapped.
    tokens = (
        np.memmap(path, header["dtype"], mode="r")
        if train.tokens + val.tokens
        else np.empty(0, header["dtype"])
    )
    batches = BatchOptions(
        config.training.batch_size,
        config.model.max_context,
        config.training.seed,
        mixture=(
            list(zip(header["mixture"], config.data.mixture, strict=True))
            if config.data.mixture
            else ()
        ),
    )
    if "marks" in header:
        marks = np.memmap(directory / header["marks"], np.uint8, mode="r")
        if "records" in header:
            records = read_records(directory / header["records"])
            answer_tokens = config.generation.max_new_tokens
            return PromptStore(
                tokens, marks, records, (train, val), batches, answer_tokens=answer_tokens
            )
        form = RECORD_FORMS[header["options"]["objective"]]
        pad_id = tokenizer.pad_id or 0
        return ConversationStore(
            tokens, marks, (train, val), batches, pad_id=pad_id, name=header["file"], form=form
        )
    before, _ = header["options"].get("around", [[tokenizer.bos_id], []])
    special = SpecialIds(tokenizer.eos_id, before[0] if before else None, tokenizer.pad_id or 0)
    packing = config.data.packing == "best_fit"
    parts = (tokens[: train.tokens], tokens[train.tokens :])
    return TokenStore(*parts, batches, special, counts=(train, val), packing=packing)
