"""`dantinox explain`, `calibrate`, `eval`, `info`, `plan` and `doctor`: flags and output."""

import argparse
import re
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

from dantinox.cli.common import (
    PROMPT_HELP,
    add_run,
    check_plot,
    given_prompt,
    given_settings,
    print_lines,
    print_result,
    use_compilation_cache,
    whole_number,
)
from dantinox.config import UserError, overlay
from dantinox.config.flags import Parser, add_config_flags, overrides
from dantinox.config.sections import AXES, DistributedSection
from dantinox.config.starting_config import DEFAULT
from dantinox.config.yaml_files import load_training
from dantinox.files import atomic_write, check_writable_folder
from dantinox.report.console import steady_progress

COUNT: dict[str, Any] = {"type": whole_number, "metavar": "N"}
# Flag → what it belongs to, of router and kv or of the kinds of `eval` ("": all), and how it is read.
Flags = dict[str, tuple[str, dict[str, Any]]]
CALIBRATE: Flags = {
    "data_path": ("", {"type": Path, "metavar": "FILE", "help":
        "the text (default: the run's own; router: its validation tokens, kv: its training tokens)"}),
    "tokens": ("router", COUNT | {"help": "tokens to read at most (default: 32768)"}),
    "sequences": ("kv", COUNT | {"help": "sequences to read (default: 20)"}),
    "length": ("kv", COUNT | {"help": "tokens of a sequence (default: the context, at most 512)"}),
    "no_loss": ("kv", {"action": "store_true", "default": None, "help":
        "leave out what eviction costs each head, the longest part"}),
    "from_results": ("kv", {"type": Path, "metavar": "FILE", "help": "take over what this file holds instead of measuring"}),
    "output": ("kv", {"type": Path, "metavar": "FILE", "help": "where to write (default: RUN/kv_entropy.json)"}),
}  # fmt: skip
EVALUATE: Flags = {
    "lengths": ("ruler", COUNT | {"nargs": "+", "help": "tokens of a prompt with its answer (default: 2048 4096)"}),
    "samples": ("ruler", COUNT | {"help": "of each task (default: 10)"}),
    "quick": ("sampling kv", {"action": "store_true", "default": None, "help":
        "less of everything: prompts, sequences, seeds, trials"}),
    "out": ("sampling kv ruler", {"type": Path, "metavar": "DIR", "help":
        "where CSV, Markdown and plot go (default: RUN/evaluation)"}),
    "methods": ("sampling kv ruler", {"nargs": "+", "metavar": "NAME", "help":
        "some of them (default: all; kv: fewer above 10 M parameters)"}),
    "tokens": ("sampling kv ppl", COUNT | {"help":
        "sampling: of each continuation; kv: of each sequence (default: the context, or 512); ppl: of a text (all)"}),
    "reference": ("sampling", {"type": Path, "metavar": "RUN", "help": "the run that judges (default: the same)"}),
    "prompts": ("sampling", COUNT | {"help": "to test on, and as many to tune on; fewer by default above 10 M parameters"}),
    "seeds": ("sampling", COUNT | {"help": "continuations of each prompt"}),
    "trials": ("sampling", COUNT | {"help": "settings tried for each method"}),
    "ratios": ("kv ruler", {"type": float, "nargs": "+", "metavar": "R", "help":
        "shares of the slots that are kept (default: .5 .3 .2 .1; .5 .2 of ruler, and above 10 M parameters)"}),
    "sequences": ("kv", COUNT | {"help": "sequences of text to read, at least 6 (default: 200; fewer above 10 M parameters)"}),
    "kv_calibration": ("kv ruler", {"type": Path, "metavar": "FILE", "help":
        "the heads' measured signals (default: RUN/kv_entropy.json)"}),
    "kv_dtype": ("kv ruler", {"choices": ["auto", "float32", "bfloat16", "int8", "int4"], "help":
        "of the compressed caches (default: auto)"}),
    "data_path": ("sampling kv ppl ruler", {"metavar": "FILE", "help":
        "the text, or what else data.path may name (default of sampling and kv: the run's own validation text; of ruler, which "
        "makes essays of it: Python's manual)"}),
    "stride": ("ppl", COUNT | {"help": "tokens from one window to the next (default: half of a window)"}),
    "context": ("ppl", COUNT | {"help": "tokens of a window (default: the model's context)"}),
    "tasks": ("tasks ruler", {"metavar": "NAME[,NAME]", "help":
        "tasks: of lm-evaluation-harness: tasks, groups, or YAML files; ruler: some of its 13 (default: all)"}),
    "include_path": ("tasks", {"type": Path, "metavar": "DIR", "help": "a folder of further tasks, whose code is run"}),
    "limit": ("tasks", COUNT | {"help": "samples of each task (default: all)"}),
    "shots": ("tasks", COUNT | {"help": "examples before each question (default: as each task has it)"}),
    "weights": ("ppl tasks", {"choices": ["auto", "float32", "bfloat16", "int8"], "help":
        "of the model (default: as the run's generation.weights)"}),
    "tensor_parallel": ("ppl tasks", COUNT | {"help": "devices that share a layer (default: as the run's)"}),
    "json": ("ppl tasks", {"action": "store_true", "default": None, "help": "print one JSON object"}),
}  # fmt: skip


def _add(command: Parser, flags: Flags) -> None:
    for name, (of, reading) in flags.items():
        one = of and " " not in of
        command.add_argument(f"--{name}", **reading | {"help": (f"{of}: " if one else "") + reading["help"]})


def given(options: argparse.Namespace, flags: Flags, chosen: str) -> dict[str, Any]:
    """The flags that were given; one that belongs to another kind is an error. `chosen`: the kind in words, as `--what kv`."""
    found = {name: getattr(options, name) for name in flags if getattr(options, name) is not None}
    for name in found:
        of = flags[name][0]
        if of and options.what not in of.split():
            owners = " and ".join(chosen.replace(options.what, one) for one in of.split())
            raise UserError(f"--{name} belongs to {owners}: leave it out with {chosen}")
    return found


def explain_flags(command: Parser) -> None:
    add_run(command)
    command.add_argument("--prompt", help=f"the text before the token; {PROMPT_HELP}")
    command.add_argument("--show", type=whole_number, default=20, metavar="K", help="tokens to show (default: 20)")
    command.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the steps as well")
    command.add_argument("--json", action="store_true", help="print one JSON object")
    add_config_flags(command, ("generation", "router"))


def explain(options: argparse.Namespace) -> int:
    check_plot(options)
    settings = given_settings(options)
    from dantinox.run import load_run_config, open_run

    base = load_run_config(open_run(options.run_dir))
    overlay(base, settings, "command line")
    prompt = given_prompt(options, base)
    use_compilation_cache()
    from dantinox.generation import load
    from dantinox.measure.explain import explain
    from dantinox.measure.explain_view import draw_explanation, explanation_lines

    found = explain(load(options.run_dir), prompt, settings, options.show)
    return _show(options, found, lambda width: explanation_lines(found, width), lambda: draw_explanation(found))


def calibrate_flags(command: Parser) -> None:
    add_run(command)
    what = "router: the thresholds of --router_preset calibrated; kv: what a head's share of --kv_budget goes by"
    command.add_argument("--what", choices=["router", "kv"], required=True, help=what)
    _add(command, CALIBRATE)
    command.add_argument("--json", action="store_true", help="print one JSON object")
    plot = "router: draw where the text and the strategies lie; kv: draw each head's entropy and what eviction costs it"
    command.add_argument("--plot", type=Path, metavar="FILE.png", help=plot)


def calibration(options: argparse.Namespace) -> dict[str, Any]:
    """The flags of `calibrate` that were given; one without effect is an error."""
    flags = given(options, CALIBRATE, f"--what {options.what}")
    for name in ("data_path", "sequences", "length", "no_loss"):
        if "from_results" in flags and name in flags:
            raise UserError(f"--from_results measures nothing: leave --{name} out")
    return flags


def calibrate(options: argparse.Namespace) -> int:
    check_plot(options)
    flags = calibration(options)
    use_compilation_cache()
    if options.what == "router":
        from dantinox.measure.calibrate_router import calibrate_router
        from dantinox.measure.calibrate_router_view import calibration_lines, draw_calibration

        with steady_progress() as progress:
            router = calibrate_router(options.run_dir, progress=progress, **flags)
        return _show(options, router, lambda width: calibration_lines(router, width), lambda: draw_calibration(router))
    from dantinox.measure.calibrate_kv import calibrate_kv
    from dantinox.measure.calibrate_kv_view import draw_kv_calibration, kv_calibration_lines

    with steady_progress() as progress:
        heads = calibrate_kv(options.run_dir, loss=not flags.pop("no_loss", False), progress=progress, **flags)
    record, lines = heads.to_dict(), kv_calibration_lines
    return _show(options, record, lambda width: lines(heads, width, options.output), lambda: draw_kv_calibration(heads))


def _show(options: argparse.Namespace, found: Any, lines: Callable[[int], Iterable[str]], draw: Callable[[], bytes]) -> int:
    """Prints what was found as JSON or as lines, and draws it where --plot asks for that."""
    print_result(options, found, lines)
    if options.plot is not None:
        atomic_write(options.plot, draw())
    return 0


def evaluate_flags(command: Parser) -> None:
    what = (
        "sampling: samplers and the entropy router, equally tuned; kv: compressed caches at equal size; "
        "ruler: the tasks of RULER through compressed caches; ppl: the perplexity of a text, in windows that slide over it; "
        "tasks: those of lm-evaluation-harness"
    )
    command.add_argument("what", choices=list(KINDS), help=what)
    add_run(command)
    _add(command, EVALUATE)


def evaluate(options: argparse.Namespace) -> int:
    return KINDS[options.what](options, given(options, EVALUATE, f"eval {options.what}"))


def _study(options: argparse.Namespace, flags: dict[str, Any]) -> int:
    """A study of `dantinox.studies`: `evaluate_…` of its module, `…_lines` and `…_files` of its view."""
    from dantinox.run import open_run

    name, out = options.what, flags.pop("out", open_run(options.run_dir).path / "evaluation")
    check_writable_folder(out, "--out")
    use_compilation_cache()
    from dantinox.report.plots import save_files

    study, view = import_module(f"dantinox.studies.{name}"), import_module(f"dantinox.studies.{name}_view")
    with steady_progress() as progress:
        found = getattr(study, f"evaluate_{name}")(options.run_dir, progress=progress, **flags)
    print_lines(lambda width: getattr(view, f"{name}_lines")(found, width))
    save_files(out, getattr(view, f"{name}_files")(found))
    return 0


def _perplexity(options: argparse.Namespace, flags: dict[str, Any]) -> int:
    if "data_path" not in flags:
        raise UserError("eval ppl needs --data_path, the text to read")
    use_compilation_cache()
    from dantinox.measure.perplexity import measure_perplexity, perplexity_lines

    flags.pop("json", None)
    with steady_progress() as progress:
        found = measure_perplexity(options.run_dir, progress=progress, **flags)
    return print_result(options, found, lambda _: perplexity_lines(found))


def _tasks(options: argparse.Namespace, flags: dict[str, Any]) -> int:
    if "tasks" not in flags:
        raise UserError("eval tasks needs --tasks, names of tasks with commas between them")
    use_compilation_cache()
    from dantinox.studies.tasks import evaluate_tasks, task_lines

    flags.pop("json", None)
    with steady_progress() as progress:
        found = evaluate_tasks(options.run_dir, progress=progress, **flags)
    return print_result(options, found, lambda width: task_lines(found, width))


KINDS: dict[str, Callable[[argparse.Namespace, dict[str, Any]], int]] = {
    "sampling": _study, "kv": _study, "ruler": _study, "ppl": _perplexity, "tasks": _tasks,
}  # fmt: skip


def info_flags(command: Parser) -> None:
    add_run(command, "the run directory")
    text = "the text that narrow weights are compared on (default: the run's own validation text)"
    command.add_argument("--data_path", metavar="FILE", help=text)


def info(options: argparse.Namespace) -> int:
    use_compilation_cache()
    from dantinox.measure.info import info_lines

    return print_lines(lambda _: info_lines(options.run_dir, options.data_path))


def plan_flags(command: Parser) -> None:
    command.add_argument("--config", type=Path, default=DEFAULT, help=f"a YAML file, or a packaged config (default: {DEFAULT})")
    names = "cpu, gpu:h100, tpu:v5e, tpu:v5p, tpu:v6e; several chips as gpu:h100:8 and tpu:v5e:4x4"
    command.add_argument("--topology", metavar="NAME", help=f"{names} (default: the machine at hand)")
    axes = "how its chips share a training, as data=4,fsdp=64; again for another one to compare (default: `distributed`)"
    command.add_argument("--mesh", action="append", type=mesh_of, metavar="AXIS=N,…", help=axes)
    command.add_argument("--batch", type=whole_number, default=1, metavar="N", help="prompts to generate from (default: 1)")
    command.add_argument("--prompt", type=whole_number, metavar="T", help="tokens of a prompt (default: what --new leaves)")
    new = "tokens to generate (default: max_new_tokens, at most half of the context)"
    command.add_argument("--new", type=whole_number, metavar="N", help=new)
    command.add_argument("--json", action="store_true", help="print one JSON object")
    add_config_flags(command)


def mesh_of(text: str) -> dict[str, int]:
    """The sizes of `data=4,fsdp=64`; an axis that is not named has one device, or for fsdp all that the others leave."""
    named: dict[str, int] = {}
    for part in text.split(","):
        axis, _, size = part.partition("=")
        if axis not in AXES or axis in named or not re.fullmatch(r"[1-9]\d{0,8}", size):
            raise argparse.ArgumentTypeError(f"must be sizes of {', '.join(AXES)}, as data=4,fsdp=64, got {text}")
        named[axis] = int(size)
    return {axis: getattr(DistributedSection(), axis) for axis in AXES} | named


def plan(options: argparse.Namespace) -> int:
    config = load_training(options.config, overrides(options))
    import jax

    if options.topology is not None:
        jax.config.update("jax_platforms", "cpu")  # a machine one does not have is not looked for
    from dantinox.measure.plan import make_plan, plan_lines
    from dantinox.measure.topology import find_topology
    from dantinox.training.resume import trained_vocab_size
    from dantinox.training.step import TrainStep

    topology, sizes = find_topology(options.topology), {name: getattr(options, name) for name in ("batch", "prompt", "new")}
    symbols = trained_vocab_size(config)
    with steady_progress() as progress:
        found = make_plan(topology, config, symbols, TrainStep, meshes=options.mesh or (), progress=progress, **sizes)
    return print_result(options, found, lambda width: plan_lines(found, width))


def doctor(options: argparse.Namespace) -> int:
    from dantinox.measure.doctor import doctor_lines

    return print_lines(lambda _: doctor_lines())
