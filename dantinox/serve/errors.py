"""What the engine raises to its callers besides UserError."""


class Busy(Exception):
    """The queue is full; asking again after `retry_after` seconds is likely to succeed."""

    def __init__(self, retry_after: float):
        super().__init__(f"all slots and all places of the queue are taken: try again in {retry_after:.0f} s")
        self.retry_after = retry_after


class Unavailable(Exception):
    """The engine is loading, draining or has failed; the message says which."""
