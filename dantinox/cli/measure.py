"""`dantinox explain`, `calibrate`, `info`, `plan` and `doctor`: their flags and output."""

import argparse
import re
from collections.abc import Callable, Iterable
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
from dantinox.cli.kind_flags import COUNT_OPTION, Flags, add_flags, given_flags
from dantinox.config.flags import Parser, add_config_flags
from dantinox.config.packaged import DEFAULT_CONFIG
from dantinox.files import UserError, atomic_write

# Flag → the value of --what that it applies to ("": both), and its arguments for `add_argument`.
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
            "default": None,  # not given, see `given_flags`
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
        (  # the flags that the first help page shows
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

    directory = open_run(options.run_dir, check=False)  # `load_opened` checks it
    base = load_run_config(directory)
    # Raises an error if a setting is invalid, before the slow imports and the weights.
    overlay(base, settings, "command line")
    prompt = given_prompt(options, base)
    use_compilation_cache()
    from dantinox.generation.api.loaded_model import load_opened
    from dantinox.lab.measure.explain import explain
    from dantinox.lab.measure.explain_view import (
        draw_explanation,
        explanation_blocks,
        explanation_lines,
    )
    from dantinox.report.document import to_html

    model = load_opened(directory, base)
    # With --chat the token ids, the second of the pair; otherwise the text.
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
    add_flags(command, CALIBRATE)
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
        # `no_loss` is popped before the remaining flags are passed on.
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
    from dantinox.config.inherited_settings import load_training

    config = load_training(options.config, overrides(options))
    import jax

    if options.topology is not None:
        # jax must not look for the target device on this machine.
        jax.config.update("jax_platforms", "cpu")
    from dantinox.lab.measure.plan import make_plan
    from dantinox.lab.measure.plan_view import plan_lines
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
