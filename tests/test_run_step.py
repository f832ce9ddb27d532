"""The benchmark of whole steps: variants, workers, and the shares of a trace."""

import csv
import io
import json

import pytest

from benchmarks import run_step, step_jax, trace_summary, workers

pytestmark = pytest.mark.usefixtures("quick_compilation")

TINY = [
    "model.layers=2", "model.hidden=16", "model.ff=24", "model.heads=2",
    "model.kv_heads=1", "model.head_dim=8", "model.attention=xla",
    "data.sequence_length=16", "data.batch_size=2", "run.steps=3",
    "optimizer.learning_rate=0.1",
]  # fmt: skip


# ------------------------------------------------------------------- variants


def test_variants_are_those_of_the_table():
    names = {(each.name, each.vocab_size) for each in run_step.VARIANTS}
    assert len(names) == len(run_step.VARIANTS)  # a row each
    for name in ("none", "full", "torch compiled"):
        assert {(name, 1024), (name, 151_936)} <= names
    assert ("dots_and_attention", 1024) in names
    assert ("offload_block", 1024) in names


def test_variant_words_are_policy_fields_and_options():
    words = "save_attention remat.save=('gate',) xla_gpu_x=True"
    variant = run_step.Variant("mine", "jax", tuple(words.split()), 64)
    job = variant.job("step.gin", ["run.steps=3"], ["mine"])
    assert job["overrides"] == [
        "model.vocab_size=64", "remat.policy=save_attention", "remat.save=('gate',)",
        "run.steps=3",
    ]  # fmt: skip
    assert job["options"] == {"xla_gpu_x": "True"} and job["trace"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "words, policy",
    [
        (
            "dots_and_attention remat.unroll=True",
            "save norm_rms attn_out attn_lse, save products",
        ),
        ("full optimizer.offload=True", "all recomputed"),
        ("fit remat.memory_limit=4", "nothing recomputed"),
    ],
)
def test_worker_measures_a_step(words, policy, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("go\n"))
    variant = run_step._jax(words, 64)
    step_jax.main(json.dumps(variant.job(str(run_step.CONFIG), TINY, ["not this"])))
    (line,) = (
        line for line in capsys.readouterr().out.splitlines()
        if line.startswith(workers.MARK)
    )  # fmt: skip
    row = json.loads(line.removeprefix(workers.MARK))
    rounding = 1e-4  # of seconds in the row; a step of this size takes few of them
    predicted = 30  # of 32: the last token of a row predicts none
    seconds = predicted / row["tokens_per_second"]
    assert row["seconds"] == pytest.approx(seconds, abs=rounding)
    assert row["last_loss"] != row["first_loss"] == pytest.approx(4.16, abs=0.1)
    assert row["shares"] == [] and "note" not in row
    assert row["policy"] == policy


def test_failure_is_a_row_and_a_traceback(capsys):
    job = run_step._jax("no_such_policy", 64).job(str(run_step.CONFIG), TINY, [])
    step_jax.main(json.dumps(job))
    out = capsys.readouterr().out
    assert "Traceback" in out
    row = json.loads(out.splitlines()[-1].removeprefix(workers.MARK))
    assert "policy must be one of" in row["note"] and "no_such_policy" in row["note"]


class FakeWorker:
    """One that sends a row at once, and counts how many were started."""

    started: list = []

    def __init__(self, variant, job, environment):
        self.started.append(variant.name)

    def rows(self, seconds):
        assert 0 < seconds <= 100
        share = {"class": "products", "ms": 1.5, "share": 0.5, "kernels": 3}
        shares = [share, share | {"kernel": "gemm"}]
        yield {"seconds": 1, "device": "H", "shares": shares}

    def stop(self):
        pass


def test_rows_and_shares_are_written_as_they_come(tmp_path, monkeypatch):
    monkeypatch.setattr(run_step, "Worker", FakeWorker)
    out = tmp_path / "step.csv"
    run_step.main(["--only=full", "--vocab=1024", "--seconds=100", f"--out={out}"])
    with out.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["variant"] for row in rows] == ["full", "full, no loop"]
    with (tmp_path / "step_trace.csv").open() as file:
        shares = list(csv.DictReader(file))
    assert [row["class"] for row in shares] == ["products"] * 4
    assert [row["kernel"] for row in shares] == ["", "gemm"] * 2


def test_nothing_starts_when_no_time_is_left(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run_step, "Worker", FakeWorker)
    run_step.main(["--only=full", "--seconds=5", f"--out={tmp_path / 'step.csv'}"])
    assert "not measured: full, full, full, sampled, full" in capsys.readouterr().out
    assert not (tmp_path / "step.csv").exists()


def test_unknown_variant_is_refused():
    with pytest.raises(SystemExit, match="no variant is left; there are: none, full"):
        run_step.main(["--only=half"])


# --------------------------------------------------------------------- shares

STEP = "jit(step)/jvp()/while/body/"
KERNELS = {
    "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT": "products",
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma": "attention",
    "mosaic_gpu_linear_forward": "head",
    "MemcpyD2D": "copies of the loop",
    "loop_dynamic_update_slice_fusion_3": "copies of the loop",
    "loop_convert_fusion_1": "elementwise",
    "input_add_reduce_fusion": "elementwise",
}


def test_classes_of_kernels():
    for kernel, name in KERNELS.items():
        assert trace_summary.class_of(kernel, STEP + "add") == name, kernel
    of_the_head = "jit(step)/jvp(jit(jaxmem_call))/while/body/sub"
    assert trace_summary.class_of("loop_sub_fusion", of_the_head) == "head"
    of_the_optimizer = "jit(step)/optimizer/sqrt"
    assert trace_summary.class_of("loop_add_fusion_2", of_the_optimizer) == "optimizer"
    assert trace_summary.class_of("loop_add_fusion_2", "") == "elementwise"


def test_operations_of_a_program():
    text = """
  %loop_convert_fusion.1 = bf16[8]{0} fusion(%a), metadata={op_name="jit(f)/jvp()/mul"}
  ROOT %add.7 = f32[] add(%b, %c), metadata={op_name="jit(f)/add" source_line=3}
"""
    assert trace_summary.operations(text) == {
        "loop_convert_fusion_1": "jit(f)/jvp()/mul", "add_7": "jit(f)/add"
    }  # fmt: skip


def test_shares_count_overlap_once_and_idle_time():
    """Two steps have a product of 6 ms and a copy beside it; 2 of 10 ms are idle."""
    events = [
        (kernel, STEP, start + offset, duration)
        for offset in (0, 10e6)
        for kernel, start, duration in (
            ("nvjet_a", 0, 6e6), ("MemcpyD2D", 2e6, 3e6), ("loop_add_fusion", 8e6, 2e6)
        )
    ]  # fmt: skip
    made = {row["class"]: row for row in trace_summary.summary(events, 2)}
    assert made["products"]["ms"] == 6 and made["products"]["share"] == 0.6
    assert made["copies of the loop"]["ms"] == 3
    assert made["idle"]["ms"] == 2
    assert made["elementwise"]["kernels"] == 1
    assert trace_summary.summary([], 2) == []
