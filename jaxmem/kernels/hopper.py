"""Backend "hopper": one kernel each way on NVIDIA H100 and H200, GEMMs for the rest.

Forward, a kernel reduces tiles of logits to statistics as they appear: no logits are
stored. Backward, another one makes the logits' derivative of a chunk of tokens, in 16
bits, and two GEMMs turn it into the gradients. Active rows come first, as in "xla".
Pallas is imported when a kernel first runs.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxmem import _stats, _xla
from jaxmem._spec import Spec
from jaxmem._xla import Head, Logits, Rows
from jaxmem.kernels.tiles import Tiles

# Measured on one H200, jax 0.11.2, N=8192 D=4096 V=151936: forward 1.14 of the GEMM's
# time with group=4, 1.21 with 1, 1.15 with 4 and panel=8, in one run; derivatives 1.01
# with group=1, 1.11 with 4, in another.
FORWARD = Tiles(group=4)
BACKWARD = Tiles(group=1, stored=32, slots=2)

# Of the caller's chunks that a step backward takes: 16-bit derivatives of two have the
# bytes of one chunk's float32 logits.
CHUNKS = 2
MAX_ROWS = 8_192  # of one forward launch; 16,384 measure 1% slower, in twice the bytes
# At 512 tokens the forward pass alone measured slower than "xla", from 2048 on it did
# not; smaller chunks have not been measured.
MIN_TOKENS, MIN_CHUNK = 2048, 1024
_SWIZZLE = 64  # 16-bit numbers; TMA cuts an axis into whole ones
_MIN_COLUMNS = 128  # with a single one, TMA would write what lies beyond into it


def supported(spec: Spec, source: Head | Logits) -> str | None:
    """None where this backend runs, else the reason why not, in words."""
    return refuses_call(spec, source) or refuses_machine()


def refuses_machine() -> str | None:
    """What this process lacks, whatever the call."""
    if jax.__version_info__ < (0, 11):
        return f"it needs jax 0.11 or newer, this is {jax.__version__}"
    if jax.default_backend() != "gpu":
        return f"it needs an NVIDIA Hopper GPU, jax runs on {jax.default_backend()!r}"
    capability = getattr(jax.devices()[0], "compute_capability", "none")
    if str(capability) != "9.0":
        return f"it needs compute capability 9.0 (Hopper), this GPU has {capability}"
    return None


def refuses_call(spec: Spec, source: Head | Logits) -> str | None:
    """What about the call is not for this backend, on any machine."""
    if isinstance(source, Logits):
        return "it makes logits from hidden states and W, the caller has logits already"
    if spec.compute_dtype not in (jnp.bfloat16, jnp.float16):
        return f"it multiplies bfloat16 or float16, hidden is {spec.compute_dtype}"
    return None


def unproven(spec: Spec, source: Head | Logits) -> str | None:
    """Why a call that could run here has not been measured to be better than "xla"."""
    if isinstance(source, Logits):
        return "never with logits that the caller has"
    if jax.device_count() > 1:  # XLA can split its own operations over devices
        return "is not measured on more than one device"
    if source.hidden.shape[0] < MIN_TOKENS:
        return f"is not measured below {MIN_TOKENS} tokens"
    if spec.chunk < MIN_CHUNK:
        return f"is not measured below chunks of {MIN_CHUNK} tokens"
    same_type = source.W.dtype == spec.compute_dtype
    if not same_type or any(n % _SWIZZLE for n in source.W.shape):
        return (
            f"would copy W, which is not {spec.compute_dtype} with both axes multiples "
            f"of {_SWIZZLE}"
        )
    return None


def forward(spec: Spec, source: Head, rows: Rows, names) -> dict:
    """The named fields of `Outputs` for every row, 0 where inactive."""
    from jaxmem.kernels import forward as kernel

    n_rows = rows.labels.shape[0]
    padded = _pad(spec, _xla.cast(spec, source))
    n_here = _forward_rows(spec, padded, n_rows)
    env = _env(spec, padded, n_here, spec.vocab_size, FORWARD)

    def chunk(row_ids, outputs):
        labels = _xla.take(rows.labels, row_ids)
        # Active rows come first, so that the kernel needs no more than their number.
        n_here = jnp.sum(row_ids < n_rows, dtype=jnp.int32)[None]
        stats = kernel.statistics(
            env, _hidden(padded, row_ids), padded.W, labels, n_here, padded.bias,
            _inverse_temperature(rows, row_ids),
        )  # fmt: skip
        made = _stats.finish(stats, labels < spec.vocab_size)._asdict()
        return {k: _xla.put(outputs[k], row_ids, made[k]) for k in outputs}

    outputs = {k: jnp.zeros(n_rows, _xla.output_dtype(spec, k)) for k in names}
    return _for_active_chunks(spec, env, rows.active, chunk, outputs)


def backward(
    spec: Spec, source: Head, rows: Rows, saved: _stats.Outputs, cotangents
) -> Head:
    """Cotangent of the source; sums over tokens in float32."""
    from jaxmem.kernels import dlogits as kernel

    padded = _pad(spec, _xla.cast(spec, source))
    n_rows = rows.labels.shape[0]
    n_here = _whole_blocks(min(n_rows, CHUNKS * spec.chunk))
    env = _env(spec, padded, n_here, None, BACKWARD)

    def chunk(row_ids, sums):
        of_rows = _stats.Outputs(*(_xla.take(x, row_ids) for x in saved))
        log_sum = _xla.take(saved.log_sum, row_ids, fill_value=kernel.NO_ROW)
        of_rows = of_rows._replace(log_sum=log_sum)
        g = _stats.Cotangents(*(_xla.take(x, row_ids) for x in cotangents))
        h = _hidden(padded, row_ids)
        dz = kernel.derivative(
            env, h, padded.W, _xla.take(rows.labels, row_ids), of_rows,
            _stats.coefficients(of_rows, g), padded.bias,
            _inverse_temperature(rows, row_ids),
        )  # fmt: skip
        dh, dw = _gradients(spec, padded.W, h, dz)
        return Head(
            hidden=_xla.put(sums.hidden, row_ids, dh),
            W=sums.W + dw,
            bias=None if sums.bias is None else sums.bias + _over_rows(dz),
        )

    sums = Head(
        hidden=jnp.zeros((n_rows, env.depth), spec.compute_dtype),
        W=jnp.zeros(padded.W.shape, jnp.float32),
        bias=None if source.bias is None else jnp.zeros(env.columns, jnp.float32),
    )
    sums = _for_active_chunks(spec, env, rows.active, chunk, sums)
    return jax.tree.map(_like, sums, source)


def _gradients(spec, W, h, dz):
    """dz W, rounded once, and dzᵀ h in float32, which is added up over chunks."""
    over_v = ((1,), (0 if spec.layout == "vd" else 1,))
    dh = lax.dot_general(
        dz, W, (over_v, ((), ())), preferred_element_type=spec.compute_dtype
    )
    left, right = (dz, h) if spec.layout == "vd" else (h, dz)
    dw = lax.dot_general(
        left, right, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32
    )
    return dh, dw


def _over_rows(dz):
    """The bias's gradient: of derivatives in 16 bits, like W's."""
    return jnp.sum(dz, axis=0, dtype=jnp.float32)


def _for_active_chunks(spec, env, active, body, carry):
    """One chunk needs no loop, so XLA may lay its parts out freely."""
    if active.shape[0] <= env.n_rows:
        ids = jnp.nonzero(active, size=env.n_rows, fill_value=active.shape[0])[0]
        return body(ids.astype(jnp.int32), carry)
    spec = dataclasses.replace(spec, chunk=env.n_rows)
    return _xla.for_active_chunks(spec, active, body, carry)


def _env(spec, padded, n_rows, visited, tiles) -> Any:
    from jaxmem.kernels.logits import Env

    columns, depth = padded.W.shape if spec.layout == "vd" else padded.W.shape[::-1]
    return Env(
        tiles, n_rows, depth, columns, visited or columns, spec.vocab_size, spec.layout,
        spec.compute_dtype, spec.softcap, _n_blocks(),
    )  # fmt: skip


def _n_blocks():
    """One a multiprocessor. No result depends on it."""
    return getattr(jax.devices()[0], "core_count", None) or 132


def _forward_rows(spec, padded, n_rows):
    """Rows a launch: no more bytes, with their statistics, than "xla" has logits."""
    columns, depth = padded.W.shape if spec.layout == "vd" else padded.W.shape[::-1]
    groups = -(-columns // (FORWARD.columns * FORWARD.group))
    # Merging holds what it reads and half of what it has written.
    a_row = 2 * depth + 4 * 5 * 2 * groups
    fitting = 4 * spec.chunk * spec.columns // a_row
    return _whole_blocks(min(n_rows, max(fitting, FORWARD.block_rows), MAX_ROWS))


def _whole_blocks(n_rows):
    return -(-n_rows // FORWARD.block_rows) * FORWARD.block_rows


def _pad(spec, head):
    """W and bias with whole swizzles along both axes; no copy where they fit."""
    to_columns = max(_round_up(spec.columns), _MIN_COLUMNS)
    depth = head.W.shape[1 if spec.layout == "vd" else 0]
    sizes = (to_columns, _round_up(depth))
    W = _pad_to(head.W, sizes if spec.layout == "vd" else sizes[::-1])
    bias = None if head.bias is None else _pad_to(head.bias, (to_columns,))
    return Head(head.hidden, W, bias)


def _round_up(n):
    return -(-n // _SWIZZLE) * _SWIZZLE


def _pad_to(x, sizes):
    after = [size - n for size, n in zip(sizes, x.shape, strict=True)]
    return jnp.pad(x, [(0, n) for n in after]) if any(after) else x


def _hidden(padded, row_ids):
    h = _xla.take(padded.hidden, row_ids)
    return _pad_to(h, (h.shape[0], _round_up(h.shape[1])))


def _inverse_temperature(rows, row_ids):
    if rows.temperature is None:
        return None
    return 1 / _xla.take(rows.temperature, row_ids, fill_value=1)


def _like(total, primal):
    """In the primal's type, without the padding."""
    return total[tuple(map(slice, primal.shape))].astype(primal.dtype)
