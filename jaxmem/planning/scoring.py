"""The program of a scoring run, for `jaxmem plan DIRECTORY`."""

import dataclasses
import functools
from typing import Any

import jax
from flax import nnx

from jaxmem import checkpoints
from jaxmem.models.decoder import Decoder
from jaxmem.models.training_head import HeadConfig
from jaxmem.score.run import ScoreConfig
from jaxmem.score.teacher_columns import TeacherColumns, token_columns
from jaxmem.train.phases import Phase, Programs


class Scoring:
    """A scoring run, as `jaxmem plan` reads it: a mesh and programs."""

    mesh = None  # one device

    def __init__(self, config: ScoreConfig):
        self.config = config

    def plan(self) -> Programs:
        """A forward pass of one micro-batch of the widest rows, on one device."""
        config = self.config
        described = checkpoints.read_config(config.model)
        dtype = config.dtype or described.dtype or "float32"
        model = dataclasses.replace(described.model, dtype=dtype, param_dtype=dtype)
        head = HeadConfig(chunk=config.chunk)
        decoder = nnx.eval_shape(lambda: Decoder(model, head, rngs=nnx.Rngs(0)))
        width = min(config.max_tokens, described.max_positions)
        ids = jax.ShapeDtypeStruct((config.max_tokens // width, width), "int32")
        phase = Phase(
            "forward",
            functools.partial(
                token_columns.trace, decoder, ids, ids, ids, ids, None, TeacherColumns()
            ),
            {"weights": nnx.state(decoder)},
            tokens=ids.size,
        )
        note = "a device scores alone: --devices adds none"
        return Programs((phase,), model, head, notes=(note,))

    def scaled(self, factor: float) -> Any:
        """Raise a ValueError: there is nothing to search."""
        raise ValueError("--fit is for training: scoring keeps nothing to choose")
