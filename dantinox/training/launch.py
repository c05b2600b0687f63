"""`launch` turns a config into a trained run directory. `dantinox train` calls it."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from dantinox.config import Config, load_config
from dantinox.config.sections import find_inactive, reset_settings
from dantinox.config.yaml_files import inherit_settings, load_training
from dantinox.distributed import (
    NullOutput,
    broadcast_from_rank0,
    initialize_processes,
    is_rank0,
    make_layout,
)
from dantinox.files import UserError
from dantinox.platform import use_compilation_cache
from dantinox.report import Console, human_count, open_console, table, trackers
from dantinox.run import (
    INHERITED_FILES,
    RunDirectory,
    check_resumable,
    clear_failed_start,
    copy_inherited_files,
    create_run,
    find_file_damage,
    hash_file_cached,
    load_run_config,
    record_files,
    save_config,
    save_tokenizer,
    write_file,
)
from dantinox.text import (
    ChatTemplate,
    ConversationStore,
    PromptStore,
    Tokenizer,
    TokenStore,
    corpus_changed,
    has_partial,
    open_store,
    prepare_data,
)
from dantinox.training.loop import train
from dantinox.training.memory import keep_freed_memory
from dantinox.training.rewards import build_rewards
from dantinox.training.signals import stop_request
from dantinox.training.starting_point import resume_config, starting_tokenizer, total_steps
from dantinox.training.step import rows_per_step
from dantinox.training.step_time import limit_steps
from dantinox.training.teacher import open_teacher
from dantinox.training.text_samples import Sampler, make_sampler

PreparedRun = tuple[Config, Tokenizer, TokenStore, Sampler | None]
MIN_STEPS = 20  # a shorter training run gets a warning if its length is given in epochs
LAUNCH_SETTINGS = ("distributed.coordinator", "distributed.processes", "distributed.process")


def launch(
    config: Config | str | Path, *, run_dir: str | Path | None = None, resume: bool = False
) -> RunDirectory:
    """Trains a model in a run directory, or resumes a run.

    Args:
      config: the settings, a YAML file, or the name of a packaged config such as "quickstart".
        Model and tokenizer settings that are not given come from the run `training.init_from`, if
        that is set.
      run_dir: the directory to write to; None: a new directory under runs/. It must be new or empty
        unless `resume` is True. A directory with only what a failed start has left counts as empty.
      resume: continue from the newest checkpoint with the tokens saved in the run, even if the
        corpus has changed. Only steps, intervals, the sample prompt, nan_policy, distributed and
        logging may differ from the saved settings.

    Raises:
      UserError: settings or data are invalid, memory or disk space is insufficient, or another
        process uses the directory.
      KeyboardInterrupt: after SIGINT, which also interrupts a notebook cell. The run is saved
        first.
      SystemExit: after SIGTERM, with code 143. The run is saved first.

    Example:
      >>> config = dantinox.load_config("my.yaml", {"training.steps": 2})
      >>> run = dantinox.launch(config, run_dir="runs/mine")
      >>> run.weights.name
      'model_weights.msgpack'
      >>> model = dantinox.load(run.path)
    """
    if resume and run_dir is None:
        raise UserError("resume=True needs run_dir")
    keep_freed_memory()
    settings = _read_settings(config, resume)
    trackers(settings, Path())  # report a missing tracker library before the corpus is read
    initialize_processes(settings)
    use_compilation_cache()
    # Settings that apply only to this launch, and settings without effect, are not saved.
    settings = reset_settings(settings, [*LAUNCH_SETTINGS, *find_inactive(settings)])
    with contextlib.ExitStack() as stack:
        console: Any = stack.enter_context(open_console() if is_rank0() else NullOutput())
        prepared: PreparedRun | None = None

        def prepare() -> str:
            nonlocal prepared
            # Reports an invalid mesh before a run is created.
            make_layout(settings, settings.trained_architecture(vocab_size=1))
            run = RunDirectory(run_dir or "") if resume else create_run(run_dir)
            if resume:
                check_resumable(run.path)
            stack.enter_context(run.lock())
            with stop_request():  # SIGTERM raises, so that an incomplete run is removed
                prepared = (_prepare_resumed_run if resume else _prepare_new_run)(
                    settings, run, console
                )
            return str(run.path)

        run = RunDirectory(broadcast_from_rank0(prepare))
        settings, tokenizer, store, sample = prepared or _load_prepared(run)
        console.note(f"run directory {run.path}")
        if settings.training.max_minutes is not None:
            settings = _limit_minutes(settings, run, tokenizer, store, console)
        for line in plan_lines(settings, tokenizer, store):
            console.note(line)
        with _cleared_if_not_started(run, resume):
            train(settings, run, tokenizer, store, console, resume=resume, sample=sample)
    return run


@contextlib.contextmanager
def _cleared_if_not_started(run: RunDirectory, resume: bool) -> Iterator[None]:
    """Clears a new run that fails before its first log row, so that the command can be repeated."""
    try:
        yield
    except Exception:
        started = run.metrics.exists() or any(run.checkpoints.glob("*"))
        if not (resume or started) and is_rank0():
            clear_failed_start(run)
        raise


def _limit_minutes(
    settings: Config, run: RunDirectory, tokenizer: Tokenizer, store: TokenStore, console: Console
) -> Config:
    """Measures a step, and replaces `training.max_minutes` by a number of steps, also on disk."""
    console.note("compiling the training step, and measuring its time")
    steps = total_steps(settings, store.windows_per_epoch)
    settings = limit_steps(settings, tokenizer.vocab_size, steps, console.note)
    if is_rank0():
        save_config(run, settings)
    return settings


def _read_settings(config: Config | str | Path, resume: bool) -> Config:
    """Returns the given settings, or those of the given file. A new run inherits the model of
    `training.init_from`.
    """
    if isinstance(config, Config):
        return config if resume else inherit_settings(config)
    return load_config(config) if resume else load_training(config)


def _load_prepared(run: RunDirectory) -> PreparedRun:
    """Loads the run that rank 0 has prepared. The other processes call it."""
    config = load_run_config(run)
    tokenizer = Tokenizer.load(run.tokenizer)
    store = open_store(config, run.data, tokenizer)
    if store is None:
        raise UserError(
            f"process {jax.process_index()} cannot find the tokens in {run.data}: all processes"
            " need the same files"
        )
    return config, tokenizer, store, make_sampler(config, tokenizer)


def _prepare_new_run(config: Config, run: RunDirectory, console: Console) -> PreparedRun:
    """Prepares a new run. On an error, restores the directory to its previous state, so that the
    command can be repeated.
    """
    clear_failed_start(run)
    try:
        if config.training.objective == "grpo":
            build_rewards(config.grpo)  # report an invalid reward here
        template = base_template(config)
        tokenizer, store = prepare_data(
            config, run.data, starting_tokenizer(config), console.stage, template
        )
        total_steps(config, store.windows_per_epoch)  # report invalid steps here
        chat = None
        if config.data_objective != "next_token":
            chat = ChatTemplate.from_name(config.data.chat_template or template, tokenizer)
            tokenizer = _add_stop_tokens(tokenizer, chat)
        sample = make_sampler(config, tokenizer)
        open_teacher(
            config,
            make_layout(config, config.trained_architecture(tokenizer.vocab_size)),
            tokenizer.fingerprint,
        )
        record_files(run.path, run.tokens())
        save_tokenizer(run, tokenizer.to_json(), tokenizer.roles)
        if config.training.init_from is not None:
            copy_inherited_files(RunDirectory(config.training.init_from), run)
        if chat is not None:
            write_file(run.path, run.chat_template.name, chat.source)
        save_config(run, config)  # last: a run with a config can be resumed
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | SystemExit) and has_partial(run.data):
            console.note(
                f"the encoded part of the text is kept: the same command with --run_dir {run.path}"
                " continues it"
            )
            raise
        shutil.rmtree(run.data, ignore_errors=True)
        for path in (
            run.tokenizer,
            run.tokenizer_config,
            run.manifest,
            *(run.path / name for name in INHERITED_FILES),
        ):
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            (run.path / ".lock").unlink()
            run.path.rmdir()
        raise
    return config, tokenizer, store, sample


def base_template(config: Config) -> str:
    """Returns the chat template for a null `data.chat_template`: that of the run that provides the
    tokenizer, else `plain`.
    """
    base = RunDirectory(config.tokenizer_run).chat_template if config.tokenizer_run else None
    return str(base) if base is not None and base.is_file() else "plain"


def _add_stop_tokens(tokenizer: Tokenizer, chat: ChatTemplate) -> Tokenizer:
    """Returns the tokenizer with the tokens that end a response in the chat template added to its
    stop tokens.
    """
    more = sorted(chat.end_ids - set(tokenizer.stop_ids))
    if not more:
        return tokenizer
    names = [tokenizer.core.id_to_token(index) for index in (*tokenizer.stop_ids, *more)]
    return Tokenizer(tokenizer.to_json(), roles=tokenizer.roles | {"stop_tokens": names})


def _prepare_resumed_run(config: Config, run: RunDirectory, console: Console) -> PreparedRun:
    """Prepares the continuation of a run with its saved tokenizer and tokens."""
    run.check(run.tokenizer, *(path for path in (run.weights, run.adapter) if path.exists()))
    has_tokens = any(run.data.glob("tokens*"))  # not only those of an interrupted build
    if has_tokens:
        run.check(*(run.path / name for name in run.tokens(recorded=True)))
    saved = load_run_config(run)
    requested = config
    config = resume_config(saved, requested)
    if config.training.max_minutes != requested.training.max_minutes:
        console.note("training.max_minutes has no effect: a resumed run keeps its number of steps")
    tokenizer = Tokenizer.load(run.tokenizer)
    store = open_store(config, run.data, tokenizer)
    if store is None:
        if has_tokens:
            raise UserError(
                f"the tokens in {run.data} are damaged: remove that"
                " directory to rebuild them from the corpus"
            )
        with_saved_template = config.model_copy(
            update={"data": config.data.model_copy(update={"chat_template": None})}
        )
        _, store = prepare_data(
            with_saved_template, run.data, tokenizer, console.stage, str(run.chat_template)
        )
        _check_rebuilt(run)
    elif corpus_changed(config, run.data):
        console.note(
            "the corpus has changed since this run began: the run continues with its saved tokens"
        )
    for problem in find_file_damage(run, hash_file_cached):
        console.note(problem)  # training does not read these files
    sample = make_sampler(config, tokenizer)
    if config != saved:
        save_config(run, config)
    return config, tokenizer, store, sample


def _check_rebuilt(run: RunDirectory) -> None:
    """Raises UserError if the rebuilt tokens differ from the original tokens of the run."""
    try:
        run.check(*(run.path / name for name in run.tokens(recorded=True)))
    except UserError:
        shutil.rmtree(run.data)
        raise UserError(
            f"the tokens of {run.path} are missing and its corpus has changed: restore one of them"
        ) from None


def plan_lines(config: Config, tokenizer: Tokenizer, store: TokenStore) -> Iterator[str]:
    """Yields a table of the model, the data, the length and the optimizer, and a warning if there
    are very few steps.
    """
    t = config.training
    m = config.architecture(tokenizer.vocab_size)
    feed_forward = f"{m.activation} {m.hidden_dim}"
    if m.experts is not None:
        feed_forward += f", {m.experts.top_k} of {m.experts.count} experts"
    steps = total_steps(config, store.windows_per_epoch)
    text, rows, epochs = _describe_data(config, store, steps)
    adapters = []
    lora = config.trained_architecture(tokenizer.vocab_size).lora
    if lora is not None:
        on = (
            f"on {', '.join(lora.targets)}; the weights of {t.init_from} are frozen, in {lora.held}"
        )
        adapters = [
            ("adapters", f"rank {lora.rank}, scale {lora.scale:g}{', DoRA' * lora.dora}, {on}")
        ]
    if t.objective == "distill":
        d = config.distill
        tokens_compared = "all tokens" if d.top_k is None else f"its {d.top_k} most probable tokens"
        adapters.append(
            (
                "teacher",
                f"{d.teacher}, {d.divergence} of {tokens_compared}, temperature {d.temperature:g}",
            )
        )
    yield table([
        ("model",
         f"{m.num_blocks} layers, dim {m.dim}, {m.n_heads} heads of {m.head_size}, {feed_forward}"),
        ("tokenizer", f"{config.tokenizer.tokenizer_type}, vocabulary of {tokenizer.vocab_size}"),
        ("text", text),
        ("training", f"{steps} steps of {rows}, {epochs:.2f} epochs"),
        *adapters,
        ("optimizer", f"{t.optimizer}, lr {t.lr:g}, {t.schedule} schedule, seed {t.seed}"),
    ]).rstrip()  # fmt: skip
    if t.steps is None and steps < MIN_STEPS:
        corpus = f"this corpus ({store.windows_per_epoch} rows, {t.batch_size} per step)"
        few = "1 step" if steps == 1 else f"{steps} steps"
        remedy = "raise training.epochs or lower training.batch_size"
        yield f"warning: training.epochs {t.epochs:g} with {corpus} gives only {few}: {remedy}"


def _describe_data(config: Config, store: TokenStore, steps: int) -> tuple[str, str, float]:
    """Returns phrases about the data and about the rows of a step, and the number of epochs."""
    batch = config.training.batch_size
    context = config.model.max_context
    epochs = steps * batch / store.windows_per_epoch
    if isinstance(store, PromptStore):
        text = (
            f"{human_count(store.train.documents)} training prompts,"
            f" {human_count(store.val.documents)} for validation"
        )
        samples = rows_per_step(config) // batch
        rows = (
            f"{batch} prompts with {samples} answers of at most {store.answer_tokens} tokens each"
        )
        return text + _left_out(store.left_out), rows, epochs
    text = (
        f"{human_count(store.train.tokens)} training tokens, {human_count(store.val.tokens)}"
        " for validation"
    )
    rows = f"{batch} × {context} tokens"
    if not isinstance(store, ConversationStore):
        return text, rows, steps * batch * context / store.train.tokens
    examples = {"conversation": "conversations", "pair": "pairs", "label": "labeled completions"}[
        store.form
    ]
    text += f" in {store.conversations} {examples}" + _left_out(store.left_out)
    return text, f"{batch} {examples} of {context} tokens" if store.pairs else rows, epochs


def _left_out(count: int) -> str:
    return f", {count} of them too long and skipped" if count else ""
