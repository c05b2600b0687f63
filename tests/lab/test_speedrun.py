"""A speedrun trains each stage once over several starts, resumes exactly, and reports the numbers
of its logs.
"""

import csv
import json
import math
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dantinox import cli
from dantinox.config import UserError, load_config
from dantinox.config.flag_values import overrides
from dantinox.config.inherited_settings import load_training
from dantinox.lab.studies import speedrun_evaluation
from dantinox.lab.studies.speedrun import (
    STAGES,
    SpeedrunRequest,
    data_settings,
    run_speedrun,
    stage_settings,
    train_command,
)
from dantinox.lab.studies.speedrun_evaluation import (
    TASKS,
    Sample,
    TaskResult,
    evaluate_speedrun,
    evaluate_tasks_of_stages,
    held_out_questions,
)
from dantinox.lab.studies.speedrun_view import Speedrun, speedrun_files, speedrun_lines
from dantinox.model.parameters import abstract_model
from dantinox.report import MetricsLog, read_csv, read_jsonl
from dantinox.report.tables import human_count
from dantinox.run import RunDirectory, load_run_config, save_config, save_tokenizer, save_weights
from dantinox.text import Tokenizer, train_tokenizer
from dantinox.text.chat_template import PLAIN
from dantinox.text.corpus_files import ADDITION, INSTRUCTIONS
from dantinox.training import launch
from dantinox.training.loop import Trainer

ROOT = Path(__file__).parents[2]


def request(folder):
    """Returns a request for a model of one layer, with a corpus and conversations in the folder."""
    lines = [f"User:\nadd {a} {b}\n\nAssistant:\n{a + b}\n\n" for a in range(40) for b in range(30)]
    (folder / "text.txt").write_text("".join(lines))
    turns = [(f"add {a} 1", str(a + 1)) for a in range(40)]
    records = [
        [{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in turns
    ]
    (folder / "chat.jsonl").write_text(
        "".join(json.dumps({"messages": messages}) + "\n" for messages in records)
    )
    return SpeedrunRequest(1, str(folder / "text.txt"), str(folder / "chat.jsonl"), smoke=True)


class InProcess:
    """Trains in this process, and notes the stages. `stop_at` (stage, step) interrupts a stage as
    SIGTERM does.
    """

    def __init__(self, monkeypatch=None, stop_at=None):
        self.trained, self.stage = [], ""
        if stop_at is not None:
            after_step = Trainer._after_step

            def stop(trainer):
                after_step(trainer)
                if (self.stage, trainer.step) == stop_at:
                    trainer.stop.signal = 15

            monkeypatch.setattr(Trainer, "_after_step", stop)

    def __call__(self, trial, run):
        self.stage = trial.name
        self.trained.append(trial.name)
        launch(trial.config, run_dir=run.path, resume=run.config.is_file())


class Written:
    """Writes the files of a training run with random weights, instead of training. `stop`
    interrupts a stage.
    """

    def __init__(self, stop=None):
        self.trained, self.stop = [], stop

    def __call__(self, trial, run):
        self.trained.append(trial.name)
        config = trial.config
        run.path.mkdir(exist_ok=True)
        save_config(run, config)
        if trial.name == self.stop:
            raise SystemExit(143)
        if config.tokenizer_run is None:
            text = Path(config.data.path).read_text()
            save_tokenizer(run, train_tokenizer(config.tokenizer, lambda: iter([text])).to_json())
        else:
            save_tokenizer(run, RunDirectory(config.tokenizer_run).tokenizer.read_text())
            run.chat_template.write_text(PLAIN)
        random = np.random.default_rng(len(self.trained))
        shapes = abstract_model(
            config.trained_architecture(Tokenizer.load(run.tokenizer).vocab_size)
        )[1]
        weights = {
            name: 0.1 * random.standard_normal(leaf.shape).astype(np.float32)
            for name, leaf in shapes.items()
        }
        save_weights(run.weights, weights)
        run.summary(config).write_text(
            json.dumps({"parameters": sum(array.size for array in weights.values())})
        )
        rewarded = trial.name == "grpo"
        sequences, length = (
            config.training.batch_size * (8 if rewarded else 1),
            (56 if rewarded else 256),
        )
        log = MetricsLog(run.log(config), run.metrics)
        for step, number in ((0, 5.5), (2, 2.25), (4, 3.125)):
            measured = (
                {"val_reward": -number}
                if rewarded
                else {"val_loss": number, "bits_per_byte": number / 4}
            )
            log.evaluation(
                {"step": step, "train_loss": 1.0, "tokens": step * sequences * length, **measured}
            )
        (run.path / "plots").mkdir()
        (run.path / "plots" / ("reward.png" if rewarded else "loss.png")).write_bytes(b"an image")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A speedrun that was interrupted in its first stage and continued: its folder, request, stages
    and progress lines.
    """
    folder, lines = tmp_path_factory.mktemp("speedrun"), []
    wanted = request(folder)
    interrupted = Written("base")
    with pytest.raises(SystemExit):
        run_speedrun(folder / "run", wanted, interrupted, lines.append)
    assert interrupted.trained == ["base"]
    state = json.loads((folder / "run" / "speedrun.json").read_text())
    assert state["finished"] == [] and state["seconds"]["base"] > 0
    stages = run_speedrun(folder / "run", wanted, Written(), lines.append)
    assert stages[0].seconds > state["seconds"]["base"], "the time before the interruption counts"
    return folder, wanted, stages, lines


@pytest.fixture(scope="module")
def evaluation(finished):
    """The results of the tasks, sampled answers, and the built-in tasks of each stage."""
    folder, *_ = finished
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speedrun_evaluation, "ANSWER_TOKENS", 8)
        patch.setattr(speedrun_evaluation, "MAX_QUESTIONS", 9)
        return *evaluate_speedrun(folder / "run"), evaluate_tasks_of_stages(
            folder / "run", smoke=True
        )


def test_the_interrupted_stage_is_resumed(finished, tmp_path):
    folder, wanted, stages, lines = finished
    settings = stage_settings(wanted, tmp_path, 0)
    assert lines == [
        f"base: {train_command('speedrun', settings, folder / 'run' / 'base')}",
        f"base: dantinox train --resume --run_dir {folder / 'run' / 'base'}",
        *(f"{stage.name}: {stage.command}" for stage in stages[1:]),
    ]


def test_results_are_those_of_the_logs(finished):
    folder, _, stages, _ = finished
    base, sft, grpo = stages
    for stage in (base, sft):
        assert (stage.val_loss, stage.bits_per_byte, stage.reward, stage.best_step) == (
            2.25,
            2.25 / 4,
            None,
            2,
        )
    assert (grpo.val_loss, grpo.bits_per_byte, grpo.reward, grpo.best_step) == (
        None,
        None,
        -2.25,
        2,
    )
    config = load_run_config(RunDirectory(folder / "run" / "base"))
    m, V = config.model, 300
    assert (m.dim, m.num_blocks, m.n_heads, m.hidden_dim, m.depth) == (64, 1, 2, 192, None)
    weights = 4 * 64 * 64 + 3 * 64 * 192
    for stage, length in zip(stages, (256, 256, 56), strict=True):
        sequences = load_run_config(RunDirectory(folder / "run" / stage.name)).training.batch_size
        sequences *= 8 if stage is grpo else 1
        assert (stage.steps, stage.tokens) == (4, 4 * sequences * length)
        assert stage.flops == stage.tokens * (6 * (weights + 64 * V) + 12 * 1 * 2 * 32 * length)
        assert stage.parameters == V * 64 + weights + 3 * 64 + 2 * 32, (
            "embeddings, matrices, norms, norms of queries and keys"
        )


def test_a_stage_without_an_evaluation_is_reported(finished, tmp_path):
    folder, wanted, _, _ = finished
    shutil.copytree(folder / "run", tmp_path / "run")
    log = tmp_path / "run" / "sft" / "training_log.csv"
    log.write_text(log.read_text().splitlines()[0] + "\n")
    with pytest.raises(
        UserError,
        match=r"sft has no val_loss in training_log\.csv: remove it and repeat the command",
    ):
        run_speedrun(tmp_path / "run", wanted, Written())


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The same as `finished`, trained."""
    folder, lines = tmp_path_factory.mktemp("speedrun"), []
    wanted = request(folder)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit):
        run_speedrun(folder / "run", wanted, InProcess(patch, ("base", 4)), lines.append)
    return folder, wanted, run_speedrun(folder / "run", wanted, InProcess(), lines.append), lines


@pytest.mark.slow
def test_the_interrupted_stage_continues_exactly(trained, tmp_path):
    folder, wanted, _, _ = trained
    settings = stage_settings(wanted, tmp_path, 0)
    launch(load_training("speedrun", settings), run_dir=tmp_path / "base")
    log = "training_log.csv"
    resumed, whole = (read_csv(run / log) for run in (folder / "run" / "base", tmp_path / "base"))
    assert [row["val_loss"] for row in resumed] == [row["val_loss"] for row in whole]
    weights = "model_weights.msgpack"
    hashes = [
        next(line for line in (run / "manifest.txt").read_text().splitlines() if weights in line)
        for run in (folder / "run" / "base", tmp_path / "base")
    ]
    assert hashes[0] == hashes[1], "the weights of both runs have the same checksum"


@pytest.mark.slow
def test_results_of_trained_stages_are_those_of_the_logs(trained):
    folder, _, stages, _ = trained
    for stage in stages:
        run = folder / "run" / stage.name
        rows = list(csv.DictReader((run / "training_log.csv").read_text().splitlines()))
        if stage.name == "grpo":
            best = max(rows, key=lambda row: float(row["val_reward"]))
            assert (stage.val_loss, stage.bits_per_byte, stage.reward) == (
                None,
                None,
                float(best["val_reward"]),
            )
        else:
            best = min(rows, key=lambda row: float(row["val_loss"]))
            assert (stage.val_loss, stage.bits_per_byte) == (
                float(best["val_loss"]),
                float(best["bits_per_byte"]),
            )
            assert stage.reward is None
        assert (stage.best_step, stage.steps, stage.tokens) == (
            int(best["step"]), int(rows[-1]["step"]), int(rows[-1]["tokens"]),
        )  # fmt: skip
        assert max(row["step"] for row in read_jsonl(run / "metrics.jsonl")) == stage.steps
    base = load_config(folder / "run" / "base" / "config.yaml")
    m, V = base.model, 300
    assert (m.dim, m.num_blocks, m.n_heads, m.hidden_dim, m.depth) == (64, 1, 2, 192, None)
    weights = 4 * 64 * 64 + 3 * 64 * 192
    assert stages[0].parameters == V * 64 + weights + 3 * 64 + 2 * 32, (
        "embeddings, matrices, norms, norms of queries and keys"
    )
    assert stages[0].tokens == stages[0].steps * base.training.batch_size * 256
    assert 0.05 * weights <= stages[0].tokens < 0.05 * weights + base.training.batch_size * 256
    assert stages[0].flops == stages[0].tokens * (6 * (weights + 64 * V) + 12 * 1 * 2 * 32 * 256)
    sft, grpo = (load_run_config(RunDirectory(folder / "run" / name)) for name in ("sft", "grpo"))
    assert (
        sft.training.lr == pytest.approx(base.training.lr / 2, rel=5e-3)
        and sft.training.muon_lr == 0.01
    )
    assert (
        grpo.training.lr == pytest.approx(base.training.lr / 64, rel=5e-3)
        and grpo.training.optimizer == "adamw"
    )
    assert sft.model == base.model == grpo.model
    length = stages[2].tokens // (2 * 4 * 8)
    assert stages[2].tokens == 2 * 4 * 8 * length and length % 8 == 0 and length < 64, (
        "2 steps, 4 prompts, 8 answers"
    )
    assert stages[2].flops == stages[2].tokens * (6 * (weights + 64 * V) + 12 * 1 * 2 * 32 * length)


def test_the_commands_train_the_same_runs(finished):
    """The flags of a printed command give the settings of the run."""
    folder, _, stages, _ = finished
    for stage in stages:
        argv = shlex.split(stage.command)[1:]
        options = cli.parser_of(["train"]).parse(argv)
        config = load_training(options.config, overrides(options))
        assert config == load_run_config(RunDirectory(folder / "run" / stage.name))
        assert options.run_dir == folder / "run" / stage.name


def test_the_reports_have_the_numbers_of_the_logs(finished, evaluation):
    folder, _, stages, _ = finished
    tasks, samples, local_tasks = evaluation
    assert [(task.task, task.corpus, task.count) for task in tasks] == [
        ("sum is right", ADDITION, 9)
    ]
    assert [sample.question for sample in samples[::2]] == [f"add {a} 1" for a in range(32, 35)], (
        "in turn from both corpora"
    )
    assert [sample.reference for sample in samples[::2]] == ["33", "34", "35"]
    sums = [sample.question.rstrip("=").split("+") for sample in samples[1::2]]
    assert [sample.reference for sample in samples[1::2]] == [str(int(a) + int(b)) for a, b in sums]
    assert list(local_tasks) == ["base", "sft", "grpo"]
    found = Speedrun(folder / "run", stages, tasks, samples, local_tasks, 1.0, "a CPU", price=36.0)
    files = {name: str(make()) for name, make in speedrun_files(found).items()}
    for stage in stages:
        row = next(
            line for line in files["report.md"].splitlines() if line.startswith(f"| {stage.name} |")
        )
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert cells[1:4] == [str(stage.steps), human_count(stage.tokens), f"{stage.flops:.2e}"]
        measured = [
            f"{number:.4f}" if number is not None else "–"
            for number in (stage.val_loss, stage.bits_per_byte, stage.reward)
        ]
        assert cells[5:] == [*measured, str(stage.best_step), f"{stage.seconds / 100:.3f}"]
        assert all(f"<td>{cell}</td>" in files["report.html"] for cell in cells)
        assert stage.command in files["report.md"]
    total = sum(stage.seconds for stage in stages) + 1
    assert f"cost {total / 100:.3f} at 36 per hour" in files["report.md"]
    assert all(
        f"]({path})" in files["report.md"]
        for path in ("base/plots/loss.png", "grpo/plots/reward.png")
    )
    assert files["report.html"].count("data:image/png;base64,") == 3
    assert "<script" not in files["report.html"] and "default-src 'none'" in files["report.html"]
    means = [study.mean() for study in local_tasks.values()]
    cells = [f"{mean.value:.3f} [{mean.low:.3f}, {mean.high:.3f}]" for mean in means]
    assert f"| mean centered accuracy | {' | '.join(cells)} |" in files["report.md"]
    accuracies = [f"{np.mean(study.scores[0].correct):.2f}" for study in local_tasks.values()]
    assert f"| arithmetic/addition | {' | '.join(accuracies)} |" in files["report.md"]
    lines = list(speedrun_lines(found, 100))
    assert (
        {"Stages", "Tasks", "Built-in tasks"} < set(lines)
        and "Commands" not in lines
        and "" in lines
    )
    assert f"next: dantinox chat {folder / 'run' / 'grpo'} --max_new_tokens 64" in lines


def test_tasks_that_do_not_fit_are_reported(finished, monkeypatch):
    folder, _, stages, _ = finished

    def fail(*_, **__):
        raise UserError("the task a has a prompt of 300 tokens")

    monkeypatch.setattr("dantinox.lab.studies.speedrun_evaluation.evaluate_local_tasks", fail)
    found = Speedrun(
        folder / "run",
        stages,
        [],
        [],
        evaluate_tasks_of_stages(folder / "run", smoke=True),
        1.0,
        "a CPU",
    )
    assert "Not run: the task a has a prompt of 300 tokens." in str(
        speedrun_files(found)["report.md"]()
    )
    assert "Not run: the task a has a prompt of 300 tokens." in list(speedrun_lines(found, 100))


def test_finished_stages_are_not_repeated(finished):
    folder, wanted, stages, _ = finished
    again = Written()
    assert run_speedrun(folder / "run", wanted, again) == stages and again.trained == []


def test_another_request_is_rejected(finished, tmp_path):
    folder, wanted, _, _ = finished
    for change, text in (
        ({"depth": 2}, "was started with depth 1, got 2"),
        ({"data": None}, r"was started with data '.*, got null"),
        ({"smoke": False}, "was started with smoke true, got false"),
    ):
        with pytest.raises(UserError, match=text):
            run_speedrun(folder / "run", replace(wanted, **change), Written())
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(UserError, match=r"is not empty and not a speedrun \(it has notes\.txt\)"):
        run_speedrun(tmp_path, wanted, Written())
    state = '{"request": %s, "finished": [], "seconds": %s}'
    for content in (
        "[]",
        state % ("[1]", "{}"),
        state % ("{}", '{"base": "x"}'),
        state % ("{}", "[]"),
        "[" * 100_000,
    ):
        (tmp_path / "speedrun.json").write_text(content)
        with pytest.raises(UserError, match="cannot be read: choose another --run_dir"):
            run_speedrun(tmp_path, wanted, Written())


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"parameters": null}'])
def test_a_damaged_summary_is_reported(finished, tmp_path, content):
    folder, wanted, _, _ = finished
    shutil.copytree(folder / "run", tmp_path / "run")
    (tmp_path / "run" / "sft" / "model_summary.json").write_text(content)
    with pytest.raises(
        UserError, match=r"model_summary\.json is damaged: remove .*sft and repeat the command"
    ):
        run_speedrun(tmp_path / "run", wanted, Written())


def test_a_later_stage_without_its_base_is_rejected(tmp_path):
    (tmp_path / "run" / "sft").mkdir(parents=True)
    wanted = request(tmp_path)
    state = {"request": vars(wanted), "finished": ["sft"], "seconds": {}}
    (tmp_path / "run" / "speedrun.json").write_text(json.dumps(state))
    with pytest.raises(
        UserError, match=r"sft was trained on an earlier .*base, which is missing: remove .*sft"
    ):
        run_speedrun(tmp_path / "run", wanted, Written())


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--data", "no.txt"], "error: no corpus at 'no.txt': name a text file, a folder, a glob"),
        (
            ["--sft_data", "no.jsonl"],
            "error: no corpus at 'no.jsonl': name a text file, a folder, a glob",
        ),
        (
            ["--depth", "0"],
            "error: model.depth must be an integer in [1, 4096], or null, got 0 (command line)",
        ),
        (
            ["--tokens_per_parameter", "-1"],
            "error: training.tokens_per_parameter must be a number > 0, or null, got -1.0",
        ),
        (["--price", "-1"], "error: --price must be a number ≥ 0, got -1"),
    ],
)
def test_errors_have_one_sentence(tmp_path, monkeypatch, capsys, flags, sentence):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["speedrun", "--smoke", "--depth", "1", *flags]) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert said[-1].startswith(sentence) and sum(line.startswith("error:") for line in said) == 1
    assert not (tmp_path / "runs").exists(), "the command can be repeated with other arguments"


def test_a_stage_that_fails_ends_the_speedrun(tmp_path):
    with pytest.raises(UserError, match="the disk is full"):
        run_speedrun(
            tmp_path / "run",
            SpeedrunRequest(depth=1, smoke=True),
            lambda trial, run: "the disk is full",
        )
    assert json.loads((tmp_path / "run" / "speedrun.json").read_text())["finished"] == []


def test_datasets_of_the_hub():
    hub = {"data.dataset_source": "huggingface"}
    assert data_settings("huggingface:a/b") == hub | {"data.path": "a/b"}
    assert data_settings("huggingface:a/b:c") == hub | {
        "data.path": "a/b",
        "data.dataset_config": "c",
    }
    assert data_settings("corpus/") == {"data.path": "corpus/"}


def test_the_configs_belong_together():
    base = load_config(STAGES[0].config)
    sft = load_config(STAGES[1].config)
    assert (base.model.num_blocks, base.model.dim, base.data.path) == (4, 256, "builtin:python")
    assert sft.training.init_from == "runs/speedrun/base"
    assert (sft.training.lr, sft.training.muon_lr) == (
        base.training.lr / 2,
        base.training.muon_lr / 2,
    )
    grpo = load_config(STAGES[2].config)
    assert grpo.training.lr == pytest.approx(base.training.lr / 64, rel=5e-3)
    assert (grpo.training.init_from, grpo.data.val_fraction) == (
        "runs/speedrun/sft",
        sft.data.val_fraction,
    )
    assert grpo.data.path in sft.data.path, "the same validation problems"


def test_answers_are_graded():
    (is_right,) = TASKS[ADDITION].values()
    assert is_right(" 95\n", "95") and not is_right("95.", "95") and not is_right("", "95")
    form, arguments = TASKS[INSTRUCTIONS].values()
    reference = "Takes: two arguments\nDoes: Return the sum."
    assert form("Takes: one argument\nDoes: Add.", reference) and not arguments(
        "Takes: one argument\nDoes: Add.", reference
    )
    assert arguments("Takes: two arguments\n", reference) and not form(
        "Takes: two arguments\n", reference
    )


def test_the_report_shows_any_answer_unchanged(finished):
    folder, _, stages, _ = finished
    answer = "```\n<script>alert(1)</script> ` and | pipes"
    task = TaskResult("<b>form</b>", INSTRUCTIONS, (1, 40, 41), 50)
    found = Speedrun(
        folder / "run", stages, [task], [Sample("q", answer, "r")], "no tasks", 0.5, "a CPU"
    )
    files = {name: str(make()) for name, make in speedrun_files(found).items()}
    assert (
        f"````text\nUser:\nq\n\nAssistant:\n{answer}\n\nReference:\nr\n````" in files["report.md"]
    )
    assert (
        "&lt;script&gt;alert(1)&lt;/script&gt;" in files["report.html"]
        and "<script" not in files["report.html"]
    )
    assert (
        "<td>&lt;b&gt;form&lt;/b&gt;</td>" in files["report.html"]
        and "40 of 50" in files["report.html"]
    )
    assert "cost" not in files["report.md"]


def test_the_command_continues_and_writes_the_report(finished, evaluation, monkeypatch, capsys):
    folder, wanted, stages, _ = finished
    tasks, samples, local_tasks = evaluation
    monkeypatch.setattr(speedrun_evaluation, "evaluate_speedrun", lambda *_: (tasks, samples))
    monkeypatch.setattr(
        speedrun_evaluation,
        "evaluate_tasks_of_stages",
        lambda path, smoke, *_: local_tasks if smoke else "",
    )
    argv = [
        "speedrun",
        "--smoke",
        "--depth",
        "1",
        "--data",
        wanted.data,
        "--sft_data",
        wanted.sft_data,
    ]
    assert cli.main([*argv, "--run_dir", str(folder / "run"), "--price", "3600"]) == 0
    printed = capsys.readouterr()
    assert f"sft: finished in {folder / 'run' / 'sft'}" in printed.err
    assert f"next: dantinox chat {folder / 'run' / 'grpo'}" in printed.out
    report = (folder / "run" / "report.md").read_text()
    assert (
        stages[1].command in report
        and "at 3600 per hour" in report
        and samples[0].question in report
    )
    assert (folder / "run" / "report.html").is_file()


def test_held_out_questions_are_those_of_validation(tmp_path):
    wanted = request(tmp_path)
    config = load_config("speedrun_sft", {"data.path": wanted.sft_data, "data.mixture": None})
    (questions,) = held_out_questions(config).values()
    assert [question.text for question in questions] == [f"add {a} 1" for a in range(32, 40)], (
        "the last fifth of 40"
    )
    assert questions[0].answer == "33"


@pytest.mark.slow
def test_the_command_from_text_to_report(tmp_path):
    wanted = request(tmp_path)
    argv = [
        sys.executable,
        "-m",
        "dantinox",
        "speedrun",
        "--smoke",
        "--depth",
        "1",
        "--data",
        wanted.data,
    ]
    done = subprocess.run(
        [*argv, "--run_dir", "runs/s"], cwd=tmp_path, env=None, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    report = (tmp_path / "runs" / "s" / "report.md").read_text()
    loss = min(
        row["val_loss"] for row in read_csv(tmp_path / "runs" / "s" / "base" / "training_log.csv")
    )
    assert f"{loss:.4f}" in report and math.isfinite(loss) and f"{loss:.4f}" in done.stdout
    assert (
        len(re.findall(r"Reference:\nTakes: ", report)) == 3
        and len(re.findall(r"Reference:\n[0-9]+\n", report)) == 2
    )
    assert "next: dantinox chat runs/s/grpo" in done.stdout
