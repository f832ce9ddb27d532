"""Drop-in Flax heads: `from jaxmem.heads.nnx import LMHead`, or `.linen`.

Nothing is imported here, so that each needs only the Flax that it is written for.
"""

import typing

from jaxmem.base import imports

imports.require(__name__, "flax", "flax")

if typing.TYPE_CHECKING:
    from jaxmem.heads import (
        linen as linen,
        nnx as nnx,
    )
else:
    __getattr__, __dir__ = imports.lazy(__name__, "linen", "nnx")
