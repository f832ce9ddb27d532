"""benchmarks/run_sharding.py: what it times, and the bytes that it reads."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P

from benchmarks import (
    results,
    run_sharding,
    sharding_on_paper,
)
from jaxmem.planning import collectives

pytestmark = pytest.mark.usefixtures("quick_compilation")

PROGRAM = """\
HloModule jit_step

%async (p: f32[8,4]) -> f32[2,4] {
  ROOT %r = f32[2,4]{1,0} reduce-scatter(%p), replica_groups={{0,1,2,3},{4,5,6,7}}
}

%body (p: (s32[], bf16[4])) -> (s32[], bf16[4]) {
  %g = (bf16[4]{0}, bf16[16]{0}) all-gather-start(%x), replica_groups=[2,4]<=[8]
}

ENTRY %main (a: f32[]) -> f32[] {
  %w = (s32[], bf16[4]) while(%t), condition=%c, body=%body, backend_config={GIVEN}
  %s = ((f32[8,4]), f32[2,4]) async-start(%a), calls=%async, metadata={op_name="f"}
  %alone = f32[3]{0} all-reduce(%a), replica_groups={{0},{1}}, to_apply=%sum
}
"""


class Compiled:
    def __init__(self, text):
        self.as_text = lambda: text


@pytest.mark.parametrize(
    ("given", "times"), [('{"known_trip_count":{"n":"36"}}', 36), ("{}", 0)]
)
def test_parse_loops_and_asynchronous_calls(given, times):
    scatter, gather = collectives.of(Compiled(PROGRAM.replace("{GIVEN}", given)))
    assert scatter == ("reduce-scatter", "f32[2,4]", 128, 4, 1, False)
    assert scatter.moved == 96
    assert gather == ("all-gather", "bf16[16]", 32, 4, times, False)
    assert gather.moved == 24


def test_permutation_sends_all_that_a_device_has():
    line = "%p = f32[8]{0} collective-permute(%a), source_target_pairs={{0,1},{1,0}}"
    (found,) = collectives.of(
        Compiled(f"ENTRY %main (a: f32[8]) -> f32[8] {{\n{line}\n}}")
    )
    assert (found.payload, found.moved) == (32, 32)


SCHEDULE = """\
%async (p: f32[4]) -> f32[2] {
  ROOT %reduce-scatter = f32[2] reduce-scatter(%p), replica_groups={{0,1}}
}

%sums (p: f32[4]) -> f32[4] {
  ROOT %all-reduce = f32[4] all-reduce(%p), replica_groups={{0,1}}
}

%copies (p: f32[4]) -> f32[4] {
  ROOT %copy = f32[4] copy(%p)
}

%body (p: f32[4]) -> f32[4] {
  %all-gather-start.1 = (f32[1], f32[4]) all-gather-start(%p), replica_groups={{0,1}}
  %fusion.3 = f32[4] fusion(%p), kind=kCustom, calls=%gemm_fusion
  %all-gather-done.1 = f32[4] all-gather-done(%all-gather-start.1)
  %reduce-scatter-start = ((f32[4]), f32[2]) async-start(%p), calls=%async
  %add.1 = f32[4] add(%p, %p), metadata={op_name="jit(gemm)"}
  %reduce-scatter-done = f32[2] async-done(%reduce-scatter-start)
  %all-reduce-start = f32[4] all-reduce-start(%p), replica_groups={{0,1}}
  %mpmd_map.2 = bf16[8] custom-call(%p), custom_call_target="mosaic_gpu_v2"
  %all-reduce-done = f32[4] all-reduce-done(%all-reduce-start)
  %fusion-start = ((f32[4]), f32[4]) fusion-start(%p), kind=kCustom, calls=%sums
  %fusion-start.1 = ((f32[4]), f32[4]) fusion-start(%p), kind=kLoop, calls=%copies
  %fusion.4 = f32[4] fusion(%p), kind=kCustom, calls=%gemm_fusion
  %fusion-done.1 = f32[4] fusion-done(%fusion-start.1)
  %fusion-done = f32[4] fusion-done(%fusion-start)
}
"""


def test_bytes_sent_beside_products():
    assert collectives.hidden(SCHEDULE) == (3, 4)


def test_collectives_of_compiled_program():
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)

    def run(x):
        def body(carry, _):
            return lax.psum(jnp.sin(carry), "b") / 4, None

        x = lax.pcast(lax.scan(body, x, length=3)[0], "b", to="varying")
        return lax.all_gather(x, "b", tiled=True)

    split = jax.shard_map(
        run, mesh=mesh, in_specs=P("a"), out_specs=P(("a", "b")), check_vma=False
    )
    found = collectives.of(jax.jit(split).lower(np.ones((4, 3), np.float32)).compile())
    assert [(c.kind, c.payload, c.parts, c.times) for c in found] == [
        ("all-reduce", 24, 4, 3),
        ("all-gather", 96, 4, 1),
    ]
    assert [c.moved for c in found] == [36, 72]


@pytest.mark.slow
def test_on_paper():
    row = sharding_on_paper.row_of((2, 2, 2), 8, 48, 16)
    assert row["devices"] == 8
    assert row["statistics_bytes_per_token"] == 20  # of one max and of one sum
    assert row["statistics_sent_bytes_per_token"] == 20
    assert row["hidden_bytes_per_token"] == row["hidden_sent_bytes_per_token"] == 32
    # Gathered and scattered among 2, then summed over 2: 384 + 384 + 384 bytes.
    assert row["weights_sent_mib"] == round(1152 / 2**20, 1)
    of_data = collectives.of(sharding_on_paper.compiled((8, 1, 1), 8, 48, 16))
    assert [(c.kind, c.payload) for c in of_data] == [("all-reduce", 4 * 8 * 48)]


def test_peak_goes_to_its_row(tmp_path):
    keys = dict.fromkeys(results.KEYS, "") | {"path": "logprobs"}
    rows = [
        {**keys, "split": split, "devices": k}
        for split, k in (("none", 1), ("vocab", 2), ("tokens", 2), ("vocab", 4))
    ]
    peak = {"path": "logprobs", "devices": 2, "device_peak_mib": 5.0}
    run_sharding.add_peak(rows, peak, tmp_path / "peaks.csv")
    run_sharding.add_peak(rows, {**peak, "path": "kl"}, tmp_path / "peaks.csv")
    assert [row.get("device_peak_mib") for row in rows] == [None, 5.0, None, None]
    (saved,) = results.read(tmp_path / "peaks.csv")
    assert (saved["split"], saved["device_peak_mib"]) == ("vocab", "5.0")


@pytest.mark.slow
def test_one_device_alone_is_timed_too():
    path = "token_stats implementation=xla"
    (row,) = run_sharding.measure((64, 16, 320), jnp.float32, [path], [], 1)
    assert (row["split"], row["devices"], row["slowest_device"]) == ("none", 1, 1)
    assert row["forward_backward_efficiency"] == 1
