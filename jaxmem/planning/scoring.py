"""The program of a scoring run, for `jaxmem plan DIRECTORY`."""

import functools
from typing import Any

import jax
from flax import nnx

from jaxmem import checkpoints
from jaxmem.models.decoder import abstract_decoder
from jaxmem.models.training_head import HeadConfig
from jaxmem.score.config import ScoreConfig
from jaxmem.score.teacher_columns import token_columns
from jaxmem.train.phases import Phase, Programs

# Fields of ScoreConfig that a program depends on.
PLANNED = (
    "adapter", "base", "chunk", "dtype", "max_tokens", "sample_ids", "temperature",
    "top_k",
)  # fmt: skip


class Scoring:
    """A scoring run, as `jaxmem plan` reads it: a mesh and programs."""

    mesh = None  # one device

    def __init__(self, config: ScoreConfig):
        self.config = config

    def plan(self) -> Programs:
        """A forward pass of one micro-batch of the widest rows, on one device."""
        config = self.config
        options: dict[str, Any] = {} if config.base is None else {"base": config.base}
        described = checkpoints.configured(
            config.model, dtype=config.dtype, param_dtype=config.dtype,
            adapter=config.adapter, **options,
        )  # fmt: skip
        model, columns = described.model, config.columns
        head = HeadConfig(chunk=config.chunk)
        decoder = abstract_decoder(model, head)
        width = min(config.max_tokens, described.max_positions)
        ids = jax.ShapeDtypeStruct((config.max_tokens // width, width), "int32")
        key = jax.eval_shape(lambda: columns.key(0, 0)) if columns.has_columns else None
        phase = Phase(
            "forward",
            functools.partial(
                token_columns.trace, decoder, ids, ids, ids, ids, key, columns
            ),
            {"weights": nnx.state(decoder)},
            tokens=ids.size,
        )
        note = "scoring runs on one device: --devices has no effect"
        return Programs((phase,), model, head, notes=(note,))

    def scaled(self, factor: float) -> Any:
        """Raise a ValueError: there is nothing to search."""
        raise ValueError(
            "--fit needs a training job: scoring keeps nothing for a backward pass"
        )
