"""A decoder with RMSNorm, RoPE, grouped-query attention and SwiGLU, and its head.

`Decoder` returns hidden states, never logits. The head is called separately, so no
array with a vocabulary axis is built by accident.
"""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxmem import remat
from jaxmem.models import (
    balance,
    coded_weights,
    embedding,
    kv_cache,
    layers,
    norms,
    partitioning,
    rereading,
    route_records,
    structure,
)
from jaxmem.models.config import BASE_TARGETS, EMBEDDING, ModelConfig as ModelConfig
from jaxmem.models.layer_inputs import LayerInputs
from jaxmem.models.positions import (
    Branches,
    Ids,
    by_kind,
    document_lengths,
    documents,
    layer_kinds,
    sights,
    window,
)
from jaxmem.models.training_head import HeadConfig, make_head
from jaxmem.models.weights import by_path, cast_weights


def make_stack(stack: structure.Stack, rngs: nnx.Rngs) -> layers.TransformerBlock:
    """The blocks of a stack, with their weights on a leading axis."""

    @nnx.split_rngs(splits=len(stack.layers))
    @nnx.vmap(in_axes=(0,), out_axes=0)
    def make(rngs: nnx.Rngs) -> layers.TransformerBlock:
        return layers.TransformerBlock(stack.config, rngs=rngs)

    return make(rngs)


def _check_coded(decoder: "Decoder") -> None:
    """Raise a ValueError for `base_targets` or `base_plain` that name no matrix."""
    config = decoder.config
    if config.base is None:
        return
    holders: dict[str, set[int]] = {}  # layers that have a matrix, by its name
    coded = {EMBEDDING} if config.codes_embedding else set()
    stacks = structure.stacks(config)
    for path in by_path(decoder):
        stack, _, module = path.rpartition("/")[0].partition("/")
        name, is_coded = module.rpartition("/")[2], coded_weights.is_coded(path)
        if stack in stacks and (is_coded or path.endswith("/kernel")):
            holders.setdefault(name, set()).update(stacks[stack].layers)
            coded |= {name} if is_coded else set()
    known = ", ".join(x for x in BASE_TARGETS if x in holders)
    names = f"its {config.layers} layers have {known}"
    for entry in config.base_plain:
        layer, _, name = entry.partition(".")
        if int(layer) not in holders.get(name, ()):
            raise ValueError(
                f"model.base_plain has {entry!r}, a matrix that layer {layer} of the "
                f"model does not have; {names}"
            )
    for name in config.base_targets or ():
        if name not in coded:
            raise ValueError(
                f"model.base_targets has {name!r}, but no layer has such a matrix to "
                f"code; {names}"
            )
    if not coded:
        raise ValueError(
            f"model.base={config.base!r} codes no matrix: model.base_targets and "
            "model.base_plain leave none"
        )


def _empty_reused(runs, x: jax.Array) -> dict[str, Any]:
    """Zeros for the keys and values that layers reuse, by the stack they are of."""
    zeros, names = {}, {stack.source for run in runs for stack in run}
    for stack in itertools.chain(*runs):
        if stack.name in names:
            shape = *x.shape[:2], stack.config.kv_heads, stack.config.head_dim
            zeros[stack.name] = (jnp.zeros(shape, x.dtype),) * 2
    return zeros


def _reused_pair(source: str | None, states, before, width: int) -> Any:
    """Keys and values [B, S, kv_heads, head_dim] of the last layer of `source`.

    None without a `source`. `states` are of the `width` tokens that are read now,
    `before` of earlier ones.
    """
    if source is None:
        return None
    last = kv_cache.Layer(*(x[-1] for x in states[source]))
    pair = kv_cache.keys_and_values(last, width)
    if not before:
        return pair
    return kv_cache.after(kv_cache.Layer(*(x[-1] for x in before[source])), *pair)


class Decoder(nnx.Module):
    """Token ids to final hidden states; `head` maps these to the vocabulary.

    The weights of all blocks of one structure are stacked on a leading axis, in
    `blocks` and, if there are several structures, `blocks_1` and so on
    (`models.structure`). The blocks run in one `jax.lax.scan`, except those that the
    policy's `last` does not recompute, so compile time does not grow with depth. With
    several structures there are several such loops, and `last` counts rounds of the
    last one, of which it leaves one at least.

    Args:
        config: sizes and choices; `vocab_size` must be known.
        head: options of the head; `head_loss` alone reads its implementation.
        policy: which residuals each block keeps: a `remat.Policy`, the name of a
            preset, or None for all of them.
        unroll: if True, blocks are traced one after the other; compile time then
            grows with depth.
        rngs: source of the initial weights.

    Raises:
        ValueError: `base_targets` or `base_plain` names a matrix that no layer has, or
            `base` codes no matrix.
    """

    def __init__(
        self,
        config: ModelConfig,
        head: HeadConfig | None = None,
        policy: remat.Policy | str | None = "full",
        *,
        unroll: bool = False,
        rngs: nnx.Rngs,
    ):
        self.embed = embedding.of_tokens(config, rngs)
        if config.embedding.positions is not None:
            self.positions = embedding.table(config, config.embedding.positions, rngs)
        if config.embedding.norm:
            self.embed_norm = norms.make_norm(config, config.hidden, rngs)
        for stack in structure.stacks(config).values():
            setattr(self, stack.name, make_stack(stack, rngs))
        if config.embedding.per_layer_width is not None:
            self.layer_inputs = LayerInputs(config, rngs=rngs)
        self.norm = norms.make_norm(config, config.hidden, rngs)
        self.head = make_head(config, head or HeadConfig(), self.embed, rngs)
        self.config, self.policy, self.unroll = config, policy, unroll
        _check_coded(self)

    def __call__(
        self, tokens: Ids, segment_ids: Ids | None, positions: Ids,
        branches: Branches | None = None, routes: Ids | None = None,
    ) -> jax.Array:  # fmt: skip
        """Run the blocks and the final norm.

        Args:
            tokens: [B, T] ids.
            segment_ids: [B, T] document of each token in its row; 0 is padding. None
                means that a row is one document, and that what follows it counts in no
                loss; if all layers are global, no T x T mask is then built.
            positions: [B, T] position of each token in its document, from 0.
            branches: layout of rows whose blocks share a prompt; None: there is none.
            routes: of the tokens, as in `models.route_records`, which routers then take
                in the place of their own choices; None: they choose.

        Returns:
            Hidden states [B, T, hidden] in the compute dtype.
        """
        return self._run_blocks(tokens, segment_ids, positions, branches, routes, None)[
            0
        ]

    def routed(
        self, tokens: Ids, segment_ids: Ids | None, positions: Ids,
        branches: Branches | None = None, routes: Ids | None = None,
    ) -> tuple[jax.Array, balance.Routed | None]:  # fmt: skip
        """As `__call__`, with sums over routers' choices; None without experts.

        The sums leave out padding.
        """
        routed = balance.nothing(self.config)
        return self._run_blocks(
            tokens, segment_ids, positions, branches, routes, routed
        )

    def _run_blocks(self, tokens, segment_ids, positions, branches, routes, routed):
        x = embedding.look_up(self, tokens, positions)
        if segment_ids is None:
            embedding.check_length(self.config, tokens.shape[1])
        seen = documents(self.config, positions, segment_ids, branches)
        lengths = document_lengths(self.config, positions, segment_ids)
        sight = sights(self.config, positions, seen, lengths)
        runs, inputs = structure.runs(self.config), self._layer_inputs(tokens, x)
        counted = balance.counted(tokens, segment_ids)
        trained = bool(self.config.router_aux_loss_coef)
        kept: dict[Any, Any] = _empty_reused(runs, x)
        for run in runs:
            definitions, scanned = self._scan_operands(run, inputs)
            reused = [kept.get(stack.source) for stack in run]

            def blocks(
                carried, of_layers, run=run, definitions=definitions, reused=reused
            ):
                x, routed, kept = carried
                each = zip(run, definitions, reused, of_layers, strict=True)
                for stack, definition, pair, (weights, kind, index, added) in each:
                    merged = nnx.merge(definition, partitioning.gathered(weights))
                    layer = jnp.asarray(stack.layers)[index]
                    chosen = route_records.of_layer(routes, stack, layer, self.config)
                    x, state, choice = merged.read(x, *sight(kind), added, pair, chosen)
                    if stack.name in kept:  # those of the last layer stay
                        kept = kept | {stack.name: state}
                    if routed is not None and choice is not None:
                        routed = balance.add(routed, layer, choice, counted, trained)
                return x, routed, kept

            policy = self.policy
            if len(runs) > 1 and isinstance(policy, remat.Policy):
                last = min(policy.last, len(run[0].layers) - 1) * (run is runs[-1])
                policy = dataclasses.replace(policy, last=last)
            carried = x, routed, {} if any(reused) else kept
            x, routed, more = remat.scan_blocks(
                blocks, scanned, carried, policy, unroll=self.unroll
            )
            kept = more or kept
        return self._final_norm(x), routed

    def _final_norm(self, x: jax.Array) -> jax.Array:
        x, multiplier = self.norm(x), self.config.logits.multiplier
        return x if multiplier == 1 else x * jnp.asarray(multiplier, x.dtype)

    def _layer_inputs(self, tokens: Ids, x: jax.Array) -> jax.Array | None:
        """Inputs of layers beside x, [layers, B, T, per_layer_width]; None without."""
        if self.config.embedding.per_layer_width is None:
            return None
        return self.layer_inputs(jnp.asarray(tokens), x)

    def _scan_operands(
        self, run: tuple[structure.Stack, ...], inputs: jax.Array | None
    ):
        """Definitions of a run's blocks, and the operands of a scan over its layers.

        A layer's operands are its weights, its entry of `layer_kinds`, its index in its
        stack, and its entry of `inputs`.
        """
        # Pass plain arrays into the scan: a module from outside must not be used
        # inside.
        split = [nnx.split(getattr(self, stack.name)) for stack in run]
        kinds = layer_kinds(self.config)
        scanned = tuple(
            (
                weights,
                None if kinds is None else kinds[list(stack.layers)],
                np.arange(len(stack.layers), dtype=np.int32),
                None if inputs is None else inputs[np.array(stack.layers)],
            )
            for stack, (_, weights) in zip(run, split, strict=True)
        )
        return [definition for definition, _ in split], scanned

    def prefill(
        self, prompts: Ids, lengths: Ids, max_length: int, *, records: bool = False
    ) -> tuple[jax.Array, kv_cache.Cache]:
        """Process prompts and fill a KV cache with them.

        Args:
            prompts: [B, P] ids, each row's prompt first; the rest of a row is ignored.
            lengths: [B] tokens of each prompt, from 1 to P.
            max_length: slots of the cache, T: P plus the tokens to decode after it.
            records: if True, the cache also has the routes of all tokens that are read.

        Returns:
            Hidden states [B, hidden] of each prompt's last token, and the cache for
            `decode`. A row whose length is out of range is NaN, whatever is decoded
            after it.

        Raises:
            ValueError: max_length is below P.
        """
        rows, width = prompts.shape
        if max_length < width:
            raise ValueError(
                f"max_length must be at least the {width} tokens of a row of prompts, "
                f"got {max_length}"
            )
        lengths = jnp.asarray(lengths, jnp.int32)
        filled = jnp.arange(width) < lengths[:, None]
        positions = jnp.broadcast_to(jnp.arange(width), (rows, width))
        embedding.check_length(self.config, max_length)
        x = embedding.look_up(self, jnp.where(filled, prompts, 0), positions)
        seen = documents(self.config, positions, filled)
        sight = sights(self.config, positions, seen, lengths[:, None])
        possible = (lengths >= 1) & (lengths <= width)
        x = jnp.where(possible[:, None, None], x, jnp.nan)
        inputs = self._layer_inputs(jnp.where(filled, prompts, 0), x)
        x, states, routes = self._read_tokens(x, inputs, sight, max_length, {}, records)
        last = x[jnp.arange(rows), jnp.clip(lengths, 1, width) - 1]
        recorded = routes, rereading.tokens(self.config, prompts)
        cache = kv_cache.of_prompts(states, lengths, width, max_length, *recorded)
        return self._final_norm(last), cache

    def extend(
        self, tokens: Ids, lengths: Ids, cache: kv_cache.Cache
    ) -> tuple[jax.Array, kv_cache.Cache]:
        """Process several more tokens per row at once, behind those of a cache.

        Args:
            tokens: [B, M] ids, those of each row first; the rest of a row is ignored.
            lengths: [B] tokens of each row, from 0 to M.
            cache: from `prefill`, `decode` or `extend`; M of its slots are taken.

        Returns:
            As `prefill`. Hidden states are NaN once the cache is full.
        """
        rows, width = tokens.shape
        lengths = jnp.asarray(lengths, jnp.int32)
        filled = jnp.arange(width) < lengths[:, None]
        positions = cache.lengths[:, None] + jnp.arange(width)
        tokens, positions = (jnp.where(filled, x, 0) for x in (tokens, positions))
        cache = rereading.longer(self, cache, tokens, lengths)
        x = embedding.look_up(self, tokens, positions)
        own = documents(self.config, positions, filled)

        def earlier(kind: str) -> jax.Array:
            return cache.seen_from(positions, window(self.config, kind, positions))

        before = by_kind(self.config, earlier)
        sight = sights(
            self.config, positions,
            lambda kind: own(kind)._replace(prefix=before(kind)),
            (cache.lengths + lengths)[:, None],
        )  # fmt: skip
        inputs = self._layer_inputs(tokens, x)
        records = cache.routes is not None
        x, read, routes = self._read_tokens(
            x, inputs, sight, width, cache.layers, records
        )
        states = self._grow_states(cache, read, lengths > 0)
        fits = cache.slot + width <= cache.max_length
        last = x[jnp.arange(rows), jnp.clip(lengths, 1, width) - 1]
        hidden = jnp.where(fits, self._final_norm(last), jnp.nan)
        return hidden, kv_cache.advance(cache, states, lengths, width, routes, tokens)

    def _read_tokens(
        self, x, inputs, sight, room, before: dict[str, Any], records: bool
    ):
        """Run `_scan_layers` over tokens of rows, with `room` slots in the states.

        `before` are the states of earlier tokens of the rows, or {}.
        """
        width = x.shape[1]

        def shared_by_stack(stack: structure.Stack, states: dict[str, Any]) -> Any:
            pair = _reused_pair(stack.source, states, before, width)
            return before.get(stack.name), pair

        def run_block(stack, block, x, shared, kind, index, added):
            earlier, pair = shared
            earlier = jax.tree.map(lambda s: s[index], earlier)
            earlier = earlier if pair is None else pair
            x, kept, choice = block.read(x, *sight(kind), added, earlier)
            # Inside the scan, so that the cache is allocated once, in its final layout.
            return x, block.attention.state(kept, room), choice

        return self._scan_layers(x, inputs, records, shared_by_stack, run_block)

    def _scan_layers(
        self, x, inputs, records: bool, shared_by_stack, run_block, unroll: bool = False
    ):
        """The hidden states after all blocks, the results of each stack, and routes.

        Routes are None unless they are recorded. `shared_by_stack` is a function of a
        stack and the results of earlier ones; its result is passed to each block of the
        stack. `run_block` is a function of a stack, a block, the hidden states, that
        result, and the layer's operands without the weights.
        """
        by_stack, routes = {}, {}
        for run in structure.runs(self.config):
            definitions, scanned = self._scan_operands(run, inputs)
            shared = [shared_by_stack(stack, by_stack) for stack in run]

            def blocks(x, of_layers, run=run, definitions=definitions, shared=shared):
                parts, choices = [], []
                each = zip(run, definitions, shared, of_layers, strict=True)
                for stack, definition, own, (weights, *of_layer) in each:
                    merged = nnx.merge(definition, weights)
                    x, part, choice = run_block(stack, merged, x, own, *of_layer)
                    parts.append(part)
                    choices.append(balance.chosen(choice, records))
                return x, (parts, choices)

            x, (parts, choices) = jax.lax.scan(blocks, x, scanned, unroll=unroll)
            by_stack |= zip((stack.name for stack in run), parts, strict=True)
            routes |= zip((stack.layers for stack in run), choices, strict=True)
        return x, by_stack, route_records.of_layers(routes, self.config)

    def _grow_states(
        self, cache: kv_cache.Cache, added: dict[str, Any], live: jax.Array
    ):
        """The states of all stacks, after `added` ones of the rows that are live."""
        states = {}
        for name, stack in structure.stacks(self.config).items():
            grow = layers.MIXERS[stack.config.mixers[0]].grow
            states[name] = grow(cache.layers[name], added[name], cache.slot, live)
        return states

    def decode(
        self, tokens: Ids, cache: kv_cache.Cache, live: jax.Array | None = None, *,
        unroll: bool = False,
    ) -> tuple[jax.Array, kv_cache.Cache]:  # fmt: skip
        """Process one more token per row, each at its row's own position.

        Attention is plain XLA here, regardless of `ModelConfig.attention`.

        Args:
            tokens: [B] ids.
            cache: as in `extend`; it is updated in place if it is donated or carried by
                a loop.
            live: [B] mask of the rows that read their tokens; None: all do.
            unroll: if True, blocks are traced one after the other. Compile time then
                grows with depth, but on GPUs XLA reads each layer's weights where they
                are in their stack, instead of copying some of them in every step.

        Returns:
            As `extend`.
        """
        config, tokens = self.config, jnp.asarray(tokens)[:, None]
        live = jnp.ones(len(tokens), bool) if live is None else live
        cache = rereading.longer(self, cache, tokens, live.astype(jnp.int32))
        positions = cache.lengths[:, None]
        x = embedding.look_up(self, tokens, positions)

        def visible(kind: str) -> jax.Array:
            return cache.seen(window(config, kind, positions))

        sight = sights(config, positions, by_kind(config, visible), positions + 1)
        inputs = self._layer_inputs(tokens, x)

        def run_block(stack, block, x, shared, kind, index, own):
            seen, rope = sight(kind)
            before = cache.layers[stack.source or stack.name]
            if stack.source is not None:
                index = jnp.asarray(len(before.keys) - 1)
            cached = kv_cache.Cached(before, index)
            return block.decode(x, rope, cached, seen, shared, own)

        records = cache.routes is not None
        x, added, routes = self._scan_layers(
            x, inputs, records, self._shared_by_stack, run_block, unroll
        )
        states = self._grow_states(cache, added, live)
        fits, read = cache.slot < cache.max_length, live.astype(jnp.int32)
        hidden = jnp.where(fits, self._final_norm(x)[:, 0], jnp.nan)
        return hidden, kv_cache.advance(cache, states, read, 1, routes, tokens)

    def _shared_by_stack(self, stack: structure.Stack, new: dict[str, Any]) -> Any:
        """Arrays for `decode` of all layers of a stack, maybe keys of the new token."""
        if stack.source is None:
            return getattr(self, stack.name).attention.shared
        return jax.tree.map(lambda x: x[-1], new[stack.source])

    def join(self) -> None:
        """Join the projections of each stack's mixer, as `layers.Attention.join`."""
        for name in structure.stacks(self.config):
            getattr(self, name).attention.join()

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Logits [..., V] in float32; see `LMHead.float_logits`."""
        return self.head.float_logits(hidden)

    def in_compute_type(self) -> tuple[Any, Any]:
        """The definition and the weights as sampling reads them, for all steps."""
        definition, weights = nnx.split(self)
        weights = cast_weights(weights, self.config.dtype)
        return definition, partitioning.gathered(weights)

    @property
    def head_path(self) -> str | None:
        """The name of the head's matrix; None if an adapter is trained with it."""
        name = "embed/embedding" if self.config.tied else "head/kernel"
        return None if self.config.lora_head else name

    def specs(self) -> None:
        """Partition specs of the weights by name; None: `partitioning` knows them."""

    recomputes = False  # True: sampling reads a row again for each token
    extends = True  # True: several tokens can follow on a cache


def abstract_decoder(
    config: ModelConfig,
    head: HeadConfig | None = None,
    policy: remat.Policy | str | None = "full",
    *,
    unroll: bool = False,
) -> Decoder:
    """A decoder that has the shape and type of each weight, and no arrays."""
    mesh = jax.sharding.get_abstract_mesh()
    return nnx.merge(*_split_abstract(config, head, policy, unroll, mesh))


# To trace the constructor takes most of the time in which a small checkpoint is read.
@functools.lru_cache(maxsize=128)
def _split_abstract(config, head, policy, unroll, mesh) -> Any:
    """Graph and shapes of a decoder; a mesh in context may give these shardings."""
    make = functools.partial(Decoder, config, head, policy, unroll=unroll)
    return nnx.split(nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0))))
