"""Estimates a job's memory from shapes alone, if no compiler is installed."""

import math
from typing import Any

import jax

from jaxmem.models.decoder import HeadConfig, ModelConfig
from jaxmem.planning import jobs, table
from jaxmem.planning.phase import device_bytes
from jaxmem.score.run import ScoreConfig
from jaxmem.train import starting
from jaxmem.train.jobs import dpo, sft
from jaxmem.train.jobs.config import DistillJobConfig, DpoJobConfig, GrpoJobConfig
from jaxmem.train.jobs.distill_program import DistillProgram
from jaxmem.train.jobs.policy_program import PolicyProgram
from jaxmem.train.program import gradient_shapes


def sizes(config: jobs.TrainConfig) -> dict[str, int]:
    """Bytes on one device by name, during the backward pass of one micro-batch.

    Devices of the default backend are used, as many as the mesh has.

    Args:
        config: of training.

    Returns:
        Name to bytes, without zeros.
    """
    config = starting.resolved(config)
    if isinstance(config, GrpoJobConfig):
        program: Any = PolicyProgram(config)
        tokens = config.grpo.max_tokens_train
    else:
        vocab_size = config.model.vocab_size or config.data.vocab_size
        tokens = config.data.batch_size * config.data.sequence_length
        if isinstance(config, DpoJobConfig):
            program, tokens = dpo.Program(config, vocab_size), 2 * tokens
        elif isinstance(config, DistillJobConfig):
            program = DistillProgram(config, vocab_size)
            tokens = math.prod(program.shapes[-1])
        else:
            program = sft.Program(config, vocab_size)
    state = program.state_shapes
    by_name = {
        "trained weights": device_bytes(state.params),
        "frozen weights": device_bytes(program.frozen_shapes),
        "moments": device_bytes(state.optimizer),
        "gradients": device_bytes(gradient_shapes(state.params)),
    }
    if isinstance(config, GrpoJobConfig) and config.grpo.kl_coefficient:
        by_name["reference weights"] = by_name["trained weights"]
    if isinstance(config, DistillJobConfig):
        by_name["teacher"] = device_bytes(program.teacher.state_shapes.params)
    kept = jobs.kept_bytes(
        program.model_config, program.policy, tokens, program.layout.sizes
    )
    by_name["activations kept"] = kept or 0
    by_name["the head"] = head_bytes(program.model_config, config.head, tokens)
    return {name: size for name, size in by_name.items() if size}


def head_bytes(model: ModelConfig, head: HeadConfig, tokens: int) -> int:
    """Bytes of a chunk's logits and their derivative, (8 + b)·C·V.

    Args:
        model: of the decoder.
        head: its options; if it is not fused, C is the number of all tokens.
        tokens: tokens of a micro-batch.

    Returns:
        The bytes.
    """
    assert model.vocab_size is not None
    fused = head.implementation == "fused"
    chunk = head.chunk if fused and isinstance(head.chunk, int) else None
    item = jax.numpy.dtype(model.dtype).itemsize
    return (8 + item) * min(tokens, chunk or tokens) * model.vocab_size


def text(config: jobs.TrainConfig | ScoreConfig, device: str) -> str:
    """The estimate as a table, which states that nothing was compiled."""
    if isinstance(config, ScoreConfig):
        return "nothing can be said of scoring without a compiler"
    by_name = sizes(config)
    rows = [[f"GiB of one {device}", "by shapes alone"]]
    rows += [[name, table.gib(size)] for name, size in by_name.items()]
    rows.append(["at least", table.gib(sum(by_name.values()))])
    return (
        f"{table.aligned(rows)}\n\nNot compiled: a sum of shapes, without what one "
        "block's backward pass, products and collectives take beside."
    )
