"""Config files of DantinoX 0."""

import pytest

from dantinox.config import UserError, load_config
from tests.error_texts import ERRORS

SECTIONS = """
model: {dim: 64, n_heads: 4, head_size: 16, num_blocks: 2, max_context: 32}
moe: {use_moe: true, n_experts: 4, top_k_mlp: 2, expansion: 4}
attention: {use_rotary_pos: true, sliding_window: False, context_window: 32, no_sink: true}
tokenizer: {tokenizer_type: "char", vocab_size: 5000, tokenizer_path: "configs/vocab.json"}
data: {dataset_source: "huggingface", dataset_name: "somebody/corpus", streaming: true}
training: {lr: 0.0005, batch_size: 64, grad_accum: 16, epochs: 200}
generation: {max_generations: 80}
logging: {eval_iters: 20, log_file: "training_log.csv"}
"""


def test_every_setting_of_a_v0_config_is_read_and_inactive_ones_are_reported(tmp_path):
    path = tmp_path / "default_config.yaml"
    path.write_text(SECTIONS)
    with pytest.warns(UserWarning, match=ERRORS["has_no_effect_have_no"]) as caught:
        config = load_config(path)
    assert any("attention.context_window" in str(warning.message) for warning in caught)
    assert any("tokenizer.tokenizer_path" in str(warning.message) for warning in caught)
    assert (
        config.data.path == "somebody/corpus"
        and config.data.streaming
        and config.training.eval_every == 20
    )
    assert (
        config.generation.max_new_tokens == 80 and config.moe.expansion == 4 and config.moe.use_moe
    )


def test_the_older_name_of_the_corpus(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("data: {dataset_name: a.txt}")
    assert (
        load_config(path).data.path == "a.txt"
        and load_config(path, {"data.path": "b.txt"}).data.path == "b.txt"
    )
    for spelled_out in (
        "{path: a.txt, dataset_name: null}",
        "{path: null, dataset_name: a.txt}",
    ):  # as runs stored it
        path.write_text(f"data: {spelled_out}")
        assert load_config(path).data.path == "a.txt"


def test_a_run_without_sections_is_recognized(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("absolute_pos: true\nbatch_size: 64\neval_iters: 20\n")
    with pytest.raises(UserError) as caught:
        load_config(path)
    says = (
        f"{path} has no sections, like a config of DantinoX 0: write"
        " absolute_pos under attention: and so on"
    )
    assert str(caught.value).startswith(says)
