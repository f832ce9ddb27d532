"""One mesh for a run: the steps of one device, on any devices, resumed on any other."""

import dataclasses
import functools
import io
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from rich.console import Console

from jaxmem.data.documents import DataConfig
from jaxmem.data.tasks import TaskConfig
from jaxmem.models import partitioning, ulysses
from jaxmem.models.decoder import ModelConfig
from jaxmem.models.partitioning import Layout, MeshConfig
from jaxmem.models.sampling import SamplingConfig
from jaxmem.models.training_head import HeadConfig
from jaxmem.remat.offload import Streamed
from jaxmem.train import jobs
from jaxmem.train.configuration import ConfigError, load
from jaxmem.train.jobs import sft
from jaxmem.train.jobs.config import GrpoJobConfig, SftJobConfig
from jaxmem.train.jobs.grpo.policy_program import PolicyProgram
from jaxmem.train.jobs.policy_objective import GrpoConfig
from jaxmem.train.memory import RematConfig
from jaxmem.train.optimizer import OptimizerConfig
from jaxmem.train.settings import RunConfig
from tests.helpers import decoders
from tests.helpers.cases import slow
from tests.helpers.shared_programs import programs_of_module

__all__ = ["programs_of_module"]

MODEL = ModelConfig(layers=2, hidden=16, ff=24, heads=4, kv_heads=2, head_dim=8)
DATA = DataConfig(vocab_size=320, sequence_length=32, batch_size=8, held_out=0.1)
RUN = RunConfig(steps=4, checkpoint_every=2, log_every=9, compare_heads=False)


pytestmark = pytest.mark.usefixtures("quick_compilation", "no_picture")


@pytest.fixture(scope="module")
def text_file(tmp_path_factory):
    words = "the head of a model maps each hidden state to a token of its text".split()
    rng = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("text") / "words.jsonl"
    rows = [" ".join(rng.choice(words, 30)) + str(i) for i in range(200)]
    path.write_text("\n".join(f'{{"text": "{row}"}}' for row in rows))
    return path


FULL, LAST_WHOLE = RematConfig(), RematConfig("offload_block", last=1)


def config_of(text_file, out_dir, sizes=(1, 1, 1, 1), remat=FULL, **run):
    return SftJobConfig(
        data=dataclasses.replace(
            DATA, source=str(text_file), cache_dir=str(text_file.parent)
        ),
        model=MODEL,
        head=HeadConfig(chunk=32),
        optimizer=OptimizerConfig(warmup_steps=1, final_fraction=1.0),
        run=dataclasses.replace(RUN, out_dir=str(out_dir), **run),
        mesh=MeshConfig(*sizes),
        remat=remat,
    )


def train(config):
    return jobs.train(config, "", Console(file=io.StringIO()))


@pytest.fixture(scope="module")
def alone(text_file, tmp_path_factory, programs_of_module):
    return train(config_of(text_file, tmp_path_factory.mktemp("alone") / "run"))


def assert_same_steps(result, wanted):
    for got, want in zip(result.history, wanted.history, strict=True):
        assert got.tokens == want.tokens
        assert got.loss == pytest.approx(want.loss, rel=2e-5)
        assert got.grad_norm == pytest.approx(want.grad_norm, rel=2e-4)
    assert result.summary["held_out_loss"] == pytest.approx(
        wanted.summary["held_out_loss"], rel=2e-5
    )


@pytest.mark.full
@pytest.mark.parametrize(
    ("sizes", "remat", "then"),
    [((1, 2, 2, 2), LAST_WHOLE, FULL), slow((1, 4, 1, 2), FULL, LAST_WHOLE)],
)
def test_checkpoint_restores_onto_another_mesh(
    sizes, remat, then, text_file, tmp_path, alone
):
    """Steps on 8 devices and on one are the same; a checkpoint knows no policy."""
    run = dict(steps=3, checkpoint_every=1)
    train(config_of(text_file, tmp_path, sizes, remat, **run))
    run["steps"] = 4
    result = train(config_of(text_file, tmp_path, remat=then, **run))
    assert_same_steps(result, alone)


@pytest.mark.slow
def test_host_moments_restore_onto_another_mesh(
    text_file, tmp_path, alone, monkeypatch
):
    """In other slices: a leaf is in one where its rows are split."""
    small = functools.partial(Streamed, slice_bytes=4096)
    monkeypatch.setattr("jaxmem.train.program.Streamed", small)
    for steps, sizes in (2, (1, 1, 1, 1)), (3, (1, 2, 1, 2)), (4, (2, 1, 1, 1)):
        run = dict(steps=steps, checkpoint_every=1)
        config = config_of(text_file, tmp_path, sizes, **run)
        offloading = dataclasses.replace(config.optimizer, offload=True)
        result = train(dataclasses.replace(config, optimizer=offloading))
    assert_same_steps(result, alone)


@pytest.mark.full
def test_devices_hold_their_parts(text_file, tmp_path):
    """Weights, their moments and a batch are in as many parts as the mesh says."""
    config = config_of(text_file, tmp_path, (1, 2, 2, 2))
    program = sft.SftProgram(config, 320)
    state = program.initial_state()
    assert state.params["embed"]["embedding"].sharding.spec == P(
        "tensor", partitioning.PARTS
    )
    parts = {
        leaf.size // leaf.addressable_shards[0].data.size
        for leaf in jax.tree.leaves(state)
        if leaf.ndim > 1 and leaf.shape[-1] > 8 and leaf.shape[-1] != 16
    }
    assert parts == {8}
    mean = state.optimizer[1][0].mu["blocks"]["feed_forward"]["down"]["kernel"]
    assert mean.sharding.spec == P(None, "tensor", partitioning.PARTS)
    head = program.trace_head(config.head).lower().compile().memory_analysis()
    assert head.temp_size_in_bytes > 0
    rows = program.layout.place(np.zeros((1, 8, 32), np.int32))
    assert rows.addressable_shards[0].data.shape == (1, 4, 16)


def test_layout_of_one_device_changes_nothing():
    layout = Layout(MeshConfig())
    shapes = {"embed": {"embedding": jax.ShapeDtypeStruct((8, 4), jnp.float32)}}
    assert layout.mesh is None and layout.of_weights(shapes) is shapes
    assert layout.compiler_options() == {}
    batch = np.zeros((1, 2, 4))
    assert layout.place(batch) is batch and layout.own_rows(3) == [0, 1, 2]


def test_errors(text_file, tmp_path):
    with pytest.raises(ValueError) as caught:
        Layout(MeshConfig(data=4, tensor=4))
    assert str(caught.value) == (
        "mesh.data=4 x mesh.fsdp=1 x mesh.sequence=1 x mesh.tensor=4 makes 16 devices, "
        "but there are 8 in 1 processes"
    )
    with pytest.raises(ValueError) as caught:
        sft.SftProgram(config_of(text_file, tmp_path, (1, 3, 1, 1)), 320)
    assert str(caught.value) == (
        "mesh.fsdp=3 x mesh.sequence=1 must divide 16, an axis of "
        "blocks/attention/key/kernel (2, 16, 16)"
    )
    with pytest.raises(ValueError) as caught:
        sft.SftProgram(config_of(text_file, tmp_path, (1, 1, 1, 3)), 320)
    assert "mesh.tensor=3 must divide" in str(caught.value)
    with pytest.raises(ValueError, match=r"mesh.data=1 x mesh.fsdp=8 must divide 4"):
        Layout(MeshConfig(fsdp=8)).of_tokens(jax.ShapeDtypeStruct((4, 8), jnp.int32))


def test_completions_indivisible_by_mesh_are_refused():
    odd = dataclasses.replace(POLICY.grpo, prompts=3, group_size=2)
    meshed = dataclasses.replace(POLICY, grpo=odd, mesh=MeshConfig(1, 2, 2, 1))
    with pytest.raises(ValueError) as caught:
        PolicyProgram(meshed)
    assert str(caught.value) == (
        "mesh.data x mesh.fsdp x mesh.sequence must divide grpo.prompts x "
        "grpo.group_size = 6, got 4"
    )


def test_mesh_from_config_file(tmp_path):
    path = tmp_path / "x.gin"
    path.write_text("mesh.fsdp = 4\nmesh.tensor = 2\n")
    config, text = load(path, ["mesh.sequence=1"])
    assert config.mesh == MeshConfig(fsdp=4, tensor=2)
    assert re.search(r"mesh.data\s+= 1", text)
    with pytest.raises(ConfigError, match=r"mesh.data must be at least 1, got 0"):
        load(path, ["mesh.data=0"])


# ------------------------------------------------------------- attention


def attention(query, key, value, mask, by_head=None):
    return jax.nn.dot_product_attention(query, key, value, mask=mask, is_causal=True)


@pytest.mark.full
@pytest.mark.parametrize(
    ("sizes", "kv_heads"),
    [
        ((2, 1, 4, 1), 2),
        ((1, 2, 2, 2), 2),
        ((1, 1, 4, 2), 8),
        ((1, 1, 8, 1), 1),
    ],
)
def test_attention_of_split_sequences(sizes, kv_heads):
    """Documents that end anywhere; fewer key heads than devices; every gradient."""
    rng = np.random.default_rng(0)
    query, *key_value = (
        rng.standard_normal((2, 16, heads, 4), np.float32)
        for heads in (8, kv_heads, kv_heads)
    )
    documents = np.sort(rng.integers(0, 3, (2, 16)), axis=1)
    mask = (documents[:, :, None] == documents[:, None, :])[:, None]

    def run(masked):
        def total(*operands):
            made = ulysses.attend(attention, *operands, mask if masked else None)
            return jnp.sum(jnp.sin(made)), made

        gradients = jax.value_and_grad(total, (0, 1, 2), has_aux=True)
        return jax.jit(gradients)(query, *key_value)

    for masked in (True, False):
        want = run(masked)
        with Layout(MeshConfig(*sizes)).context():
            got = run(masked)
        for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("sizes", "tokens", "heads", "message"),
    [
        ((1, 1, 4, 1), 6, (8, 2), "mesh.sequence=4 must divide tokens of a row, got 6"),
        (
            (1, 1, 4, 2),
            8,
            (4, 2),
            "mesh.sequence=4 x mesh.tensor=2 must divide model.heads, got 4",
        ),
        ((1, 1, 2, 4), 8, (8, 2), "mesh.tensor=4 must divide model.kv_heads, got 2"),
    ],
)
def test_attention_that_cannot_be_split(sizes, tokens, heads, message):
    query, key = (np.zeros((1, tokens, n, 4), np.float32) for n in heads)
    with Layout(MeshConfig(*sizes)).context(), pytest.raises(ValueError) as caught:
        ulysses.attend(attention, query, key, key, None)
    assert str(caught.value) == message


def test_look_up():
    table = np.arange(32, dtype=np.float32).reshape(8, 4)
    ids = np.array([[0, 7, 3, 3], [1, 2, 5, 6]], np.int32)

    def run(table):
        made = partitioning.look_up(table, jnp.asarray(ids))
        return jnp.sum(jnp.sin(made)), made

    with Layout(MeshConfig(1, 2, 2, 2)).context():
        (_, made), slope = jax.jit(jax.value_and_grad(run, has_aux=True))(table)
    np.testing.assert_array_equal(made, table[ids])
    want = np.zeros_like(table)
    np.add.at(want, ids, np.cos(table[ids]))
    np.testing.assert_allclose(slope, want, rtol=1e-6)


@pytest.mark.parametrize("changes", [{}, slow({"self_attn.softcap": 5.0})])
def test_one_document_per_row_needs_no_mask(changes):
    sizes = (
        {"pattern": ("local", "global"), "self_attn.window": 3} if not changes else {}
    )
    config = MODEL.replaced({"vocab_size": 20} | sizes | changes)
    tokens = np.arange(16, dtype=np.int32).reshape(2, 8)
    positions = np.tile(np.arange(8), (2, 1))

    @jax.jit
    def run(model):
        plain = model(tokens, np.ones_like(tokens), positions)
        return plain, model(tokens, None, positions)

    np.testing.assert_array_equal(*run(decoders.drawn(config)))


# ------------------------------------------------- reinforcement learning

POLICY = GrpoJobConfig(
    task=TaskConfig(digits=1, answer="sum", reward="prefix"),
    sampling=SamplingConfig(max_new_tokens=3, top_k=6),
    grpo=GrpoConfig(
        prompts=4, group_size=4, kl_coefficient=0.1, entropy_coefficient=0.1,
        max_tokens_train=32, max_tokens_forward=64,
    ),
    model=MODEL.replaced({"tied": False, "embedding.scaled": True}),
    head=HeadConfig(chunk=16),
    optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=1),
    run=RunConfig(job="grpo", steps=2, checkpoint_every=None, compare_heads=False),
)  # fmt: skip
