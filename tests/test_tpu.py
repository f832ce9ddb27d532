"""Programs that XLA compiles for TPUs; nothing here has run on one.

Needs libtpu (1.3 GB), but no TPU: `pip install jax[tpu]`. Compiled for v5e and v6e.
"""

import functools
import importlib.util
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import jaxmem
from jaxmem import devices, sharding
from jaxmem.data.documents import DataConfig
from jaxmem.heads.linen import LMHead as LinenHead
from jaxmem.heads.nnx import LMHead
from jaxmem.models.decoder import ModelConfig
from jaxmem.models.partitioning import MeshConfig
from jaxmem.models.training_head import HeadConfig
from jaxmem.train.jobs import sft
from jaxmem.train.jobs.config import SftJobConfig
from jaxmem.train.memory import RematConfig
from jaxmem.train.optimizer import OptimizerConfig
from jaxmem.train.settings import RunConfig
from tests.helpers.targets import forward_kl, jsd, reverse_kl, topk_kl

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs libtpu: jax[tpu]"
)

N, D, V, C = 512, 128, 4096, 128  # tokens, width, vocabulary, chunk
LOGITS = 4 * C * V  # bytes
W_SUM = 4 * V * D  # bytes of the float32 sum of W's gradient
HIDDEN, W = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((N, D), (V, D)))
LABELS = jax.ShapeDtypeStruct((N,), jnp.int32)
KINDS = ("v5e", "v6e")


def several(y):
    return jnp.stack([y, y + 1], axis=-1)


VERBS = {
    "logprobs": lambda h, W, y: jaxmem.logprobs(h, W, y, chunk=C),
    "token_stats": lambda h, W, y: jaxmem.token_stats(h, W, y, chunk=C),
    "entropy": lambda h, W, y: jaxmem.entropy(h, W, chunk=C),
    "reverse_kl": lambda h, W, y: reverse_kl(h, W, 2 * h, W, chunk=C),
    "forward_kl": lambda h, W, y: forward_kl(h, W, 2 * h, W, chunk=C),
    "jsd": lambda h, W, y: jsd(h, W, 2 * h, W, chunk=C),
    "selected_logprobs": lambda h, W, y: jaxmem.selected_logprobs(
        h, W, several(y), chunk=C
    ),
    "support_logprobs": lambda h, W, y: jaxmem.support_logprobs(
        h, W, y, several(y), chunk=C
    ),
    "topk": lambda h, W, y: jaxmem.topk(h, W, 8, chunk=C),
    "topk_kl": lambda h, W, y: topk_kl(
        h, W, several(y), -2.0 - several(y) / V, chunk=C
    ),
    "sample_ids": lambda h, W, y: jaxmem.sample_ids(
        h, W, 8, jax.random.key(0), chunk=C
    ),
}  # fmt: skip
TWO = ("reverse_kl", "forward_kl", "jsd")  # heads, each with logits


def loss(h, W, y):
    return jaxmem.token_loss(lambda stats: -stats.logprob, h, W, y, chunk=C)[0].sum()


def summed(verb):
    def total(h, W, y):
        made = jax.tree.leaves(VERBS[verb](h, W, y))
        return sum(x.sum() for x in made if jnp.issubdtype(x.dtype, jnp.floating))

    return total


def compiled(kind, fn, *args, count=1):
    with devices.target(kind, count):
        return jax.jit(fn).lower(*args).compile()


def copies(program):
    """Copies of a chunk's logits into another layout."""
    return re.findall(rf"= f32\[{C},{V}\]\S* copy\(", program.as_text())


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("kind", KINDS)
def test_forward_memory_is_the_formula(kind, verb):
    """8·C·V where two heads have logits, 4·C·V else: no copy, no term stored."""
    program = compiled(kind, VERBS[verb], HIDDEN, W, LABELS)
    temporary = program.memory_analysis().temp_size_in_bytes
    assert temporary <= (2 if verb in TWO else 1) * LOGITS + LOGITS // 4
    assert not copies(program)


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("kind", KINDS)
def test_backward_memory_is_the_formula(kind, verb):
    """(8 + b)·C·V + 4·V·D, as elsewhere; 4·C·V more where two heads have logits."""
    program = compiled(kind, jax.grad(summed(verb), (0, 1)), HIDDEN, W, LABELS)
    temporary = program.memory_analysis().temp_size_in_bytes
    assert temporary <= (3.5 if verb in TWO else 2.5) * LOGITS + W_SUM + LOGITS // 4


@pytest.mark.parametrize("kind", KINDS)
def test_token_loss_memory_on_tpu(kind):
    program = compiled(kind, jax.grad(loss, (0, 1)), HIDDEN, W, LABELS)
    temporary = program.memory_analysis().temp_size_in_bytes
    assert temporary <= 2.5 * LOGITS + 2 * W_SUM + LOGITS // 4
    assert not copies(program)


@pytest.mark.parametrize("kind", KINDS)
def test_heads(kind):
    from flax import nnx

    module = nnx.eval_shape(
        lambda: LMHead(D, V, chunk=C, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    )
    of_nnx = compiled(kind, lambda m, h, y: m.loss(h, y), module, HIDDEN, LABELS)
    head = LinenHead(V, chunk=C, param_dtype=jnp.bfloat16)
    weights = jax.eval_shape(head.init, jax.random.key(0), HIDDEN)

    def of_linen(weights, h, y):
        return head.apply(weights, h, y, method=head.loss)

    for program in (of_nnx, compiled(kind, of_linen, weights, HIDDEN, LABELS)):
        assert program.memory_analysis().temp_size_in_bytes < 4 * N * V / 2


@pytest.mark.parametrize("axis", ["tokens", "vocab"])
def test_parallel(axis):
    with devices.target("v6e", 4) as planned:
        mesh = Mesh(np.array(planned), ("x",))
        split = {"tokens": (P("x"), P()), "vocab": (P(), P("x"))}[axis]
        names = {"tokens": {"tokens": "x"}, "vocab": {"vocab": "x"}}[axis]
        h, W_, y = (
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))
            for x, spec in ((HIDDEN, split[0]), (W, split[1]), (LABELS, split[0]))
        )
        verb = sharding.parallel(jaxmem.token_stats, mesh, **names)

        def total(h, W, y):
            return verb(h, W, y, chunk=C).logprob.sum()

        program = jax.jit(jax.grad(total, (0, 1))).lower(h, W_, y).compile()
    assert "all-reduce" in program.as_text()
    assert program.memory_analysis().temp_size_in_bytes < 4 * N * V


def config_of(policy, **mesh):
    model = ModelConfig(
        layers=2, hidden=D, ff=256, heads=4, kv_heads=2, head_dim=32, vocab_size=V,
        dtype="bfloat16",
    )  # fmt: skip
    return SftJobConfig(
        data=DataConfig(sequence_length=256, batch_size=4), model=model,
        head=HeadConfig(chunk=C), optimizer=OptimizerConfig(warmup_steps=1),
        run=RunConfig(steps=3), remat=RematConfig(policy), mesh=MeshConfig(**mesh),
    )  # fmt: skip


@functools.cache
def step(kind, policy, axis=None):
    config = config_of(policy, **({axis: 2} if axis else {}))
    with devices.target(kind, 2 if axis else 1):
        program = sft.SftProgram(config, V)
        return program.trace_step(config.head).lower().compile()


@pytest.mark.parametrize("policy", ["none", "full", "save_attention", "offload_block"])
@pytest.mark.parametrize("kind", KINDS)
def test_supervised_steps(kind, policy):
    account = step(kind, policy).memory_analysis()
    assert account.alias_size_in_bytes > 0.9 * account.output_size_in_bytes
    if policy == "offload_block":
        block_in = 2 * 4 * 256 * D * 2  # of both layers
        assert account.host_temp_size_in_bytes >= block_in


@pytest.mark.parametrize("axis", ["data", "fsdp", "sequence", "tensor"])
def test_supervised_steps_on_two(axis):
    assert re.search("all-reduce|reduce-scatter", step("v6e", "full", axis).as_text())
