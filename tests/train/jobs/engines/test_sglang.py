"""The client of SGLang against a stub of its documented routes."""

import pytest

from jaxmem.models.sampling import SamplingConfig
from jaxmem.train.jobs.rollout.engines import EngineError, connect
from jaxmem.train.jobs.rollout.engines.sglang import Sglang
from tests.helpers.engine_stub import EOS, EngineStub
from tests.helpers.engines import REQUEST, SOON, options


@pytest.fixture
def stub():
    with EngineStub() as server:
        yield server


def client(stub, **changes):
    chosen, said = options(**changes)
    engine = Sglang(stub.url, chosen)
    engine.wait_ready()
    return engine, said


def spoiling(stub, change):
    """Change the next answer of `/generate`."""
    answer = stub.post_generate

    def changed(body):
        stub.post_generate = answer
        status, items = answer(body)
        return status, change(items)

    stub.post_generate = changed


def meta(**fields):
    def change(items):
        items[0]["meta_info"].update(fields)
        return items

    return change


def test_a_server_that_a_killed_run_left_paused_is_used(stub, tmp_path):
    """Its /health samples a token, and fails."""
    stub.get_health = lambda _: (503, None)
    stub.resumed.clear()
    engine, said = client(stub, timeout=SOON)
    engine.load_weights(tmp_path, 1, adapter=False)
    assert engine.generate(REQUEST) and not said


def test_generate_returns_what_was_sampled(stub):
    engine, said = client(stub)
    answers = engine.generate(REQUEST)
    fields = {"temperature": 1.0, "top_k": 0, "max_tokens": 6, "logprobs": 0}
    fields["stop_token_ids"] = [EOS]
    drawn = [stub.draw(REQUEST.prompt_ids, fields, 7 + i) for i in range(2)]
    assert [a.ids for a in answers] == [d[0] for d in drawn]
    assert [a.logprobs for a in answers] == [d[1] for d in drawn]
    assert [a.ended for a in answers] == [d[3] == "stop" for d in drawn]
    assert answers[0].versions is None and not said


def test_generate_sends_every_field_that_decides(stub):
    engine, _ = client(stub, sampling=SamplingConfig(max_new_tokens=6, temperature=2.0))
    engine.generate(REQUEST)
    sent = stub.bodies[0]
    assert sent["input_ids"] == [REQUEST.prompt_ids] * 2
    assert sent["return_logprob"] is True
    assert [p["sampling_seed"] for p in sent["sampling_params"]] == [7, 8]
    expected = {"n": 1, "max_new_tokens": 6, "temperature": 2.0, "top_k": -1,
                "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0,
                "presence_penalty": 0.0, "frequency_penalty": 0.0,
                "min_new_tokens": 0, "stop_token_ids": [EOS],
                "ignore_eos": False}  # fmt: skip
    assert all(expected.items() <= p.items() for p in sent["sampling_params"])


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda items: items[:1], "2 completions were asked for, got"),
        (lambda items: {"text": ""}, "2 completions were asked for, got"),
        (lambda items: [7, 8], "the answer is not a JSON object: 7"),
        (meta(prompt_tokens=5), "the server read 5 tokens of a prompt of 4"),
        (meta(output_token_logprobs=None), "output_token_logprobs is None"),
        (meta(output_token_logprobs=[[-1.0]]), "output_token_logprobs is"),
        (meta(output_token_logprobs=[[-1.0, 32, None]]), "the ids must be ids in"),
        (meta(output_token_logprobs=[[-1.0, 7, None]]), "output_ids are not those"),
        (meta(finish_reason={"type": "abort"}), "finish_reason is 'abort'"),
        (meta(finish_reason="stop"), "finish_reason is not a JSON object"),
    ],
)
def test_generate_asks_again_after_a_fault(stub, change, line):
    engine, said = client(stub)
    spoiling(stub, change)
    engine.generate(REQUEST)
    assert stub.bodies[0] == stub.bodies[1]
    assert said[0].startswith(f"rollouts.urls: {stub.url} ") and line in said[0]


def test_generate_reads_ids_without_the_end(stub):
    engine, said = client(stub)

    def trim(items):
        for item in items:
            item["output_ids"].pop()
        return items

    spoiling(stub, trim)
    answers = engine.generate(REQUEST)
    assert all(len(a.ids) == len(a.logprobs) for a in answers) and not said


def test_generate_refuses_other_ends(stub):
    """As of a checkpoint whose generation_config.json names more of them."""
    engine, _ = client(stub, eos_ids=(EOS, 30))
    stub.draw = lambda *_: ([5, 9], [-1.0, -1.0], [], "stop")
    with pytest.raises(EngineError, match="ended with the id 9; the ids that end"):
        engine.generate(REQUEST)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"sampling": SamplingConfig(max_new_tokens=6, top_k=3)}, "sampling.top_k"),
        (
            {"sampling": SamplingConfig(max_new_tokens=6, min_p=0.1, support=4)},
            "sampling.top_k",
        ),
        ({"wants_routes": True}, "grpo.replay_routing=True must stay False"),
    ],
)
def test_a_client_refuses_what_sglang_does_not_state(stub, changes, line):
    with pytest.raises(EngineError, match=line):
        client(stub, **changes)


def test_generate_names_the_flag_of_the_length(stub):
    stub.max_model_len = 9
    engine, _ = client(stub)
    with pytest.raises(EngineError, match="start it with --context-length=10 or more"):
        engine.generate(REQUEST)


def test_load_weights_takes_the_steps_in_order(stub, tmp_path):
    engine, said = client(stub)
    stub.requests.clear()
    pause, bodies = stub.post_pause_generation, []
    stub.post_pause_generation = lambda body: bodies.append(body) or pause(body)
    seconds = engine.load_weights(tmp_path, 7, adapter=False)
    assert bodies == [{"mode": "retract"}]  # which keeps requests, and not the cache
    assert stub.requests == [
        "/pause_generation",
        "/update_weights_from_disk",
        "/continue_generation",
        "/model_info",
    ]
    assert [*seconds] == ["pause", "reload", "resume", "check"]
    assert stub.directory == tmp_path and stub.version == "sums:7"
    assert engine.version() == 7 and stub.resumed.is_set() and not said


def test_load_weights_begins_again_after_a_death(stub, tmp_path):
    engine, said = client(stub)
    stub.dies_in = "/continue_generation"
    engine.load_weights(tmp_path, 2, adapter=False)
    assert stub.version == "sums:2" and stub.resumed.is_set() and len(said) == 2


def test_load_weights_ends_when_files_cannot_be_loaded(stub, tmp_path):
    (tmp_path / "bad").touch()
    engine, said = client(stub, timeout=SOON)
    line = r"/update_weights_from_disk: answers 400 \(Failed to load weights\); nothing"
    with pytest.raises(EngineError, match=line):
        engine.load_weights(tmp_path, 1, adapter=False)
    assert stub.resumed.is_set() and len(said) == 1


def test_load_weights_does_not_believe_a_success(stub, tmp_path):
    engine, _ = client(stub, timeout=SOON)
    stub.post_update_weights_from_disk = lambda body: (200, {"success": True})
    with pytest.raises(EngineError, match="states the version 'default' of its"):
        engine.load_weights(tmp_path, 1, adapter=False)


def test_load_weights_believes_a_failure(stub, tmp_path):
    engine, _ = client(stub, timeout=SOON)
    load = stub.post_update_weights_from_disk
    stub.post_update_weights_from_disk = lambda body: (200, {"success": not load(body)})
    with pytest.raises(EngineError, match="from_disk: it answers {'success': False}"):
        engine.load_weights(tmp_path, 1, adapter=False)


def test_load_weights_refuses_adapters(stub, tmp_path):
    engine, _ = client(stub)
    with pytest.raises(EngineError, match="loads whole checkpoints only; train all"):
        engine.load_weights(tmp_path, 1, adapter=True)


def test_a_pool_of_sglang_updates_all(stub, tmp_path):
    (tmp_path / "v1").mkdir()
    with EngineStub() as other:
        chosen, said = options()
        pool = connect("sglang", [stub.url, other.url], chosen)
        pool.load_weights(tmp_path / "v1", 1, adapter=False)
        assert pool.versions() == [1, 1]
        other.restart()
        answers = [answer for _ in range(2) for answer in pool.generate(REQUEST)]
        assert {a.versions[0][0] for a in answers} == {1}
        assert pool.engines[0].checksum() == pool.engines[1].checksum() is not None
        assert all("restarted" in line for line in said)
