"""Sampled derivatives of logits: which entries are kept, and what they weigh.

docs/sampled.md has the estimator. The label's entry is exact, and every other column j
is kept with a probability of integers,

    q_j = min(1, (⌊κ p_j u⌋ + 1) / u)      u = 2^b units, κ slightly below K,

which is positive wherever p_j > 0. With r uniform over {0, ..., u - 1}, one number per
token, and C_j the running sum of u q, column j is kept where a multiple of u lies in
(C_{j-1} + r, C_j + r]. As u q_j ≤ u, that happens for exactly u q_j values of r. As
Σ_j u q_j ≤ K u, at most K columns are kept; the number of the multiple is the entry's
slot.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from jaxmem.head.maths import checks, row_stats, running_sums, scaling
from jaxmem.head.maths.backend_operands import TokenRows, part_labels
from jaxmem.head.maths.gradients import Sample
from jaxmem.head.maths.row_stats import Coefficients, Normaliser, Outputs
from jaxmem.head.maths.spec import Spec

_BITS = 30  # K units fit, and so does any running sum plus a start
_ROUNDING = 2.0**-12  # how far a row's probabilities may add up to more than 1
# Of `Sampling` where tiles of exponentials in 16 bits are searched, and of all records
# of entries, whose probabilities then do not depend on how they were found.
MARGIN = 2.0**-7


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Static facts: at most `slots` entries of each row, besides the label's.

    Attributes:
        slots: K.
        columns: of the vocabulary, or of this shard's part.
        margin: relative error of the sums that the search goes by, 0 where they are
            those of the very units that it finds.
        shared: columns of all shards, where the slots are of all of them; None where
            each has its own.
    """

    slots: int
    columns: int
    margin: float = 0.0
    shared: int | None = None

    @property
    def bits(self) -> int:
        """Bits of one unit: b, so that K 2^b fits."""
        return _BITS - (self.slots - 1).bit_length()

    @property
    def one(self) -> int:
        """Units of a probability of 1."""
        return 1 << self.bits

    @property
    def rate(self) -> float:
        """κ: K less what rounding up adds to a row's sum, so that K slots suffice."""
        rounded_up = 1.02 * ((self.shared or self.columns) + 512) / self.one
        return self.slots * (1 - _ROUNDING - self.margin) - rounded_up


def sampling_of(spec: Spec) -> Sampling:
    """The sampling of K slots over this head's vocabulary, or over this shard of it."""
    slots = spec.gradient_samples or 0
    if spec.forward == "recorded":
        return Sampling(slots, spec.columns, MARGIN, shared=spec.all_columns)
    return Sampling(slots, spec.columns)


def starts_of(spec: Spec, rows: TokenRows) -> jax.Array:
    """`starts` of each row, int32 [N]; they differ by shard, unless it shares slots."""
    assert rows.draws is not None, "no key was given"
    sampling, shard = sampling_of(spec), 0
    if spec.shards and not sampling.shared:
        shard = lax.axis_index(spec.shards.axes)
    return starts(sampling, rows.draws, shard)


def continued(spec: Spec, starts: jax.Array, total: jax.Array) -> jax.Array:
    """Starts of rows [C] in this shard, where running sums go on from shard to shard.

    The total is that of the units here, or of bounds of them. Shards that have slots of
    their own begin anew.
    """
    sampling = sampling_of(spec)
    if not (spec.shards and sampling.shared):
        return starts
    totals = lax.all_gather(total, spec.shards.axes)
    shard = jnp.arange(len(totals), dtype=jnp.int32)[:, None]
    is_before = shard < lax.axis_index(spec.shards.axes)
    before = jnp.sum(jnp.where(is_before, totals, 0), axis=0)
    return lax.rem(starts + before, jnp.int32(sampling.one))


class Entries(NamedTuple):
    """The sampled entries of each token: residuals of the backward pass.

    An empty slot has p = 0 and a column past the last one, so that sorting by column
    moves it to the end. The label's entry is not among them.
    """

    columns: jax.Array  # int32 [N, K]
    p: jax.Array  # probabilities [N, K]
    # p / q [N, K], where q is not that of these p; see `eight_bits`
    weights: Any = None


class SparseDerivative(NamedTuple):
    """Entries of each token's derivative, the label's first; all others are zero."""

    columns: jax.Array  # int32 [N, 1 + K]
    values: jax.Array  # [N, 1 + K]; 0 in an empty slot


def token_keys(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """One key for each token, whatever other tokens and devices there are."""
    if key.shape:
        return key
    token_ids = jnp.arange(math.prod(shape), dtype=jnp.uint32)
    return jnp.reshape(jax.vmap(lambda i: jax.random.fold_in(key, i))(token_ids), shape)


def draws(keys: jax.Array) -> jax.Array:
    """Uniform uint32 [N] of the tokens' keys."""
    return jax.vmap(lambda key: jax.random.bits(key, (), jnp.uint32))(keys)


def starts(sampling: Sampling, draws: jax.Array, shard: ArrayLike = 0) -> jax.Array:
    """r, int32 [N], uniform over {0, ..., u - 1}; another one on each shard.

    For shards, the draws, uint32 [N], are mixed with the shard's number by a bijection
    of uint32 (the finalizer of MurmurHash3), so that they stay uniform and look
    independent.
    """
    mixed = draws + jnp.uint32(0x9E3779B9) * jnp.asarray(shard).astype(jnp.uint32)
    for factor in (0x85EBCA6B, 0xC2B2AE35):
        mixed = (mixed ^ (mixed >> 15)) * jnp.uint32(factor)
    return ((mixed ^ (mixed >> 16)) >> (32 - sampling.bits)).astype(jnp.int32)


def units(sampling: Sampling, p: jax.Array) -> jax.Array:
    """Probabilities q of being kept, in units; 0 where p is 0 or NaN."""
    scaled = (p * (sampling.rate * sampling.one)).astype(jnp.int32) + 1
    return jnp.where(p > 0, jnp.minimum(scaled, sampling.one), 0)


def at_columns(tree: Any, columns: jax.Array) -> Any:
    """Entries of every [C, V] of a tree in columns [C, K], of which none need exist."""
    return jax.tree.map(
        lambda x: jnp.take_along_axis(x, columns, axis=1, mode="clip"), tree
    )


def inverse(sampling: Sampling, p: jax.Array) -> jax.Array:
    """1 / q, the weights of entries with these probabilities; 0 where p is 0."""
    q = units(sampling, p).astype(p.dtype) / sampling.one
    return jnp.where(p > 0, 1 / jnp.where(p > 0, q, 1), 0)


def weighed(spec: Spec, entries: Entries) -> tuple[jax.Array, jax.Array]:
    """The columns of entries, sampled by `sampling_of`, and their weights."""
    return entries.columns, inverse(sampling_of(spec), entries.p)


def scale(part_max: jax.Array, rows: Outputs | Normaliser) -> jax.Array:
    """Factors that turn e^(z - part_max) of rows into probabilities."""
    nothing = part_max == -jnp.inf  # and -inf - -inf would be NaN
    log_scale = jnp.where(nothing, 0, part_max - rows.max) - rows.log_sum
    return jnp.where(nothing, 0, jnp.exp(log_scale))


def none(sampling: Sampling, n_rows: int, dtype) -> Entries:
    """Entries of rows that have none."""
    columns = jnp.full((n_rows, sampling.slots), sampling.columns, jnp.int32)
    return Entries(columns, jnp.zeros(columns.shape, dtype))


def select(
    sampling: Sampling, exps: jax.Array, scale: jax.Array, starts: jax.Array
) -> Entries:
    """Entries of rows over the whole vocabulary, or over this shard's part of it.

    exps [C, V], 0 at the label, times scale [C] are probabilities; starts are int32
    [C].
    """

    def units_of(exps):
        return units(sampling, exps * _broadcast_rows(scale, exps))

    multiples = jnp.arange(1, sampling.slots + 1, dtype=jnp.int32) * sampling.one
    targets = multiples[None] - starts[:, None]
    tree = running_sums.tree(units_of(exps))
    live, column, exps = running_sums.find(tree, units_of, exps, targets)
    p = jnp.where(live, exps * scale[:, None], 0)
    return Entries(jnp.where(p > 0, column, sampling.columns), p)


def derivative(
    sampling: Sampling, entries: Entries, labels: jax.Array, rows: Outputs,
    c: Coefficients,
) -> tuple[jax.Array, SparseDerivative]:  # fmt: skip
    """(ln p of the entries, dz_j / q_j), with dz of the label's in the first slot.

    Labels [N] are columns; one outside [0, V) is in another part. Of the statistics,
    logprob is read, and c has the coefficients of the rows.
    """
    ln_p = jnp.log(jnp.where(entries.p > 0, entries.p, 1))
    # p / q first: their quotient is near 1/κ even where both are tiny.
    weight = entries.weights
    if weight is None:
        q = units(sampling, entries.p).astype(ln_p.dtype) / sampling.one
        weight = jnp.where(entries.p > 0, entries.p / jnp.where(q > 0, q, 1), 0)
    slopes = _slopes(c, ln_p, entries.p, c.label)
    slopes = jnp.where(entries.p > 0, weight * slopes, 0)
    in_part = (labels >= 0) & (labels < sampling.columns)
    ln_p_label = jnp.maximum(rows.logprob, jnp.finfo(ln_p.dtype).min)[:, None]
    p_label = jnp.exp(ln_p_label)
    at_label = p_label * _slopes(c, ln_p_label, p_label, None)
    if c.label is not None:  # 1 - p would round to 0
        at_label += (c.label * -jnp.expm1(rows.logprob))[:, None]
    column = jnp.where(in_part, labels, sampling.columns)[:, None]
    return jnp.concatenate([ln_p_label, ln_p], axis=1), SparseDerivative(
        jnp.concatenate([column, entries.columns], axis=1),
        jnp.concatenate([jnp.where(in_part[:, None], at_label, 0), slopes], axis=1),
    )


def derivative_by_products(
    spec: Spec, sampling: Sampling, rows: TokenRows, saved: Outputs, cotangents,
    entries: Entries,
) -> SparseDerivative:  # fmt: skip
    """`derivative` by h Wᵀ, through temperature and softcap; 0 in inactive rows."""
    row_ids = jnp.arange(rows.labels.shape[0], dtype=jnp.int32)
    labels = jnp.where(rows.active, part_labels(spec, rows, row_ids), -1)
    c = row_stats.coefficients(saved, cotangents)
    log_p, dz = derivative(sampling, entries, labels, saved, c)
    z = log_p + (row_stats.finite(saved.max) + saved.log_sum)[:, None]
    values = scaling.unscale(spec, rows, row_ids, z, dz.values)
    return SparseDerivative(dz.columns, jnp.where(rows.active[:, None], values, 0))


class SortedEntries(NamedTuple):
    """Entries of all tokens in the order of their columns, empty slots last."""

    columns: jax.Array  # int32 [N (K + 1)]
    tokens: jax.Array
    values: jax.Array


def sort_by_column(dz: SparseDerivative) -> SortedEntries:
    """Pairs of all entries; tokens of one column stay in their order."""
    n_slots = dz.columns.shape[1]
    index = jnp.arange(dz.columns.size, dtype=jnp.int32)
    columns, index = lax.sort((dz.columns.reshape(-1), index), num_keys=1)
    return SortedEntries(columns, index // n_slots, dz.values.reshape(-1)[index])


def _slopes(c, ln_p, p, label):
    """α - label + β ln p + γ p, of rows [N, slots]; an absent coefficient is zero."""
    slope = jnp.zeros_like(p)
    terms = (c.alpha, 1), (label, -1), (c.beta, ln_p), (c.gamma, p)
    for coefficient, factor in terms:
        if coefficient is not None:
            slope += coefficient[:, None] * factor
    return slope


def _broadcast_rows(rows, x):
    return rows.reshape(rows.shape + (1,) * (x.ndim - 1))


def check_key(key, gradient, shape: tuple[int, ...]) -> jax.Array | None:
    """A typed PRNG key, or one for each token; None where nothing is sampled."""
    if not isinstance(gradient, Sample):
        if key is not None:
            raise ValueError(
                "key must not be given without gradient=jaxmem.Sample(k): only this "
                "gradient draws random numbers"
            )
        return None
    if key is None:
        raise ValueError(
            f"key must be given with gradient={gradient}, such as "
            "jax.random.fold_in(jax.random.key(seed), step)"
        )
    return check_keys(key, shape)


def check_keys(key, shape: tuple[int, ...]) -> jax.Array:
    """A typed PRNG key, or one for each token; those of `PRNGKey` are uint32."""
    is_array = isinstance(key, (jax.Array, np.ndarray))
    try:
        if not is_array:
            raise TypeError("no array")
        keys = jnp.asarray(key)
        if not jnp.issubdtype(keys.dtype, jax.dtypes.prng_key):
            keys = jax.random.wrap_key_data(keys)
    except TypeError as error:
        got = f"{key.dtype}{list(key.shape)}" if is_array else checks.brief(key)
        raise TypeError(
            f"key must be a PRNG key, as jax.random.key makes them, got {got}"
        ) from error
    if keys.shape not in ((), shape):
        raise ValueError(
            f"key must be one PRNG key or one for each token, {list(shape)}, got keys "
            f"of shape {list(keys.shape)}"
        )
    return keys
