"""The request queue: assigns free slots in order of arrival; raises `QueueFull` when too many requests wait."""

from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar


class QueueFull(Exception):
    """All slots are taken, and all places of the queue."""


class Job(Protocol):
    """What wants slots: `samples` of them, all at once."""

    samples: int


J = TypeVar("J", bound=Job)


class Scheduler(Generic[J]):
    """Jobs wait in a queue, then hold slots: while their prompts are read, one after the other, and while they are decoded.

    A job at the head of the queue that wants more slots than are free holds up those behind it, so that it gets them. One that
    is not ready, because its program is being compiled, is passed by those that are.

    Attributes:
      waiting: jobs without slots, the oldest first.
      reading: jobs whose prompts have to be read, the oldest first.
      holders: for each slot the job that has it, or None.
    """

    def __init__(self, slots: int, queue: int):
        """Takes the number of slots, and of jobs that may wait when none is free."""
        self.queue = queue
        self.waiting: list[J] = []
        self.reading: deque[J] = deque()
        self.holders: list[J | None] = [None] * slots
        self._free = list(range(slots))  # the one free for the longest time first

    @property
    def free(self) -> int:
        """Slots that nobody holds."""
        return len(self._free)

    @property
    def jobs(self) -> list[J]:
        """All of them, those without slots last."""
        return [*dict.fromkeys(job for job in self.holders if job is not None), *self.waiting]

    def slots_of(self, job: J) -> list[int]:
        """The slots that a job holds, ascending."""
        return [slot for slot, holder in enumerate(self.holders) if holder is job]

    def check(self, samples: int) -> None:
        """Whether a job of so many samples could be added.

        Raises:
          ValueError: it wants more slots than there are.
          Full: it would have to wait, and as many do as may.
        """
        if samples > len(self.holders):
            raise ValueError(f"a job of {samples} samples does not fit {len(self.holders)} slots")
        left, stuck = self.free, 0  # those for whom slots are free will have them in a moment
        for wanted in [*(other.samples for other in self.waiting), samples]:
            left -= wanted
            stuck += left < 0
        if stuck > self.queue:
            raise QueueFull

    def add(self, job: J) -> None:
        """Puts a job behind all others; raises as `check` does."""
        self.check(job.samples)
        self.waiting.append(job)

    def admit(self, ready: Callable[[J], bool], prefer: Callable[[J], int | None] = lambda job: None) -> J | None:
        """Gives the next job its slots; None where nobody can have any.

        Args:
          ready: whether a job's program is there.
          prefer: the slot that suits a job best, if it is free; else it gets those free for the longest time.
        """
        job = next(filter(ready, self.waiting), None)
        if job is None or job.samples > self.free:
            return None
        wish = prefer(job)
        order = sorted(self._free, key=lambda slot: slot != wish)  # stable
        for slot in order[: job.samples]:
            self._free.remove(slot)
            self.holders[slot] = job
        self.waiting.remove(job)
        self.reading.append(job)
        return job

    def finish_reading(self, job: J) -> None:
        """The prompt of a job has been read."""
        self.reading.remove(job)

    def release(self, slot: int) -> None:
        """A slot's text has ended."""
        assert self.holders[slot] is not None
        self.holders[slot] = None
        self._free.append(slot)

    def remove(self, job: J) -> None:
        """Takes a job out, wherever it is; what it holds becomes free."""
        if job in self.waiting:
            self.waiting.remove(job)
        if job in self.reading:
            self.reading.remove(job)
        for slot in self.slots_of(job):
            self.release(slot)
