"""Logs of the server: one line per request and all other messages, in one format, as text or
JSON.
"""

import datetime
import json
import logging
import sys
import warnings
from collections.abc import Callable, Mapping

from dantinox.serve.operations.request_record import RequestRecord, current_record

LOG_FORMATS = ("text", "json")
QUIET_PATHS = ("/health", "/metrics")  # polled every few seconds: only their errors are logged
MAX_PATH = 200  # characters of a path in the log

log = logging.getLogger("dantinox.serve.requests")


def log_request(record: RequestRecord, trace_id: str | None = None) -> None:
    """Logs one line about a complete request. It contains no prompt and no generated text."""
    if not log.isEnabledFor(logging.INFO) or (record.path in QUIET_PATHS and record.status < 400):
        return
    path = record.path[:MAX_PATH]
    fields = request_fields(record)
    if trace_id is not None:
        fields["trace_id"] = trace_id
    log.info("%s %s %d", record.method, path, record.status, extra={"fields": fields})


def request_fields(record: RequestRecord) -> dict[str, object]:
    """Returns the fields of a request's log line. A request without generations has no fields about
    slots and new tokens.

    The times are seconds: `queued_seconds` until the last prompt has a slot, `first_token_seconds`
    until the first token of any prompt, both from the arrival of the prompt at the engine, and
    `seconds` from the arrival of the request to the end of its response.
    """
    fields: dict[str, object] = {
        "request_id": record.id,
        "key": None if record.key is None else record.key.name,
        "method": record.method,
        "path": record.path[:MAX_PATH],
        "status": record.status,
        "seconds": round(record.seconds, 6),
    }
    if record.prompt_tokens:
        fields |= {"model": record.model, "prompt_tokens": record.prompt_tokens}
    if not record.generations:
        return fields
    stats = [generation.stats for generation in record.generations]
    first = [one.first_token_seconds for one in stats if one.new_tokens]
    reasons = {
        reason: None
        for one in record.generations
        for _, reason in sorted(one.finish_reasons.items())
    }
    return fields | {
        "cached_tokens": sum(one.reused_tokens for one in stats),
        "new_tokens": record.new_tokens,
        "queued_seconds": round(max(one.queued_seconds for one in stats), 6),
        "first_token_seconds": round(min(first), 6) if first else None,
        "finish_reason": ",".join(reasons) or None,
    }


def _fields_of(record: logging.LogRecord) -> Mapping[str, object]:
    """Returns the additional fields of a log record; a message of a running request has the
    request's id.
    """
    fields: Mapping[str, object] | None = getattr(record, "fields", None)
    if fields is not None:
        return fields
    request_id = current_record().id
    return {} if request_id == "-" else {"request_id": request_id}


def _time(record: logging.LogRecord) -> str:
    """Returns the time of a log record in UTC, in the format of ISO 8601 with milliseconds."""
    moment = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


class JSONFormatter(logging.Formatter):
    """Formats a log record as one JSON object on one line."""

    def format(self, record: logging.LogRecord) -> str:
        content: dict[str, object] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields_of(record),
        }
        if record.exc_info:
            content["exception"] = self.formatException(record.exc_info)
        return json.dumps(content)


class TextFormatter(logging.Formatter):
    """Formats a log record as a line `TIME LEVEL message name=value …`; the lines of a traceback
    follow it.
    """

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            name: value
            for name, value in _fields_of(record).items()
            if name not in ("method", "path", "status")
        }
        shown = "".join(f" {name}={value}" for name, value in fields.items() if value is not None)
        line = (
            f"{_time(record)} {record.levelname} {_one_line(record.getMessage())}{_one_line(shown)}"
        )
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _one_line(text: str) -> str:
    """Escapes control characters, so that a client cannot add lines or terminal commands to the
    log.
    """
    return "".join(
        character if character.isprintable() else repr(character)[1:-1] for character in text
    )


FORMATTERS: dict[str, Callable[[], logging.Formatter]] = {
    "text": TextFormatter,
    "json": JSONFormatter,
}


def configure_logging(log_format: str) -> None:
    """Writes the messages of all libraries, warnings of Python, and one line per request to
    standard error in one format.

    Args:
      log_format: one of `LOG_FORMATS`.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(FORMATTERS[log_format]())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("dantinox").setLevel(logging.INFO)
    messages = logging.getLogger("dantinox.serve")

    def show_warning(message: Warning | str, *_: object, **__: object) -> None:
        messages.warning("%s", message)

    warnings.showwarning = show_warning
