"""`dantinox eval`: the flags of each kind of evaluation, and its output."""

import argparse
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from dantinox.cli.common import add_run, print_lines, print_result, use_compilation_cache
from dantinox.cli.kind_flags import COUNT_OPTION, Flags, add_flags, given_flags
from dantinox.config.flags import Parser
from dantinox.files import UserError, check_writable_folder

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
        add_flags(one, EVALUATE, kind)
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
