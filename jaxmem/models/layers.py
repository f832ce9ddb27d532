"""The modules of a decoder: norms, attention, block."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxmem import devices, remat
from jaxmem.models import (
    attention,
    branches,
    kv_cache,
    norms,
    partitioning,
    ulysses,
)
from jaxmem.models.config import ModelConfig
from jaxmem.models.delta_mixer import DeltaMixer
from jaxmem.models.feed_forward import DenseFeedForward
from jaxmem.models.interfaces import Mixer
from jaxmem.models.latent import LatentAttention
from jaxmem.models.layer_inputs import Injection
from jaxmem.models.linears import linear, residual_linear
from jaxmem.models.mixture import DenseAndExperts, Mixture
from jaxmem.models.norms import make_norm
from jaxmem.models.positions import Ids as Ids, Rotation, Sight


class Attention(Mixer):
    """Causal grouped-query attention within documents; its state is a `Layer`."""

    grow = staticmethod(kv_cache.append)

    @staticmethod
    def state(parts: tuple[jax.Array, jax.Array], max_length: int) -> kv_cache.Layer:
        key, value = parts
        return kv_cache.layer_of(key, value, max_length)

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        width = config.head_dim
        queries, keys = config.heads * width, config.kv_heads * width

        def project(name: str, outputs: int) -> nnx.Linear:
            bias = config.self_attn.qkv_bias
            return linear(config, name, config.hidden, outputs, rngs, use_bias=bias)

        self.query = project("query", queries)
        own = config.mixers == ("attention",)
        if own:
            self.key = project("key", keys)
        if own and not config.self_attn.keys_are_values:
            self.value = project("value", keys)
        if own and config.self_attn.value_norm:
            plain = config.replaced({"norm.scale": False})
            self.value_norm = make_norm(plain, width, rngs)
        if config.self_attn.gate:
            self.gate = project("query", queries)  # of one matrix in checkpoints
        bias = config.self_attn.output_bias
        self.output = residual_linear(config, "output", queries, rngs, bias)
        if config.qk_norm.enabled:
            widths = width, width
            if config.qk_norm.axis == "width":
                widths = queries, keys
            scale = config.norm.scale and config.qk_norm.scale
            scaled = config.replaced({"norm.scale": scale})
            self.query_norm = make_norm(scaled, widths[0], rngs)
            if own:
                self.key_norm = make_norm(scaled, widths[1], rngs)
        if config.self_attn.sinks:
            zeros = jnp.zeros(config.heads, jnp.dtype(config.param_dtype))
            self.sinks = nnx.Param(zeros)
        self.config = config

    def mix(self, projected, sight: Sight, rope: Rotation, before=None):
        projected, gate = self._without_gate(projected)
        query, key, value = self.split(*projected)
        query, key = self.rotate(query, key, rope)
        value = remat.name(value, "v")
        pair = key, value
        if before is not None:
            key, value = kv_cache.after(before, key, value)
        return self.attend(query, key, value, sight, gate), pair

    def _without_gate(self, projected):
        """`readers`, or their results, without the gate's, and the gate's or None."""
        if not self.config.self_attn.gate:
            return projected, None
        return projected[:-1], projected[-1]

    def project(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries, keys and values, [B, T, heads, head_dim] each."""
        readers, _ = self._without_gate(self.readers)
        return self.split(*(read(x) for read in readers))

    @property
    def readers(self) -> tuple[nnx.Linear, ...]:
        """The projections, or the joined one; at last the gate's, if there is one."""
        gate = (self.gate,) if self.config.self_attn.gate else ()
        if hasattr(self, "joined"):
            return self.joined, *gate
        return *self._projections, *gate

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the projections before they are joined."""
        own = () if self.config.self_attn.keys_are_values else ("value",)
        return "query", "key", *own

    @property
    def _projections(self) -> tuple[nnx.Linear, ...]:
        return tuple(getattr(self, name) for name in self.names)

    def split(self, *projected: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries, keys and values, as `project`, from the results of `readers`."""
        heads = [
            each.reshape(*each.shape[:2], -1, self.config.head_dim)
            for each in projected
        ]
        if len(heads) == 1:
            ends = self.config.heads, self.config.heads + self.config.kv_heads
            heads = jnp.split(heads[0], ends[: len(self.names) - 1], axis=2)
        query, key = heads[:2]
        value = key if self.config.self_attn.keys_are_values else heads[2]
        if self.config.self_attn.value_norm:
            value = self.value_norm(value)
        return query, key, value

    def join(self) -> None:
        """Replace the three projections by `joined`, one product for all of them.

        Few rows are bound by reading the matrices, and those of keys and values alone
        are too small to occupy a GPU. With adapters of these projections, if they are
        coded, and if they are joined already, nothing changes. The projections may
        still be held elsewhere, too.
        """
        config, names = self.config, ("query", "key", "value")
        apart = {*config.lora_targets} if config.lora_rank else set()
        apart |= {name for name in names if config.base_of(name) is not None}
        if hasattr(self, "joined") or apart & {*names}:
            return
        parts = self._projections
        joined = self.query
        joined.out_features = sum(part.out_features for part in parts)
        for name in ("kernel", "bias") if config.self_attn.qkv_bias else ("kernel",):
            arrays = [getattr(part, name)[...] for part in parts]
            setattr(joined, name, nnx.Param(jnp.concatenate(arrays, axis=-1)))
        self.joined = joined
        for name in self.names:
            delattr(self, name)

    def rotate(self, query: jax.Array, key: jax.Array, rope: Rotation):
        """Queries and keys after QK-norm, if configured, and rotation."""
        key = self._normalise_and_rotate("key", key, rope)
        return rope.grow(self._normalise_and_rotate("query", query, rope)), key

    def _normalise_and_rotate(
        self, name: str, x: jax.Array, rope: Rotation
    ) -> jax.Array:
        config = self.config
        first = config.qk_norm.enabled and not config.qk_norm.after_rope
        # Without a norm before it, the rotation's gradient needs no residual.
        x = remat.name(x if first else rope.turn(x), name[0])
        if config.qk_norm.enabled:  # of each head, or of all as one
            heads = x.shape[2:] if config.qk_norm.axis == "head" else (-1,)
            norm, flat = getattr(self, f"{name}_norm"), x.reshape(*x.shape[:2], *heads)
            x = rope.if_rotated(norm(flat).reshape(x.shape), x)
        return rope.turn(x) if first else x

    @property
    def _has_kernel(self) -> bool:
        """True if `kernels.rotary` computes this layer's queries and keys."""
        config, own, qk_norm = self.config, self.config.self_attn, self.config.qk_norm
        plain = config.rope.fraction == 1 and own.query_growth is None
        plain = plain and own.unrotated_growth is None and not qk_norm.rotated_only
        plain = plain and not config.has_global_heads and not own.value_norm
        norm = config.norm.kind == "rms" and config.norm.scale
        by_head = norm and not qk_norm.after_rope and qk_norm.axis == "head"
        return plain and (by_head or not qk_norm.enabled)

    def attend(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        sight: Sight,
        gate: jax.Array | None = None,
    ) -> jax.Array:
        """[B, T, hidden] from rotated queries and keys, values, and maybe a gate."""
        sinks = self._sink_scores
        mixed = ulysses.attend(self._attend_by_backend, query, key, value, sight, sinks)
        return remat.recompute(self._project_output)(mixed, gate)

    @property
    def _sink_scores(self) -> jax.Array | None:
        return self.sinks[...] if self.config.self_attn.sinks else None

    @property
    def shared(self) -> tuple[jax.Array, ...]:
        """The scales of QK-norm; of a stack of layers, those of all layers."""
        qk_norm = self.config.qk_norm.enabled and self._has_kernel
        both = (self.query_norm, self.key_norm) if qk_norm else ()
        return tuple(norm.scale[...] for norm in both if norm.scale is not None)

    def decode(
        self, x: jax.Array, rope: Rotation, cached: kv_cache.Cached, filled, scales
    ):
        gate = self.gate(x) if self.config.self_attn.gate else None
        query, key, value = self._project_token(x, rope, cached.index, scales)
        token = kv_cache.layer_of(key, value, 1)
        return self._attend_cached(query, token, cached, filled, gate), token

    def _attend_cached(self, query, token, cached: kv_cache.Cached, filled, gate):
        config = self.config
        mixed = kv_cache.attend_in_place(
            query, token, cached, filled, scale=config.score_scale,
            softcap=config.self_attn.softcap, sinks=self._sink_scores,
        )  # fmt: skip
        return self._project_output(mixed, gate)

    def _project_token(self, x: jax.Array, rope: Rotation, index, scales):
        """Rotated queries and keys, and values; on one GPU, joined ones by a kernel."""
        on_one_gpu = devices.backend() == "gpu" and partitioning.current() is None
        on_one_gpu = on_one_gpu and self._has_kernel and devices.has_mosaic()
        if hasattr(self, "joined") and on_one_gpu:
            from jaxmem.models.kernels import rotary  # Pallas takes a while to import

            if rotary.supports(self.config.head_dim):
                scaling = None
                if self.config.qk_norm.enabled:
                    norm = self.query_norm
                    scaling = rotary.Norms(index, scales, norm.offset, norm.epsilon)
                tables = rope.cosines, rope.sines
                if rope.kind is not None:
                    tables = [table[rope.kind] for table in tables]
                tables = tuple(t.reshape(len(x), -1) for t in tables)
                joined = self.joined(x).reshape(len(x), -1, self.config.head_dim)
                heads = rotary.split(joined, self.config.kv_heads, tables, scaling)
                return (each[:, None] for each in heads)
        query, key, value = self.project(x)
        return *self.rotate(query, key, rope), value

    def _project_output(self, mixed: jax.Array, gate: jax.Array | None) -> jax.Array:
        mixed = mixed.reshape(*mixed.shape[:2], -1)
        if gate is not None:
            wide = jax.nn.sigmoid(gate.astype(jnp.float32))
            mixed = (mixed * wide).astype(mixed.dtype)
        return self.output(mixed)

    def _attend_by_backend(self, query, key, value, sight: Sight, sinks) -> jax.Array:
        config = self.config
        if query.dtype == jnp.float16 and devices.backend() == "cpu":
            raise ValueError(
                "model.dtype='float16' needs a GPU, as jax's attention has none on a "
                "CPU: set model.dtype='bfloat16' or 'float32'"
            )
        if sight.branches is not None:
            attend = functools.partial(self._attend_by_backend, sinks=sinks)
            return branches.attend(attend, query, key, value, sight)
        scale, see = config.score_scale, (query, key, value, sight)
        if config.attention == "cudnn":
            return attention.attend_by_cudnn(
                *see, scale=scale, window=config.self_attn.window
            )
        softcap = config.self_attn.softcap
        return attention.attend(*see, scale=scale, softcap=softcap, sinks=sinks)


class Reuse(Attention):
    """Attention to the keys and values of an earlier layer; it has no state.

    Its `decode` gets those of the new token as `shared`, and that layer as cached.
    """

    @property
    def names(self) -> tuple[str, ...]:
        return ("query",)

    @staticmethod
    def state(parts: Any, max_length: int) -> Any:
        del parts, max_length
        return ()

    @staticmethod
    def grow(states: Any, added: Any, slot: jax.Array, live: jax.Array) -> Any:
        del states, added, slot, live
        return ()

    def join(self) -> None:
        """There is one projection."""

    def mix(self, projected, sight: Sight, rope: Rotation, before=None):
        (query,), gate = self._without_gate(projected)
        assert before is not None
        key, value = before
        return self.attend(self._rotate_query(query, rope), key, value, sight, gate), ()

    def decode(
        self, x: jax.Array, rope: Rotation, cached: kv_cache.Cached, filled, scales
    ):
        (query,), gate = self._without_gate([read(x) for read in self.readers])
        query = self._rotate_query(query, rope)
        return self._attend_cached(query, scales, cached, filled, gate), ()

    def _rotate_query(self, query: jax.Array, rope: Rotation) -> jax.Array:
        heads = query.reshape(*query.shape[:2], -1, self.config.head_dim)
        return rope.grow(self._normalise_and_rotate("query", heads, rope))


MIXERS: dict[str, Any] = {
    "attention": Attention,
    "reuse": Reuse,
    "latent": LatentAttention,
    "delta": DeltaMixer,
}
FEED_FORWARDS: dict[str, Any] = {
    "dense": DenseFeedForward, "experts": Mixture, "dense_and_experts": DenseAndExperts,
}  # fmt: skip


class TransformerBlock(nnx.Module):
    """One layer: attention, then feed-forward, each added to its input.

    Its config is that of one layer and names the class of each part; in a path both
    keep the names "attention" and "feed_forward", whatever they are. Residuals are the
    stream before each sublayer, all products except those added to it, rotated queries
    and keys, attention's output and logsumexp, and a number for each row of a norm;
    elementwise operations between these are recomputed.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        def norm() -> norms.RMSNorm:
            return make_norm(config, config.hidden, rngs)

        self.parallel, self.multiplier = (
            config.residual.parallel,
            config.residual.multiplier,
        )
        self.pre_norms, self.post_norms = config.norm.pre, config.norm.post
        if config.norm.pre:
            self.attention_norm = norm()
        self.attention = MIXERS[config.mixers[0]](config, rngs=rngs)
        if config.norm.pre and config.residual.parallel != "shared":
            self.feed_forward_norm = norm()
        self.feed_forward = FEED_FORWARDS[config.feed_forwards[0]](config, rngs=rngs)
        if config.norm.post:
            self.post_attention_norm, self.post_feed_forward_norm = norm(), norm()
        if config.embedding.per_layer_width is not None:
            self.injection = Injection(config, rngs=rngs)
        if config.residual.layer_scale:
            self.layer_scale = nnx.Param(jnp.ones(1, jnp.dtype(config.param_dtype)))

    def read(
        self, x: jax.Array, sight: Sight, rope: Rotation, added: Any = None,
        before: Any = None, chosen: jax.Array | None = None,
    ):  # fmt: skip
        """The next stream, the operand of the mixer's `state`, and the router's choice.

        `x` and the next stream are [B, T, hidden]. `added` is the layer's input, if it
        has one, and `before` the mixer's state after earlier tokens, or the keys and
        values that it reuses, or None. The choice is `chosen`, if not None; without a
        router it is None.
        """
        x, state_parts, choice = self._run_sublayers(x, sight, rope, before, chosen)
        return self._finish_layer(x, added), state_parts, choice

    def _finish_layer(self, x: jax.Array, added: Any) -> jax.Array:
        x = x if added is None else self.injection(x, added)
        if hasattr(self, "layer_scale"):  # a constant of the checkpoint
            x = x * jax.lax.stop_gradient(self.layer_scale[...]).astype(x.dtype)
        return x

    def _run_sublayers(
        self, x: jax.Array, sight: Sight, rope: Rotation, before: Any, chosen: Any
    ):
        readers = self.attention.readers
        norm = self.attention_norm if self.pre_norms else None
        if self.parallel != "shared":
            x, projected = norms.normed_products(norm, readers, x)
            mixed, state_parts = self.attention.mix(projected, sight, rope, before)
            x, choice = self._run_feed_forward(x, mixed, chosen)
            return x, state_parts, choice
        both = (*readers, *self.feed_forward.readers)
        x, projected = norms.normed_products(norm, both, x)
        first, second = projected[: len(readers)], projected[len(readers) :]
        mixed, state_parts = self.attention.mix(first, sight, rope, before)
        output, choice = self.feed_forward.join(*second, chosen=chosen)
        return self._add_outputs(x, mixed, output), state_parts, choice

    def decode(
        self, x: jax.Array, rope: Rotation, cached: kv_cache.Cached, filled: jax.Array,
        scales: Any, added: Any = None,
    ):  # fmt: skip
        """The next stream of a token, what `grow` adds, and the router's choice."""
        x_norm = self.attention_norm(x) if self.pre_norms else x
        mixed, token = self.attention.decode(x_norm, rope, cached, filled, scales)
        if self.parallel == "shared":
            read = (each(x_norm) for each in self.feed_forward.readers)
            output, choice = self.feed_forward.join(*read)
            x = self._add_outputs(x, mixed, output)
        else:
            x, choice = self._run_feed_forward(x, mixed)
        return self._finish_layer(x, added), token, choice

    def _run_feed_forward(self, x: jax.Array, mixed: jax.Array, chosen: Any = None):
        readers = self.feed_forward.readers
        norm = self.feed_forward_norm if self.pre_norms else None
        if self.parallel == "separate":
            x, projected = norms.normed_products(norm, readers, x)
            output, choice = self.feed_forward.join(*projected, chosen=chosen)
            return self._add_outputs(x, mixed, output), choice
        mixed = self.post_attention_norm(mixed) if self.post_norms else mixed
        mixed = self._scale_output(mixed)
        x, projected = norms.normed_products(norm, readers, x, mixed)
        stream = (x,) if self.feed_forward.reads_stream else ()
        output, choice = self.feed_forward.join(*projected, *stream, chosen=chosen)
        output = self.post_feed_forward_norm(output) if self.post_norms else output
        return self._add_outputs(x, output), choice

    def _add_outputs(self, x: jax.Array, *outputs: jax.Array) -> jax.Array:
        for output in outputs:
            x = x + self._scale_output(output)
        return partitioning.constrain_activations(x)

    def _scale_output(self, x: jax.Array) -> jax.Array:
        return x if self.multiplier == 1 else x * jnp.asarray(self.multiplier, x.dtype)
