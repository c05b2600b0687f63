"""Every limit of the server: connections, requests, bodies and settings."""

from dataclasses import dataclass

# The most requests that may wait for a slot (`--queue`); a further request gets `errors.Busy`.
MAX_QUEUED_REQUESTS = 64
# The most open connections; a request on a further connection gets the error `overloaded`.
MAX_CONNECTIONS = 1000
MAX_CONNECTIONS_OF_ADDRESS = 900  # of one address, so that no client can take all connections
MAX_REFUSED = 100  # refused connections that may wait for their error; a further one is closed
OTHER_FILES = 400  # files that the process may open in addition to the connections
# A connection that waits for a complete request for this time may be closed in favor of a new one.
IDLE_SECONDS = 0.1
BACKLOG = 4096  # connections that may wait until the server accepts them
# The connections that are accepted before the server reads from those that it has.
ACCEPTED_AT_ONCE = 50
DRAIN_SECONDS = 30.0  # time after the first signal in which running responses may be completed
ABORT_SECONDS = 4.0  # from the second signal to the end of the process
# From a failure of the engine until the server stops; until then, clients get error responses.
FAULT_SECONDS = 2.0

# Several models in one server.
# The seconds for which a request waits for room for its model; then it gets the error
# `Unavailable`.
MODEL_WAIT_SECONDS = 60.0
LOAD_RETRY_SECONDS = 5.0  # after a failed load; until then, requests for the model get its error

MAX_KEYS = 1000  # keys in the file of `--api_keys`; it bounds the labels of the metrics

# Bodies.
MAX_DEPTH = 32  # of nested JSON lists and objects
MAX_DIGITS = 20  # characters of a JSON integer, including its sign
# A body that is too large is still read up to this multiple of the limit, so that its sender gets
# the error.
DRAIN_FACTOR = 16
# Larger bodies (bytes) and prompts (characters) are processed on a thread.
THREAD_THRESHOLD = 1 << 14
LOG_SECONDS = 60.0  # minimum time between two equal log lines
LOG_LINES = 256  # maximum number of different log lines in `LOG_SECONDS`

# One request.
MAX_PROMPTS = 64  # of one completion request
MAX_EMBEDDINGS = 2048  # texts of one request for embeddings, and documents of one request to rank
MAX_SAMPLES = 16  # maximum of `n`
MAX_CHOICES = 1024  # texts of `guided_choice`
MAX_SALT_LENGTH = 1024  # characters of `cache_salt`
MAX_STOPS = 32  # number of stop strings
MAX_STOP_LENGTH = 512  # characters of each
# The largest absolute value of a number in a setting; the product of two such numbers is finite in
# float32.
MAX_NUMBER = 2**32
# Entries of a setting that is a list or a map. `generation.slot_params` has the same limits for its
# arrays.
MAX_ENTRIES = 1024
MAX_ENTRIES_OF = {
    "bad_words": 256,
    "sequence_bias": 256,
    "stop_token_ids": 32,
    "dry_breakers": 8192,
    "banned_regexes": 32,
}
MAX_CHARACTERS = 1 << 16  # of all strings in one setting


@dataclass(frozen=True)
class Limits:
    """Limits of a request.

    Attributes:
      max_body, max_head: maximum size of a body, and of a head (request line and headers), in
        bytes.
      receive_seconds: time for a client to send the head, and then the body.
      stall_seconds: time for a client to read what the server has sent, after which the connection
        is closed.
    """

    max_body: int = 1 << 20
    max_head: int = 1 << 14
    receive_seconds: float = 10.0
    stall_seconds: float = 60.0
