"""Converts Hugging Face datasets, from the Hub or a folder, to JSON Lines."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dantinox.config import DataSection
from dantinox.files import UserError, escape_name, first_line, quote, require_extra, wrap_os_errors


@contextlib.contextmanager
def fetch_datasets(
    data: DataSection, directory: Path, all_fields: bool = False
) -> Iterator[DataSection]:
    """Context manager that writes the datasets in the settings to temporary JSON Lines files.

    The files are as large as the text and are deleted on exit. With `data.streaming`, Hugging
    Face's cache keeps no copy of the datasets.

    Args:
      data: the settings. Settings for local data are returned unchanged.
      directory: where the temporary files are written.
      all_fields: write all fields of the records instead of only the text.

    Yields:
      The settings, with the paths of the local files.

    Raises:
      UserError: the library is not installed, or a dataset, its split or its field does not exist
        or cannot be read.
    """
    if data.dataset_source == "local" or data.path is None:
        yield data
        return
    names = data.path if isinstance(data.path, tuple) else (data.path,)
    files = [directory / f".dataset-{number}.jsonl" for number in range(len(names))]
    try:
        for name, file in zip(names, files, strict=True):
            _write(data, name, file, all_fields)
        paths = tuple(map(str, files))
        yield data.model_copy(
            update={"dataset_source": "local", "path": paths if len(paths) > 1 else paths[0]}
        )
    finally:
        for file in files:
            file.unlink(missing_ok=True)


def _write(data: DataSection, name: str, file: Path, all_fields: bool) -> None:
    """Writes the records of one dataset."""
    with wrap_os_errors(f"cannot write the texts of {escape_name(name)} to {file}"):
        file.parent.mkdir(parents=True, exist_ok=True)
        with open(file, "w", encoding="utf-8") as out:
            for record in _records(data, name, all_fields):
                out.write(json.dumps(record, default=str) + "\n")


def _records(data: DataSection, name: str, all_fields: bool) -> Iterator[dict[str, Any]]:
    """Yields the records of one dataset, with all fields or only the text."""
    shown = escape_name(name)
    with require_extra("hf", f"the dataset {shown} needs Hugging Face's library"):
        from datasets import load_dataset
    try:
        rows: Iterator[dict[str, Any]] = iter(
            load_dataset(
                name, data.dataset_config, split=data.dataset_split, streaming=data.streaming
            )
        )
        for number, row in enumerate(rows):
            if all_fields:
                yield row
                continue
            text = row.get(data.text_field)
            if not isinstance(text, str):
                fields = escape_name(", ".join(map(str, row)))
                found = (
                    f": row {number} (counted from 0) has {quote(text)}"
                    if data.text_field in row
                    else ""
                )
                where = f"in {data.text_field!r} (data.text_field){found}"
                raise UserError(f"the dataset {shown} has no text {where}; it has {fields}")
            yield {data.text_field: text}
    except (UserError, GeneratorExit):
        raise
    except Exception as error:  # errors of the library, of its file formats, or of the network
        raise UserError(f"cannot read the dataset {shown}: {first_line(error)}") from error
