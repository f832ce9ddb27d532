"""Training jobs: supervised fine-tuning and GRPO, configured by gin files."""

import typing

from jaxmem.base import imports

imports.require(
    __name__, "train", "gin", "grain", "optax", "orbax", "rich", "tokenizers"
)

if typing.TYPE_CHECKING:
    from jaxmem.train import (
        config as config,
        jobs as jobs,
    )
else:
    __getattr__, __dir__ = imports.lazy(__name__, "config", "jobs")
