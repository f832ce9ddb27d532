"""The client of vLLM against a stub of its routes, which fails on purpose."""

import threading
import time

import pytest

from jaxmem.models.sampling import SamplingConfig
from jaxmem.train.jobs.rollout.engines import EngineError
from jaxmem.train.jobs.rollout.engines.vllm import Vllm
from tests.helpers.engine_stub import EOS, EngineStub
from tests.helpers.engines import REQUEST, SOON, options


def client(stub, **changes):
    """A client that knows its server, and the lines that it prints."""
    chosen, said = options(**changes)
    engine = Vllm(stub.url, chosen)
    engine.wait_ready()
    return engine, said


@pytest.fixture
def stub():
    with EngineStub() as server:
        yield server


def test_generate_returns_what_was_sampled(stub):
    engine, said = client(stub)
    answers = engine.generate(REQUEST)
    drawn = [stub.draw(REQUEST.prompt_ids, stub.bodies[0], 7 + i) for i in range(2)]
    assert [a.ids for a in answers] == [d[0] for d in drawn]
    assert [a.logprobs for a in answers] == [d[1] for d in drawn]
    assert [a.ended for a in answers] == [d[3] == "stop" for d in drawn]
    assert answers[0].supports is answers[0].routes is answers[0].versions is None
    assert not said


def test_generate_sends_every_field_that_decides(stub):
    """A checkpoint's generation_config.json changes the defaults of the others."""
    engine, _ = client(stub, sampling=SamplingConfig(max_new_tokens=6, temperature=2.0))
    engine.generate(REQUEST)
    sent = stub.bodies[0]
    assert sent["prompt"] == REQUEST.prompt_ids and sent["model"] == "policy"
    expected = {"n": 2, "max_tokens": 6, "seed": 7, "temperature": 2.0, "top_k": 0,
                "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0,
                "presence_penalty": 0.0, "frequency_penalty": 0.0, "min_tokens": 0,
                "stop_token_ids": [EOS], "ignore_eos": True, "logprobs": 0,
                "stop": []}  # fmt: skip
    assert expected.items() <= sent.items()


FAULTS = {
    "closed": "the server ended the connection",
    "cut": "the answer is cut off",
    "garbage": "the answer is not a JSON object: '<html>busy</html>'",
    503: "answers 503 (as the test says)",
    429: "answers 429 (as the test says)",
    "prompt": "the prompt's ids come back as [9, 5, 12, 6, 13], sent were",
    "range": "token_ids must be ids in [0, 32), got [32,",
    "nan": "a token has the log-probability nan",
    "minus": "a token has the log-probability -inf",
    "outside": "a token has the log-probability -9999.0",
    "positive": "a token has the log-probability 0.5",
    "text": "a token has the log-probability '-0.5'",
    "short": "tokens have the log-probabilities",
    "none": "tokens have the log-probabilities",
    "count": "the answer has 1 choices, 2 were asked for",
    "index": "choices have the indices",
    "end": "is said to have ended with the id 7; the ids that end completions",
    "clipped": "is cut after 2 tokens, before sampling.max_new_tokens=6",
    "aborted": "a completion's finish_reason is 'abort'",
}


@pytest.mark.parametrize("wants_spans", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
def test_generate_asks_again_after_a_fault(stub, fault, wants_spans):
    engine, said = client(stub, wants_spans=wants_spans)
    stub.faults = [fault]
    answers = engine.generate(REQUEST)
    assert [a.ids for a in answers] == [a.ids for a in engine.generate(REQUEST)]
    assert stub.bodies[0] == stub.bodies[1] and len(stub.bodies) == 3
    assert said[0].startswith(f"rollouts.urls: {stub.url} ")
    assert FAULTS[fault] in said[0]
    assert said[1:] == [
        f"rollouts.urls: {stub.url} answers again, after it failed once"
    ]


def spoiling(stub, route, change):
    """Change all answers of a route."""
    answer = getattr(stub, route)

    def changed(body):
        status, value = answer(body)
        change(value["choices"][0])
        return status, value

    setattr(stub, route, changed)


@pytest.mark.parametrize(
    ("stated", "line"),
    [
        ("sums:3", "weight_versions is 'sums:3'"),
        ([["sums:3"]], r"weight_versions is \[\['sums:3'\]\]"),
        ([[3, 6]], "weight_versions is"),
        ([["sums:3", 2.5]], "weight_versions is"),
        ([["sums:3", -1], ["sums:3", 7]], "weight_versions is"),
        ([["sums:4", 3], ["sums:3", 3]], "weight_versions is"),  # it goes back
        ([["default", 2]], r"weight_versions cover 2 of \d tokens"),
        ([["other:3", 6]], "'other:3' of another run than 'sums'"),
    ],
)
def test_generate_refuses_versions(stub, stated, line):
    spoiling(
        stub, "post_v1_completions", lambda x: x.update({"weight_versions": stated})
    )
    engine, _ = client(stub)
    with pytest.raises(EngineError, match=line):
        engine.generate(REQUEST)


@pytest.mark.parametrize(
    "tops", [7, [7], [{"17": -0.5}], [{"token_id:3": "x"}] * 6, [{"token_id:3": None}]]
)
def test_generate_refuses_supports_that_are_none(stub, tops):
    spoiling(
        stub,
        "post_v1_completions",
        lambda x: x["logprobs"].update({"top_logprobs": tops}),
    )
    engine, _ = client(stub, sampling=SamplingConfig(max_new_tokens=6, top_k=3))
    with pytest.raises(EngineError, match="top_logprobs"):
        engine.generate(REQUEST)


def test_generate_ends_after_the_same_wrong_answer(stub):
    """Another vocabulary does not get better by waiting."""
    engine, said = client(stub, timeout=60.0)
    stub.faults = ["range"] * 9
    with pytest.raises(EngineError, match=r"ids in \[0, 32\), got .* checkpoint"):
        engine.generate(REQUEST)
    assert len(stub.bodies) == 3 and len(said) == 1


@pytest.mark.parametrize("fault", ["slow", "paused"])
def test_generate_ends_at_the_stated_time(stub, fault):
    engine, _ = client(stub, timeout=SOON)
    stub.faults = [fault]
    if fault == "paused":
        stub.resumed.clear()
    start = time.monotonic()
    with pytest.raises(EngineError, match=r"no answer in time.*rollouts.timeout=0.8 s"):
        engine.generate(REQUEST)
    assert time.monotonic() - start < 5


def test_generate_ends_with_what_a_server_said(stub):
    """And not with its silence, in attempts that have little time left."""
    engine, _ = client(stub, timeout=SOON)
    answer = stub.post_v1_completions

    def failing(body):
        stub.resumed.clear()
        stub.post_v1_completions = answer
        return 503, {"detail": "no memory"}

    stub.post_v1_completions = failing
    with pytest.raises(EngineError, match=r"answers 503 \(no memory\); nothing else"):
        engine.generate(REQUEST)


def test_generate_says_first_failure_alone(stub):
    engine, said = client(stub)
    stub.faults = [503] * 5
    engine.generate(REQUEST)
    assert len(said) == 2 and said[1].endswith("answers again, after it failed 5 times")


@pytest.mark.parametrize(
    ("status", "line"),
    [
        (400, r"/v1/completions: answers 400 \(as the test says\)$"),
        (401, r"answers 401 .*; set \$JAXMEM_ENGINE_TOKEN to the server's key$"),
    ],
)
def test_generate_does_not_repeat_what_is_refused(stub, status, line):
    engine, said = client(stub)
    stub.faults = [status]
    with pytest.raises(EngineError, match=line):
        engine.generate(REQUEST)
    assert not said and len(stub.bodies) == 1


def test_generate_needs_a_seed_and_a_length_that_the_server_has(stub):
    stub.max_model_len = 9
    engine, _ = client(stub)
    line = r"needs 10; start it with --max-model-len=10 \(jaxmem serve: --max-len=10\)"
    with pytest.raises(EngineError, match=line):
        engine.generate(REQUEST)
    with pytest.raises(EngineError, match=r"seed must be in .* got -1"):
        engine.generate(REQUEST._replace(seed=-1))


def test_generate_sends_the_token(stub):
    stub.key = "secret"
    with pytest.raises(EngineError, match=r"answers 401 \(Unauthorized\); set"):
        client(stub)
    engine, _ = client(stub, token="secret")
    assert engine.generate(REQUEST)
    assert "secret" not in repr(engine.options)


def test_generate_returns_supports(stub):
    sampling = SamplingConfig(max_new_tokens=6, top_k=3, support=4)
    engine, _ = client(stub, sampling=sampling)
    for answer in engine.generate(REQUEST):
        assert [len(ids) for ids in answer.supports] == [3] * len(answer.ids)
        assert all(i in s for i, s in zip(answer.ids, answer.supports, strict=True))
    assert stub.bodies[0]["logprobs"] == 4


def test_generate_refuses_supports_that_are_not_whole(stub):
    """As of log-probabilities before truncation, or of ties at the k-th logit."""
    stub.untempered = True
    engine, _ = client(stub, sampling=SamplingConfig(max_new_tokens=6, top_k=3))
    line = r"drawn from \d ids with the probability 0.\d+ in sum .*processed_logprobs"
    with pytest.raises(EngineError, match=line):
        engine.generate(REQUEST)


def test_generate_names_the_limit_of_supports(stub):
    engine, _ = client(stub, sampling=SamplingConfig(max_new_tokens=6, top_k=21))
    with pytest.raises(EngineError, match="start the server with --max-logprobs 21"):
        engine.generate(REQUEST)


def test_generate_returns_routes(stub):
    stub.experts = (2, 3)
    engine, _ = client(stub, wants_routes=True)
    for answer in engine.generate(REQUEST):
        assert answer.routes.shape == (4 + len(answer.ids) - 1, 2, 3)
    stub.experts = None
    with pytest.raises(EngineError, match="--enable-return-routed-experts"):
        engine.generate(REQUEST)


def test_generate_returns_versions_of_tokens(stub, tmp_path):
    """Weights that change while a request is held sample the rest of its tokens."""
    engine, _ = client(stub, wants_spans=True, timeout=10.0)
    engine.load_weights(tmp_path, 3, adapter=False)
    stub.resumed.clear()
    answers = []
    thread = threading.Thread(target=lambda: answers.extend(engine.generate(REQUEST)))
    thread.start()
    while not stub.bodies:
        time.sleep(0.01)
    engine.load_weights(tmp_path, 4, adapter=False)
    thread.join()
    half = len(answers[0].ids) // 2
    assert answers[0].versions == [(3, half), (4, len(answers[0].ids) - half)]


@pytest.mark.parametrize("states_spans", [False, True])
def test_generate_without_the_route_of_versions(tmp_path, states_spans):
    """Our own server states them in /v1/completions; vLLM does not."""
    with EngineStub(scale_out=False) as stub:
        stub.states_spans = states_spans
        engine, said = client(stub, wants_spans=True)
        engine.load_weights(tmp_path, 3, adapter=False)
        answers = [*engine.generate(REQUEST), *engine.generate(REQUEST)]
        expected = [(3, len(answers[0].ids))] if states_spans else None
        assert answers[0].versions == expected
        assert len(said) == (0 if states_spans else 1)
        assert states_spans or "--enable-scale-out" in said[0]


def test_generate_ends_when_the_client_is_closed(stub):
    engine, _ = client(stub, timeout=60.0)
    stub.resumed.clear()
    threading.Timer(0.2, engine.close).start()
    with pytest.raises(EngineError, match="is not asked again, because the run ends"):
        engine.generate(REQUEST)
    with pytest.raises(EngineError, match="because the run ends"):
        engine.generate(REQUEST)


def test_wait_ready_waits_for_a_server():
    with EngineStub() as stub:
        url = stub.url
    chosen, said = options(timeout=SOON)
    start = time.monotonic()
    with pytest.raises(EngineError, match=f"{url} /health: no server listens; nothing"):
        Vllm(url, chosen).wait_ready()
    assert time.monotonic() - start < 5
    assert len(said) == 1 and "is asked again for" in said[0]


def test_wait_ready_names_what_a_server_lacks():
    with EngineStub(dev_mode=False) as stub:
        line = r"/weight_info: answers 404 \(Not Found\); .*VLLM_SERVER_DEV_MODE=1"
        with pytest.raises(EngineError, match=line):
            client(stub)


def test_an_address_with_the_prefix_of_openai_is_named(stub):
    line = r"/v1/health: answers 404 \(Not Found\); leave /v1 out of the address"
    with pytest.raises(EngineError, match=line):
        Vllm(f"{stub.url}/v1", options()[0]).wait_ready()


def test_a_refusal_that_says_what_to_do_gets_no_other_remedy(stub, tmp_path):
    engine, _ = client(stub)
    message = "not below a folder of --weights"
    stub.post_collective_rpc = lambda body: (403, {"error": {"message": message}})
    with pytest.raises(EngineError, match=rf"answers 403 \({message}\)$"):
        engine.load_weights(tmp_path, 7, adapter=False)


def test_load_weights_takes_the_steps_in_order(stub, tmp_path):
    engine, _ = client(stub)
    assert engine.version() is None
    stub.requests.clear()
    seconds = engine.load_weights(tmp_path, 7, adapter=False)
    assert stub.requests == [
        "/pause?mode=keep",
        "/collective_rpc",
        "/update_weight_version",
        "/reset_prefix_cache?reset_running_requests=true",
        "/resume",
        "/weight_info",
    ]
    assert [*seconds] == ["pause", "reload", "version", "reset", "resume", "check"]
    assert stub.directory == tmp_path and stub.version == "sums:7"
    assert engine.version() == 7 and stub.resumed.is_set()


def test_load_weights_of_adapters_names_them_by_version(stub, tmp_path):
    engine, _ = client(stub)
    for version in (1, 2):
        stub.requests.clear()
        engine.load_weights(tmp_path, version, adapter=True)
        assert engine.generate(REQUEST)[0].versions[0][0] == version
    assert stub.requests == [
        "/v1/load_lora_adapter",
        "/update_weight_version",
        "/resume",
        "/weight_info",
        "/v1/unload_lora_adapter",
        "/v1/completions",
    ]
    assert [body["model"] for body in stub.bodies] == ["sums:1", "sums:2"]
    assert stub.adapters == {"sums:2": tmp_path} and stub.version == "sums:2"


def test_adapter_of_a_request_in_flight_is_its_version(stub, tmp_path):
    """vLLM states the version that was loaded last, in the middle of a completion."""
    engine, _ = client(stub, wants_spans=True)
    engine.load_weights(tmp_path, 3, adapter=True)
    draw, answers = stub.draw, []
    started, loaded = threading.Event(), threading.Event()

    def slow_draw(*args):
        started.set()
        loaded.wait()
        return draw(*args)

    stub.draw = slow_draw
    thread = threading.Thread(target=lambda: answers.extend(engine.generate(REQUEST)))
    thread.start()
    started.wait()
    engine.load_weights(tmp_path, 4, adapter=True)
    loaded.set()
    thread.join()
    assert [a.versions for a in answers] == [[(3, len(a.ids))] for a in answers]


def test_load_weights_replaces_an_adapter_of_the_same_name(stub, tmp_path):
    """As after a lost answer, or of the run's process before."""
    engine, _ = client(stub)
    stub.adapters["sums:1"] = None
    engine.load_weights(tmp_path, 1, adapter=True)
    assert stub.adapters == {"sums:1": tmp_path}
    assert "/reset_prefix_cache?reset_running_requests=true" in stub.requests


def test_load_weights_of_an_adapter_after_a_restart_of_the_server(stub, tmp_path):
    """The adapter before is not there to be unloaded."""
    engine, said = client(stub)
    engine.load_weights(tmp_path, 1, adapter=True)
    stub.restart()
    engine.load_weights(tmp_path, 2, adapter=True)
    assert stub.adapters == {"sums:2": tmp_path} and not said


def test_load_weights_of_an_adapter_needs_a_flag(stub, tmp_path):
    engine, _ = client(stub)
    stub.lora = False
    with pytest.raises(EngineError, match="VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"):
        engine.load_weights(tmp_path, 1, adapter=True)
    assert stub.resumed.is_set()


def test_load_weights_does_not_name_a_missing_directory(stub, tmp_path):
    """It would end vLLM for good."""
    engine, _ = client(stub)
    stub.requests.clear()
    with pytest.raises(EngineError, match=r"rollouts.weights: .*v1 is not a directory"):
        engine.load_weights(tmp_path / "v1", 1, adapter=False)
    assert stub.requests == ["/resume"]


@pytest.mark.parametrize(
    "path",
    ["/pause", "/collective_rpc", "/update_weight_version", "/reset_prefix_cache",
     "/resume", "/weight_info"],
)  # fmt: skip
def test_load_weights_begins_again_after_a_death(stub, tmp_path, path):
    """A server that dies between pause and resume and comes back is not left paused."""
    engine, said = client(stub)
    stub.dies_in = path
    engine.load_weights(tmp_path, 2, adapter=False)
    assert stub.version == "sums:2" and stub.directory == tmp_path
    assert stub.resumed.is_set() and len(said) == 2


def test_load_weights_ends_when_a_reload_breaks_the_server(stub, tmp_path):
    (tmp_path / "bad").touch()
    engine, said = client(stub, timeout=SOON)
    line = "answers 500 .*EngineDeadError.*; nothing else came for rollouts.timeout=0.8"
    with pytest.raises(EngineError, match=line):
        engine.load_weights(tmp_path, 1, adapter=False)
    assert len(said) == 1


def test_load_weights_of_another_model_ends_soon(stub, tmp_path):
    """vLLM goes on, and will never load it."""
    (tmp_path / "other").touch()
    engine, said = client(stub, timeout=60.0)
    line = r"Worker failed\); it cannot load \S+; serve the run's model.checkpoint$"
    with pytest.raises(EngineError, match=line):
        engine.load_weights(tmp_path, 1, adapter=False)
    assert stub.requests.count("/collective_rpc") == 3 and stub.resumed.is_set()


def test_load_weights_resumes_a_server_that_a_killed_run_left_paused(stub, tmp_path):
    stub.resumed.clear()
    engine, said = client(stub)
    engine.load_weights(tmp_path, 1, adapter=False)
    assert engine.generate(REQUEST) and not said


def test_load_weights_resumes_a_server_that_it_gives_up(stub, tmp_path):
    engine, _ = client(stub, timeout=SOON)
    stub.post_update_weight_version = lambda body: (500, {"detail": "no"})
    with pytest.raises(EngineError, match="answers 500 .no.; nothing else came"):
        engine.load_weights(tmp_path, 1, adapter=False)
    assert stub.resumed.is_set()


def test_load_weights_does_not_believe_a_success(stub, tmp_path):
    engine, _ = client(stub, timeout=SOON)
    stub.post_update_weight_version = lambda body: (200, {"success": True})
    line = "states the version 'default' of its weights after 'sums:1' was loaded"
    with pytest.raises(EngineError, match=line):
        engine.load_weights(tmp_path, 1, adapter=False)


@pytest.mark.parametrize(
    ("version", "line"),
    [(7, "states the version 7, which is not a text"), ([], r"the version \[\]")],
)
def test_version_must_be_text(stub, version, line):
    engine, _ = client(stub, timeout=SOON)
    stub.version = version
    with pytest.raises(EngineError, match=line):
        engine.version()


def test_version_of_another_run_is_refused(stub):
    engine, _ = client(stub)
    stub.version = "other:7"
    with pytest.raises(EngineError, match="'other:7' of another run than 'sums'"):
        engine.version()


def test_checksum_differs_with_the_weights(stub, tmp_path):
    engine, _ = client(stub)
    (tmp_path / "w").write_text("1")
    engine.load_weights(tmp_path, 1, adapter=False)
    first = engine.checksum()
    assert first == engine.checksum()
    (tmp_path / "w").write_text("2")
    assert first != engine.checksum()
