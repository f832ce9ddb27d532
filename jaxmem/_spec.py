"""The static facts of one call, and every error a user can see about its arguments."""

import dataclasses
import math
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

AUTO_CHUNK_BYTES = 512 * 2**20  # float32 logits alive at once under chunk="auto"

Layout = Literal["vd", "dv"]
Chunk = int | None | Literal["auto"]


@dataclasses.dataclass(frozen=True)
class Spec:
    """Static facts of one call; a field is here only if a backend reads it."""

    columns: int  # of W or of the logits, padding included
    vocab_size: int  # logical; columns from here on are padding
    chunk: int  # tokens whose logits may be alive at once
    outputs: tuple[str, ...]  # fields of TokenStats that the caller gets
    compute_dtype: np.dtype  # of the GEMMs' inputs
    layout: Layout | None = None  # None: the caller already has logits
    softcap: float | None = None

    @property
    def stats_dtype(self) -> np.dtype:
        """Accumulation and statistics: float32, or float64 for float64 inputs."""
        return jnp.promote_types(self.compute_dtype, jnp.float32)


def check_hidden(hidden, name: str = "hidden") -> None:
    """A floating array with at least one axis."""
    _check_float(name, hidden)
    if hidden.ndim < 1:
        raise ValueError(f"{name} must have at least one axis, got a scalar")


def check_layout(hidden, W, layout: Layout | None) -> Layout:
    """Which axis of W is the vocabulary: "vd" for [V, D], "dv" for [D, V]."""
    _check_float("W", W)
    if W.ndim != 2:
        raise ValueError(f"W must be [V, D] or [D, V], got shape {W.shape}")
    if layout not in (None, "vd", "dv"):
        raise ValueError(f"layout must be 'vd', 'dv' or None, got {layout!r}")
    depth = hidden.shape[-1]
    fits = [name for name, axis in (("vd", 1), ("dv", 0)) if W.shape[axis] == depth]
    if layout is None and len(fits) == 2:
        raise ValueError(
            f"layout is ambiguous: W is square, {W.shape}; pass layout='vd' if its "
            "rows are tokens (an embedding table) or 'dv' if its columns are (a "
            "Dense or nnx.Linear kernel)"
        )
    if not fits or (layout is not None and layout not in fits):
        wanted = {"vd": f"[V, {depth}]", "dv": f"[{depth}, V]"}
        expected = wanted[layout] if layout else " or ".join(wanted.values())
        raise ValueError(
            f"W must be {expected} to match hidden's last axis D={depth}, "
            f"got shape {W.shape}"
        )
    if 0 in W.shape:
        raise ValueError(f"W must have at least one token and D ≥ 1, got {W.shape}")
    return layout or fits[0]


def check_labels(labels, shape: tuple[int, ...], vocab_size: int) -> None:
    """Integers, one a token; a label ≥ vocab_size is an error where it can be seen."""
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise TypeError(f"labels must be integers, got {labels.dtype}")
    if labels.shape != shape:
        raise ValueError(
            f"labels must have one entry a token, shape {shape}, got {labels.shape}"
        )
    if labels.size and not isinstance(labels, jax.core.Tracer):
        largest = int(np.max(np.asarray(labels)))
        if largest >= vocab_size:
            raise ValueError(
                f"labels must be below vocab_size={vocab_size}, got {largest}; mark "
                "padding with a negative label or with where="
            )


def check_vocab_size(vocab_size: int | None, columns: int) -> int:
    """The logical vocabulary of a padded matrix."""
    if vocab_size is None:
        return columns
    if not _is_integer(vocab_size) or not 1 <= vocab_size <= columns:
        raise ValueError(
            f"vocab_size must be an integer from 1 to {columns}, the columns there "
            f"are, got {vocab_size!r}"
        )
    return int(vocab_size)


def check_chunk(chunk: Chunk, tokens: int, columns: int) -> int:
    """Tokens a chunk, never more than there are."""
    if chunk is None:
        return max(tokens, 1)
    if chunk == "auto":
        chunk = max(AUTO_CHUNK_BYTES // (4 * columns), 1)
    elif not _is_integer(chunk) or chunk < 1:
        raise ValueError(
            f"chunk must be a positive number of tokens, None or 'auto', got {chunk!r}"
        )
    return max(min(int(chunk), tokens), 1)


def check_softcap(softcap: float | None) -> float | None:
    """A positive Python number, or None for no cap."""
    if softcap is None:
        return None
    _refuse_tracer("softcap", softcap)
    if not 0 < float(softcap) < math.inf:
        raise ValueError(f"softcap must be positive and finite, got {softcap!r}")
    return float(softcap)


def check_temperature(temperature, shape: tuple[int, ...]):
    """Positive where it can be seen; a scalar or one a token."""
    got = np.shape(temperature)
    if got not in ((), shape):
        raise ValueError(
            f"temperature must be a scalar or one a token, shape {shape}, got {got}"
        )
    if isinstance(temperature, jax.core.Tracer):
        return temperature
    if not np.all(np.asarray(temperature) > 0):
        raise ValueError(
            f"temperature must be positive, got {np.min(np.asarray(temperature))}"
        )
    return temperature


def check_where(where, shape: tuple[int, ...]) -> None:
    """Booleans that broadcast to the tokens."""
    if where.dtype != jnp.bool_:
        raise TypeError(f"where must be boolean, got {where.dtype}")
    try:
        fits = np.broadcast_shapes(where.shape, shape) == shape
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(f"where must broadcast to {shape}, got shape {where.shape}")


def check_bias(bias, columns: int) -> None:
    """One number a column of the logits."""
    _check_float("bias", bias)
    if bias.shape != (columns,):
        raise ValueError(f"bias must have shape ({columns},), got {bias.shape}")


def as_array(name: str, value, convert: Callable = jnp.asarray):
    """Arrays and array-likes pass; anything else is named in the error."""
    if isinstance(value, (jax.Array, np.ndarray)):
        return value
    try:
        return convert(value)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{name} must be an array, got {type(value).__name__}"
        ) from error


def _check_float(name, value):
    if not jnp.issubdtype(value.dtype, jnp.floating):
        raise TypeError(
            f"{name} must be floating point (float32, bfloat16, float16), got "
            f"{value.dtype}"
        )


def _refuse_tracer(name, value):
    if isinstance(value, jax.core.Tracer):
        raise TypeError(f"{name} must be a Python number, got a traced array")


def _is_integer(value):
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)
