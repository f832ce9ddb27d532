"""A job of one's own: a student that stays close to the average of its past weights."""

import dataclasses
import time
from typing import Annotated

import jax
import jax.numpy as jnp
import optax

from jaxmem.data.config import DataConfig
from jaxmem.train.jobs import Job, JobConfig
from jaxmem.train.phases import Phase, of_step
from jaxmem.train.program import DecoderProgram, update


@dataclasses.dataclass(frozen=True)
class EmaConfig:
    rate: Annotated[float, "weight of the newest weights in the average"] = 0.1


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmaJobConfig(JobConfig):
    data: DataConfig
    ema: EmaConfig = EmaConfig()


class Program(DecoderProgram):
    def make_optimizer(self, schedule):
        def mix(updates, mean, params):
            new = optax.apply_updates(params, updates)
            return updates, optax.incremental_update(new, mean, self.config.ema.rate)

        copy = optax.GradientTransformation(lambda x: jax.tree.map(jnp.copy, x), mix)
        return optax.chain(super().make_optimizer(schedule), copy)

    def logprobs(self, params, batch):
        model = self.model(params, {})
        hidden = model(batch.tokens, batch.segment_ids, batch.positions)
        return model.head.logprobs(hidden, batch.labels)

    def advance(self, state, batch, taught):
        def loss(params):
            lp = self.logprobs(params, batch)
            return jnp.mean((lp - taught) ** 2 - lp, where=batch.labels >= 0)

        value, slopes = jax.value_and_grad(loss)(state.params)
        state, norm = update(self.optimizer, state, slopes)
        return state, value, norm, jnp.sum(batch.labels >= 0)

    def trace_teacher(self):
        teacher = self.state_shapes.optimizer[1]
        return self.trace(self.logprobs, teacher, self.tokens())

    def trace_backward(self):
        taught = jax.ShapeDtypeStruct(self.tokens().labels.shape, jnp.float32)
        return self.trace(self.advance, self.state_shapes, self.tokens(), taught)


class Ema(Job):
    Config, changeable = EmaJobConfig, ("optimizer", "ema")

    def make_program(self, vocab_size):
        return Program(self.config, vocab_size)

    def phases(self):
        made, size = self.program, self.program.tokens().labels.size
        held = {"teacher": made.state_shapes.optimizer[1]}
        teacher = Phase("teacher", made.trace_teacher, held, tokens=size)
        return [teacher, of_step(made, made.trace_backward, size)]

    def compile(self, progress):
        self.teach = self.program.trace_teacher().lower().compile()
        self.advance = self.program.trace_backward().lower().compile()

    def step(self, number, state):
        start, batch = time.perf_counter(), next(self.batches)
        taught = self.teach(state.optimizer[1], batch)
        state, *numbers = self.advance(state, batch, taught)
        return state, lambda: self.step_metrics(number, *numbers, start)
