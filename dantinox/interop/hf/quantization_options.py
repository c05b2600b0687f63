"""Checks the options in the `quantization_config` of a Hugging Face checkpoint."""

from collections.abc import Mapping, Sequence
from typing import Any

from dantinox.files import UserError, escape_name, quote


def check_options(
    options: Mapping[str, Any],
    supported: Mapping[str, tuple[Any, ...]],
    ignored: Sequence[str],
    where: str,
) -> None:
    """Raises a `UserError` for the first option that is unknown or has an unsupported value."""
    for key, value in options.items():
        if value is None or key in ignored or key == "quant_method":
            continue
        if key not in supported:
            known = ", ".join((*supported, *ignored))
            raise UserError(
                f"config.json has the unknown option {escape_name(key)} in {where}, expected one of"
                f" {known}"
            )
        if supported[key] and (type(value), value) not in [
            (type(allowed), allowed) for allowed in supported[key]
        ]:
            allowed = ", ".join(map(quote, supported[key]))
            raise UserError(
                f"config.json has {escape_name(key)}: {quote(value)} in {where}, expected one of"
                f" {allowed}"
            )


def integer_option(
    options: Mapping[str, Any], key: str, default: int | None = None, least: int = 1
) -> int:
    """Returns the value of an option that is an integer in [`least`, 2²⁰].

    Raises:
      UserError: it is another value, or it is absent and has no default.
    """
    value = options.get(key)
    if value is None:
        value = default
    if type(value) is not int or not (least <= value <= 1 << 20):
        raise UserError(
            f"config.json has {key}: {quote(value)} in quantization_config, expected a number of at"
            f" least {least}"
        )
    return value


def block_size(block: Any, key: str) -> tuple[int, int] | None:
    """Returns the rows and columns of a block, the value of the option `key`."""
    if block is None:
        return None
    if (
        not isinstance(block, list)
        or len(block) != 2
        or any(type(size) is not int or size < 1 for size in block)
    ):
        raise UserError(
            f"config.json has {key}: {quote(block)} in quantization_config,"
            " expected two numbers of at least 1"
        )
    return block[0], block[1]
