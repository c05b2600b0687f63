"""`eval watermark` on texts with and without a watermark."""

import json

import numpy as np
import pytest

from dantinox.cli import main
from dantinox.config import UserError
from dantinox.generation import load
from dantinox.lab.measure.watermark_detection import detect_watermark, watermark_lines
from dantinox.sampling import detect

KEYS = [31, 41, 59, 26, 53, 58, 97, 93]
LETTERS = [ord(letter) for letter in "abcdefghijklmnopqrstuvwxyz "]


@pytest.fixture(scope="module")
def texts():
    """Four texts of 100 random letters. In the first two, each letter is the one of four with the
    largest statistic.
    """
    random = np.random.default_rng(0)
    made = []
    for marked in (True, True, False, False):
        ids = random.choice(LETTERS, 4).tolist()
        while len(ids) < 100:
            drawn = random.choice(LETTERS, 4 if marked else 1).tolist()
            ids.append(max(drawn, key=lambda letter: detect([*ids[-4:], letter], KEYS, 5).z))
        made.append(bytes(ids).decode())
    return made


@pytest.mark.slow
def test_generated_texts_are_found(run_dir, tmp_path):
    """The model draws 100 letters almost at random; the first two texts have the watermark."""
    run = load(run_dir)
    base = {"allowed_tokens": LETTERS, "temperature": 50.0, "max_new_tokens": 100}
    marks = [{"watermark_keys": KEYS}] * 2 + [{}] * 2
    texts = [run.generate("b", seed=seed, **base, **mark).text for seed, mark in enumerate(marks)]
    path = tmp_path / "generated.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    found = detect_watermark(run_dir, str(path), watermark_keys=KEYS)
    assert [one.p < 1e-4 for one in found.documents] == [
        True,
        True,
        False,
        False,
    ] and found.marked == 2


@pytest.fixture
def file(texts, tmp_path):
    path = tmp_path / "texts.jsonl"
    path.write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in [*texts, "abc"]), encoding="utf-8"
    )
    return str(path)


def test_marked_texts_are_found(run_dir, texts, file, capsys):
    found = detect_watermark(run_dir, file, watermark_keys=KEYS)
    assert found.documents == [*(detect(list(text.encode()), KEYS, 5) for text in texts), None]
    assert [one.p < 1e-4 for one in found.documents[:4]] == [
        True,
        True,
        False,
        False,
    ] and found.marked == 2
    assert max(abs(one.z) for one in found.documents[2:4]) < 3.5
    others = detect_watermark(run_dir, file, watermark_keys=[key + 1 for key in KEYS])
    assert others.marked == 0
    arguments = [
        "eval",
        "watermark",
        "--run_dir",
        str(run_dir),
        "--data_path",
        file,
        "--watermark_keys",
        *map(str, KEYS),
    ]
    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == watermark_lines(found)
    assert lines[-2:] == [
        "1 documents have fewer than 5 tokens",
        "2 of 4 documents have the watermark (p < 0.0001; 8 keys, sequences of 5 tokens)",
    ]
    assert main([*arguments, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (
        record["marked"] == 2
        and record["documents"][4] is None
        and record["documents"][0]["tokens"] == 96
    )


def test_errors(run_dir, file, capsys):
    cases = (
        (
            {},
            (
                "the run has no generation.watermark_keys: give the keys"
                " of the text with --watermark_keys"
            ),
        ),
        (
            {"watermark_keys": KEYS, "watermark_ngram": 16, "tokens": 15},
            "--tokens must be at least 16, the length of the hashed sequences, got 15",
        ),
        (
            {"watermark_keys": KEYS, "tokens": 0},
            "--tokens must be at least 5, the length of the hashed sequences, got 0",
        ),
        ({"watermark_keys": [-1]}, "watermark_keys must be a list"),
        ({"watermark_ngram": 4}, "watermark_ngram has no effect while"),
    )
    for settings, sentence in cases:
        with pytest.raises(UserError, match=sentence):
            detect_watermark(run_dir, file, **settings)
    assert main(["eval", "watermark", "--run_dir", str(run_dir)]) == 2
    assert capsys.readouterr().err == "error: eval watermark needs --data_path, the text to test\n"
