"""Tests that trackers receive the rows of `metrics.jsonl`, through kills, resumes and rewinds."""

import json
import struct
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from dantinox.config import UserError, build_config
from dantinox.report import MetricsLog, read_jsonl, trackers
from tests.error_texts import ERRORS


def open_log(folder, **settings):
    folder.mkdir(exist_ok=True)
    config = build_config({}, {f"logging.{key}": value for key, value in settings.items()})
    return MetricsLog(
        folder / "training_log.csv", folder / "metrics.jsonl", trackers(config, folder)
    )


def fill(log, steps, factor=1.0):
    for step in steps:
        log.event(
            "interval",
            {
                "step": step,
                "train_loss": factor / step,
                "lr": 1e-3,
                "expert_counts": [[1, 2]],
                "mfu": None,
            },
        )
        if step % 20 == 0:
            log.evaluation(
                {
                    "step": step,
                    "train_loss": factor / step,
                    "val_loss": float("nan") if step == 40 else 2 / step,
                }
            )


def numbers_of(rows):
    """Returns the numbers of rows of `metrics.jsonl` by tag and step."""
    return {
        (f"{row['kind']}/{name}", row["step"]): value
        for row in rows
        for name, value in row.items()
        if isinstance(value, int | float) and name != "step"
    }


def events(folder):
    """Yields the events of all files in order, read by the format's description: length, its CRC,
    data, its CRC.
    """
    event_pb2 = pytest.importorskip("tensorboardX.proto.event_pb2")
    for path in sorted((folder / "tensorboard").iterdir()):
        content = path.read_bytes()
        while content:
            (length,) = struct.unpack("<Q", content[:8])
            yield event_pb2.Event.FromString(content[12 : 12 + length])
            content = content[16 + length :]


def scalars(folder):
    """Returns what TensorBoard shows. A session restart discards the steps from its own step on."""
    found, shown = [], {}
    for event in events(folder):
        if event.session_log.status == event.session_log.START:
            found = [(tag, step, value) for tag, step, value in found if step < event.step]
        found += [
            (v.tag, event.step, v.simple_value)
            for v in event.summary.value
            if v.HasField("simple_value")
        ]
    for tag, step, value in found:
        assert (tag, step) not in shown, "shown once"
        shown[tag, step] = value
    return {key: value for key, value in shown.items() if not key[0].startswith("_hparams_")}


def assert_shows(folder):
    expected = numbers_of(read_jsonl(folder / "metrics.jsonl"))
    assert (
        scalars(folder) == {key: np.float32(value) for key, value in expected.items()} and expected
    )


def texts(folder, tag):
    return [
        v.tensor.string_val[0].decode()
        for e in events(folder)
        for v in e.summary.value
        if v.tag.startswith(tag)
    ]


def test_event_files_have_the_rows_of_a_killed_and_resumed_run(tmp_path):
    pytest.importorskip("tensorboardX")
    log = open_log(tmp_path, tensorboard=True)
    log.truncate(0)
    fill(log, range(10, 61, 10))
    log.sample(60, "a <text>\n\nof # two parts")
    assert_shows(tmp_path)  # each row is flushed: the file is not closed yet
    for resumed_at in (40, 40, 0):
        with open_log(tmp_path, tensorboard=True) as log:
            log.truncate(resumed_at)
            assert_shows(tmp_path) if resumed_at else None
            fill(log, range(resumed_at + 10, 101, 10), factor=3.0)
        assert_shows(tmp_path)
    log.truncate(50)  # a rewind
    fill(log, range(60, 71, 10), factor=4.0)
    assert_shows(tmp_path)
    assert texts(tmp_path, "sample") == ["    a <text>\n    \n    of # two parts\n"]
    [config] = texts(tmp_path, "config")
    assert "    training:\n" in config and "tensorboard: true" in config


def test_a_tracker_enabled_later_receives_the_earlier_rows(tmp_path, wandb):
    pytest.importorskip("tensorboardX")
    log = open_log(tmp_path)
    log.truncate(0)
    fill(log, range(10, 61, 10))
    with open_log(tmp_path, tensorboard=True, wandb=True) as log:
        log.truncate(40)
        assert_shows(tmp_path)
        fill(log, range(50, 81, 10))
    assert_shows(tmp_path)
    assert wandb.shown() == numbers_of(read_jsonl(tmp_path / "metrics.jsonl"))


class Wandb(ModuleType):
    """Replaces the parts of the library that are used; accepts rows in the order of their steps."""

    def __init__(self):
        super().__init__("wandb")
        self.runs, self.rows, self.broken, self.offline = [], [], False, True
        self.Settings, self.Html = (lambda **settings: settings), (lambda text: text)

    def init(self, **options):
        if self.broken:
            raise RuntimeError("no API key\nlook there")
        run = SimpleNamespace(
            id=options["id"] or f"id{len(self.runs)}", options=options, log=self.log, exit_code=None
        )
        run.offline, run.starting_step = (
            self.offline,
            (self.rows[-1][0] + 1 if self.rows and not self.offline else 0),
        )
        run.finish = lambda exit_code: setattr(run, "exit_code", exit_code)
        self.runs.append(run)
        return run

    def log(self, data, step):
        if self.broken:
            raise BrokenPipeError("gone")
        assert not self.rows or step >= self.rows[-1][0], "W&B drops steps that decrease"
        self.rows.append((step, data))

    def shown(self):
        flat = [((name, step), value) for step, data in self.rows for name, value in data.items()]
        assert len(flat) == len(dict(flat)), "logged once"
        return dict(flat)


@pytest.fixture
def wandb(monkeypatch):
    module = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_rows_lost_by_a_kill_are_logged_again_online(tmp_path, wandb):
    wandb.offline = False
    log = open_log(tmp_path, wandb=True)
    log.truncate(0)
    fill(log, range(10, 61, 10))
    del wandb.rows[-5:]  # of steps 40, 50 and 60
    log = open_log(tmp_path, wandb=True)
    log.truncate(20)
    fill(log, range(30, 81, 10))
    assert wandb.shown() == numbers_of(read_jsonl(log.path_jsonl))


def test_a_resumed_run_continues_the_same_weights_and_biases_run(tmp_path, wandb):
    with open_log(tmp_path / "run", wandb=True, wandb_project="small") as log:
        log.truncate(0)
        fill(log, range(10, 61, 10))
        log.sample(60, "a <b>")
    whole = numbers_of(read_jsonl(log.path_jsonl)) | {("sample", 60): "<pre>a &lt;b&gt;</pre>"}
    assert wandb.shown() == whole
    with pytest.raises(KeyError), open_log(tmp_path / "run", wandb=True) as log:
        log.truncate(20)
        fill(log, range(30, 51, 10))  # already logged
        log.truncate(20)  # a rewind: the last logged step is still 60
        fill(log, range(30, 81, 10))
        raise KeyError
    assert wandb.shown() == whole | numbers_of(read_jsonl(log.path_jsonl))
    first, second = wandb.runs
    assert (first.id, first.exit_code, second.id, second.exit_code) == ("id0", 0, "id0", 1)
    options = first.options
    assert (options["id"], options["project"], options["name"], options["resume"]) == (
        None,
        "small",
        "run",
        "allow",
    )
    assert options["config"]["training"]["lr"] == 3e-4 and options["dir"] == str(tmp_path / "run")


def test_a_weights_and_biases_failure_is_an_error_at_the_start_and_a_warning_later(tmp_path, wandb):
    with open_log(tmp_path, wandb=True) as log:
        log.truncate(0)
        wandb.broken = True
        with pytest.warns(UserWarning, match=ERRORS["weights_biases_failed_training_continues"]):
            fill(log, range(10, 31, 10))
        with pytest.raises(UserError, match=ERRORS["cannot_start_no_api_key"]):
            log.truncate(0)
    assert [row["step"] for row in read_jsonl(log.path_jsonl)] == [] and wandb.rows == []
    assert json.loads((tmp_path / "wandb" / "dantinox.json").read_text()) == {
        "id": "id0",
        "told": -1,
    }


@pytest.mark.parametrize(
    ("setting", "library"), [("tensorboard", "tensorboardX"), ("wandb", "wandb")]
)
def test_a_missing_library_is_reported_before_the_run_is_created(
    tmp_path, monkeypatch, setting, library
):
    from dantinox.training import launch

    for name in (library, "tensorboardX.event_file_writer"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(
        UserError,
        match=rf"^logging.{setting} needs {library}: in a checkout .*, pip install -e '.\[logs\]'$",
    ):
        launch(
            build_config({}, {f"logging.{setting}": True, "data.path": "nowhere.txt"}),
            run_dir=tmp_path / "run",
        )
    assert not (tmp_path / "run").exists()
