"""Where a long text may be cut so that its parts encode to what the whole would."""

import re
from collections.abc import Iterator

# Byte-level BPE (the GPT-2 pattern) begins a new word at a character after a lone line end, and at a lone space: cutting there
# changes no token. A line end that follows or precedes white space would be merged with it.
_SAFE = re.compile(r"(?<=\S\n)(?=\S)|(?<=\S)(?= \S)")
_NEAR = 2048


def cut_up(text: str, size: int) -> Iterator[str]:
    """Parts of at most `size` characters that join to `text`."""
    start = 0
    while len(text) - start > size:
        end = last_cut(text, start, start + size)
        yield text[start:end]
        start = end
    if start < len(text):
        yield text[start:]


def last_cut(text: str, start: int, end: int) -> int:
    """The best place in (start, end] to cut: before a line or a word near the end, else after a line end, else `end`."""
    near = max(start + 1, end - _NEAR)
    lines = words = 0
    for match in _SAFE.finditer(text, near - 1, min(end + 2, len(text))):
        if near <= match.start() <= end:
            words = match.start()
            lines = words if text[words - 1] == "\n" else lines
    return lines or words or text.rfind("\n", start, end) + 1 or end
