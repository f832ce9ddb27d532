"""Packs ragged sequences into micro-batches of a few static shapes."""

from jaxmem import _imports
from jaxmem.packing.plan import (
    MicroBatch as MicroBatch,
    Packing as Packing,
    buckets as buckets,
    first_fit_decreasing as first_fit_decreasing,
    karmarkar_karp as karmarkar_karp,
    pack as pack,
)

__dir__ = _imports.public_dir(__name__)
