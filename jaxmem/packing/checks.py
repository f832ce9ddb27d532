"""Checks of the arguments of `jaxmem.packing`, before anything is allocated."""

import numpy as np

from jaxmem.base import messages
from jaxmem.base.ranges import Range, integers

_SLOTS = 2**31  # bound of slots per micro-batch over all ranks: int32 numbers them
COUNTS = integers(1, limit=_SLOTS - 1)
ROWS = 2**20  # most rows per micro-batch over all ranks; most parts of `karmarkar_karp`
QUADRATIC = Range(0, limit=1e6)  # of a cost, far above that of attention
_LARGEST = float(np.finfo(np.float64).max)


def check_lengths(lengths, max_tokens, width, limit="max_tokens"):
    """Return lengths as int64 numbers that fit rows; raise for others."""
    tokens = as_array("lengths", lengths)
    if tokens.size == 0:
        tokens = tokens.astype(np.int64)
    if not np.issubdtype(tokens.dtype, np.integer):
        raise TypeError(f"lengths must be integers, got {tokens.dtype}")
    if tokens.ndim != 1:
        raise ValueError(f"lengths must have one axis, got shape {tokens.shape}")
    for i in np.flatnonzero((tokens < 0) | (tokens > width))[:1].tolist():
        if tokens[i] < 0:
            raise ValueError(f"lengths[{i}] must not be negative, got {tokens[i]}")
        row = "" if width == max_tokens else f"a row of {width} tokens under "
        raise ValueError(
            f"lengths[{i}] is {tokens[i]} tokens, longer than {row}"
            f"{limit}={max_tokens}; raise it, or cut the sequence"
        )
    return tokens.astype(np.int64)


def check_row_lengths(row_lengths, max_tokens):
    """Return the widths of rows, ascending; raise for invalid widths."""
    lengths = (max_tokens,) if row_lengths is None else row_lengths
    widths = tuple(np.ravel(as_array("row_lengths", lengths)).tolist())
    good = widths and not any(map(integers(1, max_tokens).problem, widths))
    if not good or list(widths) != sorted(set(widths)):
        expected = f"increasing integers from 1 to max_tokens={max_tokens}"
        raise ValueError(messages.must_be("row_lengths", expected, widths))
    return widths


def check_size(max_tokens, narrowest, ranks):
    """Raise if there would be more rows or slots than a machine can hold."""
    if ranks * max_tokens >= _SLOTS:
        expected = f"below 2**31 slots / max_tokens={max_tokens}"
        raise ValueError(messages.must_be("ranks", expected, ranks))
    rows = max_tokens // narrowest * ranks
    if rows > ROWS:
        raise ValueError(
            f"ranks={ranks} give {rows:,} rows of {narrowest} tokens in a micro-batch; "
            f"at most {ROWS:,} are possible: lower ranks or max_tokens, or raise the "
            "smallest of row_lengths"
        )


def check_costs(costs):
    """Return costs as an array of numbers that can be compared and added."""
    array = as_array("costs", costs)
    good = array.ndim == 1 and (array.size == 0 or array.dtype.kind in "biufV")
    array = array.astype(np.float64) if good else array
    if not good or not np.all((array >= 0) & (array <= _LARGEST / max(array.size, 1))):
        raise ValueError("costs must have one axis of finite numbers, none negative")
    return array


def check_fill(fill, dtype):
    """Require a scalar that the dtype can represent."""
    array = as_array("fill", fill)
    if array.ndim:
        raise ValueError(f"fill must be a scalar, got shape {array.shape}")
    good = array.dtype.kind != "c" or dtype.kind == "c"
    if good and np.issubdtype(dtype, np.integer):
        if not (np.isfinite(array) and array == np.round(array)):
            raise ValueError(f"fill must be an integer for {dtype}, got {fill}")
        good = np.iinfo(dtype).min <= array.item() <= np.iinfo(dtype).max
    if not good:
        raise ValueError(f"fill must be a number that {dtype} holds, got {fill}")


def check_alike(name, arrays, first_axes):
    """Require equal axes after the first ones, which are the tokens'."""
    expected = arrays[0].shape[first_axes:]
    for array in arrays:
        if array.shape[first_axes:] != expected:
            raise ValueError(
                f"{name} must have the same axes after the token axis, got {expected} "
                f"and {array.shape[first_axes:]}"
            )


def as_arrays(name, values):
    """Return a list of arrays, or raise an error that names the argument."""
    try:
        values = list(values)
    except TypeError as error:
        expected = "a sequence of arrays"
        raise TypeError(messages.must_be(name, expected, values)) from error
    return [as_array(f"{name}[{i}]", value) for i, value in enumerate(values)]


def as_array(name, value):
    """Return an array of numbers, or raise an error that names the argument."""
    expected = "an array of numbers"
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise TypeError(messages.must_be(name, expected, value)) from error
    if array.dtype.kind in "OSUMm" or array.dtype.names:  # objects, text, dates, ...
        raise TypeError(messages.must_be(name, expected, value))
    return array


def check_each_length(arrays, lengths):
    """Require one array per sequence, with one entry per token."""
    if len(arrays) != len(lengths):
        raise ValueError(
            f"values must have one array per sequence, {len(lengths)}, got "
            f"{len(arrays)}"
        )
    for i, (array, length) in enumerate(zip(arrays, lengths.tolist(), strict=True)):
        if array.shape[:1] != (length,):
            got = f"has {array.shape[0]}" if array.ndim else "is a scalar"
            raise ValueError(
                f"values must have one entry per token: values[{i}] {got}, not {length}"
            )
