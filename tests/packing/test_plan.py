"""Nothing lost, nothing crossed, nothing over budget; and the numbers do not notice."""

import functools
import math

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from flax import nnx

from jaxmem import packing
from jaxmem.models.decoder import Decoder, ModelConfig

hypothesis.settings.register_profile(
    "packing", deadline=None, max_examples=60, derandomize=True
)
PROFILE = hypothesis.settings.get_profile("packing")


@st.composite
def calls(draw):
    """Arguments of `pack` that are possible."""
    max_tokens = draw(st.integers(1, 40))
    widths = draw(st.none() | st.sets(st.integers(1, max_tokens), min_size=1))
    longest = max(widths) if widths else max_tokens
    lengths = draw(st.lists(st.integers(0, longest), max_size=40))
    return lengths, dict(
        max_tokens=max_tokens,
        row_lengths=sorted(widths) if widths else None,
        ranks=draw(st.integers(1, 4)),
        quadratic=draw(st.sampled_from([0.0, 0.1, 10.0])),
    )


def ragged(lengths, seed=0, trailing=()):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((n, *trailing)).astype(np.float32) for n in lengths]


# --------------------------------------------------------------------- properties


@PROFILE
@hypothesis.given(calls())
def test_plan_places_each_token_once_in_budget(call):
    lengths, options = call
    packed = packing.pack(lengths, **options)
    widths = options["row_lengths"] or [options["max_tokens"]]
    seen = []
    for batch in packed.micro_batches:
        rows, width = batch.segment_ids.shape
        assert width in widths
        assert rows == options["max_tokens"] // width * options["ranks"]
        for array in batch:
            assert array.shape == (rows, width) and array.dtype == np.int32
        for segment_ids, positions, sequence in zip(*batch, strict=True):
            on = segment_ids > 0
            # Segments 1, 2, ... without a gap, padding last.
            assert (np.diff(on.astype(int)) <= 0).all()
            steps = np.diff(segment_ids[on], prepend=0)
            assert (
                np.isin(steps, (0, 1)).all() and (steps == (positions[on] == 0)).all()
            )
            assert (np.diff(positions[on])[steps[1:] == 0] == 1).all()
            assert (sequence[~on] == -1).all() and not positions[~on].any()
            seen += zip(sequence[on].tolist(), positions[on].tolist(), strict=True)
            # One segment, one sequence, and the other way round.
            pairs = set(zip(segment_ids[on].tolist(), sequence[on].tolist()))  # noqa: B905
            assert len(pairs) == len(set(sequence[on].tolist())) == segment_ids.max()
    assert sorted(seen) == [(i, t) for i, n in enumerate(lengths) for t in range(n)]


def test_empty_sequences_keep_type():
    packed = packing.pack([2, 0, 1], max_tokens=4)
    (ids,) = packed.place([[1, 2], [], [3]])
    assert ids.dtype == np.int64 and sorted(ids.ravel()) == [0, 1, 2, 3]
    (pairs,) = packed.place([[[1], [2]], [], [[3]]])
    assert pairs.shape == (*ids.shape, 1)
    with pytest.raises(ValueError, match="fill must be an integer for int64, got nan"):
        packed.place([[1, 2], [], [3]], fill=np.nan)


@PROFILE
@hypothesis.given(calls())
def test_unpack_inverts_place(call):
    lengths, options = call
    packed = packing.pack(lengths, **options)
    for trailing in ((), (3,)):
        values = ragged(lengths, trailing=trailing)
        placed = packed.place(values, fill=np.nan)
        assert sum(np.isnan(x).sum() for x in placed) == sum(
            (batch.segment_ids == 0).sum() * math.prod(trailing)
            for batch in packed.micro_batches
        )
        back = packed.unpack(placed)
        assert len(back) == len(lengths)
        for a, b in zip(values, back, strict=True):
            assert len(a) == len(b) and (a.size == 0 or a.dtype == b.dtype)
            np.testing.assert_array_equal(a.ravel(), b.ravel())


@PROFILE
@hypothesis.given(calls())
def test_plan_few_shapes_equal_steps_deterministic(call):
    lengths, options = call
    packed, again = (packing.pack(np.array(lengths, int), **options) for _ in range(2))
    assert len(packed.shapes) <= len(options["row_lengths"] or [0])
    for a, b in zip(packed.micro_batches, again.micro_batches, strict=True):
        for x, y in zip(a, b, strict=True):
            np.testing.assert_array_equal(x, y)
    for batch in packed.micro_batches:
        assert len(batch.segment_ids) % options["ranks"] == 0
        assert batch.segment_ids.any()  # no step of padding alone
    if options["row_lengths"] is None:
        bins = packing.first_fit_decreasing(lengths, options["max_tokens"])
        assert len(packed.micro_batches) == math.ceil(len(bins) / options["ranks"])


def fewest_bins(lengths, capacity):
    """By dynamic programming over subsets: (bins, tokens in the last one)."""
    best = {0: (1, 0)}
    for mask in range(1, 2 ** len(lengths)):
        choices = []
        for i, n in enumerate(lengths):
            if mask >> i & 1:
                bins, used = best[mask ^ (1 << i)]
                choices.append(
                    (bins, used + n) if used + n <= capacity else (bins + 1, n)
                )
        best[mask] = min(choices)
    return best[2 ** len(lengths) - 1][0]


@PROFILE
@hypothesis.given(
    st.integers(5, 30).flatmap(
        lambda c: st.tuples(st.just(c), st.lists(st.integers(1, c), max_size=8))
    )
)
def test_first_fit_decreasing_within_its_bound(drawn):
    capacity, lengths = drawn
    bins = packing.first_fit_decreasing(lengths, capacity)
    assert sorted(i for row in bins for i in row) == list(range(len(lengths)))
    assert all(0 < sum(lengths[i] for i in row) <= capacity for row in bins)
    best = fewest_bins(lengths, capacity) if lengths else 0
    assert 9 * len(bins) <= 11 * best + 6


@PROFILE
@hypothesis.given(st.lists(st.integers(0, 50), max_size=30), st.integers(1, 9))
def test_karmarkar_karp_partitions(costs, k):
    parts = packing.karmarkar_karp(costs, k)
    assert len(parts) == k
    assert sorted(i for part in parts for i in part) == list(range(len(costs)))
    sums = [sum(costs[i] for i in part) for part in parts]
    assert sums == sorted(sums, reverse=True)
    # Never further apart than the largest cost.
    assert max(sums) - min(sums) <= max(costs, default=0)


# ------------------------------------------------------------------------ balance


def largest_sum(costs, parts):
    return max(sum(costs[i] for i in part) for part in parts)


def greedy(costs, k):
    """Longest processing time first: each to the part that has least."""
    sums = [0.0] * k
    for cost in sorted(costs, reverse=True):
        sums[sums.index(min(sums))] += cost
    return max(sums)


@pytest.mark.parametrize("k", [2, 3, 8])
@pytest.mark.parametrize("quadratic", [0, 1e-3])
def test_karmarkar_karp_is_no_worse_than_greedy(k, quadratic):
    for seed in range(5):
        lengths = np.random.default_rng(seed).lognormal(6, 1, 64).astype(int)
        costs = (lengths * (1 + quadratic * lengths)).tolist()
        parts = packing.karmarkar_karp(costs, k)
        assert largest_sum(costs, parts) <= greedy(costs, k)


def test_karmarkar_karp_beats_greedy():
    costs = [8, 7, 6, 5, 4]
    assert largest_sum(costs, packing.karmarkar_karp(costs, 2)) == 16
    assert greedy(costs, 2) == 17


def rows_of(packed):
    """Sequences of every row."""
    rows = [row for batch in packed.micro_batches for row in batch.sequence]
    return sorted(sorted(set(row[row >= 0].tolist())) for row in rows)


def test_rows_that_run_anyway_share_the_work():
    # First-fit decreasing alone would fill one row and leave the other rank two tokens.
    assert packing.first_fit_decreasing([6, 2, 2, 2], 8) == [[0, 1], [2, 3]]
    assert rows_of(packing.pack([6, 2, 2, 2], 8, ranks=2)) == [[0], [1, 2, 3]]
    # Attention makes the long one dear, so that it stays alone if the others fit.
    lengths = [6, 2, 2, 2, 2]
    by_tokens = rows_of(packing.pack(lengths, 8, ranks=2))
    assert [len(row) for row in by_tokens] == [2, 3]
    assert rows_of(packing.pack(lengths, 8, ranks=2, quadratic=1)) == [
        [0],
        [1, 2, 3, 4],
    ]


def test_budget_comes_before_balance():
    # The differencing method would make 11 and 9.
    lengths = [5, 5, 4, 3, 3]
    assert largest_sum(lengths, packing.karmarkar_karp(lengths, 2)) == 11
    assert rows_of(packing.pack(lengths, 10)) == [[0, 1], [2, 3, 4]]


def test_short_sequences_fill_wide_rows_first():
    packed = packing.pack([14, 2, 3, 3, 3], 16, row_lengths=(4, 16))
    wide, narrow = packed.micro_batches
    assert wide.segment_ids.shape == (1, 16) and narrow.segment_ids.shape == (4, 4)
    assert rows_of(packed) == [[], [0, 1], [2], [3], [4]]
    assert packed.padding == 1 - 25 / 32
    shares = [packed.share(i) for i in range(len(packed.micro_batches))]
    assert sum(shares) == pytest.approx(1)


@pytest.mark.parametrize("quadratic", [0.0, 1e-3])
def test_ranks_get_the_same_work(quadratic):
    ranks = 4
    lengths = np.random.default_rng(0).lognormal(4.5, 0.7, 400).astype(int)
    lengths = np.minimum(lengths, 1024)
    cost = lengths * (1 + quadratic * lengths)
    packed = packing.pack(
        lengths,
        1024,
        row_lengths=packing.buckets(1024),
        ranks=ranks,
        quadratic=quadratic,
    )
    work = np.zeros(ranks)
    for batch in packed.micro_batches:
        for rank, rows in enumerate(np.split(batch.sequence, ranks)):
            work[rank] += cost[np.unique(rows[rows >= 0])].sum()
    assert work.sum() == pytest.approx(cost.sum())
    assert work.max() / work.mean() < 1.03
    assert packed.padding < 0.15
    assert len(packed.shapes) <= 3


def test_costliest_rows_alternate_between_ranks():
    # Each fills a row of its own, so that dealing is all there is.
    lengths = np.arange(85, 101)
    packed = packing.pack(lengths, 100, ranks=2)
    assert len(packed.micro_batches) == 8
    tokens = sum((batch.segment_ids > 0).sum(1) for batch in packed.micro_batches)
    assert tokens[0] == tokens[1]
    pairs = [lengths[batch.sequence[:, 0]] for batch in packed.micro_batches]
    assert all(abs(a - b) == 1 for a, b in pairs)
    assert [max(pair) for pair in pairs] == list(range(100, 85, -2))


def test_sequence_takes_narrowest_row():
    for length, width in ((1, 4), (4, 4), (5, 8), (8, 8), (9, 16), (16, 16)):
        packed = packing.pack([length], 16, row_lengths=(4, 8, 16))
        assert packed.shapes == {(16 // width, width)}


def test_results_go_from_one_budget_to_the_other():
    lengths = [3, 7, 2, 2, 5]
    train, forward = packing.pack(lengths, 8), packing.pack(lengths, 32)
    assert len(train.micro_batches) > len(forward.micro_batches) == 1
    values = ragged(lengths)
    old = train.place(forward.unpack(forward.place(values)))
    for a, b in zip(old, train.place(values), strict=True):
        np.testing.assert_array_equal(a, b)


# ------------------------------------------------------------------------- errors


def test_errors():
    def raises(error, message, call):
        with pytest.raises(error) as raised:
            call()
        assert str(raised.value) == message

    pack = packing.pack
    raises(
        ValueError,
        "lengths[2] is 9 tokens, longer than max_tokens=8; raise it, or cut the "
        "sequence",
        lambda: pack([3, 8, 9, 10], 8),
    )
    raises(
        ValueError,
        "lengths[1] is 8 tokens, longer than a row of 4 tokens under max_tokens=8; "
        "raise it, or cut the sequence",
        lambda: pack([3, 8], 8, row_lengths=(2, 4)),
    )
    raises(
        ValueError,
        "lengths[1] must not be negative, got -1",
        lambda: pack([1, -1], 8),
    )
    raises(TypeError, "lengths must be integers, got float64", lambda: pack([1.5], 8))
    raises(
        ValueError,
        "lengths must have one axis, got shape (1, 1)",
        lambda: pack([[1]], 8),
    )
    raises(ValueError, "max_tokens must be at least 1, got 0", lambda: pack([1], 0))
    raises(
        ValueError,
        "ranks must be an integer, got True",
        lambda: pack([1], 8, ranks=True),
    )
    for widths in ((), (4, 2), (2, 2), (2, 9), (2.0,), (0, 4)):
        raises(
            ValueError,
            "row_lengths must be increasing integers from 1 to max_tokens=8, got "
            f"{widths}",
            lambda widths=widths: pack([1], 8, row_lengths=widths),
        )
    raises(
        ValueError,
        "quadratic must be at least 0, got -1",
        lambda: pack([1], 8, quadratic=-1),
    )
    raises(
        ValueError,
        "max_tokens=3 cannot be halved 2 times; lower count",
        lambda: packing.buckets(3),
    )
    raises(
        ValueError,
        "costs must have one axis of finite numbers, none negative",
        lambda: packing.karmarkar_karp([-1], 2),
    )


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: packing.pack([[1, 2], [3]], 8), "lengths must be an array of numbers"),
        (lambda: packing.pack([2, 3], 8, ranks=10**30), "ranks must be at most 2,147"),
        (
            lambda: packing.pack([2, 3], 8, ranks=2**30),
            r"ranks must be below 2\*\*31 s",
        ),
        (
            lambda: packing.pack([2], 8, ranks=2**27),
            "ranks=134217728 give 134,217,728 r",
        ),
        (lambda: packing.pack([2, 3], 10**30), "max_tokens must be at most 2,147,483"),
        (
            lambda: packing.pack([2], 8, quadratic="x"),
            "quadratic must be a number, got 'x'",
        ),
        (lambda: packing.pack([2], 8, quadratic=1e300), "quadratic must be at most 1e"),
        (
            lambda: packing.pack([2], 8, row_lengths=[[1], [2, 3]]),
            "row_lengths must be",
        ),
        (lambda: packing.buckets(8, 10**12), "count must be at most 2,147,483,647"),
        (lambda: packing.buckets(8, 10**6), "max_tokens=8 cannot be halved 999999 tim"),
        (lambda: packing.karmarkar_karp([1], 10**12), r"k must be at most 2\*\*20"),
        (lambda: packing.karmarkar_karp("ab", 2), "costs must be an array of numbers"),
        (
            lambda: packing.karmarkar_karp([1e308] * 9, 2),
            "costs must have one axis of fi",
        ),
        (lambda: packing.first_fit_decreasing([9], 8), "than capacity=8; raise it"),
    ],
)
def test_plan_names_bad_arguments(call, message):
    with pytest.raises((TypeError, ValueError), match=message) as raised:
        call()
    assert len(str(raised.value)) < 300


@pytest.mark.parametrize(
    ("values", "fill", "message"),
    [
        (5, 0, "values must be a sequence of arrays, got 5"),
        ([[1, 2], [[1], [2, 3], 4]], 0, r"values\[1\] must be an array of numbers"),
        ([[1, 2], ["a", "b", "c"]], 0, r"values\[1\] must be an array of numbers"),
        ([5, [1, 2, 3]], 0, r"values\[0\] is a scalar, not 2"),
        (
            [np.zeros((2, 3)), np.zeros((3, 4))],
            0,
            r"values must have the same axes .*4",
        ),
        ([[1, 2], [3, 4, 5]], "x", "fill must be an array of numbers, got 'x'"),
        ([[1, 2], [3, 4, 5]], [1, 2], r"fill must be a scalar, got shape \(2,\)"),
        ([[1, 2], [3, 4, 5]], 1j, "fill must be a number that int64 holds, got 1j"),
        ([np.zeros(2, "i1"), np.zeros(3, "i1")], 300, "that int8 holds, got 300"),
        ([np.zeros(2, "u4"), np.zeros(3, "u4")], -1, "that uint32 holds, got -1"),
    ],
)
def test_values_that_cannot_be_placed(values, fill, message):
    with pytest.raises((TypeError, ValueError), match=message):
        packing.pack([2, 3], 4).place(values, fill)


def test_unpack_refuses_results_of_different_axes():
    packed = packing.pack([2, 3], 4)
    with pytest.raises(ValueError, match=r"results must have the same axes .*\(1,\)"):
        packed.unpack([np.zeros((1, 4, 3)), np.zeros((1, 4, 1))])


def test_errors_of_values_and_results():
    packed = packing.pack([2, 3], 4)
    with pytest.raises(
        ValueError, match="^values must have one array per sequence, 2, got"
    ):
        packed.place([[1, 2]])
    with pytest.raises(
        ValueError, match=r"one entry per token: values\[1\] has 2, not 3"
    ):
        packed.place([[1, 2], [1, 2]])
    with pytest.raises(
        ValueError, match=r"results must have .* of shapes \[\(1, 4\), \(1, 4\)\]"
    ):
        packed.unpack([np.zeros((1, 4))])


# -------------------------------------------------------------- through the decoder

CONFIG = ModelConfig(
    layers=2, hidden=32, ff=48, heads=4, kv_heads=2, head_dim=8, vocab_size=61
)
LENGTHS = [9, 14, 5, 5, 11, 3, 1, 7, 16]


@functools.cache
def decoder():
    return nnx.split(Decoder(CONFIG, rngs=nnx.Rngs(0)))


@functools.cache
def documents():
    """Token ids, and the label of each token but the last."""
    rng = np.random.default_rng(0)
    ids = [rng.integers(0, CONFIG.vocab_size, n).astype(np.int32) for n in LENGTHS]
    return ids, [np.append(x[1:], -1).astype(np.int32) for x in ids]


def logprobs(weights, tokens, segment_ids, positions, labels):
    model = nnx.merge(decoder()[0], weights)
    hidden = model(tokens, segment_ids, positions)
    return model.head.logprobs(hidden, labels)


run = jax.jit(logprobs)
pull = jax.jit(jax.grad(lambda *a: -logprobs(*a).sum() / sum(n - 1 for n in LENGTHS)))


def through(function, which, *budget, **options):
    """The function on every micro-batch of the documents named."""
    ids, labels = ([x[i] for i in which] for x in documents())
    packed = packing.pack([len(x) for x in ids], *budget, **options)
    placed = zip(
        packed.micro_batches, packed.place(ids), packed.place(labels, -1), strict=True
    )
    return packed, [
        function(decoder()[1], tokens, batch.segment_ids, batch.positions, labels)
        for batch, tokens, labels in placed
    ]


EVERY = range(len(LENGTHS))


@pytest.mark.slow
def test_packed_and_alone_have_the_same_logprobs(quick_compilation):
    """Bit for bit where a document begins a row of one shape, as it does alone.

    In other places attention sums in another order, which some processors round
    otherwise.
    """
    packed, results = through(run, EVERY, 32, row_lengths=(16,))
    together = packed.unpack(results)
    assert len(results) == 3
    assert max(batch.segment_ids.max() for batch in packed.micro_batches) > 1
    placed = packed.place([np.full(n, i) for i, n in enumerate(LENGTHS)], -1)
    firsts = {int(i) for rows in placed for i in rows[:, 0]} - {-1}
    assert 4 <= len(firsts) < len(LENGTHS)
    for i in EVERY:
        alone, result = through(run, [i], 32, row_lengths=(16,))
        assert alone.shapes == packed.shapes
        np.testing.assert_allclose(alone.unpack(result)[0], together[i], rtol=1e-6)
        if i in firsts:
            np.testing.assert_array_equal(alone.unpack(result)[0], together[i])
    wider, results = through(run, EVERY, 48)
    for a, b in zip(wider.unpack(results), together, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    assert min(x[:-1].max() for x in together if len(x) > 1) < -1


@pytest.mark.slow
def test_gradients_do_not_depend_on_the_grouping(quick_compilation):
    def total(*budget, **options):
        _, gradients = through(pull, EVERY, *budget, **options)
        return len(gradients), jax.tree.map(lambda *x: sum(x), *gradients)

    steps, one_way = total(32, row_lengths=(16,))
    others = [total(48), total(16, ranks=2)]
    assert len({steps, *(n for n, _ in others)}) > 1
    for _, other in others:
        for a, b in zip(jax.tree.leaves(one_way), jax.tree.leaves(other), strict=True):
            assert np.abs(a).max() > 1e-4
            np.testing.assert_allclose(b, a, atol=3e-6 * max(1, np.abs(a).max()))
