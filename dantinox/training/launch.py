"""From settings to a trained run directory: what `train.py` does."""

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from dantinox.config import Config
from dantinox.files import UserError, atomic_write
from dantinox.generation.words import sampling_params, seeded
from dantinox.model import Transformer
from dantinox.report import Console, human_count, open_console, table
from dantinox.run import RunDirectory, create_run, load_run_config, save_config
from dantinox.text import Tokenizer, TokenStore, prepare_data
from dantinox.training.loop import train
from dantinox.training.memory import check_memory
from dantinox.training.programs import Programs
from dantinox.training.resume import resumed_config, total_steps

Sampler = Callable[[Config, Tokenizer, Transformer], str]


def launch(
    config: Config, *, run_dir: str | Path | None = None, resume: bool = False, sampler: Sampler | None = None
) -> RunDirectory:
    """Trains a model into a run directory, or goes on with one.

    Args:
      run_dir: where to write; None: a new directory under runs/. It must be new or empty, unless `resume`.
      resume: go on from the newest checkpoint; only steps, intervals and logging may differ from the run's own settings.
      sampler: writes a text with the model as it is, every `training.sample_every` steps.

    Raises:
      UserError: bad settings or data, not enough memory or disk, another process in the same directory.
      SystemExit: after SIGTERM (143) or SIGINT (130), with everything saved.
    """
    run = _existing(run_dir) if resume else create_run(run_dir)
    with run.lock(), open_console() as console:
        tokenizer = None
        if resume:
            config = resumed_config(load_run_config(run), config)
            tokenizer = Tokenizer.load(run.tokenizer)
        with contextlib.nullcontext() if resume else _undone_on_error(run):
            tokenizer, store = prepare_data(config, run.data, tokenizer, _Announcer(console), keep=resume)
            if config.training.sample_every is not None:  # a token that is none is told now, not at the first sample
                sampling_params(tokenizer, [seeded(config, 0)])
            if not resume:
                atomic_write(run.tokenizer, tokenizer.to_json())
            if not resume or config != load_run_config(run):
                save_config(run, config)  # last: where it stands, the run can be resumed
        console.note(f"run directory {run.path}")
        console.note(_plan(config, tokenizer, store))
        final = tokenizer
        sample = None if sampler is None else lambda model, step: sampler(config, final, model)
        train(config, run, tokenizer, store, console, resume=resume, sample=sample)
    return run


def rehearse(config: Config) -> Iterator[str]:
    """What `launch` would do, without a run directory: the plan, the memory it takes, the first batch as text."""
    with tempfile.TemporaryDirectory(prefix="dantinox-") as directory:
        tokenizer, store = prepare_data(config, directory)
        yield _plan(config, tokenizer, store)
        programs = Programs(config, config.architecture(tokenizer.vocab_size), total_steps(config, store.windows_per_epoch))
        yield programs.memory_line()
        check_memory(programs.memory, config)
        batch = store.batch(0)
        yield f"first batch: tokens {list(batch.tokens_BT.shape)}, first row: {tokenizer.decode(batch.tokens_BT[0])!r}"


class _Announcer:
    """Tells each stage of the preparation once."""

    def __init__(self, console: Console):
        self._console, self._stage = console, ""

    def __call__(self, stage: str, done: int, total: int) -> None:
        if stage != self._stage:
            self._stage = stage
            self._console.note(f"{stage}: {human_count(total)} characters")


def _existing(run_dir: str | Path | None) -> RunDirectory:
    if run_dir is None:
        raise UserError("resuming needs the run directory to go on with")
    run = RunDirectory(Path(run_dir).absolute())
    if not run.config.is_file():
        raise UserError(f"nothing to resume at {run_dir}: it has no {run.config.name}")
    return run


@contextlib.contextmanager
def _undone_on_error(run: RunDirectory) -> Iterator[None]:
    """Leaves the directory as it was found, so that the corrected command can be given again."""
    try:
        yield
    except BaseException:
        shutil.rmtree(run.data, ignore_errors=True)
        run.tokenizer.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            (run.path / ".lock").unlink()
            run.path.rmdir()
        raise


def _plan(config: Config, tokenizer: Tokenizer, store: TokenStore) -> str:
    """What will be trained on what, and for how long."""
    t, m = config.training, config.architecture(tokenizer.vocab_size)
    steps = total_steps(config, store.windows_per_epoch)
    tokens = steps * t.batch_size * m.max_context
    return table([
        ("model", f"{m.num_blocks} layers, dim {m.dim}, {m.n_heads} heads of {m.head_size}, {m.activation} {m.hidden_dim}"),
        ("tokenizer", f"{config.tokenizer.tokenizer_type}, {tokenizer.vocab_size} symbols"),
        ("text", f"{human_count(store.train_tokens)} training tokens, {human_count(store.val_tokens)} for validation"),
        ("training", f"{steps} steps of {t.batch_size} × {m.max_context} tokens, {tokens / store.train_tokens:.2f} passes"),
        ("optimizer", f"{t.optimizer}, {t.schedule} schedule, seed {t.seed}"),
    ]).rstrip()  # fmt: skip
