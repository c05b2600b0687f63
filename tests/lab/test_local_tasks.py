"""Local tasks: scores against log-probabilities summed in NumPy, centered accuracies and intervals
against closed forms.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dantinox.cli import main
from dantinox.config import UserError
from dantinox.generation import load
from dantinox.lab.studies.builtin_tasks import BUILTIN_QUESTIONS
from dantinox.lab.studies.local_tasks import evaluate_local_tasks
from dantinox.lab.studies.statistics import stratified_interval
from dantinox.lab.studies.task_files import is_local, load_tasks, prompts, read_questions

CHOICES = [
    {"context": "a", "choices": ["è€", "x"], "answer": 0},
    {"context": "aè", "choices": ["x", "€😀", "zz"], "answer": 2},
    {"context": "x a", "choices": [" b\n", " c a"], "answer": 1},
    {"context": "", "choices": ["b\nc", "q"], "answer": 0},
    {"context": "hello", "choices": [" world", "lo", "a", "b"], "answer": 3},
]
CONTEXTS = [
    {"contexts": ["a", "b"], "continuation": "\nc", "answer": 1},
    {"contexts": ["zzz", "a", "€"], "continuation": "😀b", "answer": 0},
    {"contexts": ["x ", "b "], "continuation": "aè", "answer": 0},
]
EXACT = [
    {"context": "a", "continuation": "è€😀"},
    {"context": "€", "continuation": "no"},
    {"context": "b", "continuation": "\nca"},
]
RANDOM = np.random.default_rng(0)


def write(path, records):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n\n" for record in records))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tasks")
    write(path / "likely.jsonl", CHOICES)
    write(path / "both/contexts.jsonl", CONTEXTS)
    write(path / "both/exact.jsonl", EXACT)
    return path


@jax.jit
def read(model, seen):
    return model(seen, jnp.arange(128)[None])[0][0]


def logp(run, context, continuation):
    """Returns ln p of each byte of the continuation, float64, and whether it is the most likely
    one. A byte is a token.
    """
    ids = [run.tokenizer.bos_id, *(context + continuation).encode()]
    seen = np.zeros((1, 128), np.int32)
    seen[0, : len(ids) - 1] = ids[:-1]
    logits_TV = np.asarray(read(run.model, seen), np.float64)[: len(ids) - 1]
    all_TV = logits_TV - np.log(np.exp(logits_TV).sum(axis=1, keepdims=True))
    new = len(continuation.encode()) + len(context) - len(context.rstrip())
    return (
        all_TV[np.arange(len(ids) - 1), ids[1:]][-new:],
        (all_TV.argmax(axis=1) == ids[1:])[-new:],
    )


def expected_correct(run, records, prefix=""):
    found = []
    for record in records:
        contexts = record.get("contexts") or [record["context"]]
        continuations = record.get("choices") or [record["continuation"]]
        scores = [logp(run, prefix + a, b) for a in contexts for b in continuations]
        if len(scores) == 1:
            found.append(int(scores[0][1].all()))
        else:
            found.append(
                int(np.argmax([values.mean() for values, _ in scores]) == record["answer"])
            )
    return tuple(found)


def test_answers_are_those_of_the_log_probabilities(run_dir, folder, tmp_path):
    run = load(run_dir)
    study = evaluate_local_tasks(run_dir, [str(folder)], out=tmp_path)
    found = {score.task: score for score in study.scores}
    assert list(found) == ["both/contexts", "both/exact", "likely"]
    for name, records in {
        "both/contexts": CONTEXTS,
        "both/exact": EXACT,
        "likely": CHOICES,
    }.items():
        assert found[name].correct == expected_correct(run, records)
    assert found["both/exact"].correct == (1, 0, 1) and 0 < sum(found["likely"].correct) < len(
        CHOICES
    )
    assert [found[name].baseline for name in found] == pytest.approx(
        [(1 / 2 + 1 / 3 + 1 / 2) / 3, 0, (3 / 2 + 1 / 3 + 1 / 4) / 5]
    )


def test_examples_come_first_and_depend_on_the_seed(run_dir, folder, tmp_path):
    (task,) = load_tasks([str(folder / "likely.jsonl")])
    for seed in range(5):
        for context, continuation in prompts(task, 1, 2, seed):
            *examples, last = context.split("\n\n")
            right = [
                record["context"] + record["choices"][record["answer"]]
                for i, record in enumerate(CHOICES)
                if i != 1
            ]
            assert last == "aè" and continuation in CHOICES[1]["choices"]
            assert len(set(examples)) == 2 and set(examples) <= set(right)
    assert len({prompts(task, 1, 2, seed)[0] for seed in range(9)}) > 3
    study = evaluate_local_tasks(
        run_dir, [str(folder / "both/exact.jsonl")], shots=1, limit=2, out=tmp_path
    )
    (exact,) = load_tasks([str(folder / "both/exact.jsonl")])
    run = load(run_dir)
    expected = tuple(int(logp(run, *prompts(exact, index, 1, 0)[0])[1].all()) for index in range(2))
    assert study.scores[0].correct == expected and study.scores[0].shots == 1


def test_means_and_intervals_have_their_closed_form():
    strata = [RANDOM.normal(size=n) for n in (5, 9, 2)]
    found = stratified_interval(strata)
    errors = [values.std(ddof=1) / np.sqrt(len(values)) for values in strata]
    half = 1.959964 * np.sqrt(np.sum(np.square(errors))) / 3
    assert found.value == pytest.approx(np.mean([values.mean() for values in strata]))
    assert (found.low, found.high) == pytest.approx((found.value - half, found.value + half))


def test_the_interval_contains_the_true_mean_as_often_as_it_says():
    draws = RANDOM.random((2000, 2, 60)) < np.array([0.3, 0.8])[:, None]
    hits = [
        found.low <= 0.55 <= found.high
        for found in (stratified_interval(list(draw)) for draw in draws)
    ]
    assert np.mean(hits) == pytest.approx(0.95, abs=0.02)


def test_record_table_and_comparison(run_dir, ending_run_dir, folder, tmp_path, capsys):
    flags = ["--tasks", str(folder), "--json"]
    assert main(["eval", "tasks", str(run_dir), *flags, "--out", str(tmp_path / "a")]) == 0
    first = json.loads(capsys.readouterr().out)
    assert json.loads((tmp_path / "a/tasks.json").read_text()) == first
    for task in first["tasks"]:
        expected = (np.mean(task["correct"]) - task["baseline"]) / (1 - task["baseline"])
        assert task["centered_accuracy"]["value"] == pytest.approx(expected)
    values = {task["task"]: task["centered_accuracy"]["value"] for task in first["tasks"]}
    assert first["mean_centered_accuracy"]["value"] == pytest.approx(np.mean(list(values.values())))
    assert first["groups"].keys() == {"both"}
    assert first["groups"]["both"]["value"] == pytest.approx(
        (values["both/contexts"] + values["both/exact"]) / 2
    )

    reference = str(tmp_path / "a/tasks.json")
    assert (
        main(
            [
                "eval",
                "tasks",
                str(ending_run_dir),
                *flags,
                "--out",
                str(tmp_path / "b"),
                "--compare",
                reference,
            ]
        )
        == 0
    )
    second = json.loads(capsys.readouterr().out)
    strata = [
        (np.array(b["correct"]) - np.array(a["correct"])) / (1 - a["baseline"])
        for a, b in zip(first["tasks"], second["tasks"], strict=True)
    ]
    assert second["tasks"] != first["tasks"] and second["reference"] == reference
    assert tuple(second["difference"].values()) == pytest.approx(tuple(stratified_interval(strata)))
    assert tuple(second["group_differences"]["both"].values()) == pytest.approx(
        tuple(stratified_interval(strata[:2]))
    )

    assert (
        main(
            [
                "eval",
                "tasks",
                str(ending_run_dir),
                *flags[:2],
                "--out",
                str(tmp_path),
                "--compare",
                reference,
            ]
        )
        == 0
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[:3] == [
        "both/contexts",
        f"{np.mean(second['tasks'][0]['correct']):.3f}",
        "0.444",
    ]
    d = second["difference"]
    assert any(
        line.endswith(f"{d['value']:+.3f} [{d['low']:+.3f}, {d['high']:+.3f}]") for line in lines
    )
    for changes in (["--shots", "1"], ["--limit", "2"]):
        assert (
            main(
                [
                    "eval",
                    "tasks",
                    str(run_dir),
                    *flags,
                    *changes,
                    "--out",
                    str(tmp_path),
                    "--compare",
                    reference,
                ]
            )
            == 2
        )
        assert "has other prompts of the task" in capsys.readouterr().err

    tasks = json.loads((tmp_path / "a/tasks.json").read_text())["tasks"]
    for task, message in (
        ({"correct": [1, 0]}, "has other prompts of the task"),
        ({"baseline": 1}, "is not a result of eval tasks"),
        ({"correct": [1, "x"]}, "is not a result of eval tasks"),
        ({"task": 5}, "has the tasks"),
    ):
        (tmp_path / "c.json").write_text(json.dumps({"tasks": [tasks[0] | task, *tasks[1:]]}))
        flags = [
            "--tasks",
            str(folder),
            "--out",
            str(tmp_path),
            "--compare",
            str(tmp_path / "c.json"),
        ]
        assert main(["eval", "tasks", str(run_dir), *flags]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "is not JSON"),
        ('{"context": "a"}', "must be a JSON object with the keys"),
        ("[1]", "must be a JSON object with the keys"),
        ('{"context": 1, "continuation": "b"}', "context must be a text, got 1"),
        ('{"context": "a", "continuation": ""}', "a continuation must not be empty"),
        (
            '{"context": "a", "choices": ["b"], "answer": 0}',
            "choices must be a list of at least 2 different texts",
        ),
        (
            '{"context": "a", "choices": ["b", "b"], "answer": 0}',
            "choices must be a list of at least 2 different texts",
        ),
        (
            '{"context": "a", "choices": ["b", "c"], "answer": 2}',
            r"answer must be an index in \[0, 1\], got 2",
        ),
        (
            '{"context": "a", "choices": ["b", "c"], "answer": true}',
            r"answer must be an index in \[0, 1\], got true",
        ),
    ],
)
def test_errors_name_the_line(tmp_path, line, message):
    path = tmp_path / "t.jsonl"
    path.write_text(f'{{"context": "a", "continuation": "b"}}\n{line}\n')
    with pytest.raises(UserError, match=rf"t\.jsonl, line 2:? .*{message}"):
        read_questions(path)


def test_errors_come_before_the_work(run_dir, folder, tmp_path, capsys):
    long = write(tmp_path / "long.jsonl", [{"context": "a" * 140, "continuation": "b"}] * 2)
    one = write(tmp_path / "one/one.jsonl", EXACT[:1])
    (tmp_path / "bad.json").write_text('{"tasks": [{}]}')
    for arguments, message in [
        ([str(long)], "has a prompt of 141 tokens, but the model's context is 128"),
        ([str(one)], "has 1 questions, but at least 2"),
        ([str(tmp_path / "missing") + "/"], "there is no folder"),
        ([f"{folder},{folder}"], "gives two tasks with the name both/contexts"),
        ([str(folder), "--shots", "3"], "--shots must be less than the 3 questions"),
        ([str(folder), "--limit", "1"], "--limit must be at least 2"),
        ([str(folder), "--include_path", "x"], "--include_path has no effect with local tasks"),
        ([f"{folder},arc_easy"], "must not mix local tasks"),
        (["arc_easy", "--seed", "1"], "--seed has no effect with tasks of lm-evaluation-harness"),
        ([str(folder), "--compare", str(tmp_path / "bad.json")], "is not a result of eval tasks"),
        ([str(folder), "--compare", str(tmp_path)], "no results at"),
    ]:
        assert (
            main(["eval", "tasks", str(run_dir), "--out", str(tmp_path), "--tasks", *arguments])
            == 2
        )
        assert message in capsys.readouterr().err, arguments
    assert not (tmp_path / "tasks.json").exists()


def test_builtin_tasks_are_right_and_balanced():
    tasks = {task.name: task for task in load_tasks(["builtin"])}
    assert len(tasks) == 9 and {task.group for task in tasks.values()} == {
        "arithmetic",
        "patterns",
        "grammar",
    }
    for task in tasks.values():
        right = ["".join(question.options[question.answer]) for question in task.questions]
        assert len(set(right)) == len(right) == BUILTIN_QUESTIONS
        counts = np.bincount(
            [question.answer for question in task.questions],
            minlength=len(task.questions[0].options),
        )
        assert counts.min() > 0.6 * BUILTIN_QUESTIONS / len(counts)

    def right_texts(name):
        return ["".join(question.options[question.answer]) for question in tasks[name].questions]

    for text in right_texts("arithmetic/addition"):
        left, total = text.split(" = ")
        assert sum(map(int, left.split(" + "))) == int(total)
    for text in right_texts("arithmetic/larger"):
        numbers, answer = text.removeprefix("The larger number of ").split(" is ")
        assert int(answer) == max(map(int, numbers.split(" and ")))
    for text in right_texts("arithmetic/next_number"):
        assert len(set(np.diff([int(word) for word in text.split(", ")]))) == 1
    for text in right_texts("patterns/copy"):
        whole, copied = text.split(": ")
        assert whole.startswith(copied) and len(copied.split()) == 4
    for text in right_texts("patterns/recall"):
        assert text.rsplit(". ", 1)[1] + "." in text
    for question in tasks["patterns/brackets"].questions:
        assert [is_nested("".join(option).split()) for option in question.options].index(
            True
        ) == question.answer
    for text in right_texts("grammar/agreement"):
        assert (text.split()[1][-1] == "s") == (" are " in text)
    for text in right_texts("grammar/article"):
        article, noun = text.split()[-2:]
        assert article == ("an" if noun[0] in "aeiou" else "a")


def is_nested(symbols):
    """Returns whether each closing bracket closes the innermost open one."""
    opened = []
    for symbol in symbols:
        if symbol in "([{":
            opened.append(symbol)
        elif not opened or opened.pop() + symbol not in ("()", "[]", "{}"):
            return False
    return True


def test_local_names(folder):
    assert all(map(is_local, ["builtin", "x.jsonl", str(folder), "missing/"]))
    assert not any(map(is_local, ["arc_easy", "my_task.yaml", "mmlu"]))


@pytest.mark.parametrize("suffix", [".ndjson", ".JSONL", ".jsonlines"])
def test_every_name_of_json_lines_is_a_task(tmp_path, suffix):
    write(tmp_path / f"exact{suffix}", EXACT)
    assert is_local(str(tmp_path / f"exact{suffix}"))
    for name in (tmp_path, tmp_path / f"exact{suffix}"):
        assert [task.name for task in load_tasks([str(name)])] == ["exact"]
