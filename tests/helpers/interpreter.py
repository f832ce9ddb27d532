"""Kernels without a GPU: lowered for one, and in the interpreter."""

import contextlib
import dataclasses

import jax
import numpy as np
import pytest
from jax._src import callback

from jaxmem.head.backends import hopper
from jaxmem.head.kernels import tuned
from jaxmem.head.maths import partition


@pytest.fixture
def lowered_anywhere(monkeypatch):
    monkeypatch.setattr(hopper, "refuses_machine", lambda: None)


@pytest.fixture
def interpreted(lowered_anywhere, quick_compilation, monkeypatch):
    """The kernels run on this CPU, two blocks at a time.

    The interpreter knows neither copies to a cluster nor additions on the way out.
    """
    import jax.experimental.pallas.mosaic_gpu as plgpu
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    from jaxmem.head.kernels import ring, row_tiles

    monkeypatch.setattr(row_tiles, "load", _load)
    monkeypatch.setattr(gpu_callbacks, "np", _NumpyOfOneThread())
    monkeypatch.setattr(hopper, "n_blocks", lambda: 2)
    monkeypatch.setattr(ring, "add_to", _add_inside)
    monkeypatch.setattr(callback, "io_callback_impl", _call_with_numpy)
    chosen = tuned.tiles_for
    monkeypatch.setattr(
        tuned, "tiles_for", lambda *of: dataclasses.replace(chosen(*of), cluster=1)
    )
    jax.clear_caches()
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        yield
    jax.clear_caches()


@contextlib.contextmanager
def _interpreting():
    import jax.experimental.pallas.mosaic_gpu as plgpu
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    from jaxmem.head.kernels import row_tiles

    jax.clear_caches()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_callbacks, "np", _NumpyOfOneThread())
        patch.setattr(partition, "is_possible", lambda: False)  # no ordered effects
        patch.setattr(row_tiles, "load", _load)
        patch.setattr(row_tiles, "TILE", 512)
        with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
            yield
    jax.clear_caches()


@pytest.fixture
def rows_interpreted(quick_compilation):
    """Kernels of rows in memory run on this CPU, a few columns at a time."""
    with _interpreting():
        yield


@pytest.fixture(scope="module")
def all_rows_interpreted(quick_compilation):
    """`rows_interpreted` for each test of a module, which share what is traced."""
    with _interpreting():
        yield


def _load(ref, shape, layout):
    """`row_tiles.load`: the interpreter reshapes no references."""
    import jax.experimental.pallas.mosaic_gpu as plgpu

    return plgpu.load(ref, optimized=False).reshape(shape)


def _call_with_numpy(*args, callback, **_):
    """`io_callback_impl` without the copy of each argument to a device and back.

    The interpreter calls Python for each read and write of a kernel, which uses numpy:
    the copies were half of its time.
    """
    scalars = [x.item() if x.ndim == 0 and x.dtype.kind == "i" else x for x in args]
    return jax.tree.map(np.asarray, callback(*scalars))


class _NumpyOfOneThread:
    """numpy whose matrix products run in one thread.

    Many threads of the interpreter multiply at the same time, and those that OpenBLAS
    starts for each product spin while they wait: half of the processors' time.
    """

    LARGEST = 2**17  # multiplications; above 2^18 OpenBLAS uses several threads

    def __getattr__(self, name):
        return getattr(np, name)

    def matmul(self, a, b, dtype):
        rows = max(self.LARGEST // b.size, 1)
        parts = [a[i : i + rows] for i in range(0, len(a), rows)]
        return np.concatenate([np.matmul(part, b, dtype=dtype) for part in parts])


def _add_inside(smem, gmem):
    """smem added to the part of an array that it is meant for; nothing beyond."""
    import jax.experimental.pallas as pl

    starts = [index.start for index in gmem.transforms[0].indices]
    row, column = (a < n for a, n in zip(starts, gmem.ref.shape, strict=True))

    @pl.when(row & column)
    def _inside():
        gmem[...] = gmem[...] + smem[...]


needs_pallas = pytest.mark.skipif(
    jax.__version_info__ < (0, 11),
    reason=f"needs jax 0.11 for its Mosaic GPU interpreter, this is {jax.__version__}",
)
