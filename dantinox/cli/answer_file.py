"""The file of `dantinox generate --out`: one JSON line per answer, in the order of the prompts,
which `--resume` continues.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dantinox.files import UserError, check_writable, first_line, wrap_os_errors

if TYPE_CHECKING:
    from dantinox.config import Config


def check_answer_file(path: Path, resume: bool) -> None:
    """Checks that the file can be written.

    Raises:
      UserError: the file cannot be written, or it exists and `resume` is false.
    """
    check_writable(path, "--out")
    if not resume and path.exists() and path.stat().st_size:
        raise UserError(
            f"--out {path} exists already: add --resume to continue it, or choose another name"
        )


def read_answers(path: Path, prompts: "Sequence[tuple[str, Config]]") -> list[dict[str, Any]]:
    """Returns the records of an unfinished file, and removes its last line from the file if that is
    incomplete.

    Args:
      prompts: all prompts with their settings.

    Raises:
      UserError: the file cannot be read, or a line is not the answer to the prompt in its place.
    """
    expected = [
        (prompt, index, config.generation.seed)
        for prompt, config in prompts
        for index in range(config.generation.n)
    ]
    with wrap_os_errors(f"cannot continue {path}"):
        content = path.read_bytes() if path.exists() else b""
        complete = content[: content.rfind(b"\n") + 1]
        records = [
            _parse_line(line, f"{path}, line {number}")
            for number, line in enumerate(complete.splitlines(), 1)
        ]
        for number, record in enumerate(records):
            if number >= len(expected) or not _is_answer(record, *expected[number]):
                raise UserError(
                    f"{path}, line {number + 1}, is no answer to these prompts with this seed:"
                    " choose another name for --out"
                )
        if len(complete) < len(content):
            with path.open("r+b") as file:
                file.truncate(len(complete))
    return records


def _parse_line(line: bytes, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}, is not JSON: {first_line(error)}") from None
    if not isinstance(record, dict):
        raise UserError(f"{where}, is not a JSON object")
    return record


def _is_answer(record: dict[str, Any], prompt: str, index: int, seed: int | None) -> bool:
    """Whether a record is sample `index` of a prompt, with the seed if it is not None."""
    if not isinstance(record.get("seed"), int) or seed not in (None, record["seed"]):
        return False
    return (record.get("prompt"), record.get("index")) == (prompt, index)


def recorded_seed(
    records: Sequence[dict[str, Any]], prompts: "Sequence[tuple[str, Config]]"
) -> int | None:
    """Returns the seed that was drawn for the answers whose settings give none; None if there is no
    such answer.
    """
    configs = [config for _, config in prompts for _ in range(config.generation.n)]
    for record, config in zip(records, configs, strict=False):
        if config.generation.seed is None:
            return int(record["seed"])
    return None
