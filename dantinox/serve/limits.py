"""Every limit of the server: connections, requests, bodies and settings."""

from dataclasses import dataclass

QUEUE = 64  # requests that may wait for a slot (`--queue`); what a client gets beyond is `errors.Busy`
CONNECTIONS = 1000  # open at once; a request on one more is answered with `errors.overloaded`
DRAIN_SECONDS = 30.0  # for responses in progress after the first signal
ABORT_SECONDS = 4.0  # until the process has ended after the second signal
FAULT_SECONDS = 2.0  # between a fault of the engine and the end of the server: clients get their errors, /health says `failed`

# Bodies.
DEPTH = 32  # nested JSON lists and objects
DIGITS = 20  # characters of a JSON integer, its sign included
DRAINED = 16  # × `Limits.body`: how much of a body that is too long is read, so that its sender gets the error
LARGE = 1 << 14  # bytes of a body, or characters of a prompt, that are processed off the event loop
LOG_SECONDS = 60.0  # between two equal lines of the log
LOG_LINES = 256  # different lines in that time

# One request.
PROMPTS = 64
SAMPLES = 16  # `n`
STOPS, STOP_LENGTH = 32, 512  # stop strings, and characters of one
LARGEST = 2**32  # number in a setting: products of two are finite in float32
# Entries of a setting that is a list or a map; `generation.slot_batch` has the same limits for what it makes of them.
ENTRIES = 1024
ENTRIES_OF = {"bad_words": 256, "sequence_bias": 256, "stop_token_ids": 32, "dry_breakers": 8192}
CHARACTERS = 1 << 16  # of all texts in one setting


@dataclass(frozen=True)
class Limits:
    """Limits of a request that a server can be started with.

    Attributes:
      body, head: bytes of each.
      seconds: to send each of them.
      stalled: seconds for which a client may read nothing of its response.
    """

    body: int = 1 << 20
    head: int = 1 << 14
    seconds: float = 10.0
    stalled: float = 60.0
