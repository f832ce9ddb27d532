"""The devices that programs are compiled for: this machine's, or others.

with devices.target("h200", 2) as planned:
    compiled = jax.jit(step).lower(*shapes).compile()  # for two H200s
"""

from jaxmem.devices.current import (
    backend as backend,
    count as count,
    current as current,
    has_mosaic as has_mosaic,
    has_wgmma as has_wgmma,
    is_stand_in as is_stand_in,
    planned as planned,
    stand_in as stand_in,
    target as target,
)
from jaxmem.devices.table import (
    MOST_FRACTION as MOST_FRACTION,
    Device as Device,
    find as find,
    known as known,
    of_kind as of_kind,
)
from jaxmem.devices.targets import (
    CompilerMissing as CompilerMissing,
    compiler_missing as compiler_missing,
)
