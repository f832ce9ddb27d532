"""Estimates a job's memory from shapes alone, if no compiler is installed."""

import jax.numpy as jnp

from jaxmem.base import messages
from jaxmem.head.maths import eight_bits
from jaxmem.models.decoder import ModelConfig
from jaxmem.models.training_head import HeadConfig
from jaxmem.planning import table
from jaxmem.train.phases import Programs, device_bytes


def sizes(programs: Programs) -> dict[str, int]:
    """Bytes on one device by name, during the backward pass of one micro-batch."""
    phase = programs.backward
    shapes = {**phase.arguments, **phase.held}
    by_name = {name: device_bytes(tree) for name, tree in shapes.items()}
    by_name |= phase.parts
    tokens = phase.tokens // phase.micro_batches
    by_name["the head"] = head_bytes(programs.model, programs.head, tokens)
    return {name: size for name, size in by_name.items() if size}


def head_bytes(model: ModelConfig, head: HeadConfig, tokens: int) -> int:
    """Bytes of a chunk's logits and their derivative, (8 + b)·C·V.

    If it is not fused, C is the number of all tokens of a micro-batch. A forward pass
    in 8 bits has a copy of the head besides.
    """
    assert model.vocab_size is not None
    fused = head.logits == "fused"
    chunk = head.chunk if fused and isinstance(head.chunk, int) else None
    item = jnp.dtype(model.dtype).itemsize
    logits = (8 + item) * min(tokens, chunk or tokens) * model.vocab_size
    in_8_bits = head.sample is not None and head.sample.forward == "int8"
    copy = eight_bits.copy_bytes(model.vocab_size, model.hidden) if in_8_bits else 0
    return logits + copy


def text(programs: Programs, device: str) -> str:
    """The estimate as a table, which states that nothing was compiled."""
    by_name = sizes(programs)
    rows = [[f"GiB of one {device}", "by shapes alone"]]
    rows += [[name, table.gib(size)] for name, size in by_name.items()]
    rows.append(["at least", table.gib(sum(by_name.values()))])
    return (
        f"{messages.aligned(rows)}\n\nNot compiled: a sum of shapes, without what one "
        "block's backward pass, products and collectives take beside."
    )
