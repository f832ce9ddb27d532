"""Several engines that share the prompts of a run, against stubs that fail."""

import concurrent.futures
import threading
import time

import pytest

from jaxmem.train.jobs.rollout import engines
from jaxmem.train.jobs.rollout.engines import EngineError, EnginePool, connect
from tests.helpers.engine_stub import EngineStub
from tests.helpers.engines import REQUEST, SOON, options


@pytest.fixture
def stubs():
    with EngineStub() as first, EngineStub() as second:
        yield first, second


def joined(stubs, **changes):
    chosen, said = options(**changes)
    return connect("vllm", [stub.url for stub in stubs], chosen), said


def weights(path, content):
    path.mkdir()
    (path / "model.safetensors").write_text(content)
    return path


def test_generate_asks_the_engine_with_the_fewest_requests(stubs):
    pool, _ = joined(stubs, timeout=20.0)
    for stub in stubs:
        stub.resumed.clear()
    with concurrent.futures.ThreadPoolExecutor(6) as threads:
        futures = [threads.submit(pool.generate, REQUEST) for _ in range(6)]
        while sum(len(stub.bodies) for stub in stubs) < 6:
            time.sleep(0.01)
        for stub in stubs:
            stub.resumed.set()
        ids = [[a.ids for a in future.result()] for future in futures]
    assert [len(stub.bodies) for stub in stubs] == [3, 3]
    assert all(x == ids[0] for x in ids)


def test_generate_asks_another_engine_after_a_failure(stubs):
    pool, said = joined(stubs, timeout=20.0)
    stubs[0].faults = [503] * 2
    for _ in range(4):
        pool.generate(REQUEST)
    assert len(stubs[0].bodies) == 1 and len(stubs[1].bodies) == 4
    assert len(said) == 1 and stubs[0].url in said[0]


def test_generate_ends_when_no_engine_answers(stubs):
    pool, _ = joined(stubs, timeout=SOON)
    for stub in stubs:
        stub.faults = [503] * 999
    with pytest.raises(EngineError, match="answers 503 .*rollouts.timeout=0.8 seconds"):
        pool.generate(REQUEST)
    assert all(stub.bodies for stub in stubs)


def test_a_server_that_hangs_gets_one_request_at_a_time(stubs, monkeypatch):
    """The others go on, and no prompt is lost."""
    monkeypatch.setattr(engines.pool, "_REST", 0.01)
    pool, said = joined(stubs, timeout=0.5)
    stubs[0].resumed.clear()
    assert pool.generate(REQUEST)
    assert [len(stub.bodies) for stub in stubs] == [1, 1]
    assert len(said) == 1 and f"{stubs[0].url} /v1/completions: no answer" in said[0]
    time.sleep(0.1)
    assert pool.generate(REQUEST)  # it rests as long as it took to fail
    assert [len(stub.bodies) for stub in stubs] == [1, 2]
    time.sleep(0.6)
    stubs[1].resumed.clear()
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        futures = [threads.submit(pool.generate, REQUEST) for _ in range(4)]
        while sum(len(stub.bodies) for stub in stubs) < 3 + 4:
            time.sleep(0.01)
        assert [len(stub.bodies) for stub in stubs] == [2, 5]
        stubs[1].resumed.set()
        assert all(future.result() for future in futures)
    assert [len(stub.bodies) for stub in stubs] == [2, 6]


def test_a_server_that_answers_has_rested_enough(stubs):
    pool, _ = joined(stubs, timeout=20.0)
    stubs[0].resumed.clear()
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        held = threads.submit(pool.generate, REQUEST)
        while not stubs[0].bodies:
            time.sleep(0.01)
        stubs[0].faults, stubs[1].faults = [503], [503]
        pool.generate(REQUEST)  # both fail and rest; after a while one is asked again
        stubs[0].resumed.set()
        assert held.result()
    asked = len(stubs[0].bodies)
    pool.generate(REQUEST)
    assert len(stubs[0].bodies) == asked + 1


def test_a_request_has_time_while_its_server_serves_others(stubs):
    """The timeout counts from a server's last answer, not from the request."""
    pool, said = joined(stubs[:1], timeout=1.0)
    stub, draw = stubs[0], stubs[0].draw

    def slowly(prompt, fields, seed):
        if seed >= 1000:
            time.sleep(0.7)  # twice: count=2
        return draw(prompt, fields, seed)

    stub.draw = slowly
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        future = threads.submit(pool.generate, REQUEST._replace(seed=1000))
        while not future.done():
            pool.generate(REQUEST)
            time.sleep(0.05)
        assert future.result() and not said


def test_the_time_of_an_update_is_not_that_of_a_request(stubs, tmp_path):
    pool, said = joined(stubs[:1], timeout=1.0)
    pool.load_weights(weights(tmp_path / "v1", "1"), 1, adapter=False)
    reload, draw = stubs[0].post_collective_rpc, stubs[0].draw
    began = threading.Event()

    def slow_reload(body):
        began.set()
        time.sleep(0.7)
        return reload(body)

    def slow_draw(*arguments):
        time.sleep(0.35)  # twice: count=2
        return draw(*arguments)

    stubs[0].post_collective_rpc, stubs[0].draw = slow_reload, slow_draw
    second = weights(tmp_path / "v2", "2")
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        update = threads.submit(pool.load_weights, second, 2, False)
        began.wait()
        answers = threads.submit(pool.generate, REQUEST)
        update.result()
        assert answers.result() and not said


def test_load_weights_updates_all(stubs, tmp_path):
    pool, said = joined(stubs)
    seconds = pool.load_weights(weights(tmp_path / "v1", "1"), 1, adapter=False)
    assert {"pause", "reload", "resume"} < seconds.keys()
    assert [stub.version for stub in stubs] == ["sums:1"] * 2
    assert pool.versions() == [1, 1]
    answers = pool.generate(REQUEST)
    assert [a.versions for a in answers] == [[(1, len(a.ids))] for a in answers]
    assert not said


def test_generate_waits_while_weights_are_loaded(stubs, tmp_path):
    """Nothing is sampled while engines have different weights."""
    pool, _ = joined(stubs, timeout=20.0)
    pool.load_weights(weights(tmp_path / "v1", "1"), 1, adapter=False)
    release, reload = threading.Event(), stubs[1].post_collective_rpc

    def slowly(body):
        release.wait()
        return reload(body)

    stubs[1].post_collective_rpc = slowly
    for stub in stubs:
        stub.requests.clear()
    second = weights(tmp_path / "v2", "2")
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        update = threads.submit(pool.load_weights, second, 2, False)
        while stubs[0].version != "sums:2":
            time.sleep(0.01)
        answers = threads.submit(pool.generate, REQUEST)
        time.sleep(0.1)
        states = [stub.requests.count("/weight_info") for stub in stubs]
        assert states == [1, 0]  # of the update; a request that waits asks nothing
        assert not answers.done() and not stubs[0].bodies and not stubs[1].bodies
        release.set()
        update.result()
        assert [a.versions[0][0] for a in answers.result()] == [2, 2]


def test_generate_loads_weights_into_a_server_that_restarted(stubs, tmp_path):
    pool, said = joined(stubs[:1])
    directory = weights(tmp_path / "v1", "1")
    pool.load_weights(directory, 1, adapter=True)
    stubs[0].restart()
    pool.generate(REQUEST)
    assert stubs[0].version == "sums:1"
    assert stubs[0].adapters == {"sums:1": directory}
    assert len(said) == 1 and "has restarted" in said[0]
    assert "version 1 is loaded again" in said[0]


def test_a_restart_during_a_request_costs_a_retry(stubs, tmp_path):
    pool, said = joined(stubs[:1])
    pool.load_weights(weights(tmp_path / "v1", "1"), 1, adapter=False)
    stubs[0].dies_in = "/v1/completions"
    pool.generate(REQUEST)
    assert stubs[0].version == "sums:1"
    assert "the server ended the connection" in said[0] and "restarted" in said[1]


def test_a_restart_just_before_a_request_is_noticed_by_its_answer(stubs, tmp_path):
    """The server said its version, and then sampled with the weights of its start."""
    pool, said = joined(stubs[:1])
    stub = stubs[0]
    stub.states_spans = True
    pool.load_weights(weights(tmp_path / "v1", "1"), 1, adapter=False)
    state = stub.get_weight_info

    def dying(body):
        answer = state(body)
        stub.get_weight_info = state
        stub.restart()
        return answer

    stub.get_weight_info = dying
    answers = pool.generate(REQUEST)
    assert [a.versions for a in answers] == [[(1, len(a.ids))] for a in answers]
    assert "has sampled with the weights of version -1; 1 was loaded" in said[0]
    assert "has restarted" in said[1]


def test_generate_refuses_tokens_of_weights_that_it_has_not_loaded(stubs, tmp_path):
    pool, _ = joined(stubs[:1])
    stub = stubs[0]
    stub.states_spans = True
    pool.load_weights(weights(tmp_path / "v1", "1"), 1, adapter=False)
    complete = stub.post_v1_completions

    def changed(body):
        stub.version = "sums:9"
        return complete(body)

    stub.post_v1_completions = changed
    line = "sampled with the weights of version 9, and the newest is 1; end the program"
    with pytest.raises(EngineError, match=line):
        pool.generate(REQUEST)


def test_weights_of_before_the_run_have_no_version(stubs):
    pool, _ = joined(stubs[:1])
    stubs[0].states_spans = True
    assert [a.versions for a in pool.generate(REQUEST)] == [None, None]


def test_a_server_that_restarted_is_not_told_of_a_removed_directory(stubs, tmp_path):
    """It would end vLLM for good."""
    pool, _ = joined(stubs[:1])
    directory = weights(tmp_path / "v1", "1")
    pool.load_weights(directory, 1, adapter=True)
    stubs[0].restart()
    (directory / "model.safetensors").unlink()
    directory.rmdir()
    with pytest.raises(EngineError, match=r"rollouts.weights: .*v1 is not a directory"):
        pool.generate(REQUEST)
    assert not stubs[0].broken and stubs[0].directory is None


def test_no_request_is_sent_after_an_update_has_begun(stubs, tmp_path):
    """A request that has read the old version waits for the new one everywhere."""
    pool, _ = joined(stubs)
    pool.load_weights(weights(tmp_path / "v1", "1"), 1, adapter=False)
    second = weights(tmp_path / "v2", "2")
    seen, state = [], stubs[0].get_weight_info
    with concurrent.futures.ThreadPoolExecutor(2) as threads:

        def updating(body):
            """The first reader of the version starts an update that takes a while."""
            stubs[0].get_weight_info = state
            answer = state(body)
            seen.append(threads.submit(pool.load_weights, second, 2, False))
            while stubs[1].version != "sums:2":
                time.sleep(0.01)
            return answer

        reload = stubs[0].post_collective_rpc

        def slowly(body):
            time.sleep(0.2)
            assert not stubs[0].bodies and not stubs[1].bodies
            return reload(body)

        stubs[0].get_weight_info = updating
        stubs[0].post_collective_rpc = slowly
        answers = threads.submit(pool.generate, REQUEST).result()
        seen[0].result()
    assert [a.versions[0][0] for a in answers] == [2, 2]


@pytest.mark.parametrize(
    ("version", "line"),
    [
        ("sums:1", "states the version 1 of its weights, and 2 was loaded"),
        ("sums:3", "states the version 3 of its weights, and 2 was loaded"),
        ("other:2", "has the weights 'other:2' of another run than 'sums'"),
    ],
)
def test_generate_refuses_weights_that_it_has_not_loaded(
    stubs, tmp_path, version, line
):
    pool, _ = joined(stubs[:1])
    pool.load_weights(weights(tmp_path / "v2", "2"), 2, adapter=False)
    stubs[0].version = version
    with pytest.raises(EngineError, match=line):
        pool.generate(REQUEST)


def test_load_weights_fails_for_all_if_one_fails(stubs, tmp_path):
    pool, _ = joined(stubs, timeout=SOON)
    directory = weights(tmp_path / "v1", "1")
    stubs[1].post_collective_rpc = lambda body: (500, {"detail": "no memory"})
    with pytest.raises(EngineError, match=f"{stubs[1].url} .*no memory"):
        pool.load_weights(directory, 1, adapter=False)
    with pytest.raises(EngineError, match="no memory"):
        pool.generate(REQUEST)


def test_load_weights_compares_engines(stubs, tmp_path):
    pool, _ = joined(stubs)
    stubs[1].checksum_of_directory = False
    with pytest.raises(EngineError, match=f"{stubs[1].url} has other weights than"):
        pool.load_weights(weights(tmp_path / "v1", "1"), 1, adapter=False)


def test_load_weights_refuses_weights_that_do_not_change(stubs, tmp_path):
    """An update may leave the files as they were, and then the weights as well."""
    pool, _ = joined(stubs[:1])
    stubs[0].checksum_of_directory = False
    pool.load_weights(weights(tmp_path / "v1", "1"), 1, adapter=False)
    pool.load_weights(weights(tmp_path / "v2", "1"), 2, adapter=False)
    with pytest.raises(EngineError, match=r"the weights of version 2 after it loaded"):
        pool.load_weights(weights(tmp_path / "v3", "3"), 3, adapter=False)


def test_close_ends_requests(stubs):
    pool, _ = joined(stubs, timeout=60.0)
    for stub in stubs:
        stub.resumed.clear()
    threading.Timer(0.2, pool.close).start()
    with pytest.raises(EngineError, match="the run ends"):
        pool.generate(REQUEST)
    with pytest.raises(EngineError, match="the run ends"):
        pool.generate(REQUEST)


def test_close_ends_a_pause_before_the_next_attempt(stubs):
    pool, said = joined(stubs[:1], timeout=600.0, first_pause=100.0)
    stubs[0].faults = [503]
    began = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        future = threads.submit(pool.generate, REQUEST)
        while not said:
            time.sleep(0.01)
        pool.close()
        with pytest.raises(EngineError, match="the run ends"):
            future.result()
    assert time.monotonic() - began < 5


def test_a_pool_has_different_servers(stubs):
    with pytest.raises(EngineError, match=f"rollouts.urls names {stubs[0].url} twice"):
        joined([stubs[0], stubs[0]])
    with pytest.raises(EngineError, match="must name at least one server"):
        EnginePool([])


def test_an_interrupt_does_not_wait_for_servers(stubs):
    """As Ctrl-C while a server hangs in the middle of an update."""
    pool, _ = joined(stubs, timeout=60.0)

    def action(member):
        if member.engine is pool.engines[0]:
            while not stubs[1].bodies:
                time.sleep(0.01)
            raise KeyboardInterrupt
        return member.engine.generate(REQUEST)

    stubs[1].resumed.clear()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        pool._on_all(action)
    assert time.monotonic() - began < 5
