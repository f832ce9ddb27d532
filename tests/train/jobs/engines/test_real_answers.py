"""The client and stand-ins against the answers that a real vLLM server gave."""

import json

import numpy as np
import pytest

from tests.helpers.engine_conversation import (
    STEPS,
    VOCAB,
    Conversation,
    Repeater,
    differences,
    recorded_lines,
)
from tests.helpers.engine_stub import EngineStub, hashed_logits

# Steps of faults and refusals that a stand-in does not have.
_NOT_OF_STUB = "aborted", "refused", "broken"


@pytest.fixture(scope="module")
def recorded():
    """The exchanges, and the client's results by step."""
    return recorded_lines()


@pytest.fixture
def folder(tmp_path):
    for version in range(1, 5):
        (tmp_path / f"v{version:06d}").mkdir()
    return tmp_path


@pytest.mark.parametrize("step", STEPS)
def test_client_reads_real_answers(recorded, folder, step):
    exchanges, results = recorded
    with Repeater(exchanges, folder) as server:

        def began(step):
            server.step = step

        made = Conversation(server.url, folder, began).run([step])
    assert made[step] == results[step]


def test_record_covers_what_happens_in_flight(recorded):
    """A completion of two versions, and one that an abortion has cut."""
    exchanges, results = recorded
    (held,) = results["held"][1:]
    assert [version for version, _ in held["versions"]] == [1, 2]
    reasons = {
        choice["finish_reason"]
        for exchange in exchanges
        if exchange["step"] == "aborted" and exchange["path"] == "/v1/completions"
        for choice in exchange["answer"]["choices"]
    }
    assert reasons == {"abort", "length"} and results["aborted"][0] == 2
    routes = {exchange["path"] for exchange in exchanges}
    assert {"/inference/v1/generate", "/v1/load_lora_adapter"} <= routes


def test_stub_answers_in_the_form_of_vllm(recorded, folder):
    def logits(ids):
        return np.where(np.arange(32) < VOCAB, hashed_logits(ids), -1e9)

    with EngineStub(logits) as stub:
        assert differences(stub.url, folder, without=_NOT_OF_STUB) == []


def test_differences_name_what_another_server_answers(recorded, folder):
    """Keys that vLLM lacks, and values of other types."""
    exchanges = json.loads(json.dumps(recorded[0]))
    for exchange in exchanges:
        if exchange["path"] == "/weight_info":
            exchange["answer"] = {"weight_version": "sums:1", "more": 1}
        if exchange["path"] == "/v1/models":
            exchange["answer"]["data"][0]["max_model_len"] = "256"
    with Repeater(exchanges, folder) as server:
        server.step = "ready"
        assert differences(server.url, folder, without=STEPS[1:]) == [
            "GET /v1/models: data.0.max_model_len is str instead of int",
            "GET /weight_info: more is not in vLLM's answer",
        ]
