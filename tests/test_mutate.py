"""`tests.mutate`: the edits of each kind, the draw, and the tests that judge a mutant."""

import argparse
import json

import pytest

from tests.mutate.__main__ import (
    format_table,
    is_selected,
    judge,
    order_tests,
    plan_stages,
    split_steps,
)
from tests.mutate.line_map import find_tests
from tests.mutate.operators import draw, find_mutants

FUNCTION = "def f(a, b, n):\n    a = 2\n"


def edits(source: str, kind: str, file: str = "dantinox/a.py") -> list[str]:
    found = find_mutants(file, source.encode())
    return [f"{mutant.before} → {mutant.after}" for mutant in found if mutant.kind == kind]


@pytest.mark.parametrize(
    ("kind", "source", "expected"),
    [
        ("arithmetic", "a + b * c", ["a + b * c → a - b * c", "b * c → b / c"]),
        ("arithmetic", "(a) // (b)", ["(a) // (b) → (a) * (b)"]),
        ("arithmetic", "a -= b", ["a -= b → a += b"]),
        ("arithmetic", "f(-a, -1)", ["-a → (a)"]),
        ("arithmetic", "a = 'x' + b, c + f'{d + e}', int | None", []),
        ("comparison", "a < b == c", ["a < b == c → a >= b == c", "a < b == c → a < b != c"]),
        ("comparison", "a not  in b", ["a not in b → a in b"]),
        ("comparison", "a is None", ["a is None → a is not None"]),
        ("boundary", "a < b", ["a < b → a <= b"]),
        ("boundary", "a >= b", ["a >= b → a > b"]),
        ("boundary", "a[n:, 1:-1]", ["n → (n) + 1", "n → (n) - 1"]),
        ("constant", "a = 3, 0.5", ["3 → 4", "3 → 2", "0.5 → 1.5", "0.5 → -0.5"]),
        ("constant", "f(a=True)['key']", ["True → False"]),
        ("constant", "a = f'{1:2}'\nraise E(1)\n__all__ = [1]", []),
        ("constant", "a: Annotated[int, 1] = 7", ["7 → 8", "7 → 6"]),
        ("constant", "@f(1)\ndef g(a: T[2] = 3) -> T[4]:\n    '''5'''", ["3 → 4", "3 → 2"]),
        ("constant", "if TYPE_CHECKING:\n    a = 1", []),
        ("swap", "a and b and c", ["a and b and c → a or b and c", "a and b and c → a and b or c"]),
        ("swap", "max(a, b)", ["max(a, b) → min(a, b)"]),
        ("swap", "a.all()", ["a.all() → a.any()"]),
        ("swap", "jnp.where(a, f(b), c)", ["jnp.where(a, f(b), c) → jnp.where(a, c, f(b))"]),
        ("condition", "if a and b:\n    c", ["a and b → not (a and b)"]),
        ("condition", "a if not b else c", ["not b → (b)"]),
        ("condition", "[a for a in b if c]", ["c → not (c)"]),
        ("condition", "while True:\n    if a < b:\n        c", []),
        ("statement", "'text'\na = 1\nf(a)", ["f(a) → pass"]),
        ("statement", FUNCTION + "    c = b\n    n += 1", ["a = 2 → pass", "n += 1 → pass"]),
        ("statement", "def f():\n    a.b, c[0] = d\n    yield a", ["a.b, c[0] = d → pass"]),
    ],
)
def test_edits_of_each_kind(kind, source, expected):
    assert edits(source, kind) == expected


def test_edit_replaces_bytes_in_the_middle_of_a_file():
    source = "text = 'è€😀'; a = (b\n    # note\n    + c)\n".encode()
    found = {mutant.kind: mutant for mutant in find_mutants("dantinox/a.py", source)}
    assert found == {}  # a comment may hide the operator
    source = "text = 'è€😀'; a = (b\n    + c)\n".encode()
    (mutant,) = find_mutants("dantinox/a.py", source)
    assert mutant.apply(source) == source.replace(b"+", b"-")
    assert (mutant.line, mutant.lines, mutant.statement) == (2, (1, 2), (1, 2))
    assert mutant.on_import and str(mutant) == "dantinox/a.py:2 arithmetic b + c → b - c"


def test_lines_of_a_head_do_not_contain_its_body():
    source = b"if f(\n    a > 1\n):\n    b(1)\n"
    lines = {(mutant.kind, mutant.line): mutant.statement for mutant in find_mutants("d/a", source)}
    assert lines["boundary", 2] == (1, 3) and lines["statement", 4] == (4, 4)


SOURCES = {
    "dantinox/model/a.py": b"def f(a, b):\n    return a + b * 2 < 3, a[b:4], a and b\n" * 5,
    "dantinox/text/b.py": b"def f(a, *, b=1):\n    a += 1\n    return not a, g(a)[:b]\n" * 5,
    "dantinox/files.py": b"A = 1, 2, 3\n",
}


def test_draw_depends_on_source_and_seed_only():
    drawn = draw(SOURCES, 20, seed=3)
    assert drawn == draw(dict(reversed(SOURCES.items())), 20, seed=3) != draw(SOURCES, 20, seed=4)
    assert sum(mutant.core for mutant in drawn) == 10 == len({m.key for m in drawn if m.core})
    for mutant in drawn:
        changed = mutant.apply(SOURCES[mutant.file])
        compile(changed, mutant.file, "exec")
        assert changed != SOURCES[mutant.file]


def test_draw_takes_all_mutants_from_one_group_if_the_other_is_empty():
    assert len(draw({"dantinox/files.py": SOURCES["dantinox/files.py"]}, 3, seed=0)) == 3


FILES = {
    "tests/text/test_b.py": {"b1": (9, []), "b2": (1, ["slow"])},
    "tests/text/test_c.py": {"c1": (2, []), "c2": (3, ["faults"])},
    "tests/cli/test_b.py": {"d1": (1, [])},
    "tests/text/test_d.py": {"e1": (1, [])},
}
TESTS = {
    file: {
        name: {"seconds": seconds, "markers": markers, "starts_processes": name == "e1"}
        for name, (seconds, markers) in tests.items()
    }
    for file, tests in FILES.items()
}


def test_order_begins_with_the_tests_of_the_line_and_the_file_named_after_the_module():
    mutant = draw({"dantinox/text/b.py": b"def f(a, b):\n    return a < b\n"}, 1, seed=0)[0]
    b, c, cli, processes = TESTS
    assert order_tests(mutant, {"b2", "c1", "d1"}, TESTS) == [
        *((b, ["b2"]), (c, ["c1"]), (cli, ["d1"])),
        *((b, ["b1"]), (c, ["c2"]), (processes, ["e1"])),
    ]
    assert order_tests(mutant, set(), TESTS) == [(processes, ["e1"])]
    (mutant,) = draw({"dantinox/text/b.py": b"A = 1\n"}, 1, seed=0)
    assert [name for _, names in order_tests(mutant, {"d1"}, TESTS) for name in names] == [
        *("d1", "b1", "b2", "e1", "c1", "c2")
    ]


def test_stages_divide_the_tests_by_markers_and_budget():
    steps = [(file, list(tests)) for file, tests in TESTS.items()]
    quick = "not faults"
    options = argparse.Namespace(quick=quick, all="not real", budget=10.5, quick_only=False)
    stages = plan_stages(steps, TESTS, options)
    b, c, cli, processes = TESTS
    assert stages == [
        ("quick", quick, [(b, ["b1", "b2"]), (c, ["c1"])]),
        ("all", "not real", [(c, ["c2"])]),
        ("quick", quick, [(cli, ["d1"]), (processes, ["e1"])]),
    ]
    options.quick_only = True
    assert plan_stages(steps, TESTS, options) == stages[:1]
    assert split_steps([(c, ["c1", "c2"])], {"c1": 2, "c2": 3}, 1) == ([(c, ["c1"])], [(c, ["c2"])])


@pytest.mark.parametrize(
    ("failing", "result", "test", "ran"),
    [
        ({"quick.py"}, "quick", "quick.py::t", ["quick.py"]),
        ({"slow.py"}, "all", "slow.py::t", ["quick.py", "slow.py", "left.py"]),
        ({"slow.py", "left.py"}, "quick", "left.py::t", ["quick.py", "slow.py", "left.py"]),
        ({"left.py"}, "survived", "", ["quick.py", "slow.py"]),
    ],
)
def test_verdict_is_of_the_first_set_that_fails(failing, result, test, ran, tmp_path, monkeypatch):
    files = []

    def run_pytest(folder, file, expression, plugin, *options):
        files.append(file)
        if file in failing:
            plugin.failed = f"{file}::t"
        return int(file in failing)

    monkeypatch.setattr("tests.mutate.__main__.run_pytest", run_pytest)
    stages = [("quick", "quick.py"), ("all", "slow.py"), ("quick", "left.py")]
    stages = [(outcome, "", [(file, ["t"])]) for outcome, file in stages]
    judge(tmp_path, stages, {"t": 0})
    assert json.loads((tmp_path / "verdict.json").read_text()) == {"result": result, "test": test}
    assert files == ran


def test_tests_of_a_line(tmp_path, monkeypatch):
    """The lines of the mutant come first, then its statement; on import, the whole module."""
    coverage = pytest.importorskip("coverage")
    monkeypatch.setattr("tests.mutate.line_map.MAP", tmp_path)
    data = coverage.CoverageData(basename=str(tmp_path / "tests+test_a.py.coverage"))
    for context, lines in {"": [1, 2], "t1": [3, 4], "t2": [3, 5], "t3": [7]}.items():
        data.set_context(context)
        data.add_lines({"dantinox/a.py": lines})
    data.write()
    source = b"A = 1\ndef f(a, b):\n    a = (\n    a\n    + b\n    )\n    return b\n    c(2)\n"
    mutants = find_mutants("dantinox/a.py", source)
    tests = find_tests(mutants, ["tests/test_a.py"])
    found = {(mutant.kind, mutant.line): tests[mutant] for mutant in mutants}
    assert found["constant", 1] == (True, {"t1", "t2", "t3"})
    assert found["arithmetic", 5] == (True, {"t1", "t2"})
    assert found["statement", 8] == (False, set())


def test_marker_expression_is_evaluated_with_the_markers_of_a_test():
    assert is_selected("not slow and not real", ["parametrize"])
    assert not is_selected("not slow and not real", ["real"])
    assert is_selected("slow or not real", ["slow", "real"])


def test_table_counts_results_by_group():
    mutants = [draw({name: SOURCES[name]}, 2, seed=0) for name in list(SOURCES)[:2]]
    (one, two), (three, four) = mutants
    judged = [(one, "quick"), (two, "all"), (three, "quick"), (four, "not covered")]
    assert format_table(judged).splitlines()[2:] == [
        "| core | 2 | 1 | 1 | 0 | 0 | 50.0% |",
        "| rest | 2 | 1 | 0 | 0 | 1 | 100.0% |",
        "| total | 4 | 2 | 1 | 0 | 1 | 66.7% |",
        "",
        f"* {four} (not covered)",
    ]
