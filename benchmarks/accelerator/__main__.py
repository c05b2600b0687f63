"""Runs DantinoX on an accelerator, and says what is good:
`python benchmarks/accelerator --minutes 8`.

Every row runs in its own process with a limit of time. Results appear in the folder `--out` at
once: `results.jsonl` has one line per row, `table.md` the verdicts, and `traces.md` the kernels of
rows that are not good. An interrupted check keeps its results; `--again` repeats the rows that are
not good. `--smoke` runs every row with tiny sizes, on a CPU too.
"""

import argparse
import importlib
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

from check import Results, chosen_rows, run_rows
from rows import FAILED, ORDER, ROWS, verdict

from dantinox.files import atomic_write


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="accelerator", description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--minutes",
        type=float,
        default=8,
        help="time for all rows together; rows that do not fit are left out",
    )
    parser.add_argument(
        "--rows", nargs="+", metavar="ROW", choices=ROWS, default=[], help=f"of {', '.join(ROWS)}"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("build/accelerator"), help="folder of the results"
    )
    parser.add_argument(
        "--again", action="store_true", help="repeat only the rows that are not good"
    )
    parser.add_argument(
        "--list", action="store_true", help="print the rows with their expected seconds"
    )
    parser.add_argument(
        "--compile",
        metavar="TOPOLOGY",
        help="compile the programs of the rows for a chip, such as gpu:h100",
    )
    parser.add_argument(
        "--references",
        type=Path,
        metavar="FILE",
        help="compute the references of the row `exactness` on this CPU",
    )
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, to check the check")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measures one row in this process, and returns its result."""
    module, function = options.measure.split(":")
    try:
        found = getattr(importlib.import_module(module), function)(options)
        figures = found.figures
        bars = ROWS[options.row].bars if options.row in ROWS else ()
        result = {"verdict": verdict(bars, figures), "figures": figures} | (
            {"machine": found.machine} if found.machine else {}
        )
        if result["verdict"] in ORDER[1:] and found.work is not None:
            from traces import explain_row

            atomic_write(options.answer, json.dumps(result))  # stays if the trace takes too long
            try:
                explain_row(options.row, found, options.out)
            except Exception as error:
                result["trace"] = f"{type(error).__name__}: {error}"[:300]
        return result
    except ModuleNotFoundError as error:
        return {"verdict": "not run", "reason": f"{error.name} is not installed"}
    except Exception as error:
        text = "".join(traceback.format_exception(error))
        memory = any(
            word in text for word in ("RESOURCE_EXHAUSTED", "OutOfMemoryError", "MemoryError")
        )
        first = str(error).strip().split("\n")[0][:300] or type(error).__name__
        return {
            "verdict": "out of memory" if memory else "failed",
            "reason": first,
            "output": text.splitlines()[-30:],
        }


def interrupt(number: int, frame: Any) -> None:
    raise KeyboardInterrupt


def main() -> int:
    options = parse()
    if options.row:
        atomic_write(options.answer, json.dumps(measure(options)))
        return 0
    if options.references:
        from exactness import write_references

        write_references(options.references, options.smoke)
        return 0
    if options.compile:
        from compiled import compile_rows

        compile_rows(options.compile, options.rows, options.smoke)
        return 0
    if options.list:
        for row in ROWS.values():
            print(
                f"{row.name:18}{row.seconds:4d} s, {row.compile:5.1f} s of them compiling "
                f" {row.what}"
            )
        return 0
    signal.signal(signal.SIGTERM, interrupt)
    results = Results(options.out)
    names = chosen_rows(options.rows, results, options.again)
    try:
        run_rows(names, results, smoke=options.smoke, minutes=options.minutes)
    except KeyboardInterrupt:
        print("interrupted; the results so far are kept", file=sys.stderr)
    results.write_table()
    print((options.out / "table.md").read_text(encoding="utf-8"))
    failed = [name for name in names if results.rows.get(name, {}).get("verdict") in FAILED]
    return int(bool(failed))


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    os.environ.setdefault(
        "DANTINOX_COMPILATION_CACHE", "off"
    )  # times of compilation are those of a first start
    sys.exit(main())
