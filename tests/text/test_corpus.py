"""Corpora: text is read unchanged, files are found in a fixed order, and other content gives an
error in one sentence.
"""

import gzip
import json
import os
import re
import socket
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dantinox import cli
from dantinox.config import UserError, build_config
from dantinox.config.sections import may_hold_records
from dantinox.text import Corpus, compressed_files, corpus, prepare_data
from dantinox.text.corpus import split_text
from dantinox.text.corpus_files import BUILTIN_BYTES, find_corpus_files
from tests.error_texts import ERRORS

ROOT = Path(__file__).resolve().parents[2]
ODD = " \r\n\r\n\tNel mezzo\n\n\n  del cammin\x0c\u2028 🙂é\n \n"


def documents(path: object, field: str = "text") -> list[str]:
    found: list[str] = []
    for document, text in Corpus.open(str(path), field).read_text():
        assert text and document in (len(found) - 1, len(found))
        if document == len(found):
            found.append("")
        found[document] += text
    return found


def test_text_is_read_unchanged(tmp_path) -> None:
    (tmp_path / "a.txt").write_bytes(ODD.encode())
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbfbom")
    assert documents(tmp_path) == [ODD, "bom"]


@given(
    text=st.text(st.sampled_from("ab\r\n 🙂é"), min_size=1, max_size=80), block=st.integers(1, 20)
)
def test_every_block_size_reads_the_same_text(tmp_path_factory, text: str, block: int) -> None:
    path = tmp_path_factory.mktemp("t") / "a.txt"
    path.write_bytes(text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "BLOCK_BYTES", block)
        patch.setattr(corpus, "_SPLIT_RANGE", block)
        assert documents(path) == [text]
        pieces = [piece.text for piece in Corpus.open(str(path)).read_text()]
        # The rest after a split has at most two blocks, and one more block follows.
        assert all(pieces) and max(map(len, pieces)) <= 3 * max(2, block) + 1


@given(text=st.text(st.sampled_from("ab\r\n .'s"), max_size=300), size=st.integers(1, 50))
def test_split_text_loses_nothing(text: str, size: int) -> None:
    parts = list(split_text(text, size))
    assert "".join(parts) == text and all(0 < len(part) <= size for part in parts)


def test_split_text_prefers_lines_then_words() -> None:
    assert list(split_text("ab cd\nef gh", 9)) == ["ab cd\n", "ef gh"]
    assert list(split_text("ab cd\n\n ef gh", 6)) == ["ab", " cd\n\n", " ef gh"]
    assert list(split_text("abcdefgh", 3)) == ["abc", "def", "gh"]


def test_folder_is_recursive_sorted_and_text_only(tmp_path) -> None:
    for name in [
        "b/z.md",
        "b/a.TXT",
        "a.py",
        "c.bin",
        ".hidden/x.txt",
        "b/.x.txt",
        "pack.txt.gz",
        "empty.txt",
    ]:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        data = b"" if name == "empty.txt" else name.encode()
        path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    assert documents(tmp_path) == ["a.py", "b/a.TXT", "b/z.md", "pack.txt.gz"]
    (tmp_path / "b" / "link.txt").symlink_to(tmp_path / "a.py")
    (tmp_path / "linked").symlink_to(tmp_path / "b")
    assert documents(tmp_path)[1:] == [
        "b/a.TXT",
        "a.py",
        "b/z.md",
        "b/a.TXT",
        "a.py",
        "b/z.md",
        "pack.txt.gz",
    ]


@pytest.mark.parametrize(
    "suffix",
    [".jsonl", ".jsonlines", ".ndjson", ".JSONL", ".NdJson", ".ndjson.gz", ".JSONLINES.GZ"],
)
def test_names_of_json_lines(tmp_path, suffix: str) -> None:
    data = b'{"text": "uno"}\n{"text": "due"}\n'
    (tmp_path / f"x{suffix}").write_bytes(
        gzip.compress(data) if suffix.lower().endswith("gz") else data
    )
    for path in (tmp_path, tmp_path / f"x{suffix}", tmp_path / "x*"):
        assert documents(path) == ["uno", "due"]
    assert may_hold_records(str(tmp_path / f"x{suffix}")) and not may_hold_records("a.txt")


def test_a_folder_lists_the_files_that_are_not_read(tmp_path) -> None:
    for name in ["a.txt", "b.bin", "c.json", "d", "e.jsonl.bz2", ".hidden"]:
        (tmp_path / name).write_text(name)
    with pytest.warns(
        UserWarning,
        match=r": 4 files without the suffix of a text file are skipped: b\.bin, c\.json, d, …$",
    ):
        assert documents(tmp_path) == ["a.txt"]
    with pytest.raises(UserError, match=r"c\.json is a \.json file: give it the suffix \.jsonl"):
        documents(tmp_path / "c.json")


@pytest.mark.parametrize("block", [1, 2, 4, 4 << 20])
def test_a_byte_order_mark_is_not_text(tmp_path, monkeypatch, block: int) -> None:
    monkeypatch.setattr(corpus, "BLOCK_BYTES", block)
    (tmp_path / "a.txt").write_bytes("\ufeff\ufeffpiù\ufeff".encode())
    assert "".join(documents(tmp_path)) == "\ufeffpiù\ufeff"
    assert Corpus.open(str(tmp_path)).scan().characters == 5


@pytest.mark.parametrize("suffix", ["txt", "jsonl"])
@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "utf-16-be", "utf-32-be"])
def test_another_encoding_is_named(tmp_path, suffix: str, encoding: str) -> None:
    (tmp_path / f"a.{suffix}").write_bytes('\ufeff{"text": "più"}'.encode(encoding))
    with pytest.raises(
        UserError, match=rf"a\.{suffix} is {encoding[:6].upper()} \(byte order mark at byte 0\)"
    ):
        documents(tmp_path)


def test_lists_and_globs(tmp_path) -> None:
    for name in ["1.txt", "2.txt", "3.md", "[x].txt"]:
        (tmp_path / name).write_text(name)
    assert documents(tmp_path / "*.txt") == ["1.txt", "2.txt", "[x].txt"]
    assert documents(tmp_path / "[x].txt") == ["[x].txt"], "an existing name is no glob"
    found = find_corpus_files((str(tmp_path / "3.md"), str(tmp_path / "[12].txt")))
    assert [source.path.name for source in found] == ["3.md", "1.txt", "2.txt"]


def zstd(data: bytes) -> bytes:
    return pytest.importorskip(
        "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"
    ).compress(data)


PACKERS = {"": bytes, ".gz": gzip.compress, ".zst": zstd}


@pytest.mark.parametrize("packed", PACKERS)
def test_json_lines(tmp_path, packed: str) -> None:
    texts = [ODD, "", "due\n", "x" * 300_000]
    lines = "\ufeff" + "\n\r\n".join(
        json.dumps({"id": 1, "body": text}, ensure_ascii=False) for text in texts
    )
    path = tmp_path / f"r.jsonl{packed}"
    path.write_bytes(PACKERS[packed](lines.encode()))
    assert documents(path, "body") == [ODD, "due\n", "x" * 300_000]


def test_builtin_corpus_exists_and_is_bounded() -> None:
    sources = find_corpus_files("builtin:python")
    names = [source.path.name for source in sources]
    assert sources == find_corpus_files("builtin:python") and "argparse.py" in names
    assert 10**6 < sum(source.path.stat().st_size for source in sources) <= BUILTIN_BYTES
    assert not any(
        {"site-packages", "test", "idlelib", "lib2to3"} & set(source.path.parts)
        for source in sources
    )


def test_digest_depends_on_content_and_file_type_but_not_names(tmp_path) -> None:
    for name, content in [("a.txt", "uno"), ("b.txt", "uno"), ("c.txt", "due"), ("c.jsonl", "due")]:
        (tmp_path / name).write_text(content)
    digests = [
        Corpus.open(str(tmp_path / name)).digest()
        for name in ["a.txt", "b.txt", "c.txt", "c.jsonl"]
    ]
    assert digests[0] == digests[1] and len(set(digests)) == 3


def test_extent(tmp_path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "più"}\n{"text": ""}\n{"text": "🙂"}')
    (tmp_path / "b.txt").write_text("abc")
    extent = Corpus.open(str(tmp_path)).scan()
    assert extent.ends.tolist() == [3, 4, 7] and extent.characters == 7


def bad_corpora(folder: Path) -> dict[str, tuple[object, str]]:
    """Maps a name to (data.path, pattern of the error message)."""

    def file(name: str, content: bytes) -> Path:
        (folder / name).write_bytes(content)
        return folder / name

    (folder / "none").mkdir()
    (folder / "none" / "a.bin").write_bytes(b"x")
    os.mkfifo(folder / "pipe.txt")
    (folder / "loop.txt").symlink_to(folder / "loop.txt")
    (folder / "ring").mkdir()
    (folder / "ring" / "again").symlink_to(folder / "ring")
    (folder / "dangling").mkdir()
    (folder / "dangling" / "a.txt").symlink_to(folder / "nowhere")
    (folder / "hollow").mkdir()
    (folder / "hollow" / "a.txt").write_bytes(b"")
    record = b'{"text": "uno"}\n'
    return {
        "missing": (
            folder / "no.txt",
            "no corpus at .*no.txt.*: name a text file, a folder, a glob, builtin:python,"
            " builtin:recall, builtin:instructions or builtin:addition$",
        ),
        "empty": (file("empty.txt", b""), r"empty\.txt is empty"),
        "empty files": (folder / "hollow", "holds no text"),
        "white space": (file("blank.txt", b" \n\t\r\n"), "only white space"),
        "binary": (file("binary.txt", b"abc\0def"), r"binary\.txt is not text: byte 3 is NUL"),
        "latin-1": (
            file("latin.txt", "è più".encode("latin-1")),
            r"latin\.txt is not UTF-8 text: byte 0 is invalid",
        ),
        "cut character": (
            file("cut.txt", "più è".encode()[:-1]),
            r"cut\.txt is not UTF-8 text: byte 5 is invalid",
        ),
        "utf-16": (file("wide.txt", "più".encode("utf-16")), r"wide\.txt is UTF-16"),
        "surrogate": (
            file("half.txt", b"ab\xed\xa0\x80"),
            r"half\.txt is not UTF-8 text: byte 2 is invalid",
        ),
        "pipe": (folder / "pipe.txt", "a named pipe"),
        "device": ("/dev/zero", "a device"),
        "loop": (folder / "loop.txt", "cannot read .*loop.txt"),
        "folder loop": (folder / "ring", "a link to a folder that contains it"),
        "dangling link": (folder / "dangling", "does not exist"),
        "no text file": (folder / "none", "no text file in the folder"),
        "glob": (folder / "*.xyz", "no file matches"),
        "no zstd": (file("z.jsonl.zst", b"xxxxxxxxx"), "zstd"),
        "truncated zstd": (
            file("y.jsonl.zst", zstd(os.urandom(9999).hex().encode())[:-20]),
            "truncated",
        ),
        "NUL in a name": ("a\0b", "cannot read|no corpus"),
        "long name": ("x" * 5000, "cannot read"),
        "empty name": ("", "no corpus at ''"),
        "unknown builtin": ("builtin:ruby", "did you mean builtin:python"),
        "not JSON": (file("a.jsonl", record + b"{'text': 1}\n"), r"not JSON: .*a\.jsonl, line 2"),
        "no object": (
            file("b.jsonl", record + record + b"[1]"),
            r"must be a JSON object, got \[1\] .*line 3",
        ),
        "no field": (
            file("c.jsonl", b'{"body": "x"}'),
            r"lacks the field 'text'.*it has 'body' .*line 1",
        ),
        "no text": (
            file("d.jsonl", record + b'\n{"text": null}'),
            r"must be text, got null .*line 3",
        ),
        "NUL in a record": (
            file("e.jsonl", rb'{"text": "a\u0000"}'),
            r"U\+0000 at character 1.*line 1",
        ),
        "lone surrogate": (
            file("f.jsonl", rb'{"text": "\ud83d"}'),
            r"U\+D83D at character 0.*line 1",
        ),
        "records in latin-1": (
            file("g.jsonl", '{"text": "è"}'.encode("latin-1")),
            "byte 10 of the line .*line 1",
        ),
        "deep nesting": (file("h.jsonl", b"[" * 200_000), "not JSON"),
        "endless number": (file("i.jsonl", b"1" * 10_000), "not JSON|JSON object"),
        "no records": (file("j.jsonl", b"\n\n"), r"j\.jsonl holds no text"),
        "truncated gzip": (
            file("k.txt.gz", gzip.compress(os.urandom(9999).hex().encode())[:-20]),
            "truncated",
        ),
        "no gzip": (file("l.jsonl.gz", record), "not a valid gzip file"),
        "damaged gzip": (
            file("m.txt.gz", gzip.compress(b"abc" * 999)[:-8] + b"\0" * 8),
            "not a valid gzip file",
        ),
    }


def test_bad_files_are_skipped_and_listed_with_the_reason(tmp_path) -> None:
    """The tokens are those of the other files. By default, the first bad file is an error."""
    for folder in ("bad", "good"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.txt").write_text("nel mezzo")
        (tmp_path / folder / "zz.jsonl").write_text('{"text": "del cammin di nostra vita"}\n' * 9)
        (tmp_path / folder / "blank.txt").write_bytes(b" \n\t\r\n")
    bad_corpora(tmp_path / "bad")
    (tmp_path / "bad" / "ring" / "again").unlink()  # an error of the folder

    def build(path: str, **changes: object) -> tuple[list[int], list[int]]:
        base = {
            "data.path": str(tmp_path / path),
            "tokenizer.tokenizer_type": "byte",
            "model.max_context": 8,
        }
        config = build_config({}, base | {"training.batch_size": 1} | changes)
        _, store = prepare_data(config, tmp_path / "store")
        return store.training_ids.tolist(), store.validation_ids.tolist()

    skip = {"data.on_bad_file": "skip"}
    with pytest.warns(UserWarning) as caught:
        assert build("bad", **skip) == build("good", **skip) == build("good")
    lines = [str(warning.message) for warning in caught if "is skipped" in str(warning.message)]
    reasons = {
        "binary.txt": "is not text: byte 3 is NUL", "latin.txt": "is not UTF-8 text",
        "wide.txt": "is UTF-16", "pipe.txt": "is a named pipe", "loop.txt": "cannot read",
        "dangling/a.txt": "does not exist", "a.jsonl": "not JSON",
        "c.jsonl": "lacks the field 'text'", "e.jsonl": "U+0000", "k.txt.gz": "truncated",
    }  # fmt: skip
    for name, reason in reasons.items():
        (line,) = [line for line in lines if f"bad/{name}" in line]
        assert line.startswith("a file is skipped (data.on_bad_file): ") and reason in line
    with pytest.raises(UserError):
        build("bad")
    with (
        pytest.warns(UserWarning),
        pytest.raises(UserError, match=r"no file of the corpus .* can be read: .*byte 3 is NUL"),
    ):
        build("bad/binary.txt", **skip)
    with (
        pytest.warns(UserWarning),
        pytest.raises(UserError, match=r"no file of the corpus .* is plain text"),
    ):
        build("good/a.txt", **skip, **{"training.objective": "sft"})


def test_invalid_corpora_on_the_command_line(tmp_path, monkeypatch, capfd) -> None:
    """The command exits with 2, prints one line to stderr and leaves no run directory, so it can be
    corrected and repeated.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "corpora").mkdir()
    for name, (path, message) in bad_corpora(tmp_path / "corpora").items():
        run = tmp_path / "run"
        code = cli.main(
            [
                "train",
                "--config",
                str(ROOT / "configs/dante.yaml"),
                f"--data_path={path}",
                "--run_dir",
                str(run),
            ]
        )
        out, err = capfd.readouterr()
        assert (code, out, err.count("\n")) == (2, "", 1) and err.startswith("error: "), (name, err)
        assert re.search(message, err) or "data.path must be a path" in err, (name, err)
        assert not run.exists(), name


def test_invalid_corpora_raise_one_sentence_each(tmp_path) -> None:
    cases = bad_corpora(tmp_path)
    assert len(cases) >= 30
    for name, (path, message) in cases.items():
        try:
            Corpus.open(str(path)).scan()
        except UserError as error:
            assert re.search(message, str(error)) and "\n" not in str(error), (name, error)
        else:
            pytest.fail(f"{name} was accepted")


def test_socket(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)  # a socket's path must be short
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("s.txt")
        with pytest.raises(UserError, match=ERRORS["a_socket"]):
            Corpus.open("s.txt")


def test_unreadable(tmp_path, monkeypatch) -> None:
    path = tmp_path / "a.txt"
    path.write_text("x")

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(
        compressed_files, "open", refuse, raising=False
    )  # as root no file is unreadable
    with pytest.raises(UserError, match=ERRORS["cannot_read_a_txt_permission"]):
        Corpus.open(str(path)).scan()


def test_a_corpus_that_changes_while_it_is_read_is_refused(tmp_path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("uno\n")
    opened = Corpus.open(str(path))
    extent = opened.scan()
    path.write_text("due\n")
    with pytest.raises(UserError, match=ERRORS["changed_while_it_was_read"]):
        list(opened.read_text(extent.digest))
    path.unlink()
    with pytest.raises(UserError, match=ERRORS["no_such_file"]):
        list(opened.read_text(extent.digest))


def test_a_record_that_is_too_long_is_refused(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(corpus, "RECORD_BYTES", 20)
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n{"text": "xxxxxxxxxxxxxxx"}\n')
    with pytest.raises(UserError, match=ERRORS["longer_than_20_bytes_line"]):
        Corpus.open(str(tmp_path)).scan()


def test_one_giant_line(tmp_path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("è".encode() * (5 << 20))
    pieces = [text for _, text in Corpus.open(str(path)).read_text()]
    assert len(pieces) > 1 and sum(map(len, pieces)) == 5 << 20
