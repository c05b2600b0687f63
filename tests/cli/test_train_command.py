"""`dantinox train` and other commands: errors, configs, files and output."""

import math
import re
import shlex
import signal
import subprocess
import sys
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from dantinox import cli, training
from dantinox.config import build_config, load_config
from dantinox.lab.measure import doctor
from dantinox.model.parameters import abstract_model
from dantinox.report import Console
from dantinox.text import build_store
from dantinox.training.launch import launch
from tests.cli.expected import ROOT, assert_one_sentence

launch_module = sys.modules[launch.__module__]


def train(environment, *argv):
    command = [sys.executable, ROOT / "train.py", *argv]
    return subprocess.run(
        [str(a) for a in command],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
        cwd=ROOT,
    )


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--config", "nowhere.yaml"], "no config file at nowhere.yaml"),
        (["--lr", "-1"], "training.lr must be a number > 0, got -1 (command line)"),
        (
            ["--seed", "3"],
            "--seed belongs to several settings: write --training.seed or --generation.seed",
        ),
        (["--data_path", "nowhere.txt"], "no corpus at 'nowhere.txt'"),
        (
            ["--use_moe", "True", "--n_experts", "2", "--top_k_mlp", "3"],
            "moe.top_k_mlp must be at most moe.n_experts, got 3 and 2",
        ),
        (["--resume"], "--resume needs --run_dir"),
        (
            ["--resume", "--run_dir", "gone", "--tokenizer_type", "byte"],
            "nothing to resume at gone: it has no config.yaml",
        ),
    ],
)
def test_an_error_of_train(dantinox, tmp_path, flags, says):
    assert_one_sentence(
        dantinox(
            "train", *flags, *([] if "--resume" in flags else ["--run_dir", tmp_path / "run"])
        ),
        says,
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_an_error_of_train_as_a_process(environment, tmp_path):
    done = train(environment, "--lr", "-1", "--run_dir", tmp_path / "run")
    assert_one_sentence(
        (done.returncode, done.stdout, done.stderr),
        "training.lr must be a number > 0, got -1 (command line)",
    )
    assert not (tmp_path / "run").exists()


TINY = [
    "--dim", 16, "--n_heads", 2, "--num_blocks", 1, "--max_context", 16, "--tokenizer_type", "byte",
    "--batch_size", 2, "--steps", 4, "--eval_every", 2, "--warmup_steps", 1, "--sample_every", 4,
    "--max_new_tokens", 5,
]  # fmt: skip


def tiny_run(text, run):
    """Returns the arguments of a command that trains a tiny quickstart model on a text."""
    config = ROOT / "configs/quickstart.yaml"
    return ["train", "--config", config, "--data_path", text, "--run_dir", run, *TINY]


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("Nel mezzo del cammin di nostra vita\n" * 40)
    return path


CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
EXPLAINED = (
    "quickstart",
    "dante",
    "recall",
    "shakespeare_char",
    "gpt2_124m",
    "llama_1b",
    "llama_8b",
    "moe_2b",
)


def test_every_packaged_config_builds_a_model():
    """Models are built from shapes, so a billion parameters need no memory."""
    assert len(CONFIGS) > 10
    for path in CONFIGS:
        lines = path.read_text(encoding="utf-8").splitlines()
        assert lines[0].startswith("# "), path.name
        config = load_config(path)
        vocab_size = config.tokenizer.vocab_size if config.tokenizer.tokenizer_type == "bpe" else 68
        leaves = abstract_model(config.architecture(vocab_size))[1].values()
        millions = sum(math.prod(leaf.shape) for leaf in leaves) / 1e6
        assert 0.4 < millions < 8100, path.name
        if path.stem in EXPLAINED:
            assert millions > 0.5, path.name
            assert "$schema=schema.json" in lines[0], path.name
            bare = [
                line
                for line in lines
                if line.startswith("  ") and not line.partition("#")[2].strip()
            ]
            assert bare == [], f"{path.name}: a comment a key"


def test_packaged_configs_are_found_by_name_in_every_directory(
    dantinox, tmp_path, text, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for chosen in ([], ["--config", "quickstart"], ["--config", ROOT / "configs/quickstart.yaml"]):
        assert "data:\n  path: builtin:python\n" in dantinox("train", *chosen, "--print_config")[1]
    (tmp_path / "dante").write_text("model: {dim: 8, n_heads: 1}")  # a file has priority
    assert "  dim: 8\n" in dantinox("train", "--config", "dante", "--print_config")[1]
    names = [path.stem for path in CONFIGS]
    says = (
        "no config file at quick, did you mean quickstart? The packaged configs are"
        f" {', '.join(names)}"
    )
    assert_one_sentence(dantinox("train", "--config", "quick"), says)


def test_init_writes_a_config_that_trains(dantinox, tmp_path, monkeypatch):
    from dantinox.config.sections import flatten_config

    monkeypatch.chdir(tmp_path)
    assert dantinox("init", "new.yaml") == (0, "", "")
    changed = {"data.path": "builtin:python", "training.sample_every": 250}
    changed |= {
        "generation.max_new_tokens": 100,
        "generation.temperature": 0.7,
        "generation.min_p": 0.1,
        "training.eval_every": 100,
    }
    changed |= {"training.batch_size": 16, "training.lr": 4e-3}
    small = ("model.dim", "model.n_heads", "model.kv_heads", "model.num_blocks",
             "model.max_context", "tokenizer.vocab_size",
             "training.optimizer", "model.qk_norm")  # fmt: skip
    changed |= {
        key: flatten_config(load_config("quickstart"))[key] for key in small
    }  # because this machine has no accelerator
    assert load_config("new.yaml") == build_config({}, changed)
    lines = (tmp_path / "new.yaml").read_text(encoding="utf-8").splitlines()
    assert (
        "#   dantinox train --config new.yaml --run_dir runs/first" in lines
        and max(map(len, lines)) < 160
    )
    assert all(" # " in line for line in lines if line.startswith("  "))
    code, out, _ = dantinox("train", "--config", "new.yaml", "--dry_run", *TINY)
    assert code == 0 and "4 steps of 2 × 16 tokens" in out
    assert_one_sentence(dantinox("init", "new.yaml"), "new.yaml already exists")
    assert_one_sentence(dantinox("init", "gone/new.yaml"), "cannot write gone/new.yaml")


def test_an_invalid_sample_prompt_is_reported_before_training(dantinox, tmp_path, text):
    run = tmp_path / "run"
    argv = tiny_run(text, run)
    code, out, err = dantinox(*argv, "--tokenizer_type", "char", "--sample_prompt", "é")
    assert (
        (code, out) == (2, "")
        and "error: training.sample_prompt: the character 'é'" in err
        and not run.exists()
    )


def test_an_invalid_token_id_is_reported_before_training(dantinox, tmp_path, text):
    run = tmp_path / "run"
    argv = tiny_run(text, run)
    code, out, err = dantinox(*argv, "--allowed_tokens", 999_999)
    assert (code, out) == (
        2,
        "",
    ) and "error: generation.allowed_tokens must hold token ids in [0, 259), got 999999" in err
    assert not run.exists(), "the corrected command can be repeated"


def test_a_start_that_ends_early_can_be_repeated(dantinox, tmp_path, text, monkeypatch):
    """SIGTERM while the text is encoded leaves nothing; an error before the first step leaves only
    the tokens.
    """
    run, stages = tmp_path / "run", []
    settings = config_of(text)

    def stop(config, directory, *args):
        directory.mkdir()
        (directory / ".tokens.tmp").touch()
        signal.raise_signal(signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(launch_module, "prepare_data", stop)
        with pytest.raises(SystemExit) as ended:
            launch(settings, run_dir=run)
    assert ended.value.code == 143 and not run.exists()

    def fail(*args, **kwargs):
        raise RuntimeError("a fault before the first step")

    monkeypatch.setattr(launch_module, "train", fail)
    for lr in (0.1, 0.2):
        with pytest.raises(RuntimeError, match="before the first step"):
            launch(config_of(text, **{"training.lr": lr}), run_dir=run)
        (stored,) = run.glob("data/*.bin")
        stages.append(stored.stat().st_mtime_ns)
        assert not (run / "config.yaml").exists() and stages == [stages[0]] * len(stages), (
            "the tokens are used again"
        )


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize(
    ("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)]
)
def test_an_interrupted_encoding_is_continued(tmp_path, text, monkeypatch, capsys, number, error):
    run, whole, seen = tmp_path / "run", tmp_path / "whole", []
    monkeypatch.setattr(build_store, "BATCH_CHARACTERS", len(text.read_text()) // 10)

    def stage(console, name, done, total, unit="characters"):
        seen.append(done)
        if len(seen) == 4:
            signal.raise_signal(number)

    def fail(*args, **kwargs):
        raise RuntimeError("a fault before the first step")

    monkeypatch.setattr(launch_module, "train", fail)
    monkeypatch.setattr(Console, "stage", stage)
    with pytest.raises(error):
        launch(config_of(text), run_dir=run)
    assert f"the same command with --run_dir {run} continues it" in capsys.readouterr().err
    for path in (run, whole):
        with pytest.raises(RuntimeError, match="before the first step"):
            launch(config_of(text), run_dir=path)
    assert seen[4] > seen[3], "it has continued"
    files = [
        {file.name: file.read_bytes() for file in (path / "data").iterdir()}
        for path in (run, whole)
    ]
    assert files[0] == files[1]


def config_of(text, **changes):
    base = {
        "data.path": str(text),
        "tokenizer.tokenizer_type": "byte",
        "model.max_context": 16,
        "training.batch_size": 2,
    }
    base |= {
        "model.dim": 16,
        "model.n_heads": 2,
        "model.num_blocks": 1,
        "training.steps": 4,
        "training.warmup_steps": 1,
    }
    return build_config({}, base | changes)


def test_a_run_is_trained_once(dantinox, tmp_path, text):
    run, config = tmp_path / "run", ["--config", ROOT / "configs/quickstart.yaml"]
    settings = [*TINY, "--optimizer", "sgd", "--plot", "false", "--sample_every", "null"]
    code, out, err = dantinox("train", *config, "--data_path", text, "--run_dir", run, *settings)
    assert (code, out) == (0, "") and "finished at step 4" in err
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    code, out, err = dantinox("train", "--run_dir", run, "--resume")
    assert (code, out) == (0, "") and "this run is finished" in err
    assert before == {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}, (
        "no file has changed"
    )
    assert_one_sentence(
        dantinox("train", "--data_path", text, "--run_dir", run), "is not empty: add --resume"
    )
    code, _, err = dantinox("train", "--run_dir", run, "--resume", "--lr", 1)
    assert (
        code == 2
        and "training.lr cannot change when a run is resumed: the run has 0.025, got 1" in err
    )


@pytest.mark.slow
def test_train_then_generate_then_resume(dantinox, tmp_path, text):
    run = tmp_path / "run"
    code, out, err = dantinox(*tiny_run(text, run))
    assert (code, out) == (0, "") and "finished at step 4" in err
    names = {
        "config.yaml",
        "tokenizer.json",
        "model_weights.msgpack",
        "training_log.csv",
        "metrics.jsonl",
        "model_summary.json",
    }
    assert (
        names <= {path.name for path in run.iterdir()}
        and (run / "samples" / "step_4.txt").is_file()
    )
    code, out, _ = dantinox(
        "generate", "--run_dir", run, "--prompt", "Nel", "--max_new_tokens", 4, "--greedy"
    )
    assert code == 0 and out.startswith("Nel")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    code, out, err = dantinox("train", "--run_dir", run, "--resume")
    assert (code, out) == (0, "") and "this run is finished" in err
    assert before == {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}, (
        "no file has changed"
    )
    assert_one_sentence(
        dantinox("train", "--data_path", text, "--run_dir", run), "is not empty: add --resume"
    )
    text.write_text("another text")
    code, _, err = dantinox("train", "--run_dir", run, "--resume")
    assert (
        code == 0
        and "the corpus has changed since this run began: the run continues with its saved tokens\n"
        in err
    )
    text.unlink()
    code, _, err = dantinox(
        "train", "--run_dir", run, "--resume", "--steps", 5, "--sample_prompt", "è"
    )
    assert (
        code == 0
        and "resumed from step 4" in err
        and "finished at step 5" in err
        and "corpus" not in err
    )
    assert (run / "samples" / "step_5.txt").read_text(encoding="utf-8").startswith("è")
    code, _, err = dantinox("train", "--run_dir", run, "--resume", "--lr", 1)
    assert (
        code == 2
        and "training.lr cannot change when a run is resumed: the run has 0.025, got 1" in err
    )
    code, out, _ = dantinox("info", run, "--compare_weights")
    assert code == 0 and "val loss" in out and "weights int8" in out and "perplexity" in out


@pytest.mark.slow
def test_a_run_directory_may_have_any_name(dantinox, tmp_path, text):
    run = tmp_path / "[/a-1] *?\\'\"\nè"
    code, _, err = dantinox(*tiny_run(text, run))
    assert code == 0 and "finished at step 4" in err
    code, _, err = dantinox("train", "--run_dir", run, "--resume", "--steps", 6)
    assert code == 0 and "resumed from step 4" in err and "finished at step 6" in err
    assert dantinox("verify", run)[0] == 0
    code, out, _ = dantinox(
        "generate", "--run_dir", run, "--prompt", "Nel", "--max_new_tokens", 4, "--greedy"
    )
    assert code == 0 and out.startswith("Nel")


def test_dry_run_and_print_config_write_no_files(dantinox, tmp_path, text, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = ["--config", ROOT / "configs/quickstart.yaml", "--data_path", text]
    code, out, err = dantinox("train", *config, "--dry_run", *TINY)
    assert (
        code == 0
        and "4 steps of 2 × 16 tokens" in out
        and "estimated peak" in out
        and "first row" in out
    )
    assert re.search(r"about \S+ for 4 steps at \S+ m?s per step, without evaluations\n$", out)
    assert err.startswith(
        "warning: tokenizer.vocab_size has no effect while tokenizer.tokenizer_type is byte ("
    )
    assert err.count("\n") == 1
    code, out, err = dantinox(
        "train", *config, "--print_config", "--training.lr", "5e-4", "--use_moe", "False"
    )
    assert (code, err) == (0, "") and "lr: 0.0005" in out and "use_moe: false" in out
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


def test_doctor(dantinox, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(doctor, "REPEATS", 1)
    monkeypatch.setattr(doctor, "bfloat16_gain", lambda: 1.5)
    monkeypatch.setattr(
        doctor, "load_kernels", lambda: SimpleNamespace(note="native kernels for a CPU")
    )
    before = jax.config.values["jax_compilation_cache_dir"]
    jax.config.update("jax_compilation_cache_dir", None)
    try:
        code, out, err = dantinox("doctor")
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
    assert (code, err) == (0, "") and "jax " in out and "device 0: " in out and "GFLOP/s" in out
    assert "\ncompiler check: sums of matrix multiplication results are correct\n" in out
    assert (
        f"bfloat16 weights: 1.5 × the speed of float32 (saved in {tmp_path / 'dantinox'})\nnative"
        " kernels for a CPU\n" in out
    )
    assert out.endswith(f"compiled programs are cached in {tmp_path / 'dantinox' / 'jax'}\n")


def check_result(found):
    """Returns the line of the compiler check for the sum that a CPU computes; 1,073,741,824 is
    right.
    """
    if found == 1_073_741_824:
        return "compiler check: sums of matrix multiplication results are correct"
    return (
        f"compiler check: wrong results, {found} instead of 1073741824 for a sum of matrix"
        " multiplication results; set"
        " XLA_FLAGS=--xla_cpu_experimental_ynn_fusion_type=LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"
    )


@pytest.mark.parametrize("found", [1_065_369_600, 1_071_645_696, 1_073_741_823, 1_073_741_824])
def test_doctor_reports_wrong_results(monkeypatch, found):
    """The first two numbers are those of jaxlib 0.10.2 on two CPUs."""
    monkeypatch.setattr(jax, "jit", lambda function: lambda x_RI: np.array([0, found]))
    assert doctor._compiler_check() == check_result(found)


SUMS = """
import jax, jax.numpy as jnp
x_RI = jnp.arange(32_769.0)[:, None] * jnp.array([1.0, 0, 0])
print(int(jax.jit(jax.vmap(lambda x_I: jnp.sum((jnp.eye(3) @ x_I) ** 2)))(x_RI)[-1]))
from dantinox.lab.measure.doctor import _compiler_check
print(_compiler_check())
"""


@pytest.mark.slow
@pytest.mark.parametrize("value", ["LIBRARY_FUSION_TYPE_DOT", "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"])
def test_doctor_computes_what_jax_computes(environment, value):
    """With the first option, jaxlib 0.10.2 computes a wrong sum, which depends on the CPU."""
    option = environment | {"XLA_FLAGS": f"--xla_cpu_experimental_ynn_fusion_type={value}"}
    out = subprocess.run(
        [sys.executable, "-c", SUMS],
        env=option,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    found, line = out.splitlines()
    assert line == check_result(int(found))
    assert value == "LIBRARY_FUSION_TYPE_DOT" or int(found) == 1_073_741_824


def test_plot_writes_a_figure_and_prints_its_path(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    from dantinox.report import MetricsLog
    from dantinox.run import create_run, save_config

    for name in ("a", "b"):
        run = create_run(tmp_path / name)
        save_config(run, build_config({}))
        MetricsLog(run.path / "training_log.csv", run.metrics).evaluation(
            {"step": 5, "val_loss": 2.0}
        )
    runs, out = [str(tmp_path / name) for name in ("a", "b")], tmp_path / "ab.png"
    assert (
        cli.main(["plot", runs[0]]) == 0
        and (tmp_path / "a" / "plots" / "loss_by_step.png").is_file()
    )
    assert cli.main(["plot", *runs, "--by", "time", "--out", str(out)]) == 0 and out.is_file()
    assert capsys.readouterr().out.splitlines()[-1] == str(out)
    for wrong, message in (
        (runs, "several runs"),
        ([str(tmp_path)], "not a run directory"),
        ([runs[0], "--out=x.svg"], ".png"),
    ):
        assert cli.main(["plot", *wrong]) == 2 and message in capsys.readouterr().err


def test_the_next_command_can_be_pasted(monkeypatch, capsys, tmp_path):
    run = SimpleNamespace(path=tmp_path / "my run ü", chat_template=tmp_path / "none")
    monkeypatch.setattr(training, "launch", lambda *_, **__: run)
    assert cli.main(["train", "--run_dir", str(run.path)]) == 0
    command = capsys.readouterr().err.split("next: ")[1]
    assert shlex.split(command) == ["dantinox", "generate", str(run.path)]


def test_a_config_without_its_flag_is_named(dantinox):
    code, out, err = dantinox("train", "x.yaml")
    assert (code, out) == (2, "")
    assert err == "error: unknown argument x.yaml: give the config as --config x.yaml\n"
