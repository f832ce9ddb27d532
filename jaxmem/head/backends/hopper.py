"""Backend "hopper": four kernels for NVIDIA H100 and H200.

In the forward pass, a kernel reduces tiles of logits to statistics in registers: no
logits are stored. In the backward pass, another kernel computes the logits' derivative
for a block of the vocabulary, in 16 bits, and two products compute the gradients from
it. Active rows come first, as in "xla", and every kernel stops after them. Pallas is
imported when a kernel first runs.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxmem import devices
from jaxmem.head.backends.protocol import OfChunk
from jaxmem.head.kernels import active, block_sizes, padding, tuned
from jaxmem.head.maths import backend_operands, row_stats, vocab_shards
from jaxmem.head.maths.backend_operands import CallerLogits, Factors, TokenRows
from jaxmem.head.maths.spec import Spec

# Times with gradients on an H200, D=4096 V=151936, in GEMMs, "xla" in parentheses:
# 256 tokens 7.7 (11.1), 512 5.3 (6.7), 1024 4.3 (5.1); chunks of 256 4.3 (7.6), of 128
# 4.7 (13.2). At 128 tokens the forward pass alone is slower than that of "xla", 2.0
# (1.8).
MIN_TOKENS, MIN_CHUNK = 256, 128
# If W is padded in a copy, V=50257: 1024 tokens 5.1 (6.1), forward alone 1.6 (1.5);
# forward alone of 512 tokens 2.2 (1.7). If it is not padded: 256 tokens 8.7 (12.5),
# forward alone 1.4 (2.0).
MIN_TOKENS_PADDED = 1024
# Losses of log-probabilities can save a pass over the exponentials (`kept.by_rows`):
# token_loss with entropies and without took 4.59 and 3.94 GEMMs at D=576, 3.87 and 3.30
# at 1024, and no less at 4096 than runs differ. W's gradient then has one rounding
# more, so that heads of this width or more take the pass, unless W is frozen.
MIN_DEPTH_ROUNDED_ONCE = 2048


def refuses_machine() -> str | None:
    """The reason why this process cannot run the backend; None if it can."""
    if jax.__version_info__ < (0, 11):
        return f"it needs jax 0.11 or newer, this is {jax.__version__}"
    if devices.backend() != "gpu":
        return f"it needs an NVIDIA Hopper GPU, jax runs on {devices.backend()!r}"
    capability = getattr(devices.current()[0], "compute_capability", "none")
    if str(capability) != "9.0":
        return f"it needs compute capability 9.0 (Hopper), this GPU has {capability}"
    return None


def refuses_call(spec: Spec, source: Factors | CallerLogits) -> str | None:
    """The reason why no machine can run the call on this backend; None if one can."""
    if isinstance(source, CallerLogits):
        return "it makes logits from hidden states and W, the caller has logits already"
    if spec.compute_dtype not in (jnp.bfloat16, jnp.float16):
        return f"it multiplies bfloat16 or float16, hidden is {spec.compute_dtype}"
    return None


def unproven(spec: Spec, source: Factors | CallerLogits) -> str | None:
    """The reason why a call is not known to be faster than on "xla"; None if it is."""
    if isinstance(source, CallerLogits):
        return "never with logits that the caller has"
    if spec.compute_dtype == jnp.float16:
        return "stores derivatives without a scale, which large weights overflow"
    # XLA partitions nothing inside shard_map over a whole mesh.
    mesh = jax.sharding.get_abstract_mesh()
    by_hand = not mesh.empty and set(mesh.axis_names) == set(mesh.manual_axes)
    if devices.count() > 1 and not (spec.token_parallel or by_hand):
        return (
            "XLA cannot split its kernels over the axes that an enclosing "
            "jax.shard_map leaves to it; over all of a mesh it runs"
        )
    if spec.vocab_groups:  # the choice, and so the bits, may not depend on the mesh
        return "is not chosen with vocab_groups unless it is named"
    # If jit partitions the tokens, the number of devices is not known yet: assume all.
    n_tokens = source.hidden.shape[0] // (devices.count() if spec.token_parallel else 1)
    if n_tokens < MIN_TOKENS:
        return f"is not measured to be faster below {MIN_TOKENS} tokens a device"
    if n_tokens < MIN_TOKENS_PADDED and padding.copies(source.W, spec.layout):
        return (
            f"W {source.W.shape} would be padded to multiples of {padding.SWIZZLE}, in "
            f"a copy that does not pay below {MIN_TOKENS_PADDED} tokens"
        )
    if spec.chunk < MIN_CHUNK:
        return f"is not measured below chunks of {MIN_CHUNK} tokens"
    return None


class Pass(NamedTuple):
    """Operands and static facts of a pass over the vocabulary, for any rows."""

    spec: Spec
    env: Any  # of the launches
    padded: Factors  # in the dtypes and shapes of the kernels
    single_block: bool  # one launch has all rows: no sums over launches


class OutputsAndCotangents(NamedTuple):
    """Saved outputs of some rows, and the cotangents of the differentiated ones."""

    outputs: row_stats.Outputs
    cotangents: row_stats.Cotangents


def forward(spec: Spec, source: Factors, rows: TokenRows, names) -> dict:
    """The named fields of `Outputs` for every row; 0 where inactive."""
    return backend_operands.outputs(spec, rows, statistics(spec, source, rows), names)


def statistics(spec: Spec, source: Factors, rows: TokenRows) -> row_stats.Stats:
    """Statistics over this shard of the vocabulary; undefined where inactive."""
    padded = padding.head(spec, source.cast(spec))
    return _add_statistics(
        spec, padded, rows, backend_operands.no_statistics(spec, rows)
    )


def backward(
    spec: Spec, source: Factors, rows: TokenRows, saved: row_stats.Outputs, cotangents
) -> Factors:
    """Cotangent of the source; sums over tokens in float32."""
    padded = padding.head(spec, source.cast(spec))
    n_rows = rows.labels.shape[0]
    columns, depth = padding.columns_and_depth(spec, padded)
    # Several launches per block of the vocabulary save memory for W's sums; but not if
    # W has no gradient, or if the sums are the gradient itself.
    row_blocks_only = spec.frozen_head or source.W.dtype == jnp.float32
    size, single_block = block_sizes.backward_rows(
        n_rows, shard_chunk(spec), columns, depth, row_blocks_only, n_clusters(),
        spec.gradient_blocks,
    )  # fmt: skip
    env = launch_env(spec, padded, size, "derivative")
    loop = Pass(spec, env, padded, single_block)
    values = OutputsAndCotangents(saved, cotangents)
    sums = _add_recomputed(loop, rows, values, _zero_sums(loop, source))
    like = backend_operands.trained(spec, source)
    return _cotangent(spec, like, sums, single_block)


def one_pass(
    spec: Spec, source: Factors, rows: TokenRows, of_chunk: OfChunk, initial, names
) -> tuple[Any, Factors]:
    """See `xla.one_pass`: the forward kernel stores exponentials, products follow."""
    from jaxmem.head.kernels.forward import statistics_and_exps

    padded = padding.head(spec, source.cast(spec))
    n_rows = rows.labels.shape[0]
    size = loss_rows(spec, source)
    env, single_block = launch_env(spec, padded, size, "exps"), n_rows <= size
    loop = Pass(spec, env, padded, single_block)

    def body(block, carry):
        all_values, sums = carry
        operands = inputs(spec, padded, rows, block)
        reference = _reference(spec, padded, operands, names)
        stats, kept = statistics_and_exps(env, *operands, reference=reference)
        stats = vocab_shards.vary(stats, spec.part_varying)
        outputs = backend_operands.merged(spec, rows, block.ids, stats)
        losses, g = of_chunk(block.ids, outputs)
        values = OutputsAndCotangents(outputs, g)
        sums = _add_kept(loop, rows, block, kept, values, sums)
        return active.put(all_values, block, losses), sums

    carry = vocab_shards.vary(initial, spec.varying), _zero_sums(loop, source)
    all_values, sums = active.for_each_block(rows.active, env.n_rows, body, carry)
    like = backend_operands.trained(spec, source)
    if not single_block:
        like = jax.tree.map(lambda x: x.astype(jnp.float32), like)
    return all_values, _cotangent(spec, like, sums, single_block)


def loss_rows(spec: Spec, source: Factors) -> int:
    """Number of rows whose exponentials `one_pass` stores at a time."""
    n_rows, depth = source.hidden.shape
    return block_sizes.loss_rows(
        n_rows, spec.chunk, depth, spec.frozen_head, n_clusters()
    )


def _add_statistics(spec, padded, rows, all_stats):
    """The statistics with those of the active rows put in."""
    from jaxmem.head.kernels.forward import statistics as of_block

    n_rows = rows.labels.shape[0]
    columns, depth = padding.columns_and_depth(spec, padded)
    tiles = tiles_of("statistics", spec, padded)
    groups = -(-columns // (tiles.columns * tiles.group))
    size = block_sizes.forward_rows(n_rows, spec.chunk, columns, depth, groups)
    env = launch_env(spec, padded, size, "statistics")

    def body(block, all_stats):
        operands = inputs(spec, padded, rows, block)
        return active.put(all_stats, block, of_block(env, *operands))

    return active.for_each_block(rows.active, env.n_rows, body, all_stats)


def inputs(spec: Spec, padded: Factors, rows: TokenRows, block) -> tuple:
    """Operands of the forward kernel, in its order."""
    temperature = _inverse_temperature(rows, block.ids)
    labels = backend_operands.part_labels(spec, rows, block.ids)
    hidden = _padded_hidden(padded, block.ids)
    return hidden, padded.W, labels, block.n_active[None], padded.bias, temperature


def _reference(spec: Spec, padded: Factors, operands, names):
    """Logits, in base 2, that all exponentials of the rows are to be relative to.

    None where the derivative by rows is no multiple of the exponentials, where the
    label's logit is not among the columns here, or where W's gradient would lose more
    than the time is worth.
    """
    from jaxmem.head.kernels import kept

    whole_tiles = spec.vocab_size == spec.all_columns == spec.columns
    of_normalisers = set(names) <= {"logprob", "logsumexp"}
    plain = padded.bias is None and spec.softcap is None and not spec.shards
    if not (whole_tiles and of_normalisers and plain):
        return None
    if not spec.frozen_head and padded.hidden.shape[1] >= MIN_DEPTH_ROUNDED_ONCE:
        return None
    if spec.compute_dtype != jnp.bfloat16:  # float16 has not its range
        return None
    hidden, W, labels, *_, inverse_temperature = operands
    column = jnp.where(labels < 0, spec.columns, labels)
    axis = 0 if spec.layout == "vd" else 1
    of_label = jnp.take(W, column, axis, mode="fill", fill_value=0)
    axes = "nd,nd->n" if spec.layout == "vd" else "nd,dn->n"
    logit = jnp.einsum(axes, hidden, of_label, preferred_element_type=jnp.float32)
    if inverse_temperature is not None:
        logit = logit * inverse_temperature
    return kept.reference_of(logit)


def _add_kept(loop, rows, block, kept, values, sums):
    """`sums` with the contribution of the rows whose exponentials are stored.

    `values` are those of the block's rows; the exponentials are overwritten.
    """
    from jaxmem.head.kernels import products
    from jaxmem.head.kernels.kept import LossRows, by_rows, derivative

    of_rows = LossRows(
        block.n_active,
        backend_operands.part_labels(loop.spec, rows, block.ids),
        values.outputs,
        row_stats.coefficients(values.outputs, values.cotangents),
        _inverse_temperature(rows, block.ids),
    )
    h, factors = _padded_hidden(loop.padded, block.ids), None
    if kept.reference is None:
        dz = derivative(loop.env, kept, of_rows)
    else:
        factors, dz = by_rows(loop.env, kept, of_rows)
        h = (h * factors[:, None]).astype(h.dtype)
    part = products.ProductRows(h, lambda part, width: dz, block.n_active, factors)
    return _add_gradients(loop, loop.env.n_tiles, [part], block, sums)


def _add_recomputed(loop, rows, values, sums):
    """`sums` with the contribution of the active rows, from recomputed logits."""
    env = loop.env

    def body(block, sums):
        n_tiles, size = _block_tiles(loop.spec, env), env.n_rows
        parts = [
            recomputed(
                loop, rows, values, block.ids[i : i + size],
                jnp.clip(block.n_active - i, 0, size),
            )
            for i in range(0, len(block.ids), size)
        ]  # fmt: skip
        return _add_gradients(loop, n_tiles, parts, block, sums)

    n_rows, at_once = len(rows.labels), env.n_rows
    if loop.single_block:
        at_once = -(-n_rows // env.n_rows) * env.n_rows
    return active.for_each_block(rows.active, at_once, body, sums)


def recomputed(
    loop: Pass, rows: TokenRows, values: OutputsAndCotangents, row_ids, n_active
):
    """The `products.ProductRows` of some rows, whose logits are recomputed."""
    from jaxmem.head.kernels import dlogits, products

    saved, padded = values.outputs, loop.padded
    outputs = jax.tree.map(lambda x: backend_operands.take(x, row_ids), saved)
    row_max = backend_operands.take(saved.max, row_ids, fill_value=dlogits.NO_ROW)
    outputs = outputs._replace(max=row_max)
    g = jax.tree.map(lambda x: backend_operands.take(x, row_ids), values.cotangents)
    h = _padded_hidden(padded, row_ids)
    labels = backend_operands.part_labels(loop.spec, rows, row_ids)
    inverse = _inverse_temperature(rows, row_ids)
    inputs = dlogits.LogitsInputs(h, padded.W, labels, padded.bias, inverse)
    coefficients = row_stats.coefficients(outputs, g)
    operands = dlogits.operands(loop.env, inputs, outputs, coefficients)
    derivative = functools.partial(dlogits.derivative, loop.env, operands)
    return products.ProductRows(h, derivative, n_active)


def _zero_sums(loop, source):
    """Accumulators; W's gradient is only overwritten if one block has all rows."""
    spec, env, W_shape = loop.spec, loop.env, loop.padded.W.shape
    dtype = spec.stats_dtype if spec.partial_hidden else spec.compute_dtype
    if loop.single_block:
        W = lax.empty(W_shape, source.W.dtype)
    else:
        W = jnp.zeros(tuple(map(padding.whole, W_shape)), jnp.float32)
    sums = Factors(jnp.zeros(source.hidden.shape, dtype), W, None)
    if source.bias is not None:  # whole blocks of the vocabulary
        n_tiles = _block_tiles(spec, env)
        width = -(-env.n_tiles // n_tiles) * n_tiles * env.tiles.columns
        sums = sums._replace(bias=jnp.zeros(width, jnp.float32))
    sums: Any = backend_operands.trained(spec, sums)
    # Typed as inside shard_map except W's, to which kernels write in place.
    typed = vocab_shards.vary(sums._replace(W=None), spec.part_varying)
    return typed._replace(W=sums.W)


def _cotangent(spec, source, sums, single_block):
    """Gradients in the source's dtypes, summed over shards unless already summed."""
    varied = vocab_shards.vary(sums, spec.part_varying)
    if single_block:
        varied = varied._replace(hidden=sums.hidden)
    else:
        varied = backend_operands.sum_over_shards(spec, varied)
    return backend_operands.rounded(spec, varied, source)


def _add_gradients(loop, n_tiles, parts, block, sums):
    """`sums` with the contribution of a block's rows."""
    from jaxmem.head.kernels import products

    spec, env, padded, single_block = (
        loop.spec,
        loop.env,
        loop.padded,
        loop.single_block,
    )
    depth, dtype = sums.hidden.shape[1], sums.hidden.dtype

    def make_sums(part):
        unscaled = dtype if part.factors is None else jnp.float32
        return products.into_hidden(env, n_tiles, n_clusters(), unscaled, part.hidden)

    def finish_sums(total, part):
        dh = products.sum_parts(total, len(part.hidden))[:, :depth]
        if part.factors is not None:
            dh = dh * part.factors[:, None]
        return dh.astype(dtype)

    shares_hidden = spec.shards and spec.shards.same_hidden and spec.shards.count > 1
    is_one_part = len(parts) == 1
    overlap_all_reduce = (
        single_block
        and is_one_part
        and bool(shares_hidden)
        and products.has_room(env, n_tiles)
    )
    hidden = tuple(map(make_sums, parts))
    blocks = products.VocabBlocks(
        env, n_tiles, single_block, tiles_of("to_hidden", spec, padded),
        tiles_of("to_W", spec, padded),
    )  # fmt: skip
    gradients = products.gradients(
        blocks, padded.W, parts, sums._replace(hidden=hidden), overlap_all_reduce
    )
    dhs = list(map(finish_sums, gradients.hidden, parts))
    dh = dhs[0] if is_one_part else jnp.concatenate(dhs)
    if not single_block:
        return gradients._replace(
            hidden=backend_operands.put(sums.hidden, block.ids, dh)
        )
    dh = vocab_shards.vary(dh, spec.part_varying)
    dh, dW = vocab_shards.sum_hidden(spec.shards, dh, gradients.W, overlap_all_reduce)
    # The block has all rows: gather them in the original order.
    return gradients._replace(hidden=backend_operands.take(dh, block.position), W=dW)


def _block_tiles(spec, env):
    """Number of vocabulary tiles whose derivatives, in 16 bits, are alive at once."""
    return block_sizes.backward_tiles(
        env.n_tiles, env.n_rows, shard_chunk(spec), spec.columns, env.depth,
        n_clusters(),
    )  # fmt: skip


def shard_chunk(spec: Spec) -> int:
    """Tokens with as many logits over this shard's columns as a chunk has over all.

    Blocks sized for the shard alone, k times smaller on k devices, would leave clusters
    idle.
    """
    return spec.chunk * (spec.all_columns // spec.columns)


def launch_env(spec: Spec, padded: Factors, n_rows: int, kernel: str) -> Any:
    """Static facts of a launch of `n_rows` rows."""
    assert spec.layout, "logits that the caller has are for the other backend"
    from jaxmem.head.kernels.logits import Env

    columns, depth = padding.columns_and_depth(spec, padded)
    return Env(
        tiles_of(kernel, spec, padded), n_rows, depth, columns,
        min(spec.vocab_size, spec.columns), spec.layout, spec.compute_dtype,
        spec.softcap, n_blocks(),
    )  # fmt: skip


def tiles_of(kernel, spec: Any, padded: Factors) -> Any:
    """The kernel's tiles for this head."""
    columns, depth = padding.columns_and_depth(spec, padded)
    return tuned.tiles_for(kernel, key_of(spec, columns, depth))


def key_of(spec: Any, columns: int, depth: int) -> tuned.TunedKey:
    """The key of a call's head in the table of tiles."""
    return tuned.TunedKey(devices.current()[0].device_kind, depth, columns, spec.layout)


def n_blocks():
    """Number of thread blocks: one per SM. No statistic depends on it."""
    return getattr(devices.current()[0], "core_count", None) or 132


def n_clusters():
    """Number of clusters, of the cluster size of the default tiles of the products."""
    return n_blocks() // tuned.DEFAULTS["to_hidden"].cluster


def _padded_hidden(padded, row_ids):
    return padding.columns(backend_operands.take(padded.hidden, row_ids))


def _inverse_temperature(rows, row_ids):
    if rows.temperature is None:
        return None
    return 1 / backend_operands.take(rows.temperature, row_ids, fill_value=1)
