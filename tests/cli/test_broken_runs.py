"""Run directories that are missing, incomplete or damaged are reported in one sentence."""

import pytest

from dantinox import cli
from dantinox.cli import generate as generating
from dantinox.config import UserError
from tests.cli.expected import assert_one_sentence
from tests.error_texts import ERRORS


def test_a_directory_that_is_not_a_run(dantinox, tmp_path, copy):
    (tmp_path / "empty").mkdir()
    assert_one_sentence(
        dantinox("generate", "--run_dir", tmp_path / "nowhere"), "no run directory at", "nowhere"
    )
    assert_one_sentence(dantinox("generate", "--run_dir", tmp_path / "empty"), "config.yaml")
    (copy / "model_weights.msgpack").unlink()
    assert_one_sentence(
        dantinox("generate", "--run_dir", copy), "has no weights yet", "model_weights.msgpack"
    )


@pytest.mark.parametrize(
    ("name", "content", "parts"),
    [
        ("model_weights.msgpack", b"", ["model_weights.msgpack"]),
        ("model_weights.msgpack", b"\x00 no weights", ["model_weights.msgpack"]),
        ("config.yaml", b"model: {dim: [}", ["config.yaml", "line 1"]),
        (
            "config.yaml",
            b"model: {dim: 48, n_heads: 4}",
            ["config.yaml is damaged: it has 28 bytes", "--accept"],
        ),
        ("config.yaml", b"\xff\xfe\x00", ["config.yaml"]),
        ("config.yaml", b"modle: {dim: 32}", ["modle", "model"]),
        ("tokenizer.json", b"{}", ["tokenizer.json"]),
        ("tokenizer.json", b'{"version": "1.0"', ["tokenizer.json"]),
        ("tokenizer.json", b"\xff", ["tokenizer.json"]),
        ("tokenizer.json", None, ["tokenizer.json"]),
    ],
)
def test_a_damaged_file_is_reported(dantinox, copy, name, content, parts):
    if content is None:
        (copy / name).unlink()
    else:
        (copy / name).write_bytes(content)
    assert_one_sentence(dantinox("generate", "--run_dir", copy), *parts)


def test_a_truncated_weights_file(dantinox, copy):
    path = copy / "model_weights.msgpack"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert_one_sentence(dantinox("generate", "--run_dir", copy), "model_weights.msgpack")


def test_the_tokenizer_of_another_run(dantinox, copy):
    from dantinox.config import TokenizerSection
    from dantinox.text import train_tokenizer

    characters = train_tokenizer(TokenizerSection(tokenizer_type="char"), lambda: iter(["abc"]))
    (copy / "tokenizer.json").write_text(characters.to_json(), encoding="utf-8")
    assert_one_sentence(
        dantinox("generate", "--run_dir", copy), "tokenizer.json is damaged", "--accept"
    )
    assert dantinox("verify", copy)[0] == 1
    assert dantinox("verify", copy, "--accept")[0] == 0
    assert_one_sentence(dantinox("generate", "--run_dir", copy), "model_weights.msgpack", "shape")


def test_debug_shows_the_traceback(run_dir):

    with pytest.raises(UserError, match=ERRORS["top_p"]):
        cli.main(["generate", "--run_dir", str(run_dir), "--top_p", "7", "--debug"])


def test_ctrl_c_prints_one_word(generate, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(generating, "_prompts", interrupted)
    assert generate() == (130, "", "interrupted\n")
