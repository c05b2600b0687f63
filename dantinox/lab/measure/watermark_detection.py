"""`dantinox eval watermark`: whether texts have the SynthID watermark of some keys."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dantinox.config import UserError, overlay
from dantinox.lab.measure.texts import read_documents
from dantinox.report.tables import Column, text_table
from dantinox.run import load_run_config, open_run
from dantinox.sampling.watermark import Detection, detect
from dantinox.text import Tokenizer

MARKED_BELOW = 1e-4  # p-value of a text that is reported as marked
MAX_LINES = 20


@dataclass(frozen=True)
class WatermarkReport:
    """The result of `eval watermark`.

    Attributes:
      marked: number of documents with p < 0.0001. Of 10,000 documents without the watermark, one is
        counted on average.
      documents: the detection in each document; None for a document with fewer tokens than an
        n-gram.
      ngram, keys: length of the hashed sequences, and number of keys.
    """

    marked: int
    documents: list[Detection | None]
    ngram: int
    keys: int


def detect_watermark(
    run_dir: str | Path,
    data_path: str,
    *,
    watermark_keys: Sequence[int] | None = None,
    watermark_ngram: int | None = None,
    tokens: int | None = None,
) -> WatermarkReport:
    """Tests every document of a text. This needs the tokenizer of a run, but not its weights.

    The documents should hold generated text only, because tokens of a prompt are not marked.

    Args:
      data_path: the text, in the form of `data.path`.
      watermark_keys, watermark_ngram: the settings with which the text was generated (default:
        those of the run).
      tokens: maximum tokens of the text to read.

    Raises:
      UserError: there are no keys, a setting is invalid, the text cannot be read, or no document is
        long enough.
    """
    run = open_run(run_dir)
    given = {"watermark_keys": watermark_keys, "watermark_ngram": watermark_ngram}
    base = load_run_config(run)
    section = overlay(
        base, {name: value for name, value in given.items() if value is not None}, "command line"
    ).generation
    keys = section.watermark_keys
    ngram = section.watermark_ngram
    if not keys:
        raise UserError(
            "the run has no generation.watermark_keys: give the keys"
            " of the text with --watermark_keys"
        )
    if tokens is not None and tokens < ngram:
        raise UserError(
            f"--tokens must be at least {ngram}, the length of the hashed sequences, got {tokens}"
        )
    documents = read_documents(
        Tokenizer.load(run.tokenizer), data_path, base.data.text_field, tokens
    )
    found = [
        detect(document.ids.tolist(), keys, ngram) if len(document.ids) >= ngram else None
        for document in documents
    ]
    if not any(found):
        raise UserError(
            f"{data_path} has no document of at least {ngram} tokens,"
            " the length of the hashed sequences"
        )
    marked = sum(detection is not None and detection.p < MARKED_BELOW for detection in found)
    return WatermarkReport(marked, found, ngram, len(keys))


def watermark_lines(report: WatermarkReport) -> list[str]:
    """Returns the result as the lines of a table: the documents with the largest z first."""
    numbered = [
        (number, detection)
        for number, detection in enumerate(report.documents, 1)
        if detection is not None
    ]
    numbered.sort(key=lambda row: -row[1].z)
    columns = [
        Column("document", "document", lambda row: str(row[0])),
        Column("tokens", "tokens", lambda row: str(row[1].tokens)),
        Column("mean", "mean g", lambda row: f"{row[1].mean:.4f}"),
        Column("z", "z", lambda row: f"{row[1].z:.2f}"),
        Column("p", "p", lambda row: f"{row[1].p:.1e}"),
    ]
    lines = list(text_table(columns, numbered[:MAX_LINES]))
    if len(numbered) > MAX_LINES:
        lines.append(f"and {len(numbered) - MAX_LINES} more documents")
    if len(numbered) < len(report.documents):
        lines.append(
            f"{len(report.documents) - len(numbered)} documents have fewer than {report.ngram}"
            " tokens"
        )
    count = f"{report.marked} of {len(numbered)} documents have the watermark"
    return [
        *lines,
        f"{count} (p < {MARKED_BELOW:g}; {report.keys} keys, sequences of {report.ngram} tokens)",
    ]
