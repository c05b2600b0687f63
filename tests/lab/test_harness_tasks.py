"""Tasks of lm-evaluation-harness: its three kinds of requests against log-probabilities summed in
NumPy, and custom tasks.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dantinox.cli import main
from dantinox.config import UserError
from dantinox.generation import load
from dantinox.lab.studies import harness_tasks
from dantinox.lab.studies.harness_tasks import (
    LMEvalModel,
    TaskScore,
    evaluate_tasks,
    parse_scores,
    task_lines,
)
from tests.error_texts import ERRORS

CYCLE = "aè€😀b\nc"  # the cycle that the model of `run_dir` generates
CONTEXT = 128


@pytest.fixture(scope="module")
def lm_eval_model(run_dir):
    return LMEvalModel(load(run_dir), {})


@jax.jit
def read(model, seen):
    return model(seen, jnp.arange(CONTEXT)[None])[0][0]


def logp(lm_eval_model, ids):
    """Returns ln p of each token but the first, float64, and whether it is the most likely one."""
    seen = np.zeros((1, CONTEXT), np.int32)
    seen[0, : len(ids) - 1] = ids[:-1]
    logits_TV = np.asarray(read(lm_eval_model.run.model, seen), np.float64)[: len(ids) - 1]
    all_TV = logits_TV - np.log(
        np.exp(logits_TV - logits_TV.max(1, keepdims=True)).sum(1, keepdims=True)
    )
    all_TV -= logits_TV.max(1, keepdims=True)
    return all_TV[np.arange(len(ids) - 1), ids[1:]], all_TV.argmax(1) == ids[1:]


def test_likelihoods_of_continuations(lm_eval_model):
    begin = lm_eval_model.run.tokenizer.bos_id
    pairs = [("a", "è€"), ("aè", "x"), ("", "b\n"), ("x a ", "b"), ("c" * 150, "aè")]
    read = [  # tokens, and how many are scored
        ([begin, *"aè€".encode()], 5),
        ([begin, *"aèx".encode()], 1),
        ([begin, *b"b\n"], 2),
        ([begin, *b"x a b"], 2),  # the space moves to the continuation
        ([*b"c" * 126, *"aè".encode()], 3),
    ]
    for (found, likeliest), (ids, new) in zip(
        lm_eval_model.loglikelihood(pairs), read, strict=True
    ):
        values, top = logp(lm_eval_model, ids[-CONTEXT - 1 :])
        np.testing.assert_allclose(found, values[-new:].sum(), rtol=1e-5, atol=1e-6)
        assert likeliest == top[-new:].all()
    assert [likeliest for _, likeliest in lm_eval_model.loglikelihood(pairs)][:3] == [
        True,
        False,
        False,
    ]
    with pytest.raises(UserError, match=ERRORS["a_continuation_has_200_tokens"]):
        lm_eval_model.loglikelihood([("a", "b" * 200)])


def test_likelihoods_of_whole_texts(lm_eval_model):
    texts = [CYCLE * 12, "b"]  # 156 bytes: two windows
    ids = [lm_eval_model.run.tokenizer.bos_id, *texts[0].encode()]
    first, rest = (
        logp(lm_eval_model, ids[: CONTEXT + 1])[0],
        logp(lm_eval_model, ids[-CONTEXT - 1 :])[0],
    )
    found = lm_eval_model.loglikelihood_rolling(texts)
    np.testing.assert_allclose(
        found[0], first.sum() + rest[-(len(ids) - 1 - CONTEXT) :].sum(), rtol=1e-5
    )
    np.testing.assert_allclose(
        found[1], logp(lm_eval_model, [ids[0], ord("b")])[0].sum(), rtol=1e-5
    )


def test_generated_answers(lm_eval_model):
    requests = [
        ("a", {"until": ["b"], "max_gen_toks": 20}),
        ("xb", {"until": "€", "do_sample": False, "temperature": 0.0}),
        ("", {"max_gen_toks": 1, "do_sample": True, "temperature": 0.5}),
        ("c" * 200, {"max_gen_toks": 3}),
    ]
    answers = lm_eval_model.generate_until(requests)
    assert answers[:2] == ["è€😀", "\ncaè"] and answers[3] == "aè"
    with pytest.raises(UserError, match=ERRORS["a_task_uses_the_generation"]):
        lm_eval_model.generate_until([("a", {"num_beams": 4})])


def test_parsing_of_the_harness_results():
    found = {
        "results": {
            "t": {
                "alias": "t",
                "acc,none": 0.5,
                "acc_stderr,none": 0.1,
                "f1,x": 1,
                "f1_stderr,x": "N/A",
                "sample_len": 3,
            }
        },
        "n-samples": {"t": {"original": 9, "effective": 4}},
        "n-shot": {"t": 2},
    }
    scores = list(parse_scores(found))
    assert scores == [
        TaskScore("t", "acc", "none", 0.5, 0.1, 2, 4),
        TaskScore("t", "f1", "x", 1.0, None, 2, 4),
    ]
    lines = list(task_lines(harness_tasks.TaskStudy(scores, {}, "0"), 100))
    assert [line.split() for line in lines[1:]] == [
        ["t", "acc", "0.5000", "0.1000", "2", "4"],
        ["t", "f1", "(x)", "1.0000", "–", "2", "4"],
    ]


def test_error_without_the_library(run_dir, monkeypatch, capsys):
    monkeypatch.setitem(__import__("sys").modules, "lm_eval", None)
    assert main(["eval", "tasks", "--run_dir", str(run_dir), "--tasks", "a"]) == 2
    assert main(["eval", "tasks", "--run_dir", str(run_dir)]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("error: eval tasks needs lm-evaluation-harness") and first.endswith(
        "in a checkout of DantinoX, pip install -e '.[lm-eval]'"
    )
    assert second == "error: eval tasks needs --tasks, task names separated by commas"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with three tasks about the cycle, each with a jsonl file."""
    pytest.importorskip("lm_eval")
    path = tmp_path_factory.mktemp("tasks")
    rows = {
        "choose": [{"q": "a", "choices": ["è€", "x"], "gold": gold} for gold in (0, 0, 1, 0)],
        "roll": [{"text": CYCLE * n} for n in (1, 2, 13)],
        "answer": [{"q": "a", "gold": "è€😀"}, {"q": "€", "gold": "no"}],
    }
    more = {
        "choose": "output_type: multiple_choice\ndoc_to_text: '{{q}}'\ndoc_to_choice: '{{choices}}'\ndoc_to_target: gold\n"
        "target_delimiter: ''\nmetric_list: [{metric: acc}]\n",
        "roll": "output_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: '{{text}}'\n"
        "metric_list: [{metric: byte_perplexity}]\n",
        "answer": "output_type: generate_until\ndoc_to_text: '{{q}}'\ndoc_to_target: '{{gold}}'\ntarget_delimiter: ''\n"
        "generation_kwargs: {until: ['b'], max_gen_toks: 12}\nmetric_list: [{metric: exact_match}]\n",
    }  # fmt: skip
    for name, records in rows.items():
        (path / f"{name}.jsonl").write_text(
            "".join(json.dumps(record) + "\n" for record in records)
        )
        data = (
            "dataset_path: json\ndataset_kwargs: {data_files: {test:"
            f" '{path / name}.jsonl'}}}}\ntest_split: test\n"
        )
        (path / f"{name}.yaml").write_text(f"task: circle_{name}\n{data}{more[name]}")
    return path


def test_custom_tasks(run_dir, folder, capfd):
    flags = ["--run_dir", str(run_dir), "--include_path", str(folder), "--json"]
    assert (
        main(["eval", "tasks", "--tasks", "circle_choose,circle_roll,circle_answer", *flags]) == 0
    )
    found = {
        (one["task"], one["metric"]): one for one in json.loads(capfd.readouterr().out)["scores"]
    }
    assert (
        found["circle_choose", "acc"]["value"] == 0.75
        and found["circle_choose", "acc"]["samples"] == 4
    )
    assert found["circle_answer", "exact_match"]["value"] == 0.5
    texts = [CYCLE * n for n in (1, 2, 13)]
    nats = -sum(LMEvalModel(load(run_dir), {}).loglikelihood_rolling(texts))
    expected = np.exp(nats / sum(len(text.encode()) for text in texts))
    np.testing.assert_allclose(
        found["circle_roll", "byte_perplexity"]["value"], expected, rtol=1e-5
    )


def test_unknown_task(run_dir, folder):
    with pytest.raises(UserError, match=ERRORS["lm_evaluation_harness_cannot_run"]):
        evaluate_tasks(run_dir, "circle_sing", include_path=folder)
