"""The token store on disk: its content, the validation split, and when it is rebuilt."""

import json
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dantinox.config import Config, TokenizerSection, UserError, build_config
from dantinox.text import (
    BatchOptions,
    SpecialIds,
    Tokenizer,
    TokenStore,
    corpus,
    corpus_changed,
    open_store,
    prepare_data,
    train_tokenizer,
)
from dantinox.text import build_store as build
from tests.error_texts import ERRORS

TEXT = (
    "Nel mezzo del cammin di nostra vita\n\n mi ritrovai per una <eos> selva oscura,\r\nché la"
    " diritta via era smarrita.\n" * 9
)


def settings(path: object, **changes: object) -> Config:
    base = {
        "data.path": path if isinstance(path, list) else str(path),
        "tokenizer.tokenizer_type": "char",
        "model.max_context": 8,
        "training.batch_size": 2,
    }
    return build_config({}, base | changes)


def write(path: Path, text: str) -> Path:
    path.write_bytes(text.encode())
    return path


def parts(store: TokenStore) -> tuple[list[int], list[int]]:
    return store.training_ids.tolist(), store.validation_ids.tolist()


BPE = train_tokenizer(TokenizerSection(tokenizer_type="bpe"), lambda: iter([TEXT]))


def joined(lists: Iterable[list[int]]) -> list[int]:
    return [token for tokens in lists for token in tokens]


def header(directory: Path) -> dict:
    return json.loads((directory / "tokens.json").read_text())


@pytest.mark.parametrize("fraction", [0.1, 0.25, 0.5])
@pytest.mark.parametrize("kind", ["char", "byte", "bpe"])
def test_one_document_is_split_at_the_character(tmp_path, kind: str, fraction: float) -> None:
    config = settings(
        write(tmp_path / "a.txt", TEXT),
        **{"tokenizer.tokenizer_type": kind, "data.val_fraction": fraction},
    )
    tokenizer, store = prepare_data(config, tmp_path / "store")
    cut = int(len(TEXT) * (1 - fraction))
    train, val = parts(store)
    assert train == [tokenizer.bos_id, *tokenizer.encode(TEXT[:cut])]
    assert val == [*tokenizer.encode(TEXT[cut:]), tokenizer.eos_id]
    assert store.train == (len(train), 1, cut, len(TEXT[:cut].encode()))
    assert store.val == (len(val), 1, len(TEXT) - cut, len(TEXT[cut:].encode()))
    assert header(tmp_path / "store")["dtype"] == "<u2"
    if kind == "char":
        assert tokenizer.encode(TEXT) == [sorted(set(TEXT)).index(c) for c in TEXT]


def test_several_documents_are_split_at_a_document_end(tmp_path) -> None:
    lengths = [30, 20, 26, 15, 9]
    texts = [letter * length for letter, length in zip("abcde", lengths, strict=True)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    # The documents end after 30, 50, 76, 91 and 100 of 100 characters.
    for fraction, documents in [(0.1, 4), (0.2, 3), (0.4, 2), (0.75, 1)]:
        tokenizer, store = prepare_data(
            settings(tmp_path, **{"data.val_fraction": fraction}), tmp_path / "store"
        )
        encoded = [[tokenizer.bos_id, *tokenizer.encode(text), tokenizer.eos_id] for text in texts]
        assert parts(store) == (joined(encoded[:documents]), joined(encoded[documents:]))
        assert (store.train.documents, store.val.documents) == (documents, 5 - documents)


@pytest.mark.parametrize(
    "sizes",
    [
        [240, 12_200],
        [12_200, 240],
        [240, 12_200, 240],
        [6000, 7000],
        [1] * 20 + [9000],
        [5, 20_000, 5],
    ],
)
@pytest.mark.parametrize("fraction", [0.1, 0.3, 0.01, 0.9])
def test_the_validation_part_is_near_its_fraction_for_documents_of_any_size(
    tmp_path, sizes, fraction: float
) -> None:
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"text": "x" * size}) + "\n" for size in sizes)
    )
    tokenizer, store = prepare_data(
        settings(tmp_path / "a.jsonl", **{"data.val_fraction": fraction}), tmp_path / "store"
    )
    share = store.val.characters / sum(sizes)
    assert 0.5 * fraction - 1 / sum(sizes) <= share <= 1.5 * fraction + 1 / sum(sizes)
    assert tokenizer.decode(joined(parts(store))) == "x" * sum(sizes)
    assert (
        joined(parts(store)).count(tokenizer.eos_id)
        == joined(parts(store)).count(tokenizer.bos_id)
        == len(sizes)
    )


def test_separate_validation_text(tmp_path) -> None:
    train, val = write(tmp_path / "a.txt", TEXT), write(tmp_path / "v.txt", "ß in validation only")
    tokenizer, store = prepare_data(
        settings(train, **{"data.val_path": str(val)}), tmp_path / "store"
    )
    expected = (
        [tokenizer.bos_id, *tokenizer.encode(text), tokenizer.eos_id]
        for text in (TEXT, "ß in validation only")
    )
    assert parts(store) == tuple(expected)


@given(text=st.text(st.sampled_from("ab \n.'\r7é"), min_size=60, max_size=400))
def test_bpe_in_chunks_equals_bpe_of_the_whole_text(tmp_path_factory, text: str) -> None:
    """Text is encoded in chunks on several cores. If it has good split points, the tokens equal
    those of the whole text.
    """
    text = "via " + text.replace("\n", ".\nx") + " via"
    opened = corpus.Corpus.open(str(write(tmp_path_factory.mktemp("t") / "a.txt", text)))
    extent = opened.scan()
    plan = build._CorpusPlan((opened,), (extent,), (extent.characters,))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "CHUNK_CHARACTERS", 50)
        patch.setattr(corpus, "BLOCK_BYTES", 90)
        chunks = list(build._split_chunks(plan, BPE))
    assert "".join(chunk.text for chunk in chunks) == text
    assert {chunk[:2] for chunk in chunks} == {(0, (0, 0))}
    if all(re.search(r"\S\n\S|\S \S", text[i : i + 20]) for i in range(len(text) - 20)):
        ids = np.concatenate(BPE.encode_batch([chunk.text for chunk in chunks]))
        assert ids.tolist() == BPE.encode(text)


def test_dropout_of_a_tokenizer_is_used_only_for_training_tokens(tmp_path) -> None:
    """BPE dropout (Provilkov et al. 2020) skips merges in training; encoding elsewhere uses all
    merges.
    """
    bpe = train_tokenizer(
        TokenizerSection(tokenizer_type="bpe", vocab_size=400), lambda: iter([TEXT * 9])
    )
    tree = json.loads(bpe.to_json())
    tree["model"]["dropout"] = 1.0  # no merges
    tokenizer = Tokenizer(json.dumps(tree))
    assert tokenizer.encode(TEXT) == bpe.encode(TEXT) and tokenizer.encode_special_ids(
        TEXT
    ) == bpe.encode_special_ids(TEXT)
    _, store = prepare_data(settings(write(tmp_path / "a.txt", TEXT)), tmp_path / "s", tokenizer)
    cut = int(len(TEXT) * 0.9)
    assert (
        len(store.training_ids) == 1 + len(TEXT[:cut].encode())
        and tokenizer.decode(store.training_ids) == TEXT[:cut]
    )
    assert store.validation_ids.tolist() == [*bpe.encode(TEXT[cut:]), bpe.eos_id]


def test_no_end_token_in_a_vocabulary_without_one(tmp_path) -> None:
    tree = json.loads(
        prepare_data(settings(write(tmp_path / "a.txt", TEXT)), tmp_path / "s")[0].to_json()
    )
    tokenizer = Tokenizer(json.dumps(tree | {"added_tokens": []}))
    _, store = prepare_data(settings(tmp_path / "a.txt"), tmp_path / "s", tokenizer)
    assert tokenizer.eos_id is None and joined(parts(store)) == tokenizer.encode(TEXT)
    assert not store.batch(0).segments_BT.any() and store.batch(0).mask_BT.all()


def test_a_large_vocabulary_uses_four_bytes_per_token(tmp_path) -> None:
    letters = [chr(0x4E00 + i % 20_000 + (i // 20_000) * 0x12000) for i in range(66_000)]
    text = "".join(letters)
    tokenizer, store = prepare_data(settings(write(tmp_path / "a.txt", text)), tmp_path / "s")
    assert header(tmp_path / "s")["dtype"] == "<u4" and tokenizer.vocab_size == 66_003
    assert tokenizer.decode(joined(parts(store))) == text


def test_tokenizer_from_a_file(tmp_path) -> None:
    config = settings(write(tmp_path / "a.txt", TEXT))
    tokenizer, _ = prepare_data(config, tmp_path / "s")
    (tmp_path / "t.json").write_text(tokenizer.to_json(), encoding="utf-8")
    more = {
        "tokenizer.tokenizer_type": "file",
        "tokenizer.tokenizer_path": str(tmp_path / "t.json"),
    }
    again, _ = prepare_data(settings(tmp_path / "a.txt", **more), tmp_path / "s")
    assert again.fingerprint == tokenizer.fingerprint


@pytest.fixture
def built(tmp_path) -> tuple[Config, Path, Tokenizer]:
    config = settings(write(tmp_path / "a.txt", TEXT))
    tokenizer, _ = prepare_data(config, tmp_path / "store")
    return config, tmp_path / "store", tokenizer


def builds(config: Config, directory: Path, tokenizer: Tokenizer | None) -> bool:
    """Returns whether this call encodes the corpus, and checks that the tokens are right."""
    stages: list[str] = []
    used, store = prepare_data(
        config, directory, tokenizer, lambda stage, done, total: stages.append(stage)
    )
    assert used.decode(joined(parts(store))) == Path(str(config.data.path)).read_bytes().decode()
    return "encoding the corpus" in stages


def test_unchanged_tokens_are_reused(built) -> None:
    config, directory, tokenizer = built
    assert not builds(config, directory, tokenizer) and not builds(config, directory, None)
    assert not builds(
        settings(config.data.path, **{"training.seed": 7, "model.max_context": 9}),
        directory,
        tokenizer,
    )


def test_every_change_rebuilds_the_store(built) -> None:
    config, directory, tokenizer = built
    path = Path(str(config.data.path))
    records = path.with_name("val.jsonl")
    records.write_text('{"text": "nel mezzo del cammin", "body": "di nostra vita"}\n' * 20)
    others = [
        {"data.val_path": str(path)},
        *({"data.val_path": str(records), "data.text_field": f} for f in ("text", "body")),
    ]
    for change in ({"data.val_fraction": 0.2}, *others):
        changed = settings(path, **change)
        if "data.val_path" not in change:
            assert builds(changed, directory, tokenizer) and not builds(
                changed, directory, tokenizer
            )
        else:
            before = header(directory)
            prepare_data(changed, directory, tokenizer)
            assert header(directory) != before
    assert builds(config, directory, tokenizer)
    assert builds(settings(path, **{"tokenizer.tokenizer_type": "byte"}), directory, None)
    assert builds(config, directory, tokenizer)
    path.write_bytes(path.read_bytes().replace(b"selva", b"valse"))  # the same size, the same name
    assert builds(config, directory, tokenizer)
    assert len(list(directory.glob("tokens-*.bin"))) == 1


def test_damage_rebuilds_the_store(built) -> None:
    config, directory, tokenizer = built
    (tokens,) = directory.glob("tokens-*.bin")
    sound, data = (directory / "tokens.json").read_text(), tokens.read_bytes()
    for content in [
        "",
        "{",
        "[]",
        "null",
        "7",
        sound[:-9],
        sound.replace('"format": 2', '"format": 0'),
        "[" * 5000,
        "x" * 10**6,
    ]:
        (directory / "tokens.json").write_text(content)
        assert builds(config, directory, tokenizer), content[:40]
    for part, value in [
        ("train", 7),
        ("val", {}),
        ("dtype", "<f8"),
        ("file", None),
        ("file", "../tokens.json"),
    ]:
        (directory / "tokens.json").write_text(json.dumps(json.loads(sound) | {part: value}))
        assert builds(config, directory, tokenizer), part
    counts = json.loads(sound)["train"]
    for change in [
        {"options": 5},
        {"options": {"around": 5}},
        {"train": {name: float(n) for name, n in counts.items()}},
    ]:
        (directory / "tokens.json").write_text(json.dumps(json.loads(sound) | change))
        assert open_store(config, directory, tokenizer) is None, change
    (directory / "tokens.json").write_text(
        json.dumps({k: v for k, v in json.loads(sound).items() if k != "options"})
    )
    assert open_store(config, directory, tokenizer) is None and builds(config, directory, tokenizer)
    for content in [b"", data[:-2], data + b"\0\0"]:
        tokens.write_bytes(content)
        assert builds(config, directory, tokenizer)
    tokens.unlink()
    assert builds(config, directory, tokenizer) and not builds(config, directory, tokenizer)


def test_a_mixture_of_other_sources_is_reported(built) -> None:
    config, directory, tokenizer = built
    mixed = config.model_copy(
        update={"data": config.data.model_copy(update={"mixture": (0.5, 0.5)})}
    )
    with pytest.raises(UserError, match=r"were not built with this data\.mixture"):
        open_store(mixed, directory, tokenizer)


def test_leftover_files_are_never_used(built, monkeypatch) -> None:
    config, directory, tokenizer = built
    before = header(directory)
    changed = settings(config.data.path, **{"data.val_fraction": 0.3})

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    for progress in (
        die,
        None,
    ):  # interrupt while tokens are written, then before the header is written
        with monkeypatch.context() as patch:
            patch.setattr(build, "atomic_write", die)
            with pytest.raises(KeyboardInterrupt):
                prepare_data(changed, directory, tokenizer, progress)
        assert header(directory) == before and not builds(config, directory, tokenizer), (
            "the old store is whole"
        )
    (directory / ".tokens-killed").write_bytes(b"half a token file")
    assert builds(changed, directory, tokenizer)
    assert sorted(path.name for path in directory.iterdir()) == [
        ".lock",
        header(directory)["file"],
        "tokens.json",
    ]


def test_a_corpus_that_changes_during_the_build_is_refused(built) -> None:
    config, directory, tokenizer = built
    before = header(directory)

    def change(stage: str, done: int, total: int) -> None:
        Path(str(config.data.path)).write_text(TEXT.replace("selva", "valse"))

    with pytest.raises(UserError, match=ERRORS["changed_while_it_was_read"]):
        prepare_data(
            settings(config.data.path, **{"tokenizer.tokenizer_type": "bpe"}),
            directory,
            None,
            change,
        )
    assert header(directory) == before


def test_progress_reaches_the_end(tmp_path) -> None:
    seen: dict[str, list[tuple[int, int]]] = {}
    config = settings(write(tmp_path / "a.txt", TEXT), **{"tokenizer.tokenizer_type": "bpe"})
    prepare_data(
        config,
        tmp_path / "s",
        None,
        lambda stage, *numbers: seen.setdefault(stage, []).append(numbers),
    )
    assert list(seen) == ["training the tokenizer", "encoding the corpus"]
    assert seen["encoding the corpus"][-1] == (len(TEXT), len(TEXT))


def test_an_unknown_character_is_reported_with_its_corpus_position(built, monkeypatch) -> None:
    _, directory, tokenizer = built
    monkeypatch.setattr(build, "BATCH_CHARACTERS", 40)
    config = settings(write(directory / "b.txt", TEXT[:100] + "ß"))
    with pytest.raises(UserError, match=ERRORS["u_00df_at_position_100"]):
        prepare_data(config, directory, tokenizer)


def test_no_corpus_and_too_little_text(tmp_path) -> None:
    with pytest.raises(UserError, match=ERRORS["data_path_data_path"]):
        prepare_data(build_config({}), tmp_path)
    config = settings(write(tmp_path / "a.txt", "abcdefghij"))
    with pytest.raises(UserError, match=ERRORS["has_10_tokens_fewer_than"]):
        prepare_data(config, tmp_path / "s")


def test_directory_that_cannot_be_written(tmp_path, monkeypatch) -> None:
    config = settings(write(tmp_path / "a.txt", TEXT))
    with pytest.raises(UserError, match=ERRORS["cannot_write_the_tokens_in"]):
        prepare_data(config, tmp_path / "a.txt" / "store")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(build.os, "fsync", full)
    with pytest.raises(UserError, match=ERRORS["no_space_left_on_device"]):
        prepare_data(config, tmp_path / "store")
    assert [path.name for path in (tmp_path / "store").iterdir()] == [".lock"]


def test_batches_from_disk_equal_batches_from_memory(built) -> None:
    config, directory, tokenizer = built
    _, store = prepare_data(config, directory, tokenizer)
    train, val = (np.array(part) for part in parts(store))
    other = TokenStore(train, val, BatchOptions(2, 8, seed=42), SpecialIds(tokenizer.eos_id))
    for a, b in zip(store.batch(9), other.batch(9), strict=True):
        assert np.array_equal(a, b)


def test_tokens_can_be_opened_without_their_corpus(tmp_path) -> None:
    config, directory = settings(write(tmp_path / "a.txt", TEXT)), tmp_path / "store"
    tokenizer, store = prepare_data(config, directory)
    assert not corpus_changed(config, directory)
    write(tmp_path / "a.txt", TEXT + "x")
    assert corpus_changed(config, directory) and parts(
        open_store(config, directory, tokenizer)
    ) == parts(store)
    (tmp_path / "a.txt").unlink()
    assert not corpus_changed(config, directory) and parts(
        open_store(config, directory, tokenizer)
    ) == parts(store)
    assert open_store(config, tmp_path / "elsewhere", tokenizer) is None


def test_a_mixture_keeps_its_sources_separate(tmp_path) -> None:
    """The store contains the training tokens of each source, then the validation tokens of each
    source.
    """
    texts = {"a.txt": TEXT, "b.txt": TEXT[::-1], "v.txt": "via smarrita"}
    paths = [str(write(tmp_path / name, text)) for name, text in texts.items()]
    config = settings(paths[:2], **{"data.mixture": [3, 1]})
    tokenizer, store = prepare_data(config, tmp_path / "store")
    cut, (b, e) = int(len(TEXT) * 0.9), (tokenizer.bos_id, tokenizer.eos_id)
    train = [[b, *tokenizer.encode(text[:cut]), e] for text in (TEXT, TEXT[::-1])]
    val = [[b, *tokenizer.encode(text[cut:]), e] for text in (TEXT, TEXT[::-1])]
    assert parts(store) == (joined(train), joined(val)) and header(tmp_path / "store")[
        "mixture"
    ] == [len(p) for p in train]
    again = settings(paths[:2], **{"data.mixture": [1, 1]})
    assert not builds_tokens(again, tmp_path / "store", tokenizer), (
        "weights do not change what is stored"
    )
    plain = settings(paths[:2])
    assert builds_tokens(plain, tmp_path / "store", tokenizer)
    apart = settings(paths[:2], **{"data.mixture": [1, 1], "data.val_path": paths[2]})
    _, store = prepare_data(apart, tmp_path / "store", tokenizer)
    assert parts(store)[1] == [b, *tokenizer.encode("via smarrita"), e]
    with pytest.raises(UserError, match=ERRORS["data_mixture_must_have_one"]):
        settings(paths[:2], **{"data.mixture": [3, 1, 1]})


def builds_tokens(config: Config, directory: Path, tokenizer: Tokenizer) -> bool:
    stages: list[str] = []
    prepare_data(config, directory, tokenizer, lambda stage, *_: stages.append(stage))
    return "encoding the corpus" in stages


LIMITED = """
import resource, sys
from dantinox.config import build_config
from dantinox.text import prepare_data
held = next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmData"))
resource.setrlimit(resource.RLIMIT_DATA, (held + int(sys.argv[2]),) * 2)
config = build_config({}, {"data.path": sys.argv[1], "tokenizer.tokenizer_type": "byte"})
_, store = prepare_data(config, sys.argv[1] + ".store")
print(store.train.tokens + store.val.tokens, store.batch(5).tokens_BT.shape)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the limit is Linux's")
def test_a_corpus_larger_than_memory(tmp_path) -> None:
    """184 MB of text give 368 MB of tokens, but RLIMIT_DATA allows the process only 168 MB more
    than it has at its start.
    """
    block = (TEXT.encode() * 5000)[: 1 << 20].decode(errors="ignore").encode()
    with open(tmp_path / "large.txt", "wb") as file:
        file.writelines([block] * 176)
    command = [sys.executable, "-c", LIMITED, str(tmp_path / "large.txt"), str(160 << 20)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-500:]
    assert done.stdout == f"{176 * len(block) + 2} (32, 256)\n"
