"""Drop-in Flax heads: `from jaxmem.heads.nnx import LMHead`, or `.linen`.

Nothing is imported here, so that each needs only the Flax that it is written for.
"""

from jaxmem import _imports

_imports.require(__name__, "flax", "flax")

__getattr__, __dir__ = _imports.lazy(__name__, "linen", "nnx")
