"""Checks of the public functions' arguments, with an error message for each."""

from collections.abc import Iterator
from typing import TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxmem.base import messages, ranges
from jaxmem.head.maths.spec import Chunk, Layout

# With chunk="auto": below a width of 4,096, a chunk of 1,024 tokens would take so
# little time that its start is a part of it. The bytes are those of 1,024 tokens with
# 262,144 columns.
_AUTO_TOKENS = 1024
_AUTO_PRODUCTS = 1024 * 4096  # of one column
AUTO_CHUNK_BYTES = 2**30  # of float32 logits

# XLA on a CPU runs different code for whole groups of rows and for the remainder. Only
# whole groups make results batch-invariant.
_ROWS = 16
_DEPTH: dict[Layout, int] = {"vd": 1, "dv": 0}  # the axis of W that has D
_MAX_AXES = 64  # the most axes of a numpy array


def as_array(name: str, value) -> jax.Array:
    """Convert to a jax array, or raise a TypeError that names the argument."""
    if isinstance(value, jax.Array):
        return value
    if _is_no_array(value):
        raise _not_an_array(name, value)
    try:
        return jnp.asarray(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise _not_an_array(name, value) from error


def as_visible_array(name: str, value) -> jax.Array | np.ndarray:
    """Like `as_array`, but keep numpy values, which stay readable under jit.

    A jax array would also truncate 64-bit values to 32 bits.
    """
    if isinstance(value, jax.Array):
        return value
    if _is_no_array(value):
        raise _not_an_array(name, value)
    if _holds_jax(value):
        return as_array(name, value)
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise _not_an_array(name, value) from error
    if (
        array.dtype.kind in "OSUMm" or array.dtype.names
    ):  # objects, text, dates, records
        raise _not_an_array(name, value)
    return array


def check_real(name: str, value) -> None:
    """Require floats of at least 16 bits, integers of at least 8, or booleans."""
    if value.dtype != jnp.bool_:
        check_number(name, value)


def check_number(name: str, value) -> None:
    """Require floats of at least 16 bits, or integers of at least 8."""
    is_float = jnp.issubdtype(value.dtype, jnp.floating) and value.dtype.itemsize > 1
    kind = value.dtype.kind if isinstance(value.dtype, np.dtype) else None
    if not (is_float or kind in ("i", "u")):
        raise TypeError(f"{name} must hold real numbers, got {value.dtype}")


def check_count(name: str, value: object, low: int = 1) -> int:
    """Require a Python integer that int32 can represent, and return it."""
    if not _is_integer(value) or not low <= value < 2**31:
        raise ValueError(
            f"{name} must be an integer, at least {low} and below 2**31, got "
            f"{brief(value)}"
        )
    return int(value)


def check_hidden(hidden, name: str = "hidden") -> None:
    """Require an array of 16, 32 or 64-bit floats with at least one axis."""
    check_float(name, hidden)
    if hidden.dtype.itemsize < 2:
        raise TypeError(
            f"{name} must be float32, bfloat16 or float16, got {hidden.dtype}; convert "
            f"it with {name}.astype"
        )
    if not hidden.shape or hidden.shape[-1] == 0:
        raise ValueError(
            f"{name} must have a last axis that is not empty, got shape {hidden.shape}"
        )


def check_layout(hidden, W, layout: Layout | None, prefix: str = "") -> Layout:
    """The layout of W: "vd" for [V, D] or "dv" for [D, V].

    Errors put the prefix before the arguments' names, as in Teacher.W.
    """
    name, depth = f"{prefix}W", hidden.shape[-1]
    check_float(name, W)
    if W.ndim != 2 or 0 in W.shape:
        raise ValueError(
            f"{name} must be [V, D] or [D, V], with at least one token, got shape "
            f"{W.shape}"
        )
    if layout is not None and not (isinstance(layout, str) and layout in _DEPTH):
        raise ValueError(
            f"{prefix}layout must be 'vd', 'dv' or None, got {brief(layout)}"
        )
    of_depth: list[Layout] = [k for k, axis in _DEPTH.items() if W.shape[axis] == depth]
    fits: list[Layout] = [k for k in of_depth if layout is None or layout == k]
    if len(fits) == 1:
        return fits[0]
    if fits:
        raise ValueError(
            f"{prefix}layout is ambiguous: {name} is square, {W.shape}; pass "
            "jaxmem.Head(W, layout='vd') if its rows are tokens (an embedding table), "
            "or 'dv' if its columns are (a Dense or nnx.Linear kernel)"
        )
    shapes = {"vd": f"[V, {depth}]", "dv": f"[{depth}, V]"}
    expected = shapes[layout] if layout else " or ".join(shapes.values())
    raise ValueError(
        f"{name} must be {expected} to match {prefix}hidden's last axis D={depth}"
        f"{f' and {prefix}layout={layout!r}' if layout else ''}, got shape {W.shape}"
    )


def as_integers(name: str, value) -> jax.Array | np.ndarray:
    """An array of integers; a numpy array stays one, to be readable under jit."""
    value = as_visible_array(name, value)
    if not jnp.issubdtype(value.dtype, jnp.integer):
        raise TypeError(
            f"{name} must be integers, got {value.dtype}; convert them with "
            f"{name}.astype('int32')"
        )
    return value


def check_labels(labels, where, shape: tuple[int, ...], vocab_size: int) -> None:
    """Require one integer per token, below vocab_size where unmasked and not traced."""
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise TypeError(
            f"labels must be integers, got {labels.dtype}; convert them with "
            "labels.astype('int32')"
        )
    if labels.shape != shape:
        raise ValueError(
            f"labels must have one entry per token, shape {shape}, got {labels.shape}"
        )
    if not (is_visible(labels) and is_visible(where)):
        return
    counts = np.broadcast_to(True if where is None else np.asarray(where), shape)
    largest = np.max(np.asarray(labels), initial=0, where=counts)
    if largest >= vocab_size:
        raise ValueError(
            f"labels must be below vocab_size={vocab_size}, got {largest}; mark "
            "padding with a negative label or with where="
        )


def check_vocab_size(vocab_size: int | None, columns: int) -> int:
    """The logical vocabulary size of a matrix that may be padded."""
    if vocab_size is None:
        return columns
    if not _is_integer(vocab_size) or not 1 <= vocab_size <= columns:
        raise ValueError(
            f"vocab_size must be an integer from 1 to {columns}, the number of "
            f"columns, got {brief(vocab_size)}"
        )
    return int(vocab_size)


def check_chunk(
    chunk: Chunk, tokens: int, columns: int, depth: int | None = None
) -> int:
    """Tokens per chunk: at most the number of tokens, rounded up to whole `_ROWS`.

    `chunk` "auto" stands for `auto_chunk`. A number of tokens that is symbolic, as
    `jax.export` has it, limits none.
    """
    if isinstance(chunk, str) and chunk == "auto":
        chunk = auto_chunk(tokens, columns, depth)
    elif chunk is not None and (not _is_integer(chunk) or chunk < 1):
        raise ValueError(
            "chunk must be a positive number of tokens, None or 'auto', got "
            f"{brief(chunk)}"
        )
    if not _is_integer(tokens):
        if chunk is None:
            raise ValueError(
                "chunk must be a number of tokens or 'auto', not None, if the "
                f"number of tokens is symbolic, {tokens}"
            )
        return int(chunk)
    whole = max(-(-tokens // _ROWS), 1) * _ROWS
    return whole if chunk is None else min(int(chunk), whole)


def auto_chunk(tokens: int, columns: int, depth: int | None) -> int:
    """Tokens per chunk that `chunk="auto"` stands for.

        min(max(1024, min(2^22 / depth, tokens / 8)), 2^30 / (4 · columns))

    rounded down to whole `_ROWS`. The columns are the values of a token that exist at
    once, and `depth` is the number of products of each. Without products, only the
    bytes limit the chunk. A symbolic number of tokens limits none.
    """
    size = AUTO_CHUNK_BYTES // (4 * columns)
    if depth is not None:
        share = tokens // 8 if _is_integer(tokens) else size
        size = min(size, max(_AUTO_TOKENS, min(_AUTO_PRODUCTS // depth, share)))
    return max(size // _ROWS * _ROWS, 1)


def check_softcap(softcap: float | None, name: str = "softcap") -> float | None:
    """A positive Python number, or None for no cap."""
    if softcap is None:
        return None
    if isinstance(softcap, Tracer) or not _is_real(softcap):
        raise TypeError(f"{name} must be a Python number or None, got {brief(softcap)}")
    number = softcap if isinstance(softcap, int) else np.asarray(softcap).tolist()
    if ranges.reals(above=0).problem(number):
        raise ValueError(f"{name} must be positive and finite, got {brief(softcap)}")
    return float(softcap)


def check_temperature(
    temperature, shape: tuple[int, ...], name: str = "temperature"
) -> None:
    """Require a scalar or one number per token, positive where it is not traced."""
    if not _is_real(temperature):
        raise TypeError(
            f"{name} must be a real number or an array of them, got {temperature.dtype}"
        )
    if temperature.shape not in ((), shape):
        raise ValueError(
            f"{name} must be a scalar or one per token, shape {shape}, got shape "
            f"{temperature.shape}"
        )
    if not is_visible(temperature):
        return
    visible = np.asarray(temperature)
    good = _fits_float32(visible) & (visible > 0)
    if not np.all(good):
        bad = visible[~good].flat[0]
        raise ValueError(
            f"{name} must be positive and finite, got {bad}; for greedy decoding use "
            "token_stats(...).is_argmax"
        )


def read_where(where, shape: tuple[int, ...]) -> jax.Array | np.ndarray | None:
    """A mask of booleans that broadcasts to the tokens' shape; None for none."""
    if where is None:
        return None
    where = as_visible_array("where", where)
    if where.dtype != jnp.bool_:
        raise TypeError(
            f"where must be boolean, got {where.dtype}; compare it, as in where != 0"
        )
    check_broadcast("where", where, shape)
    return where


def counted_tokens(where, shape: tuple[int, ...]) -> np.ndarray:
    """The visible mask of the tokens [...], all of them for None."""
    return np.broadcast_to(True if where is None else np.asarray(where), shape)


def check_broadcast(name: str, value, shape: tuple[int, ...]) -> None:
    """Require an array that broadcasts to the tokens' shape."""
    try:
        fits = np.broadcast_shapes(value.shape, shape) == shape
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(
            f"{name} must broadcast to the tokens' shape {shape}, got shape "
            f"{value.shape}"
        )


def check_bias(bias, columns: int, name: str = "bias") -> None:
    """Require one number per column of the logits."""
    check_float(name, bias)
    if bias.shape != (columns,):
        raise ValueError(
            f"{name} must have one entry per token of the vocabulary, shape "
            f"({columns},), got shape {bias.shape}"
        )


def check_per_token(name: str, value, shape: tuple[int, ...]) -> None:
    """Require real numbers whose leading axes are the tokens'."""
    if not jnp.issubdtype(value.dtype, jnp.bool_) and not _is_real(value):
        raise TypeError(f"{name} must hold real numbers, got {value.dtype}")
    if value.shape[: len(shape)] != shape:
        raise ValueError(
            f"{name} must have one entry per token, shape {shape} and maybe further "
            f"axes, got shape {value.shape}; broadcast it, or let loss_fn close over "
            "it, if all tokens share it"
        )


def check_normalizer(normalizer, name: str = "normalizer") -> None:
    """Require a scalar, not negative where it is not traced."""
    if not _is_real(normalizer):
        raise TypeError(f"{name} must be a real number, got {normalizer.dtype}")
    if normalizer.shape != ():
        raise ValueError(f"{name} must be a scalar, got shape {normalizer.shape}")
    if not is_visible(normalizer):
        return
    visible = np.asarray(normalizer)
    if visible != 0 and not (_fits_float32(visible) and visible > 0):
        raise ValueError(f"{name} must be finite and not negative, got {normalizer}")


def check_flag(name: str, value: bool) -> bool:
    """Require a Python boolean, because it decides on something static."""
    if isinstance(value, Tracer) or not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be True or False, got {brief(value)}")
    return bool(value)


def check_vocab_groups(
    vocab_groups: int | None, columns: int, n_shards: int
) -> int | None:
    """The number of groups that the columns of all shards are cut into, or None."""
    if vocab_groups is None:
        return None
    whole = _is_integer(vocab_groups) and vocab_groups > 1
    if not whole or vocab_groups & (vocab_groups - 1):
        raise ValueError(
            "vocab_groups must be a power of two, at least 2, or None, got "
            f"{brief(vocab_groups)}"
        )
    if vocab_groups % n_shards:
        raise ValueError(
            f"vocab_groups must be a multiple of the {n_shards} shards of the "
            f"vocabulary, got {vocab_groups}"
        )
    if columns % vocab_groups:
        raise ValueError(
            f"vocab_groups must divide the {columns} columns of W, got {vocab_groups}; "
            f"pad W to {columns + -columns % vocab_groups} columns and pass "
            "jaxmem.Head(W, vocab_size=…)"
        )
    return int(vocab_groups)


def forward_mode(error: TypeError) -> TypeError:
    """The error to raise for jax's own: advice if it is about forward-mode autodiff."""
    if "forward-mode autodiff" not in str(error):
        return error
    return TypeError(
        "jaxmem: forward-mode autodiff (jax.jvp, jax.jacfwd) of the head is not "
        "supported, because it is a custom_vjp function; use reverse mode: jax.grad, "
        "jax.vjp or jax.jacrev"
    )


def check_float(name: str, value) -> None:
    """Require floating point numbers."""
    if not jnp.issubdtype(value.dtype, jnp.floating):
        raise TypeError(
            f"{name} must be floating point (float32, bfloat16, float16), got "
            f"{value.dtype}"
        )


def _not_an_array(name, value):
    got = type(value).__name__
    if isinstance(value, np.ndarray):
        got = f"{got} of {value.dtype}"
    elif isinstance(value, (list, tuple)):
        got = f"{got} that is ragged or holds something else than 64-bit numbers"
    return TypeError(f"{name} must be an array of numbers, got {got}")


def is_visible(value) -> bool:
    """True if this process can read the values now: not traced, not on other hosts."""
    if isinstance(value, Tracer):
        return False
    return not isinstance(value, jax.Array) or value.is_fully_addressable


def _is_no_array(value):
    """True if the value is text, an iterator, or nested too deeply for an array.

    jax would read it as the name of a dtype, warn, or overflow the stack.
    """
    if isinstance(value, (str, bytes, Iterator)):
        return True
    level = [value]  # breadth-first, as a list may be nested deeper than _MAX_AXES
    for _ in range(_MAX_AXES + 1):
        if any(isinstance(x, (str, bytes)) for x in level):
            return True  # which older jax would read as a type's name
        nested = [x for x in level if isinstance(x, (list, tuple, dict))]
        if not nested:
            return False
        level = [y for x in nested for y in (x.values() if isinstance(x, dict) else x)]
    return True


def _is_real(value):
    if not hasattr(value, "dtype"):
        try:
            value = np.asarray(value)
        except (TypeError, ValueError):
            return False
    kinds = (jnp.floating, jnp.integer)
    return any(jnp.issubdtype(value.dtype, kind) for kind in kinds)


def _fits_float32(value: np.ndarray):
    """True for numbers that are neither 0 nor infinite in float32; False for NaN."""
    size = np.abs(value.astype(np.float64))
    return (size >= ranges.SMALLEST) & (size <= ranges.LARGEST)


def _is_integer(value) -> TypeGuard[int]:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _holds_jax(value):
    """True if the value contains jax arrays, which may be traced."""
    leaves = jax.tree.leaves(value)
    return any(isinstance(x, jax.Array) or hasattr(x, "__jax_array__") for x in leaves)


def brief(value):
    """The value for a message; for an array its dtype and shape."""
    if isinstance(value, Tracer):
        return "a traced array (close over the number, or mark it static for jax.jit)"
    if isinstance(value, (jax.Array, np.ndarray)):
        return f"an array of {value.dtype}, shape {value.shape}"
    return messages.short(value)
