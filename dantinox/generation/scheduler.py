"""The request queue: assigns free slots in order of arrival; raises `QueueFull` if too many
requests wait.
"""

from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar


class QueueFull(Exception):
    """All slots are in use and the queue is full."""


class Job(Protocol):
    """A job that needs this many slots at the same time."""

    slots: int


J = TypeVar("J", bound=Job)


class Scheduler(Generic[J]):
    """Holds jobs in a queue until they get slots. Jobs with slots are prefilled and then decode.

    If the first job in the queue needs more slots than are free, the jobs after it wait too;
    otherwise it might never get its slots. But a job whose program is still being compiled does not
    block the jobs after it.

    Attributes:
      waiting: the jobs without slots, oldest first.
      prefilling: the jobs with slots whose prompts are not completely prefilled, oldest first.
      holders: for each slot, the job that holds it, or None.
    """

    def __init__(self, slots: int, queue: int):
        """Creates a scheduler for this number of slots; at most `queue` jobs may wait for slots."""
        self.queue = queue
        self.waiting: list[J] = []
        self.prefilling: deque[J] = deque()
        self.holders: list[J | None] = [None] * slots
        self._free = list(range(slots))  # slots in the order in which they became free

    @property
    def free(self) -> int:
        """The number of free slots."""
        return len(self._free)

    @property
    def last_free(self) -> int:
        """The free slot that the next job gets last."""
        return self._free[-1]

    @property
    def jobs(self) -> list[J]:
        """All jobs: first the jobs with slots, then the waiting jobs."""
        return [*dict.fromkeys(job for job in self.holders if job is not None), *self.waiting]

    def slots_of(self, job: J) -> list[int]:
        """Returns the slots of a job, ascending."""
        return [slot for slot, holder in enumerate(self.holders) if holder is job]

    def check(self, slots: int) -> None:
        """Checks whether a job that needs this many slots can be added.

        Raises:
          ValueError: the job needs more slots than exist.
          QueueFull: the job would have to wait, and the queue is full.
        """
        if slots > len(self.holders):
            raise ValueError(f"a job of {slots} slots does not fit {len(self.holders)} slots")
        free = self.free
        # Jobs that fit into the free slots do not count, because they start immediately.
        waiting = 0
        for needed in [*(job.slots for job in self.waiting), slots]:
            free -= needed
            waiting += free < 0
        if waiting > self.queue:
            raise QueueFull

    def add(self, job: J) -> None:
        """Adds a job at the end of the queue; raises as `check` does."""
        self.check(job.slots)
        self.waiting.append(job)

    def admit(self, ready: Callable[[J], bool]) -> J | None:
        """Assigns the slots that have been free longest to the next job and returns it; None if no
        job can start.

        Args:
          ready: whether the program of a job is compiled.
        """
        job = next(filter(ready, self.waiting), None)
        if job is None or job.slots > self.free:
            return None
        for _ in range(job.slots):
            self.holders[self._free.pop(0)] = job
        self.waiting.remove(job)
        self.prefilling.append(job)
        return job

    def finish_prefill(self, job: J) -> None:
        """Marks the prompt of a job as prefilled."""
        self.prefilling.remove(job)

    def release(self, slot: int) -> None:
        """Frees a slot."""
        assert self.holders[slot] is not None
        self.holders[slot] = None
        self._free.append(slot)

    def remove(self, job: J) -> None:
        """Removes a job in any state and frees its slots."""
        if job in self.waiting:
            self.waiting.remove(job)
        if job in self.prefilling:
            self.prefilling.remove(job)
        for slot in self.slots_of(job):
            self.release(slot)
