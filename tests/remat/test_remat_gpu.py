"""On a GPU: what goes to the host goes there, gradients stay right, copies overlap."""

import concurrent.futures
import pathlib
import re

import jax
import numpy as np
import pytest

from benchmarks import stack
from jaxmem import remat
from jaxmem.remat import offload
from jaxmem.train.configuration import load
from jaxmem.train.jobs import sft
from tests.helpers import schedule

pytestmark = pytest.mark.gpu

SIZES = stack.Sizes(6, 1024, 2816, 8, 2, 1024)
INPUTS = 6 * 2 * 1024 * 1024 * 2  # bytes of all blocks' inputs
VARIANTS = {
    "none": "none",
    "full": "full",
    "dots": "dots",
    "save_attention": "save_attention",
    "offload_block": "offload_block",
    "offload_attention": "offload_attention",
    "in groups": "offload_block group=2",
    "last whole": "offload_block last=2",
    "last apart": "offload_block last=2:none",
    "both": "offload_block save=gate,up",
}
OFFLOADING = [k for k, text in VARIANTS.items() if "offload" in text]


@pytest.fixture(scope="module")
def programs():
    """Every variant, compiled side by side after the first one's GEMMs were chosen."""
    traced = {k: stack.trace(SIZES, stack.read(text)) for k, text in VARIANTS.items()}
    lowered = {k: each.lower() for k, each in traced.items()}
    made = {"full": lowered["full"].compile()}
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        jobs = {k: pool.submit(x.compile) for k, x in lowered.items() if k != "full"}
    return made | {k: job.result() for k, job in jobs.items()}


@pytest.fixture(scope="module")
def norms(programs):
    """Norms of every layer's gradients, by kind of weight."""

    def run(name):
        last = stack.read(VARIANTS[name]).last
        operands = stack.initial(SIZES, last), stack.hidden(SIZES)
        return jax.device_get(programs[name](*operands)[2])

    return {name: run(name) for name in VARIANTS}


def promised(name):
    variant = stack.read(VARIANTS[name])
    shapes = jax.eval_shape(lambda: stack.initial(SIZES, variant.last))
    h = jax.eval_shape(lambda: stack.hidden(SIZES))
    return remat.host_bytes(stack.step(SIZES, variant), shapes, h)


@pytest.mark.parametrize("name", VARIANTS)
def test_layer_gradients_equal_those_without_remat(name, norms):
    for kind, wanted in norms["none"].items():
        assert wanted.shape == (SIZES.layers,)
        np.testing.assert_allclose(norms[name][kind], wanted, rtol=1e-2, err_msg=kind)


def test_saved_attention_kernel_runs_once(programs):
    def kernels(name):
        text = programs[name].as_text()
        return len(re.findall(r'custom_call_target="__cudnn\$fmhaSoftmax"', text))

    # One forward, one backward; XLA may peel a turn off the loop of what it offloads.
    assert kernels("save_attention") == kernels("none") < kernels("full")


@pytest.mark.parametrize("name", OFFLOADING)
def test_host_holds_promised_bytes(name, programs):
    without = {"offload_block": "full", "offload_attention": "save_attention"}
    same = programs[without[name]] if name in without else None
    remat.verify(programs[name], promised(name), without=same)


def test_stack_not_copied_with_last_blocks_whole(programs):
    """Apart, the last blocks' gradients are applied, and gone, before the scan's."""
    weights = jax.tree.leaves(jax.eval_shape(lambda: stack.initial(SIZES)[0]))
    of_a_block = sum(x.size * x.dtype.itemsize for x in weights) // 6
    whole, apart = (
        remat.device_bytes(programs[name]) for name in ("last whole", "last apart")
    )
    # A copy would be 4 more than 2; the workspace of a GEMM by cuBLAS is 1.3.
    assert whole < apart + (2 + 3) * of_a_block


def test_promises_are_bytes_of_names():
    assert promised("full") == 0
    assert promised("offload_block") == INPUTS
    assert promised("last whole") == promised("last apart") == INPUTS * 4 // 6
    assert promised("in groups") == INPUTS // 2
    assert promised("offload_attention") == 4 * INPUTS  # cuDNN's own are made again


@pytest.mark.parametrize("name", ["offload_block", "offload_attention"])
@pytest.mark.parametrize("last", [0, 1])
def test_training_step_holds_promised_memory(name, last):
    """Compiling verifies it; micro-batches share the room."""
    config, _ = load(
        pathlib.Path(__file__).parents[2] / "configs" / "sft_stdlib.gin",
        [
            f"remat.policy={name}",
            f"remat.last={last}",
            "run.accumulate=2",
            "model.dtype=bfloat16",
        ],
    )
    program = sft.SftProgram(config, 16384)
    account = program.compile_step(config.head).memory_analysis()
    assert account.host_temp_size_in_bytes > 0


def test_verify_refuses_a_false_promise(programs):
    with pytest.raises(RuntimeError, match="promises 1,000,000 bytes on the host"):
        remat.verify(programs["full"], 10**6)


def test_products_overlap_copies(programs):
    copies = schedule.host_copies(programs["offload_block"].as_text())
    of_loops = [c for c in copies if c.computation != "ENTRY"]
    assert {c.to_host for c in of_loops} == {True, False}
    assert all(c.products >= 2 for c in of_loops), of_loops


def test_fit_chooses_by_limit(programs):
    def step(policy):
        return stack.trace(SIZES, stack.Variant(policy))

    full = remat.device_bytes(programs["full"])
    said = []
    less = remat.fit(
        step, full - INPUTS // 2, names=["block_in", "q"], show=said.append
    )
    assert less is not None and "block_in" in less.offload, said[0]
    assert "chosen" in said[0]
    with pytest.raises(ValueError, match="no policy fits"):
        remat.fit(step, full // 2, names=["block_in"], show=None)


def test_parked_trees_leave_the_device():
    device = jax.devices()[0]

    def held():
        return device.memory_stats()["bytes_in_use"]

    before = held()
    tree = {"w": jax.block_until_ready(jax.numpy.ones(2**26))}
    assert held() >= before + 2**28
    parked = offload.park(tree)
    assert held() < before + 2**20
    np.testing.assert_array_equal(offload.fetch(parked)["w"][:: 2**20], 1)
