"""Stop strings, found in streamed text and across token boundaries."""

from collections.abc import Sequence


class StopFinder:
    """Passes text through until a stop string appears; holds back what may be the beginning of one.

    Attributes:
      found: the stop string that ended the text, or None.
    """

    def __init__(self, stops: Sequence[str], keep: bool = False):
        self._stops, self._keep = tuple(stops), keep
        self._held = ""
        self.found: str | None = None

    def push(self, text: str, armed: bool = True) -> str:
        """The text that is certain to belong to the result once `text` has come.

        Args:
          armed: whether a stop string that is complete now ends the text; else it is passed through like any other text.
        """
        if self.found is not None:
            return ""
        self._held += text
        passed = ""
        while (hit := self._first()) is not None:
            at, stop = hit
            if armed:
                self.found = stop
                passed += self._held[: at + len(stop) if self._keep else at]
                self._held = ""
                return passed
            passed += self._held[: at + len(stop)]
            self._held = self._held[at + len(stop) :]
        split = len(self._held) - self._pending()
        passed, self._held = passed + self._held[:split], self._held[split:]
        return passed

    def flush(self) -> str:
        """What was held back, at the end of the text."""
        held, self._held = self._held, ""
        return held

    def _first(self) -> tuple[int, str] | None:
        """The stop string that is complete first, the longest where several end together, and its place."""
        hits = [(at + len(stop), at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        return min(hits)[1:] if hits else None

    def _pending(self) -> int:
        """The length of the longest end of the held text that some stop string begins with."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for size in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-size:]) for stop in self._stops):
                return size
        return 0
