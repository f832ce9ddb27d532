"""A real vLLM server on this host, and the tiny checkpoints that it serves.

$JAXMEM_VLLM is the path of its program, as `.ci/engine` installs it. The server runs on
CPUs: the first request of a process takes seconds, later ones milliseconds.
"""

import dataclasses
import os
import pathlib
import signal
import subprocess
import time
import urllib.request

import jax
import jax.numpy as jnp
from flax import nnx

from jaxmem import checkpoints
from jaxmem.checkpoints import Text
from jaxmem.data import tasks, vocabulary
from jaxmem.models.decoder import Decoder, ModelConfig
from jaxmem.models.weights import join_weights
from tests.helpers.processes import free_port

PROGRAM = os.environ.get("JAXMEM_VLLM")
MODEL = "policy"  # its name in requests
LENGTH = 256  # tokens of a prompt and its completion
_STARTS_WITHIN = 300.0  # seconds
_ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
_FLAGS = (
    "--served-model-name", MODEL, "--host", "127.0.0.1", "--dtype", "float32",
    "--enforce-eager", "--max-model-len", str(LENGTH), "--enable-scale-out",
)  # fmt: skip
PROCESSED = "--logprobs-mode", "processed_logprobs"
ADAPTERS = "--enable-lora", "--max-lora-rank", "16"


class VllmServer:
    """A server on a free port; `with` starts and ends it.

    Args:
        checkpoint: directory that it serves.
        log: file of what it prints.
        flags: of `vllm serve`, after those that every server here has.
    """

    def __init__(self, checkpoint, log, flags=(*PROCESSED, "--max-num-seqs", "256")):
        self.log, self._port = pathlib.Path(log), free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self._command = [PROGRAM, "serve", str(checkpoint), *_FLAGS, *flags]
        self._command += ["--port", str(self._port)]

    def __enter__(self):
        self.start()
        try:
            self.wait()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, *_):
        self.kill()

    def start(self):
        library = pathlib.Path(PROGRAM).parents[1] / "lib" / "libiomp5.so"
        environment = os.environ | _ENVIRONMENT | {"LD_PRELOAD": str(library)}
        for name in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"):
            environment.pop(name, None)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, env=environment, stdin=subprocess.DEVNULL, stdout=log,
                stderr=log, start_new_session=True,
            )  # fmt: skip

    def wait(self):
        """Return when requests are answered; an error if the process has ended."""
        deadline = time.monotonic() + _STARTS_WITHIN
        while not self.is_healthy():
            text = self.log.read_text(errors="replace")[-3000:]
            assert self._process.poll() is None, f"vLLM has ended:\n{text}"
            assert time.monotonic() < deadline, f"vLLM has not started:\n{text}"
            time.sleep(0.5)

    def is_healthy(self):
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return answer.status == 200
        except OSError:
            return False

    def kill(self):
        """End it and its processes at once, as `kill -9` does."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:  # it has ended by itself
            pass
        self._process.wait()


def write_checkpoint(directory, seed=0, **sizes):
    """The decoder of grpo_arithmetic.gin, with heads as wide as vLLM's kernels need."""
    sizes = {"hidden": 64, "layers": 2, "heads": 4, "kv_heads": 2, "ff": 192} | sizes
    model = ModelConfig().replaced(
        {
            "vocab_size": len(tasks.VOCABULARY),
            "head_dim": 32,
            "tied": False,
            "embedding.scaled": True,
            **sizes,
        }
    )
    decoder = Decoder(model, rngs=nnx.Rngs(jax.random.key(seed)))
    pad, eos = (tasks.VOCABULARY[i] for i in (tasks.PAD_ID, tasks.EOS_ID))
    text = Text(vocabulary.of_words(), bos=None, eos=eos, pad=pad)
    checkpoints.save_new(directory, decoder, text=text, max_positions=LENGTH)
    return pathlib.Path(directory)


def write_adapter(directory, base, seed=0):
    """An adapter that moves log-probabilities by a tenth of a nat or more."""
    plain = checkpoints.load(base, dtype="float32", param_dtype="float32")
    config = dataclasses.replace(plain.config, lora_rank=4, lora_alpha=4.0)
    key = jax.random.key(seed)
    definition, fresh = nnx.split(Decoder(config, rngs=nnx.Rngs(key)))
    weights = join_weights(
        nnx.to_pure_dict(fresh), nnx.to_pure_dict(nnx.split(plain)[1])
    )

    def moved(path, array):  # B starts as zeros
        if path[-1].key != "lora_b":
            return array
        return 0.3 * jax.random.normal(key, jnp.shape(array))

    decoder = nnx.merge(definition, jax.tree_util.tree_map_with_path(moved, weights))
    checkpoints.save_adapter(directory, decoder, base=str(base))
    return pathlib.Path(directory)
