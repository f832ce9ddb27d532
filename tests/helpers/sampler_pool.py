"""A pool of engines in this process: jaxmem's own sampler behind the pool's methods."""

import dataclasses
import functools

import jax
import numpy as np

from jaxmem import checkpoints
from jaxmem.models import sampling
from jaxmem.train.jobs.rollout.engines.protocol import EngineAnswer


class SamplerPool:
    """Answers by the weights of the directory that was loaded last.

    Args:
        options: the `EngineOptions` of a run.
        base: directory of the checkpoint that adapters are for.
        shift: added to the log-probabilities of all answers.
    """

    def __init__(self, options, base="", shift=0.0):
        self.options, self.base, self.shift = options, base, shift
        self.loaded, self.requests, self.is_closed = [], [], False
        self._model = None

    def load_weights(self, directory, version, adapter):
        base, more = (self.base, {"adapter": directory}) if adapter else (directory, {})
        self._model = checkpoints.load(
            base, dtype="float32", param_dtype="float32", **more
        )
        self.loaded.append((directory.name, version, adapter))
        return {"reload": 0.25}  # seconds

    def generate(self, request):
        self.requests.append(request)
        width = 8 if len(request.prompt_ids) <= 8 else 64
        ids = np.zeros((request.count, width), np.int32)
        ids[:, : len(request.prompt_ids)] = request.prompt_ids
        lengths = np.full(request.count, len(request.prompt_ids), np.int32)
        key = jax.random.key(request.seed % 2**31)
        options = self.options
        draw = _draw(options.sampling, request.max_tokens, tuple(options.eos_ids))
        samples = jax.device_get(draw(self._model, ids, lengths, key))
        version = self.loaded[-1][1]
        answers = []
        for i, length in enumerate(samples.lengths.tolist()):
            tokens = samples.tokens[i, :length].tolist()
            supports = None
            if samples.support_ids is not None:
                rows = samples.support_ids[i, :length]
                supports = [row[row >= 0].tolist() for row in rows]
            logprobs = (samples.logprobs[i, :length] + self.shift).tolist()
            ended = tokens[-1] in self.options.eos_ids
            spans = [(version, length)]
            answers.append(EngineAnswer(tokens, logprobs, ended, supports, None, spans))
        return answers

    def close(self):
        self.is_closed = True


@functools.cache
def _draw(config, max_tokens, eos_ids):
    config = dataclasses.replace(config, max_new_tokens=max_tokens)

    def draw(model, ids, lengths, key):
        return sampling.sample(
            model, ids, lengths, key, config, eos_id=eos_ids, pad_id=0
        )

    return jax.jit(draw)
