"""Every damaged or inconsistent checkpoint of `damaged.py` gives an error in one sentence, and
nothing is written.
"""

import shutil

import numpy as np
import pytest

from dantinox.config import TokenizerSection, UserError, build_config
from dantinox.interop import checkpoints
from dantinox.interop.checkpoints import export_checkpoint, import_checkpoint
from dantinox.interop.gguf import gguf_file
from dantinox.interop.gguf.gguf_checkpoint import export_gguf
from dantinox.interop.gguf.gguf_file import open_gguf
from dantinox.interop.hf.hf_config import hf_config_to_settings
from dantinox.interop.hf.hf_weights import parameter_shapes, to_hf
from dantinox.text import train_tokenizer

from .damaged import CUTS, FOLDERS, GGUF, EditableGGUF, damaged_gguf, is_one_sentence, text

CONFIG = {
    "model_type": "llama", "vocab_size": 300, "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "tie_word_embeddings": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A GGUF file with Q8_0 tensors, and the Hugging Face folder exported from it."""
    place = tmp_path_factory.mktemp("whole")
    sample = "the cat and the dog and the hat of the man " * 9
    tokenizer = train_tokenizer(
        TokenizerSection(tokenizer_type="bpe", vocab_size=300), lambda: iter([sample])
    )
    config = CONFIG | {"vocab_size": tokenizer.vocab_size}
    settings = build_config(hf_config_to_settings(config, 64))
    rng = np.random.default_rng(0)
    shapes = parameter_shapes(settings.architecture(tokenizer.vocab_size))
    weights = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    export_gguf(
        place / "x.gguf",
        settings,
        *to_hf(settings, tokenizer.vocab_size, weights, config),
        tokenizer,
        kind="q8_0",
    )
    import_checkpoint(place / "x.gguf", place / "run", "float32")
    export_checkpoint(place / "run", place / "hf", "hf")
    return place


def refused(source, tmp_path):
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError) as error:
        import_checkpoint(source, tmp_path / "run")
    assert is_one_sentence(str(error.value)), str(error.value)
    assert sorted(tmp_path.rglob("*")) == before


LARGE = ("text of 70 MB", "template of 50 MB")


@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(name, marks=pytest.mark.slow) if name in LARGE else name for name in GGUF),
        *(f"cut in {name}" for name in CUTS),
        *("half of the data", "a byte less"),
    ],
)
def test_damaged_gguf_is_an_error_in_one_sentence(name, whole, tmp_path):
    dict(damaged_gguf(whole / "x.gguf"))[name](tmp_path / "x.gguf")
    refused(tmp_path / "x.gguf", tmp_path)


def test_texts_have_a_largest_size(whole, tmp_path, monkeypatch):
    """A file with a text of this size is read, one with a byte more is not; so it is with the chat
    template of a checkpoint.
    """
    longest = max(
        len(token.encode())
        for token in open_gguf(whole / "x.gguf").metadata["tokenizer.ggml.tokens"]
    )
    monkeypatch.setattr(gguf_file, "MAX_STRING_BYTES", size := 64 + longest)
    monkeypatch.setattr(checkpoints, "MAX_TEMPLATE_BYTES", 32)
    for key, most in (("general.description", size), ("tokenizer.chat_template", 32)):
        for length in (most, most + 1):
            parts = EditableGGUF(memoryview((whole / "x.gguf").read_bytes()))
            parts.set(key, text("é" + "x" * (length - 2)))
            path = tmp_path / f"{key} {length}.gguf"
            path.write_bytes(b"".join(parts.chunks()))
            if length == most:
                import_checkpoint(path, tmp_path / f"run of {key}", "float32")
            else:
                refused(path, tmp_path)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in LARGE else n for n in FOLDERS]
)
def test_damaged_folder_is_an_error_in_one_sentence(name, whole, tmp_path):
    shutil.copytree(whole / "hf", tmp_path / "hf")
    FOLDERS[name](tmp_path / "hf")
    refused(tmp_path / "hf", tmp_path)
