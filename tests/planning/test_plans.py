"""Counts, messages and refusals of plans."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import jaxmem
from jaxmem import devices
from jaxmem.planning import accounts

SQUARE = jax.ShapeDtypeStruct((256, 256), jnp.float32)
BYTES = 256 * 256 * 4
GIB = 2**30


def update(weights, batch):
    return weights - jnp.tanh(batch @ weights) @ weights


@pytest.fixture
def made(fake):
    return jaxmem.plan(update, SQUARE, SQUARE, device="h200")


def test_parts_make_the_total(made):
    (phase,) = made.phases
    want = {"weights": BYTES, "batch": BYTES, "results": BYTES}
    assert phase.resident == want
    parts = sum(want.values()) + phase.account.temporary + accounts.RUNTIME["cuda"]
    assert phase.total == made.peak == parts


def test_donated_arguments_count_once(fake):
    step = functools.partial(jax.jit, donate_argnums=0)(update)
    (phase,) = jaxmem.plan(step, SQUARE, SQUARE, device="h200").phases
    assert phase.resident == {"weights": BYTES, "batch": BYTES}


def test_shards_count_on_one_device(fake):
    with devices.target("h200", 4) as planned:
        place = NamedSharding(Mesh(planned, ("x",)), P("x"))
        rows = jax.ShapeDtypeStruct((256, 256), jnp.float32, sharding=place)
        made = jaxmem.plan(jax.jit(jnp.sum), rows)
    assert made.count == 4
    assert made.phases[0].resident["a"] == BYTES // 4
    (found,) = made.phases[0].account.collectives
    assert found.kind == "all-reduce"
    assert made.phases[0].estimate.sent == found.moved
    assert "1 all-reduce" in str(made)


@pytest.mark.parametrize(
    "memory, fits, said",
    [
        (100 * GIB, True, "fits: "),
        (10 * GIB, True, "set XLA_PYTHON_CLIENT_MEM_FRACTION=0.95"),
        (9 * GIB, False, "does not fit: "),
    ],
)
def test_verdicts(made, memory, fits, said):
    phase = dataclasses.replace(made.phases[0], total=9 * GIB)
    made = dataclasses.replace(made, memory=memory, phases=(phase,))
    assert made.fits == fits
    assert said in made.verdict
    assert made.verdict in str(made)


def test_tpu_has_no_share_to_set(made):
    phase = dataclasses.replace(made.phases[0], total=9 * GIB)
    made = dataclasses.replace(made, device="v5e", memory=10 * GIB, phases=(phase,))
    assert made.fits and "FRACTION" not in made.verdict


def test_json_has_what_the_table_says(made):
    said = json.loads(json.dumps(made.as_json()))
    assert said["peak"] == made.peak and said["fits"] is True
    assert said["phases"][0]["account"]["temporary"] == made.phases[0].account.temporary


def test_traced_steps_are_taken_as_they_are(fake, made):
    with devices.target("h200"):
        traced = jax.jit(update).trace(SQUARE, SQUARE)
        assert jaxmem.plan(traced).peak == made.peak


def test_no_device_is_an_error():
    with pytest.raises(ValueError, match="device must be given, as in device='h200'"):
        jaxmem.plan(update, SQUARE, SQUARE)


@pytest.mark.parametrize(
    "message, gib",
    [
        ("Ran out of memory on HBM, the total memory required for HLO temporaries "
         "(20.13G) exceeds available HBM (15.75G). HLO module: jit_step.", 20.13),
        ("Ran out of memory in memory space hbm. Used 512.00M of 15.75G hbm.", 0.5),
    ],
)  # fmt: skip
def test_compiler_out_of_memory_is_a_verdict(fake, monkeypatch, message, gib):
    def refuse(traced, options=None):
        raise jax.errors.JaxRuntimeError(message)

    monkeypatch.setattr(accounts, "compile_for", refuse)
    made = jaxmem.plan(update, SQUARE, SQUARE, device="v5e")
    assert not made.fits and "does not fit" in str(made)
    assert made.phases[0].account.temporary == int(gib * GIB)


def test_other_errors_of_the_compiler_are_raised(fake, monkeypatch):
    def fail(traced, options=None):
        raise jax.errors.JaxRuntimeError("INTERNAL: of another kind")

    monkeypatch.setattr(accounts, "compile_for", fail)
    with pytest.raises(jax.errors.JaxRuntimeError, match="another kind"):
        jaxmem.plan(update, SQUARE, SQUARE, device="v5e")


CALL = (
    "  %bwd.8 = (bf16[2,16,64,8]{3,1,2,0}, bf16[2,4,64,8]{3,1,2,0}, "
    "bf16[2,4,64,8]{3,1,2,0}, u8[SIZE]{0}) custom-call(%q, %k), "
    'custom_call_target="__cudnn$fmhaSoftmaxBackward", operand_layout_constraints='
    "{bf16[2,64,16,8]{3,2,1,0}, bf16[2,64,4,8]{3,2,1,0}}, api_version=X\n"
)


def test_workspaces_that_the_compiler_does_not_know():
    queries = 4 * 2 * 64 * 16 * 8
    rows = 4 * 2 * 64 * 16
    assert accounts.workspace(CALL.replace("SIZE", "0")) == queries + rows
    assert accounts.workspace(CALL.replace("SIZE", "1024")) == 0  # in the temporaries
    assert accounts.workspace("  %add = f32[] add(%a, %b)") == 0
    config = 'api_version=X, backend_config={"max_seg_per_batch": 4, "seed": 42}'
    packed = CALL.replace("SIZE", "0").replace("api_version=X", config)
    assert accounts.workspace(packed) == 4 * (queries + rows)
