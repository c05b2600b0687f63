"""The reward python_tests: fractions of passed tests, and code that exceeds a limit or ends
early.
"""

import os
import sys
import textwrap
import time

import pytest

from dantinox.config import UserError, build_config
from dantinox.config.grpo_settings import GRPOSection
from dantinox.training.code_execution import count_passed_tests
from dantinox.training.rewards import build_rewards

needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="python_tests needs Linux")


def run_code(code, *tests, seconds=20.0, memory_mib=512):
    return count_passed_tests(
        textwrap.dedent(code), [textwrap.dedent(test) for test in tests], seconds, memory_mib
    )


@needs_linux
def test_the_fraction_of_passed_tests_is_the_reward():
    record = {
        "tests": [
            "assert double(2) == 4",
            "assert double(1) == 3",
            "assert double(double(1)) == 4",
            "1 / 0",
        ]
    }
    answer = "The function:\n```python\nfactor = 2\n\ndef double(x):\n    return factor * x\n```\n"
    reward = build_rewards(GRPOSection(rewards=["python_tests"], allow_code_execution=True))
    assert reward.score("", answer, record) == {"python_tests": 0.5}
    assert reward.score("", "def double(x", record) == {"python_tests": 0.0}
    assert reward.score("", "def double(x): return 2 * x", {"tests": "assert double(3) == 6"}) == {
        "python_tests": 1.0
    }
    for tests in ([], [3], 3, ["x"] * 1001):
        with pytest.raises(
            UserError,
            match=r"^the field tests must be Python code or a list of 1 to 1000 of these, got",
        ):
            reward.score("", answer, {"tests": tests})


@needs_linux
@pytest.mark.parametrize(
    "code",
    [
        "while True: pass",
        "import time; time.sleep(60)",
        (
            "from signal import *\nfor s in (SIGTERM, SIGINT, SIGXCPU): signal(s, SIG_IGN)\nwhile"
            " True: pass"
        ),
    ],
    ids=["loop", "sleep", "ignored signals"],
)
def test_code_that_does_not_end_is_killed(code):
    started = time.monotonic()
    assert run_code(code, "pass", seconds=0.5) == 0
    assert time.monotonic() - started < 30


@needs_linux
def test_tests_that_end_before_a_hanging_test_count():
    assert (
        run_code("x = 1", "assert x", "import time; time.sleep(60)", "assert x", seconds=2.0) == 1
    )


@needs_linux
@pytest.mark.parametrize(
    "attempt",
    [
        "bytearray(1 << 30)",
        "x = []\nwhile True: x.append(bytearray(1 << 20))",
        "import os\nos.fork()",
        "import subprocess\nsubprocess.run(['true'])",
        "import os\nos.system('true')",
        "import os, signal\nos.kill(os.getppid(), signal.SIGTERM)",
        "import socket\nsocket.socket()",
        (
            "with open('big', 'wb') as f:\n    for _ in range(1 << 6): f.write(bytes(1 << 16));"
            " f.flush()"
        ),
        "files = [open(f'{i}', 'w') for i in range(100)]",
        "def f(): f()\nf()",
        "raise KeyboardInterrupt",
        "import sys\nsys.exit(0)",
    ],
)
def test_a_test_that_exceeds_a_limit_fails_alone(attempt):
    assert run_code("x = 1", attempt, "assert x == 1", memory_mib=256) == 1


@needs_linux
@pytest.mark.parametrize(
    "code",
    [
        "import os\nos._exit(0)",
        "import sys\nsys.exit(0)",
        "print('0\\n1\\n' * 1000)\n1 / 0",
        "def f(: pass",
        "\0",
        "raise SystemExit",
    ],
)
def test_code_that_ends_early_passes_no_test(code):
    assert run_code(code, "pass", "pass") == 0


@needs_linux
def test_the_code_sees_no_environment_and_a_temporary_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("SECRET_TOKEN", "x")
    monkeypatch.chdir(tmp_path)
    tests = [
        "import os\nassert 'SECRET_TOKEN' not in os.environ",
        f"import os\nassert os.getcwd() != {str(tmp_path)!r}",
        "open('a.txt', 'w').write('x')",
        "import numpy\nassert numpy.ones((9, 9)).dot(numpy.ones(9)).sum() == 81",
        "import sys\nassert '' not in sys.path and sys.flags.isolated",
        "input()",  # standard input is empty
    ]
    assert run_code("x = 1", *tests) == 5
    assert not os.listdir(tmp_path)


@needs_linux
def test_code_is_run_only_if_the_settings_allow_it():
    settings = {
        "training": {"objective": "grpo", "init_from": "runs/x"},
        "grpo": {"rewards": ["python_tests"]},
    }
    with pytest.raises(
        UserError,
        match=r"^grpo.rewards contain python_tests, .*: set grpo.allow_code_execution: true",
    ):
        build_config(settings)
    with pytest.raises(
        UserError, match=r"^the reward python_tests needs grpo.allow_code_execution: true$"
    ):
        build_rewards(GRPOSection(rewards=["python_tests"]))
