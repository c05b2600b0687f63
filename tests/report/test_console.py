"""Tests the console: plain lines for scripts, a live display that escapes all text, nothing on
stdout.
"""

import io
import re
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from rich.console import Console as Screen

import dantinox.report.console as report_console
import dantinox.report.live as report_live
from dantinox.report import open_console
from dantinox.report.console import Console, Progress, format_headline, printable, steady_progress
from dantinox.report.live import LiveConsole
from dantinox.report.tables import human_bytes, human_count, human_time, table

ROW = {
    "step": 20,
    "train_loss": 2.0,
    "lr": 3e-4,
    "tokens": 15360,
    "tokens_per_s": 18640.2,
    "memory_gb": 0.41,
    "seconds_left": 83,
}


def show_on_both(action) -> tuple[str, str]:
    """Returns the output of the plain and of the live console for one action."""
    plain, live = io.StringIO(), io.StringIO()
    screen = Screen(
        file=live,
        force_terminal=True,
        width=100,
        height=30,
        color_system=None,
        markup=False,
        emoji=False,
    )
    for console in (Console(plain), LiveConsole(live, screen)):
        with console:
            console.start(2000, step=10)
            action(console)
    return plain.getvalue(), live.getvalue()


def test_plain_lines_are_key_value_pairs():
    plain, _ = show_on_both(lambda console: console.interval(ROW))
    expected = (
        "step 20 train_loss 2.0000 lr 0.0003 tokens 15360 tokens_per_s 18640 memory_gb 0.41"
        " seconds_left 1m23s\n"
    )
    assert plain == expected
    words = plain.split()
    assert dict(zip(words[::2], words[1::2], strict=True)).keys() == ROW.keys()


def test_a_missing_value_is_omitted():
    plain, _ = show_on_both(
        lambda console: console.evaluation(
            {"step": 20, "train_loss": None, "val_loss": float("nan")}
        )
    )
    assert plain == "step 20 val_loss nan\n"


def test_the_live_display_shows_progress_and_the_latest_numbers():
    _, live = show_on_both(lambda console: console.interval(ROW))
    assert "20/2000" in live and "1m23s left" in live
    assert "loss 2.0000 · lr 3.0e-04 · 18.6k tok/s · 0.41 GB" in live


def test_the_best_evaluation_is_marked():
    def evaluations(console):
        for step, loss in ((10, 2.0), (20, 1.5), (30, 1.8)):
            console.evaluation({"step": step, "val_loss": loss})

    _, live = show_on_both(evaluations)
    marked = {
        loss: any(f"val {loss}" in line and "best" in line for line in live.splitlines())
        for loss in ("2.0", "1.5", "1.8")
    }
    assert marked == {"2.0": True, "1.5": True, "1.8": False}


def test_the_best_reward_is_marked():
    """Rows of training with rewards; the first is that of the starting weights."""

    def evaluations(console):
        console.evaluation(
            {
                "step": 0,
                "train_loss_since_eval": None,
                "val_loss": None,
                "reward": None,
                "val_reward": 0.25,
            }
        )
        for step, reward in ((10, 0.75), (20, 0.5)):
            console.evaluation(
                {"step": step, "val_loss": None, "reward": 0.125, "val_reward": reward}
            )

    plain, live = show_on_both(evaluations)
    lines = [line for line in live.splitlines() if "val reward" in line]
    assert ["best so far" in line for line in lines] == [True, True, False]
    assert "reward 0.125 · val reward 0.750" in lines[1]
    assert plain.splitlines()[:2] == [
        "step 0 val_reward 0.25",
        "step 10 reward 0.125 val_reward 0.75",
    ]


@pytest.mark.parametrize("text", ["[bold]KING[/bold]", "[/]", "a :smile: b", "[red", "[link=x]y"])
def test_generated_text_is_not_interpreted_as_markup(text):
    for shown in show_on_both(lambda console: console.sample(text, 20)) + show_on_both(
        lambda console: console.note(text)
    ):
        assert text in shown


def test_generated_text_cannot_control_the_terminal():
    hostile = "a\x1b[2Jb\x07c\rd\x9be\ud800"
    for shown in show_on_both(lambda console: console.sample(hostile, 20)):
        assert "\x1b[2J" not in shown and "\x07" not in shown and "\x9b" not in shown
    assert printable("a\tb\nè\u200d") == "a\tb\nè\u200d"
    assert printable(hostile) == "a�[2Jb�c�d�e�"


@pytest.mark.parametrize("error", [BrokenPipeError, OSError])
@pytest.mark.parametrize("kind", [Console, LiveConsole])
def test_output_that_cannot_be_written_does_not_stop_the_run(kind, error):
    """A closed pipe or terminal, or a full disk."""

    class Closed(io.StringIO):
        def write(self, text):
            raise error

        def flush(self):
            raise error

    console = kind(Closed())
    console.start(5)
    console.note("one")
    console.evaluation({"step": 1, "val_loss": 1.0})
    console.close()


def test_a_full_disk_with_the_output_does_not_change_the_exit_code():
    code = (
        "import sys; from dantinox.report import open_console; c = open_console();"
        " [c.note('x' * 9999) for _ in range(9)]; c.close(); print('end', file=sys.stderr)"
    )
    with open("/dev/full", "w") as full:
        assert (
            subprocess.run([sys.executable, "-c", code], stderr=full, check=False).returncode == 0
        )


def test_piped_output_is_plain_goes_to_stderr_and_needs_no_rich():
    code = (
        "import sys; from dantinox.report import open_console; c = open_console(); c.start(5);"
        " c.note('hi'); c.close();assert 'rich' not in sys.modules and 'matplotlib' not in"
        " sys.modules and 'jax' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "hi\n")


def test_a_terminal_gets_the_live_display_and_a_dumb_one_does_not(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv("TERM", "xterm-256color")
    assert isinstance(open_console(Terminal()), LiveConsole)
    monkeypatch.setenv("TERM", "dumb")
    assert type(open_console(Terminal())) is Console


def test_a_stage_is_announced_once_and_has_a_bar_on_a_terminal():
    def stages(console):
        for name in ("training the tokenizer", "encoding the corpus"):
            for done in (0, 40_000, 80_000):
                console.stage(name, done, 80_000)

    plain, live = show_on_both(stages)
    assert (
        plain == "training the tokenizer: 80.0k characters\nencoding the corpus: 80.0k characters\n"
    )
    assert all(line in live for line in plain.splitlines()) and "100%" in live


@pytest.mark.parametrize("first", [0, 400_000])
def test_a_long_stage_shows_the_time_left(monkeypatch, first):
    """100,000 of a million characters need 10 s. The time is estimated from those that this process
    has encoded.
    """
    seconds = 0.0
    for module in (report_console, report_live):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: seconds))

    def stage(console):
        nonlocal seconds
        for done in range(first, 1_000_001, 100_000):
            seconds = done / 10_000
            console.stage("encoding the corpus", done, 1_000_000)

    plain, live = show_on_both(stage)
    shown = [
        f"{done}k of 1.00M characters, {left} left"
        for done, left in [(300, "1m10s"), (600, "40s"), (900, "10s")]
    ]
    if first:
        shown = ["700k of 1.00M characters, 30s left", "1.00M of 1.00M characters, 0s left"]
    assert plain.splitlines() == [
        "encoding the corpus: 1.00M characters",
        *(f"encoding the corpus: {line}" for line in shown),
    ]
    assert live.count("encoding the corpus") == 1 and "0s left" in live


def test_the_bar_of_a_finished_stage_is_removed():
    with LiveConsole(io.StringIO()) as console:
        console.stage("encoding the corpus", 40_000, 80_000)
        assert console.bar is not None
        console.stage("encoding the corpus", 80_000, 80_000)
        assert console.bar is None


def test_a_console_can_be_closed_twice():
    def close(console):
        console.close()

    show_on_both(close)


def test_the_headline_of_a_row_without_numbers_is_empty():
    assert format_headline({"step": 3}) == ""


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (human_bytes(0), "0 B"),
        (human_bytes(999), "999 B"),
        (human_bytes(1000), "1.00 kB"),
        (human_bytes(999_700), "1.00 MB"),
        (human_bytes(1.42e9), "1.42 GB"),
        (human_bytes(5e15), "5000 TB"),
        (human_count(812), "812"),
        (human_count(25_132), "25.1k"),
        (human_count(1_310_000), "1.31M"),
        (human_count(7e9), "7.00B"),
        (human_time(0.4), "0s"),
        (human_time(59.6), "1m00s"),
        (human_time(125), "2m05s"),
        (human_time(3 * 3600 + 7 * 60), "3h07m"),
        (human_time(2 * 86400 + 4 * 3600), "2d04h"),
        (table([("layers", 4), ("dim", 64)]), "layers  4\ndim     64\n"),
        (table([]), ""),
    ],
)
def test_numbers_are_formatted_for_people(shown, expected):
    assert shown == expected


def test_a_notebook_gets_a_bar_that_is_updated_in_place(monkeypatch, capsys):
    """Uses a replacement of IPython, which a notebook has imported."""
    shown = []

    class Handle:
        def update(self, content, raw):
            shown.append((content["text/plain"], raw))

    def display(content, raw, display_id):
        assert display_id is True
        shown.append((content["text/plain"], raw))
        return Handle()

    ipython = SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=object()))
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=display))
    with open_console() as console:
        console.start(40, 10)
        console.interval(ROW)
        console.evaluation({"step": 20, "val_loss": 1.5})
    assert [raw for _, raw in shown] == [True, True]
    assert shown[0][0].startswith("step 10/40 " + "█" * 7 + "░" * 23)
    assert (
        shown[1][0] == "step 20/40 " + "█" * 15 + "░" * 15 + f" {format_headline(ROW)} · 1m23s left"
    )
    assert capsys.readouterr().err == "step 20 val_loss 1.5000\n"
    ipython.get_ipython = lambda: None  # IPython is imported but not in use
    assert type(open_console()) is Console


def test_the_training_loss_of_an_evaluation_has_its_own_name():
    plain, live = show_on_both(
        lambda console: console.evaluation(
            {"step": 20, "train_loss_since_eval": 1.25, "val_loss": 1.5}
        )
    )
    assert (
        plain == "step 20 train_loss_since_eval 1.2500 val_loss 1.5000\n"
        and "mean loss 1.2500 · val 1.5000" in live
    )


def test_progress_shows_the_completed_share_and_the_remaining_time(monkeypatch):
    lines, clock = [], iter([0.0, 1.0, 10.0, 12.0, 20.0])
    monkeypatch.setattr(report_console, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    progress = Progress(lines.append, "reading", 8, "windows")
    for count in (1, 1, 1, 3):
        progress.advance(count, ", 2.5 nats")
    assert lines == [
        "reading: 8 windows",
        "reading: 2 of 8 windows, 30s left, 2.5 nats",
        "reading: 6 of 8 windows, 7s left, 2.5 nats",
    ]


def test_the_last_line_is_repeated_after_an_interval_without_lines():
    lines, repeated = [], threading.Event()

    def show(line):
        lines.append(line)
        if len(lines) > 2:
            repeated.set()

    with steady_progress(show, seconds=0.04) as progress:
        progress("reading: 2 of 5 files")
        assert repeated.wait(30)
    count = len(lines)
    assert lines[0] == "reading: 2 of 5 files" and re.fullmatch(
        r"reading: 2 of 5 files \(for .*s\)", lines[1]
    )
    time.sleep(0.1)
    assert len(lines) == count, "no line is shown after the work"
