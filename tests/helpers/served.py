"""Two versions of a tiny checkpoint, requests to a server, numbers of trainers."""

import concurrent.futures
import functools
import http.client
import json
import shutil
import threading

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file, save_file

from jaxmem import checkpoints
from jaxmem.serve.config import ServeRequest
from tests.helpers import texts

VOCAB, EOS, LONGEST = 40, 2, 64


def write_versions(directory, name="llama"):
    """Two checkpoints of one architecture below a directory, with other weights."""
    first = texts.checkpoint(name, directory)
    second = shutil.copytree(first, directory / "second")
    change_weights(second)
    return first, second


def change_weights(directory):
    """Add random numbers to the weights of a checkpoint or an adapter."""
    rng = np.random.default_rng(0)
    for path in directory.glob("*.safetensors"):
        weights = load_file(path)
        is_adapter = path.name.startswith("adapter")  # it may repeat its base
        for name, x in weights.items():
            if not is_adapter or ".lora_" in name:
                weights[name] = (x + 0.05 * rng.normal(size=x.shape)).astype(x.dtype)
        save_file(weights, path, metadata={"format": "pt"})


def options(directory, **changes):
    """Options of a server in float32 on a free port."""
    plain = dict(dtype="float32", port=0, slots=3, max_len=LONGEST, name="policy")
    return ServeRequest(str(directory), **{**plain, **changes})


class Gate:
    """Holds the decoding thread after some parts, until another thread has a call."""

    def __init__(self, server, monkeypatch, parts):
        self.reached, self._left = threading.Event(), parts
        self._loop, self._decode = server.loop, server.loop._decode_part
        monkeypatch.setattr(server.loop, "_decode_part", self._decode_part)

    def _decode_part(self):
        self._decode()
        self._left -= 1
        if self._left == 0:
            self.reached.set()
            with self._loop._changed:
                assert self._loop._changed.wait_for(lambda: self._loop._calls, 20)


def send(url, path, body=None, *, method=None, headers=None):
    """The status and the parsed answer of one request."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
    method = method or ("GET" if body is None else "POST")
    content = json.dumps(body) if isinstance(body, dict) else body
    try:
        connection.request(method, path, content, headers or {})
        response = connection.getresponse()
        text = response.read().decode()
    finally:
        connection.close()
    is_json = (response.headers["Content-Type"] or "").startswith("application/json")
    return response.status, json.loads(text) if is_json else text


def at_once(*actions):
    """The results of some functions, each called in a thread."""
    with concurrent.futures.ThreadPoolExecutor(len(actions)) as threads:
        return [x.result() for x in [threads.submit(action) for action in actions]]


@functools.cache
def _decoder(directory, adapter=None):
    return checkpoints.load(
        directory, dtype="float32", param_dtype="float32", adapter=adapter
    )


@jax.jit
def _run(decoder, ids):
    return decoder(ids, None, jnp.arange(ids.shape[1])[None])[0]


def _hidden_states(decoder, prompt, ids):
    """Hidden states [R, D] that the tokens of a completion are predicted from."""
    padded = np.zeros((1, LONGEST), np.int32)
    padded[0, : len(prompt) + len(ids)] = [*prompt, *ids]
    return _run(decoder, padded)[len(prompt) - 1 :][: len(ids)]


def trainer_logprobs(directory, prompt, ids, temperature=1.0, adapter=None):
    """Log-probabilities of completion ids, as trainers compute them."""
    decoder = _decoder(directory, adapter)
    hidden = _hidden_states(decoder, prompt, ids)
    logprobs = decoder.head.logprobs(hidden, np.array(ids), temperature=temperature)
    return np.asarray(logprobs)


def trainer_logits(directory, prompt, ids):
    """Logits of the tokens of a completion, [R, V]."""
    decoder = _decoder(directory)
    return np.asarray(decoder.logits(_hidden_states(decoder, prompt, ids)))
