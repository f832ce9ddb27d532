"""The stack of blocks that policies are measured on; what a schedule says of copies."""

import pytest

from benchmarks import stack
from jaxmem import remat
from tests.helpers import schedule

pytestmark = pytest.mark.usefixtures("quick_compilation")


# ------------------------------------------------------------------ variants


def test_variants_are_read_and_policies_written():
    made = stack.read("offload_block save=q,k group=2 rows=8 last=2:none xla_a=True")
    assert made.policy == remat.Policy(save=["q", "k"], offload=["block_in"])
    assert (made.group, made.rows, made.last, made.last_policy) == (2, 8, 2, None)
    assert made.options == (("xla_a", True),) and made.is_large
    names = "full save=q,k offload=block_in", "dots offload=q", "offload_block last=2"
    for text in (*remat.PRESETS, *names):
        assert stack.text_of(stack.read(text).policy) == text
    with pytest.raises(ValueError, match="'lost=1' is no option of a variant"):
        stack.read("full lost=1")
    with pytest.raises(ValueError, match="'none' keeps all blocks whole"):
        stack.read("none last=1")


def test_variant_options_come_last_and_are_removable():
    options = stack.compiler_options(stack.read("offload_block xla_gpu_x=False"))
    assert options["xla_gpu_x"] is False
    assert options["xla_gpu_enable_command_buffer"] == ""
    back = stack.read("offload_block xla_gpu_enable_command_buffer=default")
    assert "xla_gpu_enable_command_buffer" not in stack.compiler_options(back)


# ------------------------------------------------------------------ schedule

PROGRAM = """
%body.1 (p: s32[]) -> s32[] {
  %copy-out = ((bf16[4]{0:S(5)}, bf16[1]{0}), bf16[4]{0:S(5)}, u32[]) fusion-start(%s)
  %dynamic-update-slice-start = ((bf16[4]{0:S(5)}), bf16[4]{0:S(5)}) fusion-start(%g)
  %custom-call.3 = (bf16[4]{0}) custom-call(%a), custom_call_target="__cublas$lt$matmul"
  %loop_add_fusion = bf16[4]{0} fusion(%custom-call.3), kind=kLoop, calls=%fused_add
  %gemm_fusion_dot.2 = bf16[4]{0} fusion(%b), kind=kCustom, calls=%gemm_fusion_dot
  %dynamic-update-slice-done = bf16[4]{0:S(5)} fusion-done(%dynamic-update-slice-start)
}
ENTRY %main (p: s32[]) -> s32[] {
  %dynamic-slice-start.2 = ((bf16[4]{0:S(5)}, s32[]), bf16[1]{0}) fusion-start(%h, %i)
  %dynamic-slice-done.2 = bf16[1]{0} fusion-done(%dynamic-slice-start.2)
  %copy-start.5 = (bf16[4]{0:S(5)}, bf16[4]{0}, u32[]) copy-start(%c)
  %dot.9 = bf16[4]{0} fusion(%b), kind=kCustom, calls=%fused_dot
  %copy-done.5 = bf16[4]{0:S(5)} copy-done(%copy-start.5)
  %fusion-start.7 = ((bf16[4]{0}), bf16[4]{0}) fusion-start(%w)
  %fusion-done.7 = bf16[4]{0} fusion-done(%fusion-start.7)
}
"""


def test_products_between_start_and_end_of_copies():
    assert schedule.host_copies(PROGRAM) == [
        schedule.Copy("body.1", True, 2),
        schedule.Copy("ENTRY", False, 0),
        schedule.Copy("ENTRY", True, 1),
    ]
