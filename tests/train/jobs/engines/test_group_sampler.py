"""Groups that threads sample: their order, failures, counts and what is kept."""

import threading

import pytest

from jaxmem.train.jobs.rollout.engines.group_sampler import Attempt, GroupSampler
from jaxmem.train.jobs.rollout.transcripts import Transcript

FIRST, SECOND = Attempt(1, 0), Attempt(2, 0)


@pytest.fixture
def sampler():
    sampler = GroupSampler(threads=2)
    yield sampler
    sampler.close()


def group(*ids):
    return [Transcript([1], [i], [0.0]) for i in ids]


def ids_of(transcripts):
    return [x.completion_ids[0] for x in transcripts]


def test_result_has_the_order_of_the_units(sampler):
    second_is_done = threading.Event()

    def slow():
        assert second_is_done.wait(10)
        return group(1, 2)

    def fast():
        second_is_done.set()
        return group(3)

    sampler.submit(FIRST, [slow, fast])
    assert ids_of(sampler.result(FIRST)) == [1, 2, 3]


def test_result_raises_the_error_of_a_unit_and_others_go_on(sampler):
    def fails():
        raise ValueError("the engine is away")

    sampler.submit(FIRST, [lambda: group(1), fails, lambda: group(2)])
    with pytest.raises(ValueError, match="the engine is away"):
        sampler.result(FIRST)
    sampler.submit(SECOND, [lambda: group(3)])
    assert ids_of(sampler.result(SECOND)) == [3]
    finished = sampler.finished(FIRST)
    assert [x and ids_of(x) for x in finished] == [[1], None, [2]]


def test_finished_units_of_an_earlier_process_are_not_run_again(sampler):
    runs = []

    def run():
        runs.append(1)
        return group(9)

    sampler.submit(FIRST, [run, run], [group(4), None])
    assert ids_of(sampler.result(FIRST)) == [4, 9] and runs == [1]
    assert sampler.queued == 2
    sampler.forget(FIRST)
    assert FIRST not in sampler and sampler.queued == 0


def test_finished_leaves_out_units_under_way(sampler):
    go_on = threading.Event()

    def waits():
        assert go_on.wait(10)
        return group(1)

    sampler.submit(FIRST, [lambda: group(2), waits])
    while sampler.queued < 1:
        pass
    assert [x and ids_of(x) for x in sampler.finished(FIRST)] == [[2], None]
    go_on.set()
    assert ids_of(sampler.result(FIRST)) == [2, 1]


def test_traffic_counts_tokens_and_times_since_the_last_look(sampler):
    sampler.submit(FIRST, [lambda: group(1, 2), lambda: group(3)])
    sampler.result(FIRST)
    first = sampler.traffic()
    assert first.tokens == 3 and first.busy_seconds > 0
    second = sampler.traffic()
    assert second.tokens == 0 and second.busy_seconds == 0 < second.idle_seconds


def test_close_cancels_units_that_have_not_begun():
    sampler, go_on = GroupSampler(threads=1), threading.Event()

    def waits():
        go_on.wait(10)
        return group(1)

    sampler.submit(FIRST, [waits, lambda: group(2)])
    sampler.close()
    go_on.set()
    assert sampler.finished(FIRST)[1] is None
