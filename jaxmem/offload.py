"""Deprecated path of `jaxmem.remat.offload`."""

import warnings

from jaxmem.remat.offload import (
    Streamed as Streamed,
    Transformation as Transformation,
    fetch as fetch,
    park as park,
)

warnings.warn(
    "jaxmem.offload is deprecated and will be removed in the next version: "
    "import jaxmem.remat.offload",
    DeprecationWarning,
    stacklevel=2,
)
