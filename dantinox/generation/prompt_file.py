"""Prompt files: one prompt per line, as text or as a JSON object with settings."""

import json
from collections.abc import Mapping
from pathlib import Path

from dantinox.config import Config, UserError, overlay

Prompts = list[tuple[str, Config]]  # (prompt, settings), as `LoadedModel.start` takes them


def read_prompts(path: Path, settings: Mapping[str, object], base: Config) -> Prompts:
    """The requests of a file's lines; empty lines are none. What a JSON object has under `prompt` is the text.

    Args:
      settings: of all lines; those that an object has beside its prompt win over them.
      base: the run's own settings, for checking.

    Raises:
      UserError: the file cannot be read, or a line is wrong: it is named.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # not at the other line breaks of Unicode
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the prompts {path}: {getattr(error, 'strerror', None) or 'not UTF-8 text'}") from None
    return [_request(line, settings, base, f"{path}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]


def _request(line: str, settings: Mapping[str, object], base: Config, where: str) -> tuple[str, Config]:
    if not line.lstrip().startswith("{"):
        return line, overlay(base, settings)
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"a line that begins with {{ must be a JSON object: {error} ({where})") from None
    prompt = record.pop("prompt", None)
    if not isinstance(prompt, str):
        raise UserError(f"a JSON prompt must have a text under the key prompt ({where})")
    return prompt, overlay(base, record, where, settings)
