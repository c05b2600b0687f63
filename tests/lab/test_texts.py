"""Special tokens around a text are the same in training, in evaluation and as a prompt."""

import json
from types import SimpleNamespace

import pytest
from tokenizers.processors import TemplateProcessing

from dantinox.config import TokenizerSection, build_config
from dantinox.generation.model_bundle import ModelBundle
from dantinox.lab.measure.texts import read_tokens
from dantinox.text import Tokenizer, prepare_data, train_tokenizer

BYTES = train_tokenizer(TokenizerSection(tokenizer_type="byte"), lambda: iter(()))
BOS, EOS = BYTES.bos_id, BYTES.eos_id


def with_post_processor(single):
    core = Tokenizer(BYTES.to_json()).core
    core.post_processor = TemplateProcessing(
        single=single, special_tokens=[("<bos>", BOS), ("<eos>", EOS)]
    )
    return core.to_str()


@pytest.mark.parametrize(
    ("content", "roles", "before"),
    [
        (BYTES.to_json(), {}, [BOS]),
        (BYTES.to_json(), {"stop_tokens": ["<eos>", "<pad>"]}, [BOS]),  # as fine-tuning writes it
        (BYTES.to_json(), {"add_bos_token": True}, [BOS]),
        (BYTES.to_json(), {"add_bos_token": False}, []),
        (BYTES.to_json(), {"bos_token": None}, []),
        (BYTES.to_json(), {"bos_token": "<eos>"}, [EOS]),
        (with_post_processor("<bos> $A"), {"bos_token": "<bos>"}, [BOS]),
        (with_post_processor("<bos> $A"), {"add_bos_token": False}, []),
        (with_post_processor("$A <eos>"), {"bos_token": "<bos>"}, []),
    ],
)
def test_special_tokens_around_a_text(tmp_path, content, roles, before):
    """Without `add_bos_token`, transformers follows the post-processor of the tokenizer.json."""
    tokenizer, texts = (
        Tokenizer(content, roles=roles),
        [
            "first text",
            "second",
            "third of all",
            "held out",
        ],
    )
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    config = build_config(
        {},
        {"data.path": str(tmp_path / "a.jsonl"), "model.max_context": 4, "training.batch_size": 1},
    )
    _, store = prepare_data(config, tmp_path / "store", tokenizer)
    bundle = SimpleNamespace(tokenizer=tokenizer)
    prompts = [ModelBundle.prompt_ids(bundle, text) for text in texts]
    assert prompts == [[*before, *text.encode()] for text in texts]
    documents = [token for prompt in prompts for token in [*prompt, EOS]]
    assert [*store.training_ids, *store.validation_ids] == documents
    assert (
        read_tokens(tokenizer, str(tmp_path / "a.jsonl"), "text", 1000).tolist() == documents[:-1]
    )


def test_another_rule_rebuilds_the_tokens(tmp_path):
    (tmp_path / "a.txt").write_text("some text " * 9)
    config = build_config(
        {}, {"data.path": str(tmp_path / "a.txt"), "model.max_context": 4, "training.batch_size": 1}
    )
    for roles, first in (({}, BOS), ({"add_bos_token": False}, ord("s")), ({}, BOS)):
        tokenizer = Tokenizer(BYTES.to_json(), roles=roles)
        assert prepare_data(config, tmp_path / "store", tokenizer)[1].training_ids[0] == first
