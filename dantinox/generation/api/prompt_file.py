"""Prompt files: one prompt per line, as text or as a JSON object with settings."""

import json
from collections.abc import Mapping
from pathlib import Path

from dantinox.config import Config, UserError, overlay

Prompts = list[tuple[str, Config]]  # prompts with their settings, for `LoadedModel.start`


def read_prompts(path: Path, settings: Mapping[str, object], base: Config) -> Prompts:
    """Reads the prompts of a file and skips empty lines. In a JSON object, the key `prompt` holds
    the text.

    Args:
      settings: settings for all lines. The other keys of a JSON object override them.
      base: the settings of the run, which `settings` override.

    Raises:
      UserError: the file cannot be read, or a line is invalid; the error message contains the line
        number.
    """
    try:
        # `splitlines` would also split at other Unicode line breaks.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"cannot read the prompts {path}:"
            f" {getattr(error, 'strerror', None) or 'not UTF-8 text'}"
        ) from None
    return [
        _parse_line(line, settings, base, f"{path}, line {number}")
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]


def _parse_line(
    line: str, settings: Mapping[str, object], base: Config, where: str
) -> tuple[str, Config]:
    if not line.lstrip().startswith("{"):
        return line, overlay(base, settings)
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"a line that starts with {{ must be a JSON object: {error} ({where})"
        ) from None
    prompt = record.pop("prompt", None)
    if not isinstance(prompt, str):
        raise UserError(f"a JSON object must have a string under the key prompt ({where})")
    return prompt, overlay(base, record, where, settings)
