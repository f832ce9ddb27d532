"""A server with the routes of vLLM and SGLang, which fails where a test tells it to."""

import base64
import http.server
import io
import json
import threading
import time
import urllib.parse
from pathlib import Path

import numpy as np

EOS, VOCAB = 1, 32


def hashed_logits(ids, weights=0):
    """Logits [VOCAB] after `ids`: another draw for each last id and kind of weights."""
    return np.random.default_rng([weights, ids[-1]]).normal(size=VOCAB) * 2


def log_softmax(logits):
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


class EngineStub:
    """One server on a free port; `with` starts and ends it.

    `faults` is a list of names; each request for completions takes the first and fails
    as it says. `logits` is the model: from ids to the next token's logits.
    """

    def __init__(self, logits=hashed_logits, scale_out=True, dev_mode=True):
        self.logits, self.scale_out, self.dev_mode = logits, scale_out, dev_mode
        self.faults, self.requests, self.bodies = [], [], []
        self.lora = True  # VLLM_ALLOW_RUNTIME_LORA_UPDATING
        self.untempered = False  # --logprobs-mode raw_logprobs
        self.states_spans = False  # as `jaxmem serve` does in /v1/completions
        self.max_model_len, self.max_logprobs = 256, 20
        self.key = None
        self.checksum_of_directory = True
        self.experts = None  # (layers, experts a token) of routed_experts
        self.dies_in = None  # a path, whose next request ends the process
        self.restart()

    def restart(self):
        """The state of a process that has just started."""
        self.version, self.directory, self.adapters = "default", None, {}
        self.broken = False
        self.resumed = threading.Event()
        self.resumed.set()

    def __enter__(self):
        stub = self

        class Handler(_Handler):
            engine = stub

        self._server = _Server(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.01,), daemon=True
        )
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        return self

    def __exit__(self, *_):
        self.resumed.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    # Sampling.

    def draw(self, prompt, fields, seed):
        """Ids, log-probabilities, the best ids' log-probabilities, and the reason."""
        rng, ids, ends = np.random.default_rng(seed), [], fields["stop_token_ids"]
        logprobs, tops = [], []
        while len(ids) < fields["max_tokens"] and (
            not ids or ids[-1] not in fields["stop_token_ids"]
        ):
            logits = np.asarray(self.logits([*prompt, *ids]), np.float64)
            drawn = log_softmax(_truncated(logits / fields["temperature"], fields))
            token = int(rng.choice(VOCAB, p=np.exp(drawn)))
            stated = log_softmax(logits) if self.untempered else drawn
            stated = np.maximum(stated, -9999.0)
            best = np.argsort(-stated, kind="stable")[: fields["logprobs"]]
            ids.append(token)
            logprobs.append(float(stated[token]))
            tops.append({int(i): float(stated[i]) for i in (token, *best)})
        return ids, logprobs, tops, "stop" if ids[-1] in ends else "length"

    # Routes: each returns (status, JSON).

    def get_health(self, _):
        return 200, None

    def get_v1_models(self, _):
        return 200, {"data": [{"id": "policy", "max_model_len": self.max_model_len}]}

    def get_weight_info(self, _):
        return 200, {"weight_version": self.version}

    get_model_info = get_weight_info

    def post_pause(self, _):
        self.resumed.clear()
        return 200, {"status": "paused"}

    def post_resume(self, _):
        self.resumed.set()
        return 200, {"status": "resumed"}

    post_pause_generation, post_continue_generation = post_pause, post_resume

    def post_collective_rpc(self, body):
        self.directory = Path(body["kwargs"]["weights_path"])
        if (self.directory / "other").exists():
            return 500, _error("Call to collective_rpc method failed: Worker failed")
        self.broken = not self.directory.is_dir() or (self.directory / "bad").exists()
        return (500, {"detail": "EngineDeadError"}) if self.broken else (200, None)

    def post_v1_load_lora_adapter(self, body):
        if not self.lora:
            return 404, {"detail": "Not Found"}
        name = body["lora_name"]
        if name in self.adapters:
            return 400, _error(f"The lora adapter '{name}' has already been loaded.")
        self.adapters[name] = Path(body["lora_path"])
        return 200, f"Success: LoRA adapter '{name}' added successfully."

    def post_v1_unload_lora_adapter(self, body):
        name = body["lora_name"]
        if name not in self.adapters:
            return 404, _error(f"The lora adapter '{name}' cannot be found.")
        del self.adapters[name]
        return 200, f"Success: LoRA adapter '{name}' removed successfully."

    def post_update_weights_from_disk(self, body):
        self.directory = Path(body["model_path"])
        if not self.directory.is_dir() or (self.directory / "bad").exists():
            return 400, {"success": False, "message": "Failed to load weights"}
        self.version = body["weight_version"]
        return 200, {"success": True, "message": "", "num_paused_requests": 0}

    def post_update_weight_version(self, body):
        self.version = body["new_version"]
        return 200, {"success": True, "new_version": self.version}

    def post_reset_prefix_cache(self, _):
        return 200, {"success": True}

    def post_weight_checker(self, _):
        content = self.directory and self.checksum_of_directory
        files = sorted(self.directory.iterdir()) if content else []
        return 200, {"checksums": {"w": [p.read_text() for p in files]}}

    def post_weights_checker(self, body):
        return 200, {"success": True, "ranks": [self.post_weight_checker(body)[1]]}

    def post_v1_completions(self, body):
        if body["model"] not in ("policy", *self.adapters):
            return 404, _error(f"The model `{body['model']}` does not exist.")
        if body["logprobs"] > self.max_logprobs:
            message = f"Requested sample logprobs of {body['logprobs']}"
            return 400, _error(message)
        choices = []
        for i, drawn in enumerate(self._draws(body["prompt"], body)):
            ids, logprobs, tops, reason = drawn
            choice = self._choice(i, body["prompt"], ids, reason)
            choice["prompt_token_ids"] = body["prompt"]
            named = [{f"token_id:{k}": x for k, x in top.items()} for top in tops]
            choice["logprobs"] = {"token_logprobs": logprobs, "top_logprobs": named}
            if self.states_spans:
                choice["weight_versions"] = [[self.version, len(ids)]]
            choices.append(choice)
        return 200, {"choices": choices[::-1]}

    def post_inference_v1_generate(self, body):
        if not self.scale_out:
            return 403, {"error": {"message": "Scale-out endpoints are disabled."}}
        prompt, choices = body["token_ids"], []
        version = self.version
        for i, drawn in enumerate(self._draws(prompt, body["sampling_params"])):
            ids, logprobs, tops, reason = drawn
            choice = self._choice(i, prompt, ids, reason)
            choice["logprobs"] = {"content": [
                {"token_id": t, "logprob": x, "top_logprobs": [
                    {"token_id": k, "logprob": y} for k, y in top.items()]}
                for t, x, top in zip(ids, logprobs, tops, strict=True)]}  # fmt: skip
            ends = (
                [0, len(ids) // 2, len(ids)]
                if version != self.version
                else [0, len(ids)]
            )
            names = [version, self.version][-len(ends) + 1 :]
            choice["weight_versions"] = [
                {"version": v, "start": a, "end": b}
                for v, a, b in zip(names, ends, ends[1:], strict=False)
            ]
            choices.append(choice)
        return 200, {"choices": choices, "prompt_token_ids": prompt}

    def post_generate(self, body):
        items = []
        for prompt, p in zip(body["input_ids"], body["sampling_params"], strict=True):
            fields = {**p, "top_k": 0, "logprobs": 0, "max_tokens": p["max_new_tokens"]}
            self.resumed.wait()
            ids, logprobs, _, reason = self.draw(prompt, fields, p["sampling_seed"])
            pairs = [[x, i, None] for x, i in zip(logprobs, ids, strict=True)]
            meta = {
                "prompt_tokens": len(prompt),
                "output_token_logprobs": pairs,
                "finish_reason": {"type": reason},
                "weight_version": self.version,
            }
            items.append({"text": "", "output_ids": ids, "meta_info": meta})
        return 200, items

    def _draws(self, prompt, fields):
        self.resumed.wait()
        return [
            self.draw(prompt, fields, fields["seed"] + i) for i in range(fields["n"])
        ]

    def _choice(self, index, prompt, ids, reason):
        choice = {"index": index, "token_ids": ids, "finish_reason": reason,
                  "routed_experts": None}  # fmt: skip
        if self.experts is not None:
            read = len(prompt) + len(ids) - 1
            choice["routed_experts"] = encoded(
                np.zeros((read, *self.experts), np.uint8)
            )
        return choice


def _error(message):
    return {"error": {"message": message}}


def encoded(array):
    """Base64 of an npy file, as vLLM writes it."""
    data = io.BytesIO()
    np.save(data, array)
    return base64.b64encode(data.getvalue()).decode()


def _truncated(logits, fields):
    """Logits with -inf outside of the top k, the only truncation of the stub."""
    if fields["top_k"] > 0:
        kth = np.sort(logits)[-fields["top_k"]]
        return np.where(logits < kth, -np.inf, logits)
    return logits


def _spoiled(fault, answer):
    """The answer of vLLM's routes with a fault in its first choice."""
    choice = next(x for x in answer["choices"] if x["index"] == 0)
    holder = choice if "prompt_token_ids" in choice else answer
    if fault == "prompt":
        holder["prompt_token_ids"] = [9, *holder["prompt_token_ids"]]
    elif fault == "range":
        choice["token_ids"][0] = VOCAB
    elif fault == "count":
        answer["choices"].pop()
    elif fault == "index":
        choice["index"] = [0]
    elif fault == "end":  # as of an engine that has ends of its own
        choice["token_ids"][-1], choice["finish_reason"] = 7, "stop"
    elif fault == "clipped":  # as of an engine with a limit of its own
        choice["token_ids"], choice["finish_reason"] = [7, 8], "length"
        _change_logprobs(choice, lambda values: [-1.0, -1.0])
        choice.pop("weight_versions", None)
    elif fault == "aborted":
        choice["finish_reason"] = "abort"
    elif fault in _LOGPROBS:
        _change_logprobs(choice, _LOGPROBS[fault])
    return answer


_LOGPROBS = {
    "nan": lambda values: [float("nan"), *values[1:]],
    "minus": lambda values: [float("-inf"), *values[1:]],
    "outside": lambda values: [-9999.0, *values[1:]],  # vLLM's log of 0
    "positive": lambda values: [0.5, *values[1:]],
    "text": lambda values: ["-0.5", *values[1:]],
    "short": lambda values: values[:-1],
    "none": lambda values: None,
}


def _change_logprobs(choice, change):
    """Replace the log-probabilities of a choice, in the form of its route."""
    logprobs = choice["logprobs"]
    if "token_logprobs" in logprobs:
        logprobs["token_logprobs"] = change(logprobs["token_logprobs"])
        return
    values = change([token["logprob"] for token in logprobs["content"]])
    logprobs["content"] = values and [
        {"token_id": 7, "logprob": x, "top_logprobs": []} for x in values
    ]


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request, client_address):
        """Clients end connections on purpose; nothing to print."""


class _Handler(http.server.BaseHTTPRequestHandler):
    engine: EngineStub

    def log_message(self, *_):
        """Print nothing."""

    def do_GET(self):
        self._answer("get", None)

    def do_POST(self):
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self._answer("post", json.loads(content) if content else None)

    def _answer(self, verb, body):
        stub, path = self.engine, urllib.parse.urlsplit(self.path).path
        stub.requests.append(self.path)
        if stub.key and self.headers.get("Authorization") != f"Bearer {stub.key}":
            return self._send(401, {"error": "Unauthorized"})
        if path == stub.dies_in:
            stub.dies_in = None
            stub.restart()
            return self.close_connection
        route = getattr(stub, verb + path.replace("/", "_"), None)
        hidden = not stub.dev_mode and not path.startswith(("/v1", "/health", "/inf"))
        if route is None or hidden:
            return self._send(404, {"detail": "Not Found"})
        if stub.broken and path != "/health":
            return self._send(500, {"error": {"message": "EngineDeadError"}})
        samples = path in ("/v1/completions", "/inference/v1/generate", "/generate")
        if samples:
            stub.bodies.append(body)
        fault = stub.faults.pop(0) if samples and stub.faults else None
        if fault == "closed":
            return self.close_connection
        if isinstance(fault, int):
            return self._send(fault, {"detail": "as the test says"})
        status, value = route(body)
        if fault and isinstance(value, dict):  # and not SGLang's list
            value = _spoiled(fault, value)
        return self._send(status, value, fault)

    def _send(self, status, value, fault=None):
        text = value if isinstance(value, str) else json.dumps(value)
        content = b"" if value is None else text.encode()
        if fault == "garbage":
            content = b"<html>busy</html>"
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if fault == "cut":
            content = content[: len(content) // 2]
        if fault != "slow":
            return self.wfile.write(content)
        for i in range(len(content)):  # ever the next byte, never the whole
            self.wfile.write(content[i : i + 1])
            self.wfile.flush()
            time.sleep(0.05)
        return None
