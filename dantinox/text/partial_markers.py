"""Text that may begin a marker: it is held back until more text shows whether the marker follows.

Stop strings, the guides of generation and the parsers of replies use this.
"""


def overlap(text: str, markers: tuple[str, ...]) -> int:
    """Returns the length of the longest end of a text that is the beginning of a marker."""
    longest = max((len(marker) for marker in markers), default=1) - 1
    for size in range(min(longest, len(text)), 0, -1):
        if any(marker.startswith(text[-size:]) for marker in markers if len(marker) > size):
            return size
    return 0
