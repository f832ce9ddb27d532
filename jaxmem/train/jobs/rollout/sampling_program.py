"""A program that also samples completions of prompts from the model it trains."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxmem.data.completion_ends import Ends
from jaxmem.head.maths.random_streams import Stream
from jaxmem.models import own_model, route_records
from jaxmem.models.kv_cache import Cache
from jaxmem.models.partitioning import Layout
from jaxmem.models.sampling import (
    COMPILER_OPTIONS,
    Sampler,
    SamplerState,
    Samples,
    SamplingConfig,
    prepared,
    row_keys,
    samples_of,
)
from jaxmem.train.jobs.accumulated import AccumulatedProgram
from jaxmem.train.jobs.rollout.entries import bytes_of_token
from jaxmem.train.phases import Phase, weights_of


class SamplingProgram(AccumulatedProgram):
    """An `AccumulatedProgram` that samples; call `sample_from` first.

    Attributes:
        ends: the ids that end completions.
        slots: completions that are decoded at a time.
        sampling_layout: shardings of prompts and completions.
    """

    rows = 0  # completions of a rollout; 0: nothing is sampled
    records = False  # routes are recorded, as in `Sampler`
    entries: int | None = None  # of a token that are recorded, as in `Sampler`

    def sample_from(
        self,
        rows: int,
        named: str,
        ends: Ends,
        records: bool = False,
        entries: int | None = None,
    ) -> None:
        """Set the sampler's rows and ends, and refuse slots and meshes without support.

        Args:
            rows: completions of a rollout.
            named: names of the settings whose product is `rows`, for errors.
            ends: the ids that end completions.
            records: True records the experts that tokens are routed to.
            entries: of each token's softmax that are recorded; None: none are.
        """
        self.rows, self.ends, self.records = rows, ends, records
        self.entries = entries
        by_rows, slots = self.config.mesh.by_rows, self.config.sampling.slots
        self.slots = rows if slots is None else slots
        if self.model_config.base is None:
            self.config.check_stays("sampling.decode_base", False, "without model.base")
        if self.slots > rows:
            raise ValueError(
                f"sampling.slots must be at most {named} = {rows}, got {slots}"
            )
        if math.prod(by_rows.sizes) > 1:
            why = "on a mesh of several devices"
            self.config.check_stays("sampling.slots", None, why)
        if rows % (parts := by_rows.data * by_rows.fsdp):
            raise ValueError(
                f"mesh.data x mesh.fsdp x mesh.sequence must divide {named} = {rows}, "
                f"got {parts}"
            )
        if self.model_config.factory is not None:
            why = "for a model of model.factory"
            self.config.check_stays("sampling.slots", None, why)
        self.sampling_layout = Layout(by_rows, self.layout.specs)

    @property
    def keeps_cache(self) -> bool:
        """True if turns after the first read only tokens that their cache lacks."""
        task = self.config.task
        return (
            task.environment is not None and task.turns > 1 and not self._cache_obstacle
        )

    @property
    def _cache_obstacle(self) -> str | None:
        """The setting that rules out a cache kept from turn to turn; None without one.

        A rollout function may continue any tokens. Refilled slots write at one
        position, which wraps around and would overwrite a row that waits for its reply.
        Only a user's model knows which axes of its cache are rows.
        """
        config, own = self.config, self.model_config.factory is not None
        settings = {
            "task.rollout": config.task.rollout is not None,
            "sampling.slots": config.sampling.slots is not None,
            "a model.factory on a mesh": own and self.sampling_layout.mesh is not None,
            "a model.factory without extend": not self.abstract.extends,
        }
        return next((name for name, is_set in settings.items() if is_set), None)

    def trace_sample(self, evaluated_at: float | None = None) -> jax.stages.Traced:
        """Trace a rollout, or the first turn of one whose cache is kept.

        It returns `Samples`, and the cache that is kept, or None. `evaluated_at` is the
        temperature of an evaluation, 0 for the most probable tokens; None: a rollout of
        training.
        """
        sampler = self._make_sampler(evaluated_at)

        def run(params, frozen, prompts, lengths, step):
            model, key = self.model(params, frozen), self._rollout_key(step)
            if self.keeps_cache:
                model = prepared(model, sampler.config.decode_base)
                keys = row_keys(key, jnp.arange(len(lengths)))
                state = sampler.start(model, prompts, lengths, keys)
                return _decode_turn(sampler, model, state)
            return sampler.complete(model, prompts, lengths, key), None

        layout, kept = self.sampling_layout, None
        with layout.context():
            if self.keeps_cache:
                kept = self._cache_shapes(sampler)
            results = self._int_scalar, kept
            jitted = layout.jit(run, results, compiler_options=COMPILER_OPTIONS)
            weights = self.state_shapes.params, self.frozen_shapes
            return jitted.trace(*weights, *self.prompts, self._int_scalar)

    def trace_further(self, evaluated_at: float | None = None) -> jax.stages.Traced:
        """Trace a turn after the first, where a cache is kept, which is consumed."""
        layout, sampler = self.sampling_layout, self._make_sampler(evaluated_at)

        def run(params, frozen, cache, tokens, lengths, step):
            model = prepared(self.model(params, frozen), sampler.config.decode_base)
            keys = row_keys(self._rollout_key(step), jnp.arange(len(lengths)))
            state = sampler.resume(model, cache, tokens, lengths, keys)
            return _decode_turn(sampler, model, state)

        with layout.context():
            cache = self._cache_shapes(sampler)
            jitted = layout.jit(
                run, (self._int_scalar, cache), donate_argnums=2,
                compiler_options=COMPILER_OPTIONS,
            )  # fmt: skip
            weights = self.state_shapes.params, self.frozen_shapes
            return jitted.trace(*weights, cache, *self.replies, self._int_scalar)

    def _cache_shapes(self, sampler: Sampler) -> Any:
        """Shapes and shardings of the cache that is kept from turn to turn."""

        def start(params, frozen, prompts, lengths):
            key = self._rollout_key(jnp.zeros((), jnp.uint32))  # any: only shapes count
            keys = row_keys(key, jnp.arange(len(lengths)))
            model = self.model(params, frozen)
            return sampler.start(model, prompts, lengths, keys).cache

        weights = self.state_shapes.params, self.frozen_shapes
        shapes = jax.eval_shape(start, *weights, *self.prompts)
        layout = self.sampling_layout
        return shapes if layout.mesh is None else layout.of_cache(shapes)

    def _make_sampler(self, evaluated_at: float | None) -> Sampler:
        """A sampler; that of an evaluation records neither routes nor entries."""
        config, ends = self.config.sampling, self.ends
        if evaluated_at:
            config = dataclasses.replace(config, temperature=evaluated_at)
        elif evaluated_at is not None:
            config = SamplingConfig(
                config.max_new_tokens, top_k=1, slots=config.slots,
                decode_base=config.decode_base,
            )  # fmt: skip
        is_training = evaluated_at is None
        return Sampler(
            config, ends.eos_ids, ends.pad_id, room=self._max_read_tokens,
            records=self.records and is_training,
            entries=self.entries if is_training else None,
        )  # fmt: skip

    def _rollout_key(self, step: jax.Array) -> jax.Array:
        return Stream.ROLLOUTS.key(self.config.run.seed, step)

    @property
    def _int_scalar(self) -> Any:
        return self.sampling_layout.whole(jax.ShapeDtypeStruct((), jnp.int32))

    @property
    def prompts(self) -> tuple[Any, Any]:
        """Shapes of the sampler's prompts: ids [N, P] and lengths [N]."""
        width = self.config.task.prompt_length
        if not self.keeps_cache:  # room for all turns before the last completion
            width = self._max_read_tokens + 1 - self.config.sampling.max_new_tokens
        return self._row_shapes(width)

    @property
    def replies(self) -> tuple[Any, Any]:
        """Shapes of tokens after a kept cache: a completion's last one and a reply."""
        return self._row_shapes(1 + self.config.task.max_reply_tokens)

    def _row_shapes(self, width: int) -> tuple[Any, Any]:
        ids = jax.ShapeDtypeStruct((self.rows, width), jnp.int32)
        lengths = jax.ShapeDtypeStruct((self.rows,), jnp.int32)
        return self.sampling_layout.of_rows((ids, lengths))

    @property
    def _max_read_tokens(self) -> int:
        """Tokens that the model reads of the longest possible conversation."""
        config = self.config
        task, slots = config.task, config.sampling.max_new_tokens
        return task.prompt_length + task.conversation_length(slots) - 1

    def rollout_phases(self, held: Mapping[str, Any]) -> list[Phase]:
        """The phases of a rollout, for a plan: one, or two where a cache is kept."""
        config = self.config
        rows, max_tokens = self.prompts[0].shape[0], config.sampling.max_new_tokens
        steps = max_tokens - 1
        if config.sampling.slots is not None:  # from one refilled slot to the next
            steps = -(-steps // self.slots)
        runs, kept = config.task.turns, {}
        if self.model_config.factory is None:  # else it is unknown
            kept["keys and values"] = self._cache_bytes()
        if self.records:
            kept["routes"] = self._routes_bytes()
        if self.entries:  # on each device
            kept["recorded entries"] = rows * max_tokens * bytes_of_token(self.entries)
        weights, tokens = weights_of(self), rows * max_tokens
        first = Phase(
            "rollout", self.trace_sample, weights, held, {}, tokens, turns=steps
        )
        if not self.keeps_cache:
            return [dataclasses.replace(first, parts=kept, runs=runs)]
        trace = self.trace_further
        further = dict(name="further turns", trace=trace, runs=runs - 1)
        return [first, dataclasses.replace(first, **further)]

    def lines(self) -> Iterator[str]:
        """See `DecoderProgram`; also the cost of sampling without a cache."""
        yield from super().lines()
        if not (self.rows and self.config.samples_itself):
            return
        config = self.config
        if config.task.turns > 1 and self._cache_obstacle is not None:
            yield (
                f"each of up to {config.task.turns} turns reads its whole "
                "conversation again, because no cache is kept between turns with "
                f"{self._cache_obstacle}"
            )
        if self.abstract.recomputes and config.sampling.max_new_tokens > 1:
            row = -(-self._max_read_tokens // 8) * 8  # as `Sampler.start` rounds it
            yield own_model.recomputation(config.sampling.max_new_tokens, row)

    def _cache_bytes(self) -> int:
        """Bytes of states of a rollout's slots on one device."""
        rows, mesh = self.slots, self.layout.sizes
        room = -(-self._max_read_tokens // 8) * 8
        definition, weights = nnx.split(self.abstract)

        def states(weights, prompts, lengths):
            model = nnx.merge(definition, weights)
            return model.prefill(prompts, lengths, room)[1].layers

        prompts = jax.ShapeDtypeStruct((rows, 1), jnp.int32)
        lengths = jax.ShapeDtypeStruct((rows,), jnp.int32)
        shapes = jax.tree.leaves(jax.eval_shape(states, weights, prompts, lengths))
        parts = mesh["data"] * mesh["fsdp"] * mesh["sequence"] * mesh["tensor"]
        return sum(x.size * x.dtype.itemsize for x in shapes) // parts

    def _routes_bytes(self) -> int:
        mesh, room = self.layout.sizes, -(-self._max_read_tokens // 8) * 8
        routes = route_records.struct(self.model_config, (self.slots, room))
        parts = mesh["data"] * mesh["fsdp"] * mesh["sequence"]
        return math.prod(routes.shape) * routes.dtype.itemsize // parts


def _decode_turn(
    sampler: Sampler, model: Any, state: SamplerState
) -> tuple[Samples, Cache]:
    """Decode until all completions of a turn end: (completions, cache after them)."""
    state = sampler.advance(model, state, sampler.config.max_new_tokens)
    return samples_of(state), state.cache
