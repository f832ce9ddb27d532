"""A program that also samples completions of prompts from the model it trains."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from jaxmem.core.random_streams import Stream
from jaxmem.data.ends import Ends
from jaxmem.data.tasks import TaskConfig
from jaxmem.models.partitioning import Layout, MeshConfig
from jaxmem.models.sampling import COMPILER_OPTIONS, SamplingConfig, sample
from jaxmem.train.jobs.accumulated import AccumulatedProgram
from jaxmem.train.phases import Phase, weights_of
from jaxmem.train.settings import RunConfig


class SamplingSections(Protocol):
    """The config sections that decide completions."""

    @property
    def task(self) -> TaskConfig:
        """The prompts."""
        ...

    @property
    def sampling(self) -> SamplingConfig:
        """How completions are drawn."""
        ...

    @property
    def run(self) -> RunConfig:
        """The seed."""
        ...

    @property
    def mesh(self) -> MeshConfig:
        """The device mesh."""
        ...


class Rollouts(NamedTuple):
    """Which completions are sampled."""

    rows: int  # completions of a rollout
    named: str  # the settings whose product that is
    config: SamplingSections


class SamplingProgram(AccumulatedProgram):
    """An `AccumulatedProgram` that samples; `sample_from` comes first.

    Attributes:
        ends: the ids that end completions.
        slots: completions that are decoded at a time.
        sampling_layout: shardings of prompts and completions.
    """

    def sample_from(self, rollouts: Rollouts, ends: Ends) -> None:
        """Say what is sampled.

        Raises:
            ValueError: the mesh does not divide the completions, or there are more
                slots than completions, or slots are refilled on several devices.
        """
        self._rollouts, self.ends = rollouts, ends
        by_rows, slots = rollouts.config.mesh.by_rows, rollouts.config.sampling.slots
        self.slots = rollouts.rows if slots is None else slots
        if self.slots > rollouts.rows:
            raise ValueError(
                f"sampling.slots must be at most {rollouts.named} = {rollouts.rows}, "
                f"got {slots}"
            )
        if slots is not None and math.prod(by_rows.sizes) > 1:
            raise ValueError(
                f"sampling.slots={slots} must stay None on a mesh of several devices"
            )
        if rollouts.rows % (parts := by_rows.data * by_rows.fsdp):
            raise ValueError(
                f"mesh.data x mesh.fsdp x mesh.sequence must divide {rollouts.named} = "
                f"{rollouts.rows}, got {parts}"
            )
        self.sampling_layout = Layout(by_rows)

    def trace_sample(self, greedy: bool = False) -> jax.stages.Traced:
        """Trace a rollout; greedy is at temperature 0: the most probable tokens."""
        _, _, given = self._rollouts
        config = given.sampling
        if greedy:
            config = SamplingConfig(config.max_new_tokens, top_k=1, slots=config.slots)

        def run(params, frozen, prompts, lengths, step):
            key = Stream.ROLLOUTS.key(given.run.seed, step)
            return sample(
                self.model(params, frozen),
                prompts,
                lengths,
                key,
                config,
                eos_id=self.ends.eos_ids,
                pad_id=self.ends.pad_id,
            )

        layout = self.sampling_layout
        scalar = layout.whole(jax.ShapeDtypeStruct((), jnp.int32))
        with layout.context():
            jitted = layout.jit(run, scalar, compiler_options=COMPILER_OPTIONS)
            weights = self.state_shapes.params, self.frozen_shapes
            return jitted.trace(*weights, *self.prompts, scalar)

    @property
    def prompts(self) -> tuple[Any, Any]:
        """Shapes of what is sampled from: ids [N, P] and lengths [N]."""
        rows, _, config = self._rollouts
        ids = jax.ShapeDtypeStruct((rows, self._prompt_width), jnp.int32)
        lengths = jax.ShapeDtypeStruct((rows,), jnp.int32)
        return self.sampling_layout.of_rows((ids, lengths))

    @property
    def _prompt_width(self) -> int:
        """Tokens before the last completion of the longest conversation."""
        _, _, config = self._rollouts
        slots, task = config.sampling.max_new_tokens, config.task
        return task.prompt_length + task.conversation_length(slots) - slots

    def rollout_phase(self, held: Mapping[str, Any]) -> Phase:
        """The rollout, for a plan.

        Args:
            held: shapes of what else is on the device, by name.
        """
        _, _, config = self._rollouts
        rows, most = self.prompts[0].shape[0], config.sampling.max_new_tokens
        steps = most - 1
        if config.sampling.slots is not None:  # from one refilled slot to the next
            steps = -(-steps // self.slots)
        return Phase(
            "rollout",
            self.trace_sample,
            weights_of(self),
            held,
            {"keys and values": self._cache_bytes()},
            rows * most,
            runs=config.task.turns,
            turns=steps,
        )

    def _cache_bytes(self) -> int:
        """Bytes of a rollout's KV cache on one device."""
        _, _, config = self._rollouts
        model, mesh = self.model_config, self.layout.sizes
        room = self._prompt_width + config.sampling.max_new_tokens - 1
        room = -(-room // 8) * 8
        numbers = 2 * model.layers * model.kv_heads * model.head_dim * room
        parts = mesh["data"] * mesh["fsdp"] * mesh["sequence"] * mesh["tensor"]
        item = jnp.dtype(model.dtype).itemsize
        return self.slots * numbers * item // parts
