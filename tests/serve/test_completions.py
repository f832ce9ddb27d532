"""Completions over HTTP: the trainer's log-probabilities, seeds, bounds, clients."""

import socket
import time

import numpy as np
import pytest
from flax import nnx

from jaxmem import generate
from jaxmem.generate.completions import EncodedPrompt
from jaxmem.models.sampling import SamplingConfig
from jaxmem.serve import command
from jaxmem.serve.completion_request import (
    CompletionRequest,
    DrawOptions,
    RequestReader,
)
from jaxmem.serve.request_error import RequestError
from jaxmem.serve.served_rows import CompletionJob
from jaxmem.serve.slot_pool import SlotPool
from jaxmem.train.jobs.rollout.engines import EngineOptions, SamplingRequest
from jaxmem.train.jobs.rollout.engines.vllm import Vllm
from tests.helpers import served, texts
from tests.helpers.served import EOS, VOCAB, at_once, send

pytestmark = pytest.mark.usefixtures("quick_compilation")
PROMPT = [5, 12, 6, 13]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return served.write_versions(tmp_path_factory.mktemp("models"))[0]


@pytest.fixture(scope="module")
def server(directory, quick_compilation):
    with command.served(served.options(directory, max_waiting=24)) as running:
        yield running


@pytest.fixture(autouse=True)
def no_row_is_left(server):
    yield
    assert wait_until(lambda: server.loop.is_idle)


def wait_until(condition):
    end = time.monotonic() + 20
    while not (done := condition()) and time.monotonic() < end:
        time.sleep(0.01)
    return done


def client(server, wants_spans=False, **sampling):
    options = EngineOptions(
        sampling=SamplingConfig(max_new_tokens=16, **sampling), eos_ids=(EOS,),
        vocab_size=VOCAB, run="sums", timeout=30, wants_spans=wants_spans, token=None,
    )  # fmt: skip
    engine = Vllm(server.url, options)
    info = engine.wait_ready()
    assert info == ("policy", 64, "default")
    return engine


def complete(server, **fields):
    body = {"prompt": PROMPT, "max_tokens": 16, "return_token_ids": True, "seed": 7}
    status, answer = send(server.url, "/v1/completions", body | fields)
    assert status == 200, answer
    return answer["choices"]


def ids_of(choices):
    return [choice["token_ids"] for choice in choices]


# ------------------------------------------------------------------ the client of vLLM


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_logprobs_are_the_trainers(server, directory, temperature):
    request = SamplingRequest(PROMPT, 5, 16, seed=7)
    engine = client(server, temperature=temperature)
    answers = engine.generate(request)
    for answer in answers:
        expected = served.trainer_logprobs(directory, PROMPT, answer.ids, temperature)
        np.testing.assert_allclose(answer.logprobs, expected, atol=1e-5)
    assert {answer.ended for answer in answers} == {True, False}
    assert len({tuple(answer.ids) for answer in answers}) == 5


def test_temperatures_share_the_slots(server, directory):
    def long(temperature):
        fields = dict(temperature=temperature, logprobs=0, max_tokens=60)
        return complete(server, ignore_eos=True, **fields)[0]

    long(1.0)
    pool = server.loop._pool
    temperatures = 2.0, 0.3, 1e-3
    choices = at_once(*(lambda t=t: long(t) for t in temperatures))
    for temperature, choice in zip(temperatures, choices, strict=True):
        ids, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
        expected = served.trainer_logprobs(directory, PROMPT, ids, temperature)
        tolerance = 1e-5 / min(temperature, 1)  # of logits, by the temperature
        np.testing.assert_allclose(logprobs, expected, atol=tolerance)
    assert server.loop._pool is pool


def test_both_routes_give_equal_answers(server):
    request = SamplingRequest(PROMPT, 3, 16, seed=7)
    by_text, by_ids = (
        client(server, spans).generate(request) for spans in (False, True)
    )
    assert by_text == by_ids


@pytest.mark.parametrize(
    "truncation",
    [
        dict(top_p=0.7, support=VOCAB),
        pytest.param(dict(top_k=5), marks=pytest.mark.full),
        pytest.param(
            dict(top_k=9, top_p=0.9, min_p=0.05, support=9), marks=pytest.mark.full
        ),
    ],
)
def test_logprobs_are_of_the_truncated_distribution(server, directory, truncation):
    engine = client(server, temperature=0.5, **truncation)
    for answer in engine.generate(SamplingRequest(PROMPT, 2, 16, seed=7)):
        logits = served.trainer_logits(directory, PROMPT, answer.ids) / 0.5
        for row, id_, logprob, support in zip(
            logits, answer.ids, answer.logprobs, answer.supports, strict=True
        ):
            kept = row[support]
            assert kept.min() >= np.delete(row, support).max(initial=-np.inf)
            total = np.log(np.exp(kept - kept.max()).sum()) + kept.max()
            np.testing.assert_allclose(logprob, row[id_] - total, atol=1e-5)
    assert 1 < max(map(len, answer.supports)) < VOCAB


# ------------------------------------------------------------------ tokens and seeds


def test_greedy_tokens_are_those_of_generate(server, directory):
    model = generate.load(directory, dtype="float32")
    config = generate.GenerateConfig(max_new_tokens=16, temperature=0, batch_size=1)
    expected = generate.Generator(model, config).complete(
        [EncodedPrompt("", PROMPT, 0, 16)]
    )
    assert ids_of(complete(server, temperature=0)) == [expected[0].ids]


def test_seed_gives_tokens_of_generate(server, directory):
    model = generate.load(directory, dtype="float32")
    config = generate.GenerateConfig(max_new_tokens=16, seed=7, batch_size=1)
    expected = generate.Generator(model, config).complete(
        [EncodedPrompt("", PROMPT, 0, 16)]
    )
    assert ids_of(complete(server)) == [expected[0].ids]


def test_choice_adds_its_index_to_the_seed(server):
    alone = [ids_of(complete(server, seed=seed))[0] for seed in (7, 8, 9, 10)]
    other = [9, 9, 8, 31, 4]
    together, _, of_two_prompts = at_once(
        lambda: complete(server, n=4),
        lambda: complete(server, n=3, prompt=other, max_tokens=40),
        lambda: complete(server, n=2, prompt=[PROMPT, other]),
    )
    assert ids_of(together) == alone
    assert ids_of(of_two_prompts)[:2] == alone[:2]
    assert [choice["index"] for choice in of_two_prompts] == [0, 1, 2, 3]
    assert of_two_prompts[3]["prompt_token_ids"] == other


@pytest.mark.parametrize("seed", [-(2**63), -2, 2**31, 2**63 - 1])
def test_all_seeds_of_64_bits_are_taken(server, seed):
    first, again, next_ = (complete(server, seed=s) for s in (seed, seed, seed // 2))
    assert ids_of(first) == ids_of(again) != ids_of(next_)


@pytest.mark.parametrize("seed", [None, -1])
def test_request_without_a_seed_is_drawn_at_random(server, seed):
    first, again = (complete(server, seed=seed) for _ in range(2))
    assert ids_of(first) != ids_of(again)


def test_text_prompts_are_encoded(server):
    by_text = complete(server, prompt="abc")[0]
    assert by_text["prompt_token_ids"] == [1, 3, 4, 5]
    assert by_text["token_ids"] == complete(server, prompt=[1, 3, 4, 5])[0]["token_ids"]
    assert by_text["weight_versions"] == [["default", len(by_text["token_ids"])]]


def test_stop_ids_end_completions(server):
    ids = complete(server, ignore_eos=True)[0]["token_ids"]
    cut = complete(server, ignore_eos=True, stop_token_ids=[ids[5]])[0]
    assert cut["token_ids"] == ids[: ids.index(ids[5]) + 1]
    assert (cut["finish_reason"], cut["stop_reason"]) == ("stop", ids[5])


def test_tokens_are_named_by_text_or_id(server):
    for by_id in (False, True):
        choice = complete(server, logprobs=2, return_tokens_as_token_ids=by_id)[0]
        logprobs, ids = choice["logprobs"], choice["token_ids"]
        letters = [f"token_id:{i}" if by_id else text_of(i) for i in ids]
        assert logprobs["tokens"] == letters
        for name, logprob, top in zip(
            letters, logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
        ):
            assert top[name] == logprob and len(top) in (2, 3)
    assert complete(server)[0]["logprobs"] is None


def text_of(id_):
    return [*texts.SPECIAL, *texts.LETTERS][id_]


def test_routes_of_earlier_weights_stay():
    request = CompletionRequest(
        "policy", [PROMPT], 1, 9, 0, 1.0, DrawOptions(False, None, None, None, (), 0),
        frozenset(), None, True, False,
    )  # fmt: skip
    row = CompletionJob(request).rows[0]
    row.ids = [1, 2, 3]
    row.add_routes(np.full((12, 1, 2), 7))  # read again after them, by other weights
    row.ids += [4, 5]
    row.add_routes(np.full((12, 1, 2), 8))
    assert np.concatenate(row.routes)[:, 0, 0].tolist() == [7] * 6 + [8] * 2


# ------------------------------------------------------------------ bounds


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": None}, "prompt must be a text, a list of ids, or a list of these"),
        ({"prompt": []}, "prompt must be a text"),
        ({"prompt": [[]]}, "prompt[0] has no token"),
        ({"prompt": [5, 40]}, "prompt[1] must be an id of the vocabulary, in [0, 40)"),
        ({"prompt": [5, True]}, "prompt[1] must be an id"),
        ({"prompt": [5, -1]}, "prompt[1] must be an id"),
        ({"prompt": [5] * 64}, "maximum context length is 64 tokens (--max-len)"),
        ({"prompt": "\ud800"}, "the tokenizer cannot encode the prompt"),
        ({"max_tokens": 0}, "max_tokens must be an integer from 1"),
        ({"max_tokens": 1.5}, "max_tokens must be an integer"),
        ({"max_tokens": 61}, "max_tokens=61 and a prompt of 4 tokens need 65"),
        ({"n": 0}, "n must be an integer from 1"),
        ({"n": 25}, "asks for 25 completions, and 24 may wait (--max-waiting)"),
        ({"n": 2, "temperature": 0}, "n must be 1 at temperature 0, got 2"),
        ({"temperature": -1}, "temperature must be a number from 0 on"),
        ({"temperature": 1e-7}, "temperature must be 0 or at least 1e-06, got 1e-07"),
        ({"temperature": "hot"}, "temperature must be a number"),
        ({"top_p": 0}, "top_p must be in (0, 1]"),
        ({"top_k": -2}, "top_k must be an integer from -1"),
        ({"min_p": 1.5}, "min_p must be a number from 0 to 1"),
        ({"seed": 2**63}, "seed must be an integer"),
        ({"stop_token_ids": [40]}, "stop_token_ids[0] must be an id"),
        ({"logprobs": 10**400}, "logprobs must be an integer"),
        ({"stream": True}, "stream=True is not implemented by jaxmem serve"),
        ({"stop": ["x"]}, "stop=['x'] is not implemented"),
        ({"repetition_penalty": 1.1}, "repetition_penalty=1.1 is not implemented"),
        ({"temprature": 1}, "unknown fields 'temprature'"),
        ({"return_token_ids": 1}, "return_token_ids must be true or false"),
    ],
)
def test_impossible_fields_are_refused(server, fields, message):
    body = {"prompt": PROMPT, "max_tokens": 4} | fields
    status, answer = send(server.url, "/v1/completions", body)
    assert status == 400
    assert message in answer["error"]["message"]
    assert answer["error"]["code"] == 400


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"token_ids": []}, "token_ids has no token"),
        ({"token_ids": [[5]]}, "token_ids[0] must be an id"),
        ({"token_ids": None}, "token_ids must be a list of ids"),
        ({"sampling_params": None}, "sampling_params must be a JSON object"),
        ({"sampling_params": {"prompt": [5]}}, "unknown fields 'prompt'"),
        ({"temperature": 1}, "unknown fields 'temperature'"),
    ],
)
def test_impossible_fields_of_token_requests_are_refused(server, fields, message):
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 4}} | fields
    status, answer = send(server.url, "/inference/v1/generate", body)
    assert status == 400
    assert message in answer["error"]["message"]


def test_other_models_are_named(server):
    body = {"model": "other", "prompt": PROMPT}
    status, answer = send(server.url, "/v1/completions", body)
    assert status == 404
    assert answer["error"]["message"] == (
        "The model `other` does not exist; this server has 'policy'"
    )


def test_logprobs_are_bounded(directory):
    model = generate.load(directory, dtype="float32")
    reader = RequestReader(model, 64, 24, 20)
    with pytest.raises(RequestError) as raised:
        reader({"prompt": PROMPT, "logprobs": 21}, ["policy"])
    assert str(raised.value) == (
        "Requested sample logprobs of 21, which is greater than max allowed: 20 "
        "(--max-logprobs)"
    )
    assert reader({"prompt": PROMPT, "logprobs": 20}, ["policy"]).logprobs == 20


def test_full_queue_asks_to_come_later(server):
    send(server.url, "/pause?mode=keep", {})
    try:
        body = {"prompt": PROMPT, "n": 20, "max_tokens": 4}
        waiting = [lambda: send(server.url, "/v1/completions", body)]

        def refused():
            assert wait_until(lambda: not server.loop.is_idle)
            try:
                return send(server.url, "/v1/completions", body | {"n": 5})
            finally:
                send(server.url, "/resume", {})

        (status, _), (later, answer) = at_once(*waiting, refused)
    finally:
        send(server.url, "/resume", {})
    assert (status, later) == (200, 429)
    assert answer["error"]["message"] == (
        "20 completions wait for a slot, and 24 may (--max-waiting); send the 5 of "
        "this request later"
    )


def test_64_requests_at_once_are_answered(server, directory):
    bodies = [
        dict(prompt=[3 + i % 30, 4], seed=i, max_tokens=3 + i % 9) for i in range(64)
    ]
    made = at_once(*(lambda b=b: patient(server, b) for b in bodies))
    for body, choice in zip(bodies, made, strict=True):
        assert choice == complete(server, logprobs=0, **body)[0] | {
            "logprobs": choice["logprobs"]
        }


def patient(server, body):
    """The only choice of a request that is sent again while the queue is full."""
    body = {"return_token_ids": True, "logprobs": 0} | body
    while (made := send(server.url, "/v1/completions", body))[0] == 429:
        time.sleep(0.02)
    return made[1]["choices"][0]


def test_client_that_leaves_frees_its_slots(server, monkeypatch):
    monkeypatch.setattr("jaxmem.serve.decoding_loop._POLL", 0.02)
    send(server.url, "/pause?mode=keep", {})
    try:
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as sock:
            body = b'{"prompt": [5], "max_tokens": 60, "n": 9}'
            head = b"POST /v1/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n"
            sock.sendall(head % len(body) + body)
            assert wait_until(lambda: not server.loop.is_idle)
        assert wait_until(lambda: server.loop.is_idle)
    finally:
        send(server.url, "/resume", {})


def test_server_goes_on_after_the_device_fails(server, monkeypatch):
    pool, failures = SlotPool.advance, [RuntimeError("out of memory")]

    def advance(*arguments):
        if failures:
            raise failures.pop()
        return pool(*arguments)

    expected = ids_of(complete(server, n=5))
    monkeypatch.setattr(SlotPool, "advance", advance)
    body = {"prompt": PROMPT, "n": 5}
    status, answer = send(server.url, "/v1/completions", body)
    assert status == 500
    assert answer["error"]["message"] == "decoding failed: RuntimeError: out of memory"
    assert ids_of(complete(server, n=5)) == expected


def test_logits_that_are_not_finite_are_an_error(server, directory):
    decoder = server.loop.weights._prepared["policy"]
    definition, weights = nnx.split(decoder)
    bad = nnx.to_pure_dict(weights)
    bad["norm"]["scale"] = bad["norm"]["scale"] * np.nan
    server.loop.weights._prepared["policy"] = nnx.merge(definition, bad)
    try:
        body = {"prompt": PROMPT, "max_tokens": 4}
        status, answer = send(server.url, "/v1/completions", body)
    finally:
        server.loop.weights._prepared["policy"] = decoder
    assert status == 500
    assert (
        "a log-probability is nan: weights of the versions 'default'"
        in (answer["error"]["message"])
    )
