"""Separates a streamed reply into its answer, its reasoning and its tool calls."""

import re
from collections.abc import Sequence
from typing import Protocol

from dantinox.text.partial_markers import overlap
from dantinox.text.reply_formats import HARMONY, ReplyFormat, Schemas
from dantinox.text.tool_calls import CallReader, Part


class ReplyParser(Protocol):
    """Reads the text of one reply as it is generated."""

    def push(self, text: str) -> list[Part]:
        """Adds text and returns the parts that are certain."""

    def finish(self) -> list[Part]:
        """Returns the remaining parts, after the end of the reply."""


def make_parser(
    form: ReplyFormat,
    schemas: Schemas | None,
    *,
    reasoning_is_open: bool = False,
    continues: bool = False,
) -> ReplyParser:
    """Returns a parser of one reply.

    Args:
      schemas: the parameters of the tools by name; None: the reply has no tool calls, and their
        notation is ordinary text.
      reasoning_is_open: whether the prompt ends inside the reasoning.
      continues: whether the prompt ends inside a message, which the reply continues.
    """
    if form.name == HARMONY:
        return HarmonyParser(schemas, continues)
    return MarkedParser(form, schemas, reasoning_is_open, continues)


def is_reasoning_open(form: ReplyFormat, prompt: str) -> bool:
    """Whether a prompt ends with the text that begins the reasoning."""
    return form.reasoning is not None and prompt.rstrip().endswith(form.reasoning.begin)


class MarkedParser:
    """Parses replies in which markers surround the reasoning and the tool calls.

    Whitespace next to a marker belongs to the notation and is dropped. A section that turns out not
    to be a tool call is part of the answer.
    """

    def __init__(
        self,
        form: ReplyFormat,
        schemas: Schemas | None,
        reasoning_is_open: bool,
        continues: bool = False,
    ):
        self._form = form
        self._schemas = schemas
        self._in_reasoning = reasoning_is_open
        self._buffer = ""
        self._skips_space = not continues  # at the start, and after a marker
        self._answered = False  # whether the reply has answer text
        self._reader: CallReader | None = None
        self._section = ""  # the text of the current section of calls, with its marker

    def push(self, text: str) -> list[Part]:
        self._buffer += text
        parts: list[Part] = []
        while self._buffer and (new := self._advance()) is not None:
            parts += new
        return [part for part in parts if part.text]

    def finish(self) -> list[Part]:
        parts: list[Part] = []
        if self._reader is not None:
            parts = self._reader.finish()
            if not self._reader.recognized:
                parts = [Part("content", self._section)]
        kind = "reasoning" if self._in_reasoning else "content"
        text = self._buffer.lstrip() if self._skips_space else self._buffer
        if kind == "reasoning":
            text = text.rstrip()
        self._buffer = ""
        return [part for part in [*parts, Part(kind, text)] if part.text]  # type: ignore[arg-type]

    def _advance(self) -> list[Part] | None:
        """Processes the buffer up to the next marker; None if more text is needed."""
        if self._reader is not None:
            return self._read_calls(self._reader)
        if self._skips_space:
            self._buffer = self._buffer.lstrip()
            if not self._buffer:
                return None
        if self._in_reasoning and self._form.reasoning is not None:
            return self._text_until("reasoning", (self._form.reasoning.end,))
        tools = self._form.tools if self._schemas is not None else None
        if (
            tools
            and tools.opening
            and not self._answered
            and self._buffer.startswith(tools.opening)
        ):
            self._begin_calls("")
            return []
        markers = [self._form.reasoning.begin] if self._form.reasoning else []
        if tools:
            markers += tools.begin_markers
            markers += [
                tools.bare_call.format(name) for name in self._schemas or () if tools.bare_call
            ]
        return self._text_until("content", markers)

    def _text_until(self, kind: str, markers: Sequence[str]) -> list[Part] | None:
        """Passes text on up to the first marker, without whitespace before the marker."""
        found = min(
            ((at, marker) for marker in markers if (at := self._buffer.find(marker)) >= 0),
            default=None,
        )
        if found is None:
            size = len(self._buffer) - overlap(self._buffer, tuple(markers))
            size = len(self._buffer[:size].rstrip())
            text = self._buffer[:size]
            self._buffer = self._buffer[size:]
            self._note_text(kind, text)
            return [Part(kind, text)] if text else None  # type: ignore[arg-type]
        at, marker = found
        text = self._buffer[:at].rstrip()
        self._buffer = self._buffer[at + len(marker) :]
        self._note_text(kind, text)
        self._skips_space = True
        if kind == "reasoning":
            self._in_reasoning = False
        elif self._form.reasoning is not None and marker == self._form.reasoning.begin:
            self._in_reasoning = True
        else:
            # The call has no begin marker: this marker is part of it.
            if marker not in self._form.tools.begin_markers:
                self._buffer = marker + self._buffer
                marker = ""
            self._begin_calls(marker)
        return [Part(kind, text)]  # type: ignore[arg-type]

    def _note_text(self, kind: str, text: str) -> None:
        """Records that text was passed on."""
        if text:
            self._skips_space = False
            self._answered |= kind == "content"

    def _begin_calls(self, marker: str) -> None:
        """Begins a section of calls, whose text begins with the marker."""
        self._reader = self._form.tools.reader(self._schemas or {})
        self._section = marker

    def _read_calls(self, reader: CallReader) -> list[Part]:
        """Passes the buffer to the reader of the current section."""
        text = self._buffer
        self._buffer = ""
        self._section += text
        parts = reader.push(text)
        if reader.rejected:
            self._reader = None
            self._answered = True
            self._skips_space = False
            return [Part("content", self._section)]
        if reader.rest is not None:
            self._reader = None
            self._buffer = reader.rest
            self._skips_space = True
            if not reader.recognized:
                self._answered = True
                return [Part("content", self._section[: len(self._section) - len(reader.rest)])]
        return parts


class HarmonyParser:
    """Parses replies in OpenAI's harmony format: messages in channels, each with a header and a
    body.

    The channel `analysis` is reasoning, a message to `functions.NAME` is a tool call, and other
    messages are the answer.
    """

    def __init__(self, schemas: Schemas | None, continues: bool = False):
        self._schemas = schemas
        self._buffer = ""
        self._header = ""
        # The kind of the current message; None in a header.
        self._kind: str | None = "content" if continues else None

    def push(self, text: str) -> list[Part]:
        self._buffer += text
        parts: list[Part] = []
        while (new := self._advance()) is not None:
            parts += new
        return [part for part in parts if part.text]

    def finish(self) -> list[Part]:
        text = self._buffer
        self._buffer = ""
        if self._kind is None:  # an incomplete header has no text
            text = text if text and not text.lstrip().startswith(("<|", "assistant")) else ""
        return [Part(self._kind or "content", text)] if text else []  # type: ignore[arg-type]

    def _advance(self) -> list[Part] | None:
        if self._kind is None:
            header, found, rest = self._buffer.partition("<|message|>")
            if not found:
                return None
            self._buffer = rest
            recipient = re.search(r"to=functions\.([^\s<]+)", header)
            if recipient and self._schemas is not None:
                self._kind = "arguments"
                return [Part("call", recipient[1])]
            self._kind = "reasoning" if "<|channel|>analysis" in header else "content"
            return []
        ends = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
        found_end = min(
            ((at, end) for end in ends if (at := self._buffer.find(end)) >= 0), default=None
        )
        kind = self._kind
        if found_end is None:
            size = len(self._buffer) - overlap(self._buffer, ends)
            text = self._buffer[:size]
            self._buffer = self._buffer[size:]
            return [Part(kind, text)] if text else None  # type: ignore[arg-type]
        at, end = found_end
        text = self._buffer[:at]
        self._buffer = self._buffer[at + len(end) :]
        self._kind = None
        return [Part(kind, text)]  # type: ignore[arg-type]
