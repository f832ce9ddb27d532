"""A conversation of the client with a server of vLLM's routes, recorded and repeated.

`Conversation` goes through every route that the client uses, and through refusals. A
`Listener` stands between client and server and keeps what they say; a `Repeater` is a
server that answers from such a record.
"""

import collections
import contextlib
import http.client
import http.server
import json
import pathlib
import re
import threading
import time
import urllib.parse

from jaxmem.models.sampling import SamplingConfig
from jaxmem.train.jobs.rollout.engines import EngineOptions, SamplingRequest
from jaxmem.train.jobs.rollout.engines.patience import EngineError, EngineFailure
from jaxmem.train.jobs.rollout.engines.vllm import Vllm

RECORD = pathlib.Path(__file__).parents[1] / "train/jobs/engines/vllm_0_32.jsonl"
EOS, VOCAB, LENGTH = 1, 14, 256  # of `vllm_server.write_checkpoint`
PROMPT = [5, 12, 6, 13]
_LONG = 200  # tokens of a completion that is in flight when something happens
FOLDER, ADDRESS = "FOLDER", "ADDRESS"  # stand in records for what differs by run
_KEY = re.compile(r"(?<=^token_id:)\d+")  # in keys that contain an id
_REFUSED = {  # by a server that goes on; changes of a good request
    "another model": {"model": "other"},
    "an id outside of the vocabulary": {"prompt": [VOCAB]},
    "a prompt of the longest length": {"prompt": PROMPT * (LENGTH // len(PROMPT))},
    "too many log-probabilities": {"logprobs": 21},
    "a seed of 65 bits": {"seed": 2**63},
    "an end outside of the vocabulary": {"stop_token_ids": [VOCAB]},
}


class Conversation:
    """The steps of a conversation with a server, and the client's results of each.

    Args:
        url: of the server.
        folder: with the weights `v000001`, `v000002`, and the adapters `v000003` and
            `v000004`.
        began: called with the name of each step.
    """

    def __init__(self, url, folder, began=lambda step: None):
        self._url, self._folder, self._began = url, folder, began
        self.lines, self.results = [], {}

    def run(self, steps):
        """The results of some of `STEPS` by name, in JSON."""
        for step in steps:
            self._began(step)
            result = getattr(self, step)()
            text = json.dumps(result).replace(self._url, ADDRESS)
            self.results[step] = json.loads(text.replace(str(self._folder), FOLDER))
        return self.results

    # Steps.

    def ready(self):
        return self._client().wait_ready()

    def completions(self):
        return self._answers(self._client(), SamplingRequest(PROMPT, 3, 6, seed=7))

    def truncated(self):
        sampling = SamplingConfig(max_new_tokens=4, temperature=2.0, top_k=3)
        client = self._client(sampling=sampling)
        return self._answers(client, SamplingRequest(PROMPT, 2, 4, seed=7))

    def tokens(self):
        client = self._client(wants_spans=True)
        return self._answers(client, SamplingRequest(PROMPT, 3, 6, seed=7))

    def truncated_tokens(self):
        sampling = SamplingConfig(max_new_tokens=4, temperature=2.0, top_k=3)
        client = self._client(sampling=sampling, wants_spans=True)
        return self._answers(client, SamplingRequest(PROMPT, 2, 4, seed=7))

    def weights(self):
        return self._loaded(self._client(), 1, adapter=False)

    def held(self):
        """Weights are loaded while a completion is sampled, which goes on with them."""
        client = self._client(wants_spans=True, eos_ids=())
        with self._in_flight(client) as answers:
            steps = self._loaded(self._client(), 2, adapter=False)
        return [steps, *answers]

    def checksum(self):
        return self._client().checksum()

    def aborted(self):
        """Samples again what an abortion has cut."""
        client = self._client(eos_ids=(), max_new_tokens=_LONG)
        with self._in_flight(client) as answers:
            self._post(client, "/abort_requests", {})
        return [len(self.lines), *answers]  # one of its failure, one of its recovery

    def adapters(self):
        client = self._client(wants_spans=True)
        steps = [self._loaded(client, version, adapter=True) for version in (3, 4)]
        return [*steps, self._answers(client, SamplingRequest(PROMPT, 2, 6, seed=7))]

    def refused(self):
        """The client's kinds of errors for requests that no server can serve."""
        client, good = self._client(), SamplingRequest(PROMPT, 1, 6, seed=7)
        body = client._sampling_fields(good) | {
            "model": "policy", "prompt": PROMPT, "return_tokens_as_token_ids": True
        }  # fmt: skip
        requests = [("/v1/completions", body | change) for change in _REFUSED.values()]
        requests += [("/update_weight_version", {}), ("/no/route", {})]
        return [self._post(client, path, sent) for path, sent in requests]

    def broken(self):
        """A folder that is missing ends the engine for good."""
        client = self._client()
        arguments = {"weights_path": str(self._folder / "missing")}
        body = {"method": "reload_weights", "kwargs": arguments}
        sent = {"model": "policy", "prompt": PROMPT}
        return [
            self._post(client, "/collective_rpc", body),
            self._post(client, "/v1/completions", sent),
        ]

    # Parts of them.

    def _client(self, max_new_tokens=6, **changes):
        options = {
            "sampling": SamplingConfig(max_new_tokens=max_new_tokens),
            "eos_ids": (EOS,),
            "vocab_size": VOCAB,
            "run": "sums",
            "timeout": 60.0,
            "say": self.lines.append,
            "first_pause": 0.01,
            "token": None,
        }
        client = Vllm(self._url, EngineOptions(**(options | changes)))
        client.wait_ready()
        return client

    def _answers(self, client, request):
        return [answer._asdict() for answer in client.generate(request)]

    def _loaded(self, client, version, adapter):
        """The steps of an update, and the version after it."""
        directory = self._folder / f"v{version:06d}"
        return [*client.load_weights(directory, version, adapter), client.version()]

    @contextlib.contextmanager
    def _in_flight(self, client):
        """A list, into which the answers to a long request come after the block."""
        answers, request = [], SamplingRequest(PROMPT, 1, _LONG, seed=7)
        thread = threading.Thread(
            target=lambda: answers.extend(self._answers(client, request))
        )
        thread.start()
        time.sleep(0.04)  # a token takes milliseconds
        yield answers
        thread.join()

    def _post(self, client, path, body):
        end = time.monotonic() + 60
        try:
            return client.call(path, lambda: end, body)
        except (EngineError, EngineFailure) as error:
            return f"{type(error).__name__} {getattr(error.__cause__, 'status', None)}"


STEPS = (
    "ready", "completions", "truncated", "tokens", "truncated_tokens", "weights",
    "held", "checksum", "aborted", "adapters", "refused", "broken",
)  # fmt: skip


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True


class _Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_):
        """Print nothing."""

    def do_GET(self):
        self._answer("GET", None)

    def do_POST(self):
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self._answer("POST", json.loads(content) if content else None)

    def _answer(self, method, body):
        status, value = self.server.answer(method, self.path, body)
        content = b"" if value is None else json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


class _Served:
    """A server on a free port of this process, while `with` lasts."""

    def __enter__(self):
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.answer = self.answer
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.01,), daemon=True
        )
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class Listener(_Served):
    """Passes requests to a server, and keeps them with the answers in `exchanges`."""

    def __init__(self, url, folder):
        self._target = urllib.parse.urlsplit(url).netloc
        self._folder = str(folder)
        self.exchanges, self.step = [], None

    def answer(self, method, path, body):
        step = self.step
        connection = http.client.HTTPConnection(self._target, timeout=120)
        content = None if body is None else json.dumps(body)
        connection.request(method, path, content, {"Content-Type": "application/json"})
        response = connection.getresponse()
        text = response.read().decode()
        connection.close()
        try:
            value = json.loads(text) if text else None
        except ValueError:
            value = text
        exchange = {"step": step, "method": method, "path": path, "body": body,
                    "status": response.status, "answer": value}  # fmt: skip
        kept = json.dumps(exchange).replace(self._folder, FOLDER)
        self.exchanges.append(json.loads(kept))
        return response.status, value


class Repeater(_Served):
    """Gives the recorded answers of a step; equal requests get them one by one."""

    def __init__(self, exchanges, folder):
        self._folder, self.step = str(folder), None
        self._answers = collections.defaultdict(collections.deque)
        for exchange in exchanges:
            answer = exchange["status"], exchange["answer"]
            self._answers[self._key(**exchange)].append(answer)

    def answer(self, method, path, body):
        answers = self._answers[self._key(self.step, method, path, body)]
        if not answers:
            return 400, {"error": {"message": f"{method} {path} is not in the record"}}
        return answers.popleft()

    def _key(self, step, method, path, body, **_):
        text = json.dumps(body, sort_keys=True)
        return step, method, path, text.replace(self._folder, FOLDER)


def recorded_lines():
    """The exchanges of `RECORD`, and the client's results by step."""
    lines = [json.loads(line) for line in RECORD.read_text().splitlines()]
    results = {line["step"]: line["result"] for line in lines if "result" in line}
    return [line for line in lines if "result" not in line], results


def differences(url, folder, without=()):
    """Lines about a server's answers whose keys or types vLLM's do not have.

    Args:
        url: of the server.
        folder: as in `Conversation`.
        without: names of steps that are left out.
    """
    real = collections.defaultdict(list)
    for exchange in recorded_lines()[0]:
        real[_name(exchange)].append(exchange["answer"])
    with Listener(url, folder) as listener:
        Conversation(listener.url, folder).run([x for x in STEPS if x not in without])
    lines = {
        f"{_name(x)}: {line}"
        for x in listener.exchanges
        for line in _differences(x["answer"], real[_name(x)])
    }
    return sorted(lines)


def _name(exchange):
    """The route of an exchange, and the status unless it is 200."""
    status = exchange["status"]
    name = f"{exchange['method']} {exchange['path'].partition('?')[0]}"
    return name if status == 200 else f"{name} {status}"


def _differences(value, examples, where=""):
    """Lines about keys and types of a value that none of the examples has."""
    examples = [x for x in examples if x is not None]
    if value is None or not examples:
        return
    kinds = {_kind(x) for x in examples}
    if _kind(value) not in kinds:
        yield f"{where} is {_kind(value)} instead of {' or '.join(sorted(kinds))}"
    elif isinstance(value, list):
        items = [item for example in examples for item in example]
        for i, item in enumerate(value):
            yield from _differences(item, items, f"{where}.{i}".strip("."))
    elif isinstance(value, dict):
        known = collections.defaultdict(list)
        for example in examples:
            for key, item in example.items():
                known[_KEY.sub("", key)].append(item)
        for key, item in value.items():
            name = f"{where}.{key}".strip(".")
            if where != "checksums" and _KEY.sub("", key) not in known:
                yield f"{name} is not in vLLM's answer"
            yield from _differences(item, known[_KEY.sub("", key)], name)


def _kind(value):
    return type(value).__name__
