"""Tests the scheduler by a simulation of arrivals, cancellations and ends, without a clock and
without a model.
"""

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dantinox.generation.scheduler import QueueFull, Scheduler
from tests.error_texts import ERRORS


@dataclass(eq=False)
class Work:
    number: int
    slots: int
    parts: int  # prefill chunks of its prompt
    chunks: int  # decode steps of each sample
    lane: int = 0


def always(job):
    return True


EVENTS = st.one_of(
    st.tuples(
        st.just("add"), st.integers(1, 3), st.integers(0, 4), st.integers(1, 5), st.integers(0, 1)
    ),
    st.tuples(st.just("cancel"), st.integers(0, 30)),
    st.tuples(st.just("compiled"), st.just(1)),
    st.tuples(st.just("step")),
)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(EVENTS, max_size=60), st.integers(3, 5), st.integers(0, 4))
def test_any_course_of_events(events, slots, queue):
    scheduler = Scheduler(slots, queue)
    compiled, jobs, started, left, unread = {0}, [], [], {}, {}

    def step():
        while (job := scheduler.admit(lambda job: job.lane in compiled)) is not None:
            held = scheduler.slots_of(job)
            assert len(held) == job.slots and not set(held) & set(left)
            # All earlier jobs hold slots, except those whose program is missing.
            assert all(
                other.lane not in compiled
                for other in scheduler.waiting
                if other.number < job.number
            )
            started.append(job)
            unread[job] = job.parts
        if scheduler.prefilling:
            job = scheduler.prefilling[0]
            unread[job] -= 1
            if unread[job] <= 0:
                scheduler.finish_prefill(job)
                left.update(dict.fromkeys(scheduler.slots_of(job), job.chunks))
        for slot in [*left]:
            left[slot] -= 1
            if left[slot] <= 0:
                del left[slot]
                scheduler.release(slot)

    for kind, *of in events:
        if kind == "add":
            job = Work(len(jobs), *of)
            wanted = job.slots + sum(other.slots for other in scheduler.waiting)
            try:
                scheduler.add(job)
                jobs.append(job)
            except QueueFull:
                assert len(scheduler.waiting) >= queue and wanted > scheduler.free
        elif kind == "cancel" and of[0] < len(jobs):
            job = jobs[of[0]]
            for slot in scheduler.slots_of(job):
                left.pop(slot, None)
            scheduler.remove(job)
            assert job not in scheduler.jobs
        elif kind == "compiled":
            compiled.add(1)
        elif kind == "step":
            step()
        assert len(scheduler.waiting) <= queue + slots
        assert scheduler.free == sum(holder is None for holder in scheduler.holders)
    compiled.add(1)
    for _ in range(20 * (len(jobs) + 1)):
        step()
    assert not scheduler.jobs and scheduler.free == slots, "all jobs finish"
    for lane in (0, 1):
        numbers = [job.number for job in started if job.lane == lane]
        assert numbers == sorted(numbers)


def test_the_slot_that_has_been_free_longest():
    scheduler = Scheduler(3, 0)
    jobs = [Work(number, 1, 0, 1) for number in range(3)]
    for job in jobs:
        scheduler.add(job)
        scheduler.admit(always)
    assert [scheduler.slots_of(job) for job in jobs] == [[0], [1], [2]]
    for slot in (1, 0, 2):
        scheduler.release(slot)
    found = []
    for _ in range(3):
        job = Work(9, 1, 0, 1)
        scheduler.add(job)
        scheduler.admit(always)
        found += scheduler.slots_of(job)
    assert found == [1, 0, 2]


def test_a_large_job_is_not_overtaken():
    scheduler = Scheduler(3, 4)
    small, large, late = Work(0, 1, 0, 1), Work(1, 3, 0, 1), Work(2, 1, 0, 1)
    for job in (small, large, late):
        scheduler.add(job)
    assert scheduler.admit(always) is small and scheduler.admit(always) is None
    scheduler.release(0)
    assert scheduler.admit(always) is large and scheduler.admit(always) is None
    with pytest.raises(ValueError, match=ERRORS["a_job_of_4_slots"]):
        scheduler.add(Work(3, 4, 0, 1))
