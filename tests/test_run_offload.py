"""The benchmarks of policies and of state on the host, at tiny shapes; what a schedule
says of copies."""

import csv
import json

import jax
import pytest

from benchmarks import (
    plot_offload,
    results,
    run_fit,
    run_offload,
    run_optimizer,
    schedule,
    stack,
    workers,
)
from jaxmem import remat

pytestmark = pytest.mark.usefixtures("quick_compilation")


def rows_of(capsys, main, arguments):
    main(arguments)
    lines = capsys.readouterr().out.splitlines()
    sent = [line for line in lines if line.startswith(workers.MARK)]
    return [json.loads(line.removeprefix(workers.MARK)) for line in sent]


def started(capsys, monkeypatch, mains):
    """Workers in this process, by module."""

    def start(module, environment, arguments):
        yield from rows_of(capsys, mains[module], arguments)

    monkeypatch.setattr(workers, "start", start)


# ------------------------------------------------------------------ variants


def test_variants_are_read_and_policies_written():
    made = stack.read("offload_block save=q,k group=2 rows=8 last=2:none xla_a=True")
    assert made.policy == remat.policy(save=["q", "k"], offload=["block_in"])
    assert (made.group, made.rows, made.last, made.last_policy) == (2, 8, 2, None)
    assert made.options == (("xla_a", True),) and made.is_large
    names = "full save=q,k offload=block_in", "dots offload=q", "offload_block last=2"
    for text in (*remat.PRESETS, *names):
        assert stack.text_of(stack.read(text).policy) == text
    with pytest.raises(ValueError, match="'lost=1' is no option of a variant"):
        stack.read("full lost=1")
    with pytest.raises(ValueError, match="'none' keeps all blocks whole"):
        stack.read("none last=1")


def test_options_of_a_variant_come_last_and_can_be_taken_away():
    options = stack.compiler_options(stack.read("offload_block xla_gpu_x=False"))
    assert options["xla_gpu_x"] is False
    assert options["xla_gpu_enable_command_buffer"] == ""
    back = stack.read("offload_block xla_gpu_enable_command_buffer=default")
    assert "xla_gpu_enable_command_buffer" not in stack.compiler_options(back)


# A later test compares the gradients of these blocks.
@pytest.mark.slow
def test_blocks_after_the_scan_have_the_weights_they_had_in_it():
    whole, none = stack.initial(stack.SIZES["tiny"])
    first, last = stack.initial(stack.SIZES["tiny"], 1)
    assert none == [] and len(last) == 1
    assert (whole["query"][:-1] == first["query"]).all()
    assert (whole["query"][-1] == last[0]["query"]).all()


# --------------------------------------------------------------------- runs


# The tests above and below run the functions that this script calls.
@pytest.mark.slow
def test_run_offload(tmp_path, capsys, monkeypatch):
    modules = {"benchmarks.run_offload": run_offload.main}
    started(capsys, monkeypatch, modules)
    variants = ["full", "offload_block last=1:none", "offload_block last=1"]
    asked = [f"--variant={text}" for text in variants]
    out = tmp_path / "offload.csv"
    run_offload.main([*asked, "--sizes=tiny", "--rounds=2", f"--out={out}"])
    rows = {row["variant"]: row for row in results.read(out)}
    assert rows.keys() == set(variants)
    assert rows["full"]["over_first"] == "1.0"
    for text in variants[1:]:
        assert float(rows[text]["gradient_error"]) < 0.01
    assert all(float(row["ms"]) > 0 for row in rows.values())
    assert {"device", "jax", "jaxlib", "date"} <= rows["full"].keys()


def test_a_program_is_held_against_the_same_one_without_the_host():
    texts = ["full", "full last=2:none", "full last=2", "save_attention"]
    variants = {text: stack.read(text) for text in texts}

    def twin(text):
        return run_offload.twin_of(stack.read(text), variants)

    assert twin("offload_block xla_gpu_x=False") == "full"
    assert twin("offload_block last=2:none") == "full last=2:none"
    assert twin("offload_block last=2") == "full last=2"
    assert twin("offload_block rows=8") is twin("none") is None


def test_a_wrong_gradient_shows():
    wanted = {"w": jax.numpy.array([1.0, 2.0])}
    assert run_offload.gradient_error(wanted, wanted) == 0
    wrong = {"w": jax.numpy.array([1.0, 1.0])}
    assert run_offload.gradient_error(wrong, wanted) == 0.5


def test_the_pick_stands_beside_the_best_that_fits():
    class Step:
        """Three candidates that the chooser prefers in this order."""

    picked = remat.PRESETS["save_attention"]
    table = {"none": (100, 1.0), "save_attention": (50, 3.0), "full": (30, 2.0)}

    def fit(step, limit, last, rates):
        return picked

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remat, "fit", fit)
        row = run_fit.choice(Step(), 60, None, table)
    assert (row["candidate"], row["best"]) == ("save_attention", "full")
    assert row["over_best"] == 1.5


def test_run_optimizer(tmp_path, capsys, monkeypatch):
    modules = {"benchmarks.run_optimizer": run_optimizer.main}
    started(capsys, monkeypatch, modules)
    out = tmp_path / "optimizer.csv"
    run_optimizer.main(["--gib=0", "--rounds=1", f"--out={out}"])
    rows = results.read(out)
    assert [row["form"] for row in rows] == list(run_optimizer.FORMS)
    assert all(float(row["error"]) < 1e-6 for row in rows)


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


def test_products_between_the_start_and_the_end_of_copies():
    assert schedule.host_copies(PROGRAM) == [
        schedule.Copy("body.1", True, 2),
        schedule.Copy("ENTRY", False, 0),
        schedule.Copy("ENTRY", True, 1),
    ]


def test_the_figure(tmp_path):
    path = tmp_path / "offload.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["variant", "ms", "over_first", "peak_gib"])
        writer.writerow(["full", "1076.1", "1.0", "24.2"])
        writer.writerow(["none", "out of memory", "", ""])
        writer.writerow(["offload_block rows=8", "8000", "", "40"])
    (point,) = plot_offload.points(results.read(path))
    assert point[0] == "full" and point[2:] == (24.2, 1.0)
    said = "offload_block save=q last=4"
    assert plot_offload.label_of(said) == said
    for other in ("offload_block xla_gpu_x=False", "full last=2:none", "full rows=8"):
        assert plot_offload.label_of(other) is None
    plot_offload.main([str(path), "--out", str(tmp_path / "offload.svg")])
    assert "full" in (tmp_path / "offload.svg").read_text()
