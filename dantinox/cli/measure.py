"""`dantinox explain`, `calibrate`, `eval`, `info`, `plan` and `doctor`: their flags and output."""

import argparse
import re
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

from dantinox.cli.common import (
    CONFIG_HELP,
    PROMPT_HELP,
    add_run,
    check_plot,
    check_report,
    given_prompt,
    given_settings,
    print_lines,
    print_result,
    use_compilation_cache,
    whole_number,
)
from dantinox.config.flags import Parser, add_config_flags
from dantinox.config.packaged import DEFAULT_CONFIG
from dantinox.files import UserError, atomic_write, check_writable_folder

COUNT_OPTION: dict[str, Any] = {"type": whole_number, "metavar": "N"}
# Flag → the kinds that it applies to ("": all kinds), and its arguments for `add_argument`. A kind
# is a value of `calibrate --what`, or a subcommand of `eval`.
Flags = dict[str, tuple[str, dict[str, Any]]]
CALIBRATE: Flags = {
    "data_path": (
        "",
        {
            "type": Path,
            "metavar": "FILE",
            "help": (
                "text to read (default: the run's validation tokens for"
                " router, its training tokens for kv)"
            ),
        },
    ),
    "tokens": (
        "router",
        COUNT_OPTION | {"help": "maximum number of tokens to read (default: 32768)"},
    ),
    "sequences": ("kv", COUNT_OPTION | {"help": "sequences to read (default: 20)"}),
    "length": (
        "kv",
        COUNT_OPTION | {"help": "tokens per sequence (default: the context, at most 512)"},
    ),
    "no_loss": (
        "kv",
        {
            "action": "store_true",
            "default": None,
            "help": (
                "skip the slowest measurement: how much eviction from each head raises the loss"
            ),
        },
    ),
    "from_results": (
        "kv",
        {
            "type": Path,
            "metavar": "FILE",
            "help": "copy the results of this file instead of measuring",
        },
    ),
    "output": (
        "kv",
        {"type": Path, "metavar": "FILE", "help": "file to write (default: RUN/kv_entropy.json)"},
    ),
}
EVALUATE: Flags = {
    "lengths": (
        "ruler",
        COUNT_OPTION
        | {
            "nargs": "+",
            "help": "total tokens of a prompt and its answer (default: 2048 4096)",
        },
    ),
    "samples": ("ruler", COUNT_OPTION | {"help": "samples per task (default: 10)"}),
    "quick": (
        "sampling kv",
        {
            "action": "store_true",
            "default": None,
            "help": "use fewer prompts, sequences, seeds and trials",
        },
    ),
    "out": (
        "sampling kv ruler tasks",
        {
            "type": Path,
            "metavar": "DIR",
            "help": (
                dict.fromkeys(
                    ("sampling", "kv", "ruler"),
                    "folder for the CSV, Markdown and plot files (default: RUN/evaluation)",
                )
                | {
                    "tasks": (
                        "folder for tasks.json, the results of"
                        " local tasks (default: RUN/evaluation)"
                    )
                }
            ),
        },
    ),
    "methods": (
        "sampling kv ruler",
        {
            "nargs": "+",
            "metavar": "NAME",
            "help": {
                "sampling": "methods to compare (default: all)",
                "kv": "methods to compare (default: all; fewer above 10 M parameters)",
                "ruler": "methods to compare (default: all)",
            },
        },
    ),
    "tokens": (
        "sampling kv ppl watermark",
        COUNT_OPTION
        | {
            "help": {
                "sampling": "tokens per continuation",
                "kv": "tokens per sequence (default: the context, at most 512)",
                "ppl": "tokens to read from the beginning of the text (default: 8192)",
                "watermark": "tokens to read (default: all)",
            }
        },
    ),
    "reference": (
        "sampling",
        {
            "type": Path,
            "metavar": "RUN",
            "help": "run whose model scores the texts (default: the run itself)",
        },
    ),
    "prompts": (
        "sampling",
        COUNT_OPTION
        | {
            "help": (
                "number of test prompts, and of tuning prompts (the default"
                " is smaller above 10 M parameters)"
            )
        },
    ),
    "seeds": ("sampling", COUNT_OPTION | {"help": "number of continuations per prompt"}),
    "trials": ("sampling", COUNT_OPTION | {"help": "number of settings to try per method"}),
    "ratios": (
        "kv ruler",
        {
            "type": float,
            "nargs": "+",
            "metavar": "R",
            "help": {
                "kv": (
                    "fractions of the slots to keep (default: .5 .3 .2"
                    " .1; above 10 M parameters: .5 .2)"
                ),
                "ruler": "fractions of the slots to keep (default: .5 .2)",
            },
        },
    ),
    "sequences": (
        "kv",
        COUNT_OPTION
        | {"help": "sequences to read, at least 6 (default: 200; fewer above 10 M parameters)"},
    ),
    "kv_calibration": (
        "kv ruler",
        {
            "type": Path,
            "metavar": "FILE",
            "help": (
                "calibration file with the signals of the attention heads (default:"
                " RUN/kv_entropy.json)"
            ),
        },
    ),
    "kv_dtype": (
        "kv ruler",
        {
            "choices": ["auto", "float32", "bfloat16", "int8", "int4", "int2"],
            "help": "precision of the compressed caches (default: auto)",
        },
    ),
    "watermark_keys": (
        "watermark",
        {
            "type": int,
            "nargs": "+",
            "metavar": "KEY",
            "help": (
                "secret numbers of the watermark (default: the run's generation.watermark_keys)"
            ),
        },
    ),
    "watermark_ngram": (
        "watermark",
        COUNT_OPTION
        | {
            "help": (
                "length of the hashed token sequences (default: the run's"
                " generation.watermark_ngram)"
            )
        },
    ),
    "data_path": (
        "sampling kv ppl ruler watermark",
        {
            "metavar": "FILE",
            "help": {
                "sampling": (
                    "text, in any form that data.path accepts"
                    " (default: the run's own validation text)"
                ),
                "kv": (
                    "text, in any form that data.path accepts"
                    " (default: the run's own validation text)"
                ),
                "ruler": (
                    "text to build essays from, in any form that data.path accepts (default:"
                    " Python's manual)"
                ),
                "ppl": "text to read, in any form that data.path accepts (required)",
                "watermark": "text to test, in any form that data.path accepts (required)",
            },
        },
    ),
    "stride": (
        "ppl",
        COUNT_OPTION | {"help": "tokens from one window to the next (default: half of a window)"},
    ),
    "context": ("ppl", COUNT_OPTION | {"help": "tokens per window (default: the model's context)"}),
    "tasks": (
        "tasks ruler",
        {
            "metavar": "NAME[,NAME]",
            "help": {
                "tasks": (
                    "builtin, folders or .jsonl files; or tasks, groups or YAML files of"
                    " lm-evaluation-harness (required)"
                ),
                "ruler": "tasks to run, out of 13 (default: all)",
            },
        },
    ),
    "include_path": (
        "tasks",
        {
            "type": Path,
            "metavar": "DIR",
            "help": "folder with further tasks; their code is executed",
        },
    ),
    "limit": (
        "tasks",
        COUNT_OPTION | {"help": "maximum number of samples per task (default: all)"},
    ),
    "shots": (
        "tasks",
        COUNT_OPTION
        | {
            "help": (
                "number of examples before each question (default: that of the task; 2 for builtin,"
                " 0 for other local tasks)"
            )
        },
    ),
    "seed": (
        "tasks",
        COUNT_OPTION
        | {"help": "local tasks: seed of the examples before each question (default: 0)"},
    ),
    "compare": (
        "tasks",
        {
            "type": Path,
            "metavar": "RUN",
            "help": (
                "local tasks: run to compare with, which was evaluated on"
                " the same tasks, or its tasks.json"
            ),
        },
    ),
    "weights": (
        "ppl tasks",
        {
            "choices": ["auto", "float32", "bfloat16", "int8", "int4"],
            "help": "precision of the weights (default: the run's generation.weights)",
        },
    ),
    "tensor_parallel": (
        "ppl tasks",
        COUNT_OPTION | {"help": "number of devices that share each layer (default: the run's)"},
    ),
    "json": (
        "ppl tasks watermark",
        {"action": "store_true", "default": None, "help": "print one JSON object"},
    ),
}


def _add(command: Parser, flags: Flags, kind: str = "") -> None:
    """Adds flags to a parser.

    If `kind` is not empty, the flags of the other kinds are parsed but hidden from `--help`, so
    that `given_flags` can name them in its error.
    """
    for name, (kinds, arguments) in flags.items():
        text = arguments["help"]
        if kind and kinds and kind not in kinds.split():
            text = argparse.SUPPRESS
        elif isinstance(text, dict):
            text = text[kind]
        elif not kind and kinds:
            text = f"{kinds}: {text}"
        command.add_argument(f"--{name}", **arguments | {"help": text})


def given_flags(options: argparse.Namespace, flags: Flags, chosen: str) -> dict[str, Any]:
    """Returns the flags that were given.

    Args:
      chosen: the part of the command line that selects the kind: `--what kv` or `eval kv`.

    Raises:
      UserError: a flag belongs to another kind.
    """
    found = {name: getattr(options, name) for name in flags if getattr(options, name) is not None}
    for name in found:
        kinds = flags[name][0].split()
        if kinds and options.what not in kinds:
            allowed = " and ".join(chosen.replace(options.what, kind) for kind in kinds)
            raise UserError(f"--{name} has no effect with {chosen}: it is a flag of {allowed}")
    return found


def add_explain_flags(command: Parser) -> None:
    add_run(command)
    command.add_argument("--prompt", help=f"text whose next token is explained; {PROMPT_HELP}")
    command.add_argument(
        "--chat",
        action="store_true",
        help="format the prompt as a user message with the chat template",
    )
    command.add_argument(
        "--show",
        type=whole_number,
        default=20,
        metavar="K",
        help="number of tokens to show (default: 20)",
    )
    command.add_argument(
        "--plot",
        type=Path,
        metavar="FILE.png",
        help="plot how each sampling step changes the distribution",
    )
    command.add_argument(
        "--attention_stats",
        action="store_true",
        help="show the attention of the heads of each layer",
    )
    weights = (
        "show the attention weights of a layer and a query head, both from 0; --report draws them"
        " between all tokens"
    )
    command.add_argument("--attention", type=layer_and_head, metavar="LAYER:HEAD", help=weights)
    command.add_argument(
        "--report",
        type=Path,
        metavar="FILE.html",
        help="write a page with the tables and the map of --attention",
    )
    command.add_argument("--json", action="store_true", help="print one JSON object")
    add_config_flags(
        command,
        ("generation", "router"),
        (
            "prompt",
            "chat",
            "show",
            "plot",
            "attention",
            "report",
            "json",
            "temperature",
            "top_k",
            "top_p",
        ),
    )


def layer_and_head(text: str) -> tuple[int, int]:
    """Parses the value of --attention."""
    if not re.fullmatch("[0-9]{1,6}:[0-9]{1,6}", text):
        raise argparse.ArgumentTypeError(
            f"must be LAYER:HEAD, two integers from 0 such as 2:5, got {text!r}"
        )
    layer, head = text.split(":")
    return int(layer), int(head)


def explain(options: argparse.Namespace) -> int:
    check_plot(options)
    check_report(options)
    settings = given_settings(options)
    from dantinox.config import overlay
    from dantinox.run import load_run_config, open_run

    base = load_run_config(open_run(options.run_dir))
    overlay(base, settings, "command line")
    prompt = given_prompt(options, base)
    use_compilation_cache()
    from dantinox.generation import load
    from dantinox.lab.measure.explain import explain
    from dantinox.lab.measure.explain_view import (
        draw_explanation,
        explanation_blocks,
        explanation_lines,
    )
    from dantinox.report.document import to_html

    model = load(options.run_dir)
    text = model.chat_prompt(prompt)[1] if options.chat else prompt
    found = explain(
        model,
        text,
        settings,
        options.show,
        attention=options.attention_stats,
        head=options.attention,
    )
    if options.report is not None:
        blocks = list(explanation_blocks(found))
        atomic_write(options.report, to_html(blocks, "The next token", options.report.parent))
    return _show(
        options,
        found,
        lambda width: explanation_lines(found, width),
        lambda: draw_explanation(found),
    )


def add_calibrate_flags(command: Parser) -> None:
    add_run(command)
    what = (
        "router: thresholds for --router_preset=calibrated; kv: signals that"
        " set each head's share of --kv_budget"
    )
    command.add_argument("--what", choices=["router", "kv"], required=True, help=what)
    _add(command, CALIBRATE)
    command.add_argument("--json", action="store_true", help="print one JSON object")
    plot = (
        "router: plot token entropies and strategy regions; kv: plot the"
        " entropy and eviction cost of each head"
    )
    command.add_argument("--plot", type=Path, metavar="FILE.png", help=plot)


def calibration_flags(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the flags of `calibrate` that were given.

    Raises:
      UserError: a flag has no effect.
    """
    flags = given_flags(options, CALIBRATE, f"--what {options.what}")
    for name in ("data_path", "sequences", "length", "no_loss"):
        if "from_results" in flags and name in flags:
            raise UserError(f"--from_results measures nothing: leave --{name} out")
    return flags


def calibrate(options: argparse.Namespace) -> int:
    check_plot(options)
    flags = calibration_flags(options)
    use_compilation_cache()
    from dantinox.report.console import steady_progress

    if options.what == "router":
        from dantinox.lab.measure.calibrate_router import calibrate_router
        from dantinox.lab.measure.calibrate_router_view import calibration_lines, draw_calibration

        with steady_progress() as progress:
            router = calibrate_router(options.run_dir, progress=progress, **flags)
        return _show(
            options,
            router,
            lambda width: calibration_lines(router, width),
            lambda: draw_calibration(router),
        )
    from dantinox.lab.measure.calibrate_kv import calibrate_kv
    from dantinox.lab.measure.calibrate_kv_view import draw_kv_calibration, kv_calibration_lines

    with steady_progress() as progress:
        heads = calibrate_kv(
            options.run_dir, loss=not flags.pop("no_loss", False), progress=progress, **flags
        )
    record = heads.to_dict()
    lines = kv_calibration_lines
    return _show(
        options,
        record,
        lambda width: lines(heads, width, options.output),
        lambda: draw_kv_calibration(heads),
    )


def _show(
    options: argparse.Namespace,
    found: Any,
    lines: Callable[[int], Iterable[str]],
    draw: Callable[[], bytes],
) -> int:
    """Prints a result as JSON or as lines, and writes the plot of --plot."""
    print_result(options, found, lines)
    if options.plot is not None:
        atomic_write(options.plot, draw())
    return 0


KIND_HELP = {
    "sampling": "Compare samplers and the entropy router, all with the same tuning budget.",
    "kv": "Compare compressed KV caches of equal size.",
    "ruler": "Run the RULER tasks with compressed KV caches.",
    "ppl": "Measure the perplexity of a text in sliding windows.",
    "tasks": "Run local tasks or tasks of lm-evaluation-harness.",
    "watermark": "Test whether texts have the SynthID watermark of some keys.",
}


def add_evaluate_flags(command: Parser) -> None:
    kinds = command.add_subparsers(metavar="kind", required=True, dest="what")
    for kind, text in KIND_HELP.items():
        one = kinds.add_parser(kind, help=text, description=text)
        add_run(one)
        _add(one, EVALUATE, kind)
        one.add_argument("--debug", action="store_true", help=argparse.SUPPRESS)


def evaluate(options: argparse.Namespace) -> int:
    return KINDS[options.what](options, given_flags(options, EVALUATE, f"eval {options.what}"))


def _study(options: argparse.Namespace, flags: dict[str, Any]) -> int:
    """Runs the study `eval NAME` and writes its report.

    `lab/studies/NAME_study.py` has `evaluate_NAME`. `lab/studies/NAME_view.py` has `NAME_blocks`,
    and `draw_NAME` if the report has a plot.
    """
    from dantinox.run import open_run

    name = options.what
    out = flags.pop("out", open_run(options.run_dir).path / "evaluation")
    check_writable_folder(out, "--out")
    use_compilation_cache()
    from dantinox.report.console import steady_progress
    from dantinox.report.document import study_files, to_lines
    from dantinox.report.plots import save_files

    study = import_module(f"dantinox.lab.studies.{name}_study")
    view = import_module(f"dantinox.lab.studies.{name}_view")
    with steady_progress() as progress:
        found = getattr(study, f"evaluate_{name}")(options.run_dir, progress=progress, **flags)
    blocks = list(getattr(view, f"{name}_blocks")(found))
    print_lines(lambda width: to_lines(blocks, width))
    save_files(out, study_files(name, found, blocks, getattr(view, f"draw_{name}", None)))
    return 0


def _perplexity(options: argparse.Namespace, flags: dict[str, Any]) -> int:
    if "data_path" not in flags:
        raise UserError("eval ppl needs --data_path, the text to read")
    use_compilation_cache()
    from dantinox.lab.measure.perplexity import measure_perplexity, perplexity_lines
    from dantinox.report.console import steady_progress

    flags.pop("json", None)
    with steady_progress() as progress:
        found = measure_perplexity(options.run_dir, progress=progress, **flags)
    return print_result(options, found, lambda _: perplexity_lines(found))


def _tasks(options: argparse.Namespace, flags: dict[str, Any]) -> int:
    if "tasks" not in flags:
        raise UserError("eval tasks needs --tasks, task names separated by commas")
    from dantinox.lab.studies.task_files import is_local

    flags.pop("json", None)
    names = [name.strip() for name in flags["tasks"].split(",") if name.strip()]
    local = [name for name in names if is_local(name)]
    if local and len(local) < len(names):
        raise UserError(
            f"--tasks must not mix local tasks ({', '.join(local)}) with tasks of"
            " lm-evaluation-harness"
        )
    kind = "local tasks" if local else "tasks of lm-evaluation-harness"
    flags_of_others = ("include_path",) if local else ("seed", "compare", "out")
    for name in flags_of_others:
        if name in flags:
            raise UserError(f"--{name} has no effect with {kind}")
    use_compilation_cache()
    return _local_tasks(options, local, flags) if local else _harness_tasks(options, flags)


def _local_tasks(options: argparse.Namespace, names: list[str], flags: dict[str, Any]) -> int:
    from dantinox.lab.studies.local_tasks import evaluate_local_tasks
    from dantinox.lab.studies.local_tasks_view import local_task_blocks
    from dantinox.report.console import steady_progress
    from dantinox.report.document import to_lines

    del flags["tasks"]
    with steady_progress() as progress:
        found = evaluate_local_tasks(options.run_dir, names, progress=progress, **flags)
    record = found.record() if options.json else found
    return print_result(options, record, lambda width: to_lines(local_task_blocks(found), width))


def _harness_tasks(options: argparse.Namespace, flags: dict[str, Any]) -> int:
    from dantinox.lab.studies.harness_tasks import evaluate_tasks, task_lines
    from dantinox.report.console import steady_progress

    with steady_progress() as progress:
        found = evaluate_tasks(options.run_dir, progress=progress, **flags)
    return print_result(options, found, lambda width: task_lines(found, width))


def _watermark(options: argparse.Namespace, flags: dict[str, Any]) -> int:
    if "data_path" not in flags:
        raise UserError("eval watermark needs --data_path, the text to test")
    from dantinox.lab.measure.watermark_detection import detect_watermark, watermark_lines

    flags.pop("json", None)
    found = detect_watermark(options.run_dir, **flags)
    return print_result(options, found, lambda _: watermark_lines(found))


KINDS: dict[str, Callable[[argparse.Namespace, dict[str, Any]], int]] = {
    "sampling": _study,
    "kv": _study,
    "ruler": _study,
    "ppl": _perplexity,
    "tasks": _tasks,
    "watermark": _watermark,
}


def add_info_flags(command: Parser) -> None:
    add_run(command, "run directory")
    compare = "measure how much bfloat16, int8 and int4 weights raise the loss"
    command.add_argument("--compare_weights", action="store_true", help=compare)
    text = "compare the weights on this text (default: the run's own validation text)"
    command.add_argument("--data_path", metavar="FILE", help=text)


def info(options: argparse.Namespace) -> int:
    from dantinox.lab.measure.info import info_lines

    print_lines(lambda _: info_lines(options.run_dir))
    if options.compare_weights or options.data_path is not None:
        use_compilation_cache()
        from dantinox.lab.measure.weight_comparison import comparison_lines

        print_lines(lambda _: comparison_lines(options.run_dir, options.data_path))
    return 0


def add_plan_flags(command: Parser) -> None:
    command.add_argument(
        "--config",
        type=Path,
        default=DEFAULT_CONFIG,
        metavar="FILE",
        help=CONFIG_HELP,
    )
    names = (
        "target device: cpu, gpu:h100, tpu:v5e, tpu:v5p, tpu:v6e;"
        " several chips: gpu:h100:8, tpu:v5e:4x4"
    )
    command.add_argument("--topology", metavar="NAME", help=f"{names} (default: this machine)")
    axes = (
        "mesh of the target device, such as data=4,fsdp=64; repeat to compare meshes (default: the"
        " distributed settings)"
    )
    command.add_argument("--mesh", action="append", type=mesh_of, metavar="AXIS=N,…", help=axes)
    command.add_argument(
        "--batch",
        type=whole_number,
        default=1,
        metavar="N",
        help="prompts to generate from (default: 1)",
    )
    command.add_argument(
        "--prompt",
        type=whole_number,
        metavar="T",
        help="tokens per prompt (default: context minus --new)",
    )
    new = "tokens to generate (default: max_new_tokens, at most half of the context)"
    command.add_argument("--new", type=whole_number, metavar="N", help=new)
    command.add_argument("--json", action="store_true", help="print one JSON object")
    used = (
        "config",
        "topology",
        "mesh",
        "batch",
        "prompt",
        "new",
        "json",
        "dim",
        "num_blocks",
        "max_context",
        "batch_size",
    )
    add_config_flags(command, most_used=used)


def mesh_of(text: str) -> dict[str, int]:
    """Parses mesh axis sizes like `data=4,fsdp=64`.

    The axis fsdp defaults to all remaining devices, and every other axis to 1.
    """
    from dantinox.config.distributed_settings import MESH_AXES, DistributedSection

    named: dict[str, int] = {}
    for part in text.split(","):
        axis, _, size = part.partition("=")
        if axis not in MESH_AXES or axis in named or not re.fullmatch(r"[1-9]\d{0,8}", size):
            raise argparse.ArgumentTypeError(
                f"must be AXIS=N pairs like data=4,fsdp=64 (axes: {', '.join(MESH_AXES)}), got"
                f" {text}"
            )
        named[axis] = int(size)
    return {axis: getattr(DistributedSection(), axis) for axis in MESH_AXES} | named


def plan(options: argparse.Namespace) -> int:
    from dantinox.config.flag_values import overrides
    from dantinox.config.yaml_files import load_training

    config = load_training(options.config, overrides(options))
    import jax

    if options.topology is not None:
        # jax must not look for the target device on this machine.
        jax.config.update("jax_platforms", "cpu")
    from dantinox.lab.measure.plan import make_plan, plan_lines
    from dantinox.lab.measure.topology import find_topology
    from dantinox.report.console import steady_progress
    from dantinox.training.starting_point import trained_vocab_size
    from dantinox.training.step import TrainStep
    from dantinox.training.teacher import open_teacher

    def make_step(config: Any, model: Any, steps: int, layout: Any) -> TrainStep:
        return TrainStep(config, model, steps, layout, teacher=open_teacher(config, layout))

    topology = find_topology(options.topology)
    sizes = {name: getattr(options, name) for name in ("batch", "prompt", "new")}
    vocab_size = trained_vocab_size(config)
    with steady_progress() as progress:
        found = make_plan(
            topology,
            config,
            vocab_size,
            make_step,
            meshes=options.mesh or (),
            progress=progress,
            **sizes,
        )
    return print_result(options, found, lambda width: plan_lines(found, width))


def doctor(options: argparse.Namespace) -> int:
    from dantinox.lab.measure.doctor import doctor_lines

    return print_lines(lambda _: doctor_lines())
