"""Packs ragged sequences and ragged supports into arrays of a few static shapes."""

from jaxmem.base import imports
from jaxmem.packing.plan import (
    MicroBatch as MicroBatch,
    Packing as Packing,
    buckets as buckets,
    first_fit_decreasing as first_fit_decreasing,
    karmarkar_karp as karmarkar_karp,
    pack as pack,
)
from jaxmem.packing.supports import (
    Supports as Supports,
    csr_to_support as csr_to_support,
    support_to_csr as support_to_csr,
    take_supports as take_supports,
)

__dir__ = imports.public_dir(__name__)
