"""Training jobs: supervised fine-tuning and GRPO, configured by gin files."""

from jaxmem import _imports

_imports.require(
    __name__, "train", "gin", "grain", "optax", "orbax", "rich", "tokenizers"
)

__getattr__, __dir__ = _imports.lazy(__name__, "config", "jobs")
