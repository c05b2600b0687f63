"""Tests embeddings against NumPy pooling of `Transformer.hidden` over the whole text."""

import jax
import numpy as np
import pytest
from tokenizers import Tokenizer as Core
from tokenizers import models, pre_tokenizers, processors

from dantinox.config import ExpertsConfig, LatentConfig, UserError, build_config
from dantinox.generation import LoadedModel
from dantinox.generation.api.embedder import Embedder, embedding_ids
from dantinox.text import Tokenizer
from tests.error_texts import ERRORS

from . import builder
from .builder import BYTES

MODELS = {
    "experts": {
        "windows": (None, 4),
        "experts": ExpertsConfig(4, 2, shared_dim=16),
        "sink_logits": True,
    },
    "shared keys and per-layer inputs": {
        "windows": (4, None, 4, None),
        "kv_shared_layers": 2,
        "per_layer_dim": 6,
    },
    "latents": {
        "windows": (None, 4),
        "kv_heads": 4,
        "latent": LatentConfig(12, 4, 6, query_rank=10),
    },
}
# Vectors of length 1, after two layers of sums of 48 products and a mean over up to 192 tokens.
TOLERANCE = 4 * (2 * 3 * 48 + 192) ** 0.5 * 2**-24
TEXTS = ["a", "once upon a time", "x" * 33, "there was a fox; " * 3, "z" * 64]


@pytest.fixture(scope="module")
def model():
    return builder.byte_model(64, windows=(None,))


@jax.jit
def _hidden(model, tokens_BT, positions_BT):
    return model.hidden(tokens_BT, positions_BT)[0]


def reference(model, ids, pooling):
    """Pools the hidden states of one call over the whole text, in float64. All texts are padded to
    one length.
    """
    T = model.config.max_context
    tokens_BT, positions_T = np.zeros((1, T), np.int32), np.arange(T)
    tokens_BT[0, : len(ids)] = ids
    x_BTD = _hidden(model, tokens_BT, np.where(positions_T < len(ids), positions_T, -1)[None])
    x_TD = np.asarray(x_BTD[0, : len(ids)], np.float64)
    pooled_D = x_TD.mean(axis=0) if pooling == "mean" else x_TD[-1]
    return pooled_D / np.sqrt((pooled_D**2).sum())


def references(model, pooling):
    return [reference(model.model, model.prompt_ids(text), pooling) for text in TEXTS]


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_embeddings_equal_pooled_hidden_states(model, pooling):
    expected = references(model, pooling)
    found = model.embed(TEXTS, pooling=pooling)
    assert found.dtype == np.float32 and found.shape == (len(TEXTS), 32)
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(
        np.linalg.norm(found.astype(np.float64), axis=1), 1, rtol=0, atol=TOLERANCE
    )
    assert np.abs(found[0] - found[1]).max() > 0.05  # the texts differ


def test_a_sliding_window_uses_a_ring_buffer():
    model = builder.byte_model(64, windows=(24,))
    for pooling in ("mean", "last"):
        np.testing.assert_allclose(
            model.embed(TEXTS, pooling=pooling), references(model, pooling), rtol=0, atol=TOLERANCE
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("experts", marks=pytest.mark.slow),
        "shared keys and per-layer inputs",
        "latents",
    ],
)
def test_other_architectures(name):
    config = builder.config(**MODELS[name])
    model = LoadedModel(build_config({}), builder.model(config), BYTES)
    ids = [[5, 9, 2, 33, 7] * 8, [1, 2, 3]]
    for pooling in ("mean", "last"):
        expected = [reference(model.model, row, pooling) for row in ids]
        embedder = Embedder(model, model.config, config.max_context, rows=2, chunk=16)
        embedder.start(ids, pooling)
        while not embedder.done:
            embedder.step()
        np.testing.assert_allclose(embedder.result(), expected, rtol=0, atol=TOLERANCE)


@pytest.mark.filterwarnings("ignore:all heads get the same share")
def test_settings_of_the_cache_and_the_weights(model):
    """A compressed cache changes nothing, although it reorders the heads. Quantized weights change
    the vectors slightly.
    """
    plain = model.embed(TEXTS)
    compressed = model.settings({"kv_budget": 0.5})
    np.testing.assert_allclose(model.embed(TEXTS, kv_budget=0.5), plain, rtol=0, atol=TOLERANCE)
    embedder = Embedder(model, compressed, 64)
    embedder.start([model.prompt_ids(TEXTS[3])], "mean")
    while not embedder.done:
        embedder.step()
    np.testing.assert_allclose(embedder.result()[0], plain[3], rtol=0, atol=TOLERANCE)
    quantized = model.embed(TEXTS, weights="bfloat16")
    assert np.abs(quantized - plain).max() > 1e-6 and (quantized * plain).sum(axis=1).min() > 0.98


@pytest.mark.parametrize(
    ("rows", "chunk"),
    [
        (3, 16),
        *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((1, 16), (1, 64), (3, 64))),
    ],
)
def test_chunks_neighbors_and_earlier_texts_do_not_change_an_embedding(model, rows, chunk):
    """The cache still has the keys of the texts before, and rows of different lengths are
    padded.
    """
    ids = [model.prompt_ids(text) for text in TEXTS]
    alone = model.embed(TEXTS)
    embedder = Embedder(model, model.config, 64, rows=rows, chunk=chunk)
    for numbers in ([4, 1, 2], [0, 3, 4], [3, 0], [2]):
        embedder.start([ids[number] for number in numbers[:rows]], "mean")
        tokens = 0
        while not embedder.done:
            tokens += embedder.step()
        assert tokens == sum(len(ids[number]) for number in numbers[:rows])
        np.testing.assert_allclose(embedder.result(), alone[numbers[:rows]], rtol=0, atol=TOLERANCE)


def test_one_string_and_no_text(model):
    assert model.embed("abc").shape == (1, 32)
    assert model.embed([]).shape == (0, 32)


@pytest.mark.parametrize(("texts", "options", "key"), [
    (["a" * 193], {}, "embed_length"),
    (["a"], {"pooling": "max"}, "embed_pooling"),
    ([3], {}, "embed_texts"),
    (["a"], {"tensor_parallel": 2}, "embed_tensor"),
])  # fmt: skip
def test_invalid_arguments(texts, options, key):
    with pytest.raises(UserError, match=ERRORS[key]):
        builder.byte_model(192, windows=(None,)).embed(texts, **options)


def test_the_post_processor_appends_tokens():
    """As Qwen3-Embedding: the EOS token follows the text, as transformers add it."""
    core = Core(
        models.WordLevel({"a": 0, "b": 1, "<s>": 2, "</s>": 3, "<unk>": 4}, unk_token="<unk>")
    )
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.add_special_tokens(["<s>", "</s>"])
    model = builder.byte_model(64, windows=(None,))
    for template, expected in (
        ("$A </s>", [0, 1, 3]),
        ("<s> $A </s> </s>", [2, 0, 1, 3, 3]),
        ("<s> $A", [2, 0, 1]),
    ):
        core.post_processor = processors.TemplateProcessing(
            template, special_tokens=[("<s>", 2), ("</s>", 3)]
        )
        roles = {
            "bos_token": "<s>",
            "eos_token": "</s>",
            "add_bos_token": template.startswith("<s>"),
        }
        tokenizer = Tokenizer(core.to_str(), roles=roles)
        assert embedding_ids(LoadedModel(model.config, model.model, tokenizer), "a b") == expected
        assert core.encode("a b").ids == expected
