"""The perplexity of a text against log-probabilities of single windows, summed in NumPy."""

import json
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dantinox.cli import main
from dantinox.config import UserError
from dantinox.generation import load
from dantinox.lab.measure.perplexity import (
    ScoringInput,
    measure_perplexity,
    perplexity_lines,
    score_sequences,
    sliding_windows,
)
from dantinox.lab.measure.texts import read_documents

TEXT = "aè€😀b\nc, and what no circle says: " * 4
CONTEXT, STRIDE = 32, 12


@pytest.fixture(scope="module")
def run(run_dir):
    return load(run_dir)


def by_hand(run, ids, context, stride):
    """Returns −ln p of each token but the first, given at least context − stride tokens, with a
    separate pass per window.
    """
    nats, scored = [], 1
    read = jax.jit(lambda model, seen: model(seen, jnp.arange(context)[None])[0][0])
    for begin in range(0, len(ids), stride):
        end = min(begin + context, len(ids))
        seen = np.zeros((1, context), np.int32)
        seen[0, : end - begin] = ids[begin:end]
        logits_TV = np.asarray(read(run.model, seen), np.float64)
        lse_T = np.log(np.exp(logits_TV - logits_TV.max(1, keepdims=True)).sum(1)) + logits_TV.max(
            1
        )
        nats += [
            lse_T[t - begin - 1] - logits_TV[t - begin - 1, ids[t]] for t in range(scored, end)
        ]
        scored = max(scored, end)
        if end == len(ids):
            break
    return np.array(nats)


def test_text_matches_one_pass_per_window(run, run_dir, tmp_path, capsys):
    file = tmp_path / "text.txt"
    file.write_text(TEXT, encoding="utf-8")
    flags = ["--context", str(CONTEXT), "--stride", str(STRIDE), "--json"]
    assert main(["eval", "ppl", "--run_dir", str(run_dir), "--data_path", str(file), *flags]) == 0
    found = json.loads(capsys.readouterr().out)
    ids = [run.tokenizer.bos_id, *run.tokenizer.encode(TEXT)]
    nats = by_hand(run, ids, CONTEXT, STRIDE)
    assert (found["tokens"], found["bytes"], found["unscored"], found["documents"]) == (
        len(TEXT.encode()),
    ) * 2 + (0, 1)
    assert len(nats) == found["tokens"]
    np.testing.assert_allclose(found["nats"], nats.mean(), rtol=1e-5)
    np.testing.assert_allclose(found["perplexity"], math.exp(nats.mean()), rtol=1e-4)
    np.testing.assert_allclose(
        found["bits_per_byte"], nats.sum() / math.log(2) / len(TEXT.encode()), rtol=1e-5
    )


def test_documents_do_not_see_each_other(run, run_dir, tmp_path):
    file, texts = tmp_path / "texts.jsonl", [TEXT[:40], "b", TEXT[5:17]]
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    found = measure_perplexity(run_dir, str(file), context=CONTEXT, stride=STRIDE)
    begin = [run.tokenizer.bos_id]
    nats = np.concatenate(
        [by_hand(run, begin + run.tokenizer.encode(text), CONTEXT, STRIDE) for text in texts]
    )
    assert (found.documents, found.tokens) == (3, len(nats))
    np.testing.assert_allclose(found.nats, nats.mean(), rtol=1e-5)


def test_first_tokens_of_a_text(run, tmp_path):
    file = tmp_path / "text.txt"
    file.write_text(TEXT, encoding="utf-8")
    (document,) = read_documents(run.tokenizer, str(file), "text", 4)
    assert document.ids.tolist() == list("aè€".encode()[:4])
    assert document.bytes == 4, "also if a character is split"


def test_scores_mark_the_most_likely_tokens(run):
    """The model of the run predicts its cycle of characters with near certainty."""
    circle = np.array(list("aè€😀b\nca".encode()), np.int32)
    broken = np.concatenate([circle[:5], circle[:3]])
    (_, sure), (_, unsure) = score_sequences(
        run.model, [ScoringInput(circle, 4), ScoringInput(broken, 5)]
    )
    assert sure.is_top1.tolist() == [True] * 4
    assert unsure.is_top1.tolist() == [True, True, False, True, True]
    assert len(unsure.logp) == 5 and (unsure.logp < 0).all()


@pytest.mark.parametrize(
    ("count", "context", "stride"), [(100, 16, 8), (5, 16, 3), (17, 16, 15), (40, 16, 1), (1, 4, 2)]
)
def test_windows_score_each_token_once_with_enough_context(count, context, stride):
    ids = np.arange(count)
    found = list(sliding_windows(ids, context, stride))
    scored = np.concatenate([text.ids[-text.new :] for text in found] or [ids[:0]])
    assert scored.tolist() == list(range(1, count))
    for text in found:
        assert len(text.ids) <= context
        assert text.ids[0] == 0 or len(text.ids) - text.new >= context - stride


def test_a_long_text_is_truncated_and_the_time_is_estimated_first(run_dir, tmp_path):
    file, lines = tmp_path / "text.txt", []
    file.write_text("a" * 10_000, encoding="utf-8")
    found = measure_perplexity(run_dir, str(file), progress=lines.append)
    assert (found.tokens, found.bytes, found.truncated) == (8192, 8192, True)
    windows = 1 + math.ceil((8193 - 128) / 64)  # of 128 tokens, 64 apart, with the BOS token
    assert re.match(
        rf"{windows} windows of 128 tokens take at least \d+s at \d+ GFLOP/s$", lines[0]
    )
    assert any("the beginning" in line for line in perplexity_lines(found))
    file.write_text("a" * 100, encoding="utf-8")
    assert not measure_perplexity(run_dir, str(file)).truncated


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"stride": 0}, "--stride must be in [1, 127], less than a window of 128 tokens, got 0"),
        (
            {"context": 8, "stride": 8},
            "--stride must be in [1, 7], less than a window of 8 tokens, got 8",
        ),
        ({"context": 129}, "--context must be in [2, 128], the model's context, got 129"),
        ({"tokens": 1}, "--tokens must be at least 2, got 1"),
    ],
)
def test_numbers_out_of_range(run_dir, tmp_path, settings, sentence):
    with pytest.raises(UserError) as caught:
        measure_perplexity(run_dir, str(tmp_path / "text.txt"), **settings)
    assert str(caught.value) == sentence


def test_flags_of_another_evaluation(run_dir, capsys):
    assert main(["eval", "ppl", "--run_dir", str(run_dir)]) == 2
    assert main(["eval", "ppl", "--run_dir", str(run_dir), "--data_path", "x", "--quick"]) == 2
    assert (
        capsys.readouterr().err == "error: eval ppl needs --data_path, the text to read\n"
        "error: --quick has no effect with eval ppl: it is a flag of eval sampling and eval kv\n"
    )
