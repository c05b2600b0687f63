"""Stop strings, found in streamed text and across token boundaries."""

from collections.abc import Sequence

from dantinox.text.partial_markers import overlap


class StopFinder:
    """Passes text through until a stop string appears; holds back text that may be the beginning of
    a stop string.

    Attributes:
      matched_stop: the stop string that ended the text, or None.
    """

    def __init__(self, stops: Sequence[str], keep: bool = False):
        self._stops = tuple(stops)
        self._keep = keep
        self._buffer = ""
        self.matched_stop: str | None = None

    def push(self, text: str, active: bool = True) -> str:
        """Adds `text` and returns the text that has become final.

        Args:
          active: whether a stop string ends the text; if false, stop strings are passed through
            like other text.
        """
        if not self._stops:
            return text
        if self.matched_stop is not None:
            return ""
        self._buffer += text
        passed = ""
        while (hit := self._find_first()) is not None:
            start, stop = hit
            end = start + len(stop)
            if active:
                self.matched_stop = stop
                passed += self._buffer[: end if self._keep else start]
                self._buffer = ""
                return passed
            passed += self._buffer[:end]
            self._buffer = self._buffer[end:]
        # What follows may be the beginning of a stop string.
        split = len(self._buffer) - overlap(self._buffer, self._stops)
        passed += self._buffer[:split]
        self._buffer = self._buffer[split:]
        return passed

    def flush(self) -> str:
        """Returns the text that is still held back; call it at the end of the text."""
        buffered = self._buffer
        self._buffer = ""
        return buffered

    def _find_first(self) -> tuple[int, str] | None:
        """Returns the position and value of the stop string that ends first; of several with the
        same end, the longest.
        """
        hits = [
            (start + len(stop), start, stop)
            for stop in self._stops
            if (start := self._buffer.find(stop)) >= 0
        ]
        return min(hits)[1:] if hits else None
