"""The tasks, the diversity and the comparison at equal diversity of
`benchmarks/router_verdict.py`.
"""

import sys
from pathlib import Path

import numpy as np
import pytest

MODULES = (
    "router_verdict",
    "verdict.tasks",
    "verdict.decoding",
    "verdict",
    "instruction_tasks",
    "common",
)
TEXT = "\n".join(
    [
        "the sons and sisters say some sad songs",
        "she sees six ships",
        "a bad boy buys big blue balls",
    ]
    * 9
)


@pytest.fixture
def verdict(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import router_verdict

    yield router_verdict
    for name in MODULES:
        sys.modules.pop(name, None)


def test_tasks_accept_their_answers_and_reject_others(verdict):
    tasks = sys.modules["verdict.tasks"]
    for hint in (0, 2):
        source = tasks.read_source(
            TEXT, slice(0.0, 1.0), tasks.Difficulty(2, 9, 2, 0, 2, 3, 10, hint)
        )
        random = np.random.default_rng(0)
        for kind, make in tasks.KINDS.items():
            for _ in range(20):
                task = make(random, source)
                assert task.solved(task.answer, ()), (kind, task)
                assert not task.solved("?", ()), kind
    random = np.random.default_rng(1)
    prompt = tasks.make_prompt("split", random, source)
    total = int(prompt.text.splitlines()[-1].split(" ")[0])
    assert len(prompt.text.splitlines()) == 3 and prompt.solved(f"{total - 1} + 1")
    assert not prompt.solved(f"{total} + 0") and not prompt.solved(f"{total} + 1")
    person = tasks.person(random, source)
    assert not person.solved(person.answer, [person.answer])  # the name is one of the examples'


def test_distance_of_answers(verdict):
    a, b, c = (
        verdict.Answer("", True, frozenset(pairs))
        for pairs in ([(1, 2), (2, 3)], [(1, 2), (2, 4)], [(5, 6)])
    )
    assert [verdict.distance(a, x) for x in (a, b, c)] == [0, 1 - 1 / 3, 1]
    assert verdict.mean_distance([a, b, c]) == pytest.approx((2 / 3 + 1 + 1) / 3)
    assert verdict.distances_from_others([a, b, c]) == pytest.approx([5 / 6, 5 / 6, 1])


def test_scores_are_compared_at_equal_diversity(verdict):
    names, kinds, prompts = [*verdict.METHODS], 2, 3
    shape = (1, len(names), 4, kinds, prompts)
    diversity, solved = np.full(shape, np.nan), np.full(shape, np.nan)
    diversity[0, :, :3] = np.array([0.2, 0.4, 0.6])[:, None, None]
    solved[0, :, :3] = np.array([0.9, 0.5, 0.1])[:, None, None]
    learned = names.index("learned")
    diversity[0, learned, :] = np.array([0.1, 0.3, 0.35, 0.45])[
        :, None, None
    ]  # with a further factor
    solved[0, learned, :] = np.array([0.8, 0.8, 0.6, 0.2])[:, None, None]
    found = verdict.at_equal_diversity(verdict.Results(solved, diversity, solved), 1)
    assert found["reached"] == pytest.approx(np.full(len(names), 0.4))
    expected = [0.4 if name == "learned" else 0.5 for name in names]  # halfway between 0.6 and 0.2
    assert found["solved"] == pytest.approx(expected) and found["by_kind"].shape == (
        len(names),
        kinds,
    )


def test_methods_that_miss_the_diversity_get_more_factors(verdict):
    def row(name, factor, diversity):
        return {"method": name, "factor": factor, "diversity": [diversity]}

    wide = {0.7: 0.3, 1.0: 0.5, 1.4: 0.7}
    rows = [row(name, factor, value) for name in verdict.METHODS for factor, value in wide.items()]
    assert verdict.more_factors(rows) == []
    low = [row("learned", factor, 0.2) for factor in wide]
    others = [r for r in rows if r["method"] != "learned"]
    assert verdict.more_factors(others + low) == [("learned", 2.0)]
    high = [row("random", factor, 0.6) for factor in wide]
    others = [r for r in rows if r["method"] != "random"]
    assert verdict.more_factors([*others, *high, row("random", 0.5, 0.4)]) == [("random", 0.5)]
