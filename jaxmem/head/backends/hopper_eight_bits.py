"""Sampled derivatives of a forward pass in 8 bits, on NVIDIA Hopper GPUs.

The kernels of what `xla_eight_bits` computes: a launch of rows stores exponentials of
8-bit logits, entries are selected from them as in `hopper_sampled`, and a kernel
computes their logits in 16 bits. The backward pass is that of `hopper_sampled`.
"""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np

from jaxmem.head.backends import hopper, hopper_sampled
from jaxmem.head.kernels import active, block_sizes
from jaxmem.head.maths import backend_operands, column_sampling, eight_bits
from jaxmem.head.maths.backend_operands import Factors, TokenRows
from jaxmem.head.maths.column_sampling import Entries
from jaxmem.head.maths.eight_bits import EightBits
from jaxmem.head.maths.spec import Spec


def forward(
    spec: Spec, source: Factors, rows: TokenRows, names, shared: EightBits
) -> tuple[dict, Entries]:
    """See `xla_eight_bits.forward`."""
    from jaxmem.head.kernels import int8_factors, sampled_logits, sampled_select
    from jaxmem.head.kernels.forward import others_and_exps

    head = source.cast(spec)
    W, sampling = int8_factors.padded(shared.W), hopper_sampled.sampling_of(spec)
    starts = column_sampling.starts_of(spec, rows)
    size = block_sizes.whole(min(rows.labels.shape[0], spec.chunk))
    env = _launch_env(spec, W.values, size)

    def body(block, results):
        hidden = backend_operands.take(head.hidden, block.ids)
        labels = backend_operands.take(rows.labels, block.ids)
        exists = labels < spec.vocab_size
        label_logit = sampled_logits.at_entries(
            labels[:, None], head.W, hidden, spec.layout
        )
        has_label = exists & (labels >= 0)
        label_logit = jnp.where(has_label, label_logit[:, 0], -jnp.inf)
        low = int8_factors.padded(eight_bits.rounded(hidden, shared.channels))
        others, kept = others_and_exps(env, low, W, labels, block.n_active[None])
        normaliser = eight_bits.normaliser(others, label_logit)
        facts = sampled_select.RowFacts(
            labels, others.label_logit, others.max, normaliser
        )
        of_rows = functools.partial(
            column_sampling.continued, spec, backend_operands.take(starts, block.ids)
        )
        selected = sampled_select.entries(
            sampling, env.tiles.columns, kept, facts, of_rows, block.n_active
        )
        z = sampled_logits.at_entries(selected.columns, head.W, hidden, spec.layout)
        new = eight_bits.corrected(sampling, others, selected, z, label_logit, exists)
        return eight_bits.put(results, block.ids, new)

    results = eight_bits.nothing(spec, sampling, rows, names)
    return active.for_each_block(rows.active, env.n_rows, body, results)


def _launch_env(spec, values, n_rows):
    """Static facts of a launch, whose W is [V, D] whatever the head's layout."""
    rounded = dataclasses.replace(spec, layout="vd", compute_dtype=np.dtype(np.int8))
    env = hopper.launch_env(rounded, Factors(values, values, None), n_rows, "exps")
    # Half as many bytes a stage; `lowbit_h100.csv` has other sizes' times.
    tiles = dataclasses.replace(
        env.tiles, stages=6, stored=64, slots=1, operand_bytes=1
    )
    return dataclasses.replace(env, tiles=tiles)
