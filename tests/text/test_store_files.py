"""The files of a store: their content for every kind of corpus and tokenizer, and builds that are
interrupted.
"""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from dantinox.config import build_config
from dantinox.text import has_partial, prepare_data, store_writer

from .stores import cases, content_digest, use_small_blocks

# The digests of the stores in release 1.0.0rc1. A run with these tokens continues with the same
# batches.
DIGESTS = json.loads(Path(__file__).with_name("stores.json").read_text())


@pytest.mark.parametrize("blocks", ["small", pytest.param("default", marks=pytest.mark.slow)])
def test_the_files_of_a_store_do_not_change(tmp_path, monkeypatch, blocks):
    if blocks == "small":
        use_small_blocks(monkeypatch)
    found = {}
    for name, tokenizer, config in cases(tmp_path):
        prepare_data(config, tmp_path / "store" / name, tokenizer)
        found[name] = content_digest(tmp_path / "store" / name)
    assert found == DIGESTS


def interrupt_after(calls):
    """Returns a `progress` that raises KeyboardInterrupt in the given call of the stage of
    encoding, and its list of calls.
    """
    seen = []

    def progress(stage, *numbers):
        seen.append((stage, *numbers))
        if len([name for name, *_ in seen if name.startswith("encoding")]) == calls:
            raise KeyboardInterrupt

    return progress, seen


def interrupt(config, directory, tokenizer, calls):
    progress, _ = interrupt_after(calls)
    with pytest.raises(KeyboardInterrupt):
        prepare_data(config, directory, tokenizer, progress)
    assert has_partial(directory)


CONTINUED = [
    "records, bpe",
    "mixture, other",
    "val_path, char",
    "list, byte",
    "sft, bpe",
    "kto, byte",
    "grpo, bpe",
    "dpo, char",
]


def test_an_interrupted_build_continues_with_equal_files(tmp_path, monkeypatch):
    use_small_blocks(monkeypatch)
    for name, tokenizer, config in cases(tmp_path):
        if name not in CONTINUED:
            continue
        directory = tmp_path / "store" / name
        progress, whole = interrupt_after(None)
        prepare_data(config, tmp_path / "whole" / name, tokenizer, progress)
        for number in itertools.count():
            progress, seen = interrupt_after(number % 3 + 2)
            try:
                prepare_data(config, directory, tokenizer, progress)
                break
            except KeyboardInterrupt:
                for file in directory.glob(".tokens.partial*"):
                    if file.name != store_writer.STATE:  # a write that the state does not contain
                        file.write_bytes(file.read_bytes() + b"x" * number)
        assert number > 0 and len(seen) < len(whole) - 1, "it has continued"
        assert not seen or (seen[-1] == whole[-1] and seen[-1][1] == seen[-1][2])
        assert content_digest(directory) == DIGESTS[name], name
        assert not list(directory.glob(".tokens*"))


def test_other_inputs_start_again(tmp_path, monkeypatch):
    use_small_blocks(monkeypatch)
    found = {name: inputs for name, *inputs in cases(tmp_path)}
    directory, (bpe, config), (byte, _) = (
        tmp_path / "store",
        found["records, bpe"],
        found["records, byte"],
    )
    record = json.dumps({"text": "another text"}) + "\n"
    (tmp_path / "other.jsonl").write_text(record + (tmp_path / "records.jsonl").read_text())
    elsewhere = config.model_copy(
        update={"data": config.data.model_copy(update={"path": str(tmp_path / "other.jsonl")})}
    )
    for tokenizer, changed in ((byte, config), (bpe, elsewhere)):
        interrupt(config, directory, bpe, 4)
        progress, seen = interrupt_after(None)
        prepare_data(changed, directory, tokenizer, progress)
        prepare_data(changed, tmp_path / "whole", tokenizer)
        assert 0 < seen[0][1] < 700 and content_digest(directory) == content_digest(
            tmp_path / "whole"
        )
    for damage in (b"", b"{", b"[]", b'{"inputs": {}, "written": {}}'):
        interrupt(config, directory, bpe, 4)
        (directory / store_writer.STATE).write_bytes(damage)
        prepare_data(config, directory, bpe)
        assert content_digest(directory) == DIGESTS["records, bpe"]
        (directory / "tokens.json").unlink()
    interrupt(config, directory, bpe, 4)
    (directory / store_writer.TOKENS).write_bytes(b"")
    prepare_data(config, directory, bpe)
    assert content_digest(directory) == DIGESTS["records, bpe"]


def test_a_trained_tokenizer_is_kept_with_the_encoded_part(tmp_path, monkeypatch):
    next(cases(tmp_path))
    use_small_blocks(monkeypatch)
    given = {
        "data.path": str(tmp_path / "texts"),
        "tokenizer.tokenizer_type": "bpe",
        "tokenizer.vocab_size": 290,
    }
    config = build_config({}, given | {"model.max_context": 8, "training.batch_size": 1})
    whole, _ = prepare_data(config, tmp_path / "whole")
    interrupt(config, tmp_path / "store", None, 5)
    progress, seen = interrupt_after(None)
    tokenizer, _ = prepare_data(config, tmp_path / "store", None, progress)
    assert {stage for stage, *_ in seen} == {
        "encoding the corpus"
    } and tokenizer.to_json() == whole.to_json()
    assert content_digest(tmp_path / "store") == content_digest(tmp_path / "whole")
    interrupt(config, tmp_path / "again", None, 5)
    progress, seen = interrupt_after(None)
    more = build_config(
        {}, {**given, "tokenizer.vocab_size": 291, "model.max_context": 8, "training.batch_size": 1}
    )
    assert prepare_data(more, tmp_path / "again", None, progress)[0].vocab_size == 291
    assert seen[0][0] == "training the tokenizer" and not list(
        (tmp_path / "again").glob(".tokens*")
    )


def test_an_error_keeps_nothing(tmp_path, monkeypatch):
    next(cases(tmp_path))
    use_small_blocks(monkeypatch)
    config = build_config(
        {}, {"data.path": str(tmp_path / "one.txt"), "tokenizer.tokenizer_type": "byte"}
    )

    def fail(*_):
        raise RuntimeError("a fault")

    with pytest.raises(RuntimeError):
        prepare_data(config, tmp_path / "store", None, fail)
    assert [path.name for path in (tmp_path / "store").iterdir()] == [".lock"] and not has_partial(
        tmp_path / "store"
    )


KILLED = """
import os, signal, sys
from dantinox.config import build_config
from dantinox.text import build_store, prepare_data, store_writer
build_store.BATCH_CHARACTERS, store_writer.SAVE_SECONDS = 300, 0
def progress(stage, done, total):
    if len(sys.argv) > 3 and done > 1000:
        os.kill(os.getpid(), signal.SIGKILL)
    print(done)
config = build_config({}, {"data.path": sys.argv[1], "tokenizer.tokenizer_type": "byte", "model.max_context": 8,
    "training.batch_size": 1})
prepare_data(config, sys.argv[2], None, progress)
"""


@pytest.mark.slow
def test_a_killed_build_continues(tmp_path):
    """The state is written while the text is encoded, so that a process that ends without notice
    leaves it.
    """
    next(cases(tmp_path))
    command = [sys.executable, "-c", KILLED, str(tmp_path / "one.txt"), str(tmp_path / "store")]
    killed = subprocess.run([*command, "kill"], capture_output=True, text=True, check=False)
    assert killed.returncode == -9 and (tmp_path / "store" / store_writer.STATE).exists()
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (
        int(done.stdout.split()[0]) > 1000
        and content_digest(tmp_path / "store") == DIGESTS["one, byte"]
    )
