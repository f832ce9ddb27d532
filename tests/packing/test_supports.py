"""Ragged supports: from dense ones and back, and taken in another order."""

import numpy as np
import pytest

from jaxmem import packing

DENSE = np.array([[5, -1, 7], [-1, -1, -1], [2, -3, -1], [0, 9, 4]])
IDS, OFFSETS = [5, 7, 2, 0, 9, 4], [0, 2, 2, 3, 6]


def lists(supports):
    ids, offsets = supports
    return [ids[a:b].tolist() for a, b in zip(offsets, offsets[1:], strict=False)]


def test_from_dense():
    made = packing.support_to_csr(DENSE)
    assert made.ids.tolist() == IDS and made.offsets.tolist() == OFFSETS
    assert made.ids.dtype == made.offsets.dtype == np.int32


def test_any_leading_shape_and_a_mask():
    where = np.array([[True], [False]])
    made = packing.support_to_csr(DENSE.reshape(2, 2, 3), where)
    assert lists(made) == [[5, 7], [], [], []]
    assert lists(packing.support_to_csr([3, -1])) == [[3]]


def test_capacity():
    made = packing.support_to_csr(DENSE, capacity=8)
    assert made.ids.tolist() == [*IDS, -1, -1] and made.offsets.tolist() == OFFSETS
    taken = packing.take_supports(*made, [3], capacity=4)
    assert taken.ids.tolist() == [0, 9, 4, -1] and lists(taken) == [[0, 9, 4]]


def test_and_back():
    dense = packing.csr_to_support(IDS, OFFSETS)
    np.testing.assert_array_equal(
        dense, [[5, 7, -1], [-1, -1, -1], [2, -1, -1], [0, 9, 4]]
    )
    assert dense.dtype == np.int32
    wide = packing.csr_to_support([8, *IDS, 8], np.add(OFFSETS, 1), max_ids=4)
    np.testing.assert_array_equal(wide[:, :3], dense)
    assert (wide[:, 3] == -1).all()
    assert lists(packing.support_to_csr(dense)) == lists((np.array(IDS), OFFSETS))


def test_nothing():
    assert packing.csr_to_support([], [0]).shape == (0, 0)
    made = packing.support_to_csr(np.zeros((0, 3), int))
    assert made.ids.shape == (0,) and made.offsets.tolist() == [0]
    assert lists(packing.take_supports([], [0], [-1, -1])) == [[], []]


def test_taken_in_another_order():
    rng = np.random.default_rng(0)
    counts = rng.integers(0, 5, 20)
    offsets = np.r_[3, 3 + np.cumsum(counts)]
    ids = rng.integers(0, 99, offsets[-1] + 2)
    tokens = rng.integers(-1, 20, (4, 6))
    made = packing.take_supports(ids, offsets, tokens)
    every = [*lists((ids, offsets)), []]
    assert lists(made) == [every[i] for i in tokens.ravel()]


def test_any_integer_type():
    made = packing.take_supports(np.uint8(IDS), np.uint64(OFFSETS), np.int8([3, 0]))
    assert lists(made) == [[0, 9, 4], [5, 7]]


ERRORS = [
    (lambda: packing.support_to_csr(3), ValueError,
     "support_ids must have an axis of entries, got a scalar"),
    (lambda: packing.support_to_csr([[0.5]]), TypeError,
     "support_ids must be integers, got float64"),
    (lambda: packing.support_to_csr("text"), TypeError,
     "support_ids must be an array of numbers, got 'text'"),
    (lambda: packing.support_to_csr([[2**31]]), ValueError,
     "support_ids must be below 2**31, got 2147483648"),
    (lambda: packing.support_to_csr(DENSE, np.ones(3, bool)), ValueError,
     "where must broadcast to the tokens' shape (4,), got shape (3,)"),
    (lambda: packing.support_to_csr(DENSE, np.ones(4)), TypeError,
     "where must be boolean, got float64"),
    (lambda: packing.support_to_csr(DENSE, capacity=5), ValueError,
     "capacity must be at least the number of ids, 6, got 5"),
    (lambda: packing.support_to_csr(DENSE, capacity=-1), ValueError,
     "capacity must be at least 0, got -1"),
    (lambda: packing.csr_to_support([IDS], OFFSETS), ValueError,
     "ids must have one axis, got shape (1, 6)"),
    (lambda: packing.csr_to_support(IDS, []), ValueError,
     "offsets must have one entry per token and one more, got none"),
    (lambda: packing.csr_to_support(IDS, [0, 3, 2]), ValueError,
     "offsets must not decrease and must be from 0 to 6, the number of ids"),
    (lambda: packing.csr_to_support(IDS, [0, 7]), ValueError,
     "offsets must not decrease and must be from 0 to 6, the number of ids"),
    (lambda: packing.csr_to_support(IDS, OFFSETS, 2), ValueError,
     "max_ids must be at least 3, the ids of token 3, got 2"),
    (lambda: packing.csr_to_support(IDS, OFFSETS, 0), ValueError,
     "max_ids must be at least 1, got 0"),
    (lambda: packing.take_supports(IDS, OFFSETS, [4]), ValueError,
     "tokens must be below 4, the number of tokens of offsets, got 4"),
]  # fmt: skip


@pytest.mark.parametrize("call,kind,message", ERRORS)
def test_errors(call, kind, message):
    with pytest.raises(kind) as error:
        call()
    assert str(error.value) == message
