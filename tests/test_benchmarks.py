"""The benchmarks measure what they say: at tiny shapes, and on a clock of our own."""

import fnmatch
import importlib.util
import itertools
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import (
    compare,
    distill_verbs,
    exact,
    on_jax,
    plot_cards,
    plot_first,
    plot_head,
    plot_offload,
    results,
    rl_learning,
    rl_mismatch,
    rl_sampler,
    rl_tokens,
    run_distill,
    run_engine,
    run_grpo,
    run_head,
    run_integrations,
    run_low_bit,
    run_offload,
    run_peers,
    run_recorded,
    run_rl,
    stack,
    workers,
)
from jaxmem.base import timing
from tests.helpers import oracle
from tests.helpers.cases import Case

pytestmark = pytest.mark.usefixtures("quick_compilation")

ROOT = Path(__file__).parent.parent
SHAPE = (64, 16, 300)
MADE_BY_TESTS = (
    "faults_cpu.csv", "mutants_cpu.csv", "mutants_head_cpu.csv",
    "coverage_head_cpu.csv",
)  # fmt: skip
TINY = ["--shape=64,16,300", "--dtype=float32", "--repetitions=2"]


def rows_of(capsys, main, arguments):
    """The rows that a worker sends, and its other output."""
    main(arguments)
    lines = capsys.readouterr().out.splitlines()
    sent = [line for line in lines if line.startswith(workers.MARK)]
    said = [line for line in lines if not line.startswith(workers.MARK)]
    return [json.loads(line.removeprefix(workers.MARK)) for line in sent], said


# ---------------------------------------------------------------- the protocol


class Clock:
    """Time that passes only in calls, and slower and slower, as on a hot chip."""

    def __init__(self, monkeypatch, drift=0.0):
        self.now, self.drift, self.log = 0.0, drift, []
        monkeypatch.setattr(timing, "time", self)

    def perf_counter(self):
        return self.now

    def run(self, name, cost):
        def call():
            self.now += cost * (1 + self.drift * self.now)
            self.log.append(name)

        return call


class NoMemory(Exception):
    pass


def stopwatch(sample_seconds=10.0):
    def is_out_of_memory(error):
        return isinstance(error, NoMemory)

    return timing.Stopwatch(lambda made: None, is_out_of_memory, sample_seconds)


def test_ratios_survive_a_chip_that_slows_down(monkeypatch):
    clock = Clock(monkeypatch, drift=1e-3)
    paths = {"two": clock.run("two", 2.0), "five": clock.run("five", 5.0)}
    unit_ms, made = timing.take_turns(stopwatch(), clock.run("unit", 1.0), paths, 3)
    assert unit_ms > 1050 and made["two"].ms > 2100  # milliseconds show it
    assert made["two"].over_unit == pytest.approx(2, rel=5e-3)
    assert made["five"].over_unit == pytest.approx(5, rel=5e-3)
    assert made["five"].spread < 5e-3


def test_take_turns_alternates_long_samples(monkeypatch):
    clock = Clock(monkeypatch)
    paths = {"two": clock.run("two", 2.0), "five": clock.run("five", 5.0)}
    timing.take_turns(stopwatch(), clock.run("u", 1.0), paths, 2)
    calibration = 3 * (1 + timing._TRIES)
    blocks = []
    for name in clock.log[calibration:]:
        if not blocks or blocks[-1][0] != name:
            blocks.append([name, 0])
        blocks[-1][1] += 1
    order = ["u", "two", "u", "five", "u", "five", "u", "two", "u"]
    assert [name for name, _ in blocks] == order
    assert dict(blocks) == {"u": 10, "two": 5, "five": 2}  # at least 10 s each


def test_slow_second_call_makes_no_sample_short(monkeypatch):
    clock = Clock(monkeypatch)
    costs = itertools.chain([30.0, 20.0], itertools.repeat(2.0))

    def path():
        clock.run("path", next(costs))()

    timing.take_turns(stopwatch(), clock.run("u", 1.0), {"path": path}, 1)
    *_, sample, _ = (list(block) for _, block in itertools.groupby(clock.log))
    assert sample == ["path"] * 5  # of 2 s each, for 10 s


def test_path_without_memory_takes_no_other_with_it(monkeypatch):
    clock = Clock(monkeypatch)

    def greedy():
        raise NoMemory

    paths = {"greedy": greedy, "two": clock.run("two", 2.0)}
    _, made = timing.take_turns(stopwatch(), clock.run("unit", 1.0), paths, 1)
    assert made["greedy"] is None
    assert made["two"].over_unit == 2
    row = timing.columns(SHAPE, 1.0, made["two"], made["greedy"])
    assert row["forward_over_gemm"] == 2
    assert row["forward_backward_ms"] == "out of memory"
    assert row["forward_backward_over_gemm"] == ""
    with pytest.raises(ZeroDivisionError):  # any other error is one
        timing.take_turns(stopwatch(), lambda: 1 / 0, {}, 1)


def test_rates():
    timings = [timing.Timing(ms, ms, 0.0) for ms in (2.0, 8.0)]
    row = timing.columns((8192, 4096, 131072), 1.0, *timings, active=0.5)
    tflop = 2 * 8192 * 4096 * 131072 / 1e12
    assert row["gemm_tflops"] == round(tflop / 1e-3, 1)
    assert row["forward_tflops"] == round(0.5 * tflop / 2e-3, 1)
    assert row["forward_backward_tflops"] == round(0.5 * 3 * tflop / 8e-3, 1)


# ------------------------------------------------------------------- the check


def test_checks_float64_agrees_with_the_oracle():
    h, W, y = Case(*SHAPE, std=3.0).make()
    rng = np.random.default_rng(1)
    g = {name: rng.standard_normal(len(y)) for name in ("logprob", "entropy")}
    want, (dh, dW, _) = oracle.head(h, W, y, g)
    h, W = h.astype(np.float64), W.astype(np.float64)
    columns = np.arange(len(W))
    made, grads = exact.head(np, h, W, y, columns, g["logprob"], g["entropy"])
    for name in g:
        np.testing.assert_allclose(made[name], want[name], rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(grads[0], dh, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(grads[1], dW, rtol=1e-10, atol=1e-12)


@pytest.mark.slow
def test_wrong_results_are_not_timed():
    right, wrong = run_head.call_of("token_stats"), run_head.call_of("materialised")

    def shifted(h, W, y):
        return wrong(h, W, (y + 1) % SHAPE[2])

    def broken(h, W, y):
        raise NotImplementedError("not here\nfor many reasons")

    calls = {"right": right, "shifted": shifted, "broken": broken}
    rows = {r["path"]: r for r in on_jax.measure(SHAPE, jnp.float32, calls, 1)}
    assert rows["right"]["forward_backward_ms"] > 0
    assert rows["shifted"]["forward_ms"] == rows["shifted"]["note"] == "wrong"
    assert rows["broken"]["forward_ms"] == "failed"
    assert rows["broken"]["note"] == "failed: NotImplementedError: not here"


# ------------------------------------------------------------------ the scripts


@pytest.mark.full
def test_run_head_materialised(capsys):
    arguments = ["--worker=time", *TINY, "--path=materialised"]
    ((row,), _) = rows_of(capsys, run_head.main, arguments)
    assert row["forward_backward_over_gemm"] > 0 and not row.get("entropy_error")
    assert float(row["logprob_error"]) < 2e-5 and float(row["dw_error"]) < 1e-5


@pytest.mark.full
def test_run_head_call_with_options(capsys):
    path = "logprobs where=half chunk=16"
    ((row,), _) = rows_of(
        capsys, run_head.main, ["--worker=time", *TINY, f"--path={path}"]
    )
    assert row["path"] == path and row["forward_backward_over_gemm"] > 0
    assert float(row["logprob_error"]) < 2e-5


def test_run_head_names_unknown_call(capsys):
    rows, said = rows_of(
        capsys, run_head.main, ["--worker=time", *TINY, "--path=token_stats no=1"]
    )
    assert rows[0]["forward_ms"] == "failed" and "'no'" in rows[0]["note"]
    assert said == []


@pytest.mark.full
def test_jax_peers(capsys):
    peers = ["--peer=lax.map + checkpoint, 1024", "--peer=tokamax xla"]
    rows, said = rows_of(capsys, run_peers.main, ["--worker=jax", *TINY, *peers])
    assert float(rows[0]["logprob_error"]) < 2e-5
    assert rows[0]["package"].startswith("jax ")
    if importlib.util.find_spec("tokamax") is None:
        assert said[0].startswith("skipped: tokamax xla: ModuleNotFoundError")


def test_torch_peers(capsys):
    peers = ["--peer=torch eager", "--peer=torch eager stats", "--peer=verl"]
    rows, said = rows_of(capsys, run_peers.main, ["--worker=torch", *TINY, *peers])
    if importlib.util.find_spec("torch") is None:
        assert said == ["skipped: all of torch's peers: No module named 'torch'"]
        return
    assert float(rows[0]["logprob_error"]) < 2e-5
    assert float(rows[1]["entropy_error"]) < 2e-5
    assert float(rows[1]["dw_error"]) < 1e-5
    if importlib.util.find_spec("verl") is None:
        assert said[0].startswith("skipped: verl: ModuleNotFoundError")


TINY_POLICY = (
    "run.steps=3 optimizer.warmup_steps=1 grpo.prompts=4 grpo.group_size=4 "
    "model.layers=1 model.hidden=16 model.ff=16"
).split()


@pytest.mark.slow
def test_run_grpo_by_phases(tmp_path):
    out = tmp_path / "phases.csv"
    arguments = [*run_grpo.ARITHMETIC[1:], *TINY_POLICY, "grpo.kl_coefficient=0.1"]
    run_grpo.main([f"--phases={out}", *arguments])
    rows = results.read(out)
    phases = ["rollout", "old", "reference", "update"]
    assert [row["phase"] for row in rows] == [*phases, "rewards", "step"]
    assert all(float(row["seconds"]) > 0 for row in rows)
    assert all(float(row["program_gib"]) >= 0 for row in rows[:4])
    seconds = {row["phase"]: float(row["seconds"]) for row in rows}
    assert seconds["rewards"] < seconds["rollout"] < seconds["step"]
    assert float(rows[-1]["share"]) == 1 and float(rows[0]["share"]) < 1
    tokens = float(rows[-1]["tokens"]) / seconds["step"]
    assert float(rows[-1]["tokens_per_second"]) == pytest.approx(tokens, rel=0.01)


def test_run_grpo_reads_a_run_that_is_there(tmp_path):
    phase = {"seconds": 2.0, "temporary": 2**30, "peak": 2**31}
    summary = {"phases": {"update": phase}, "peak_gib": 5.5, "device": "X", "jax": "1"}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    steps = [{"tokens": n, "mismatch_mean": 0.1} for n in (1, 7)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, steps)) + "\n")
    out = tmp_path / "phases.csv"
    run_grpo.main([f"--phases={out}", f"--run={tmp_path}", "a.gin", "run.steps=2"])
    (row,) = results.read(out)
    wanted = {"phase": "update", "tokens": "7", "temporary_gib": "1.0", "device": "X"}
    assert wanted.items() <= row.items() and row["overrides"] == "run.steps=2"


# -------------------------------------------------------------------------- rl


def test_rl_steps_of_slots_by_hand():
    lengths = np.array([5, 2, 3, 2])  # decoded in 4, 1, 2 and 1 steps after a prompt
    assert rl_sampler.steps_in_order(lengths, 2) == 4
    assert rl_sampler.steps_in_parts(lengths, 2) == 4 + 2
    assert rl_sampler.steps_advancing_alike(lengths, 2) == 2 + 1 + 1 + 1


def test_rl_lengths_share_variance_of_their_prompts():
    rng = np.random.default_rng(0)
    lengths, before = rl_sampler.lengths_of(rng, 500, alike=0.8, scale=1)
    assert (lengths < rl_sampler.BELOW).mean() == pytest.approx(0.75, abs=0.03)
    assert lengths.max() == rl_sampler.LIMIT
    groups = np.stack([lengths, before]).reshape(2, 500, -1)
    alike, _ = rl_sampler.alike_of(np.concatenate([*groups], axis=1))
    assert alike == pytest.approx(0.8, abs=0.05)
    halves = rl_sampler.halves_of(rng, groups[0], rl_sampler.LIMIT)
    assert halves.shape == (2, 500 * rl_sampler.GROUP // 2)


def test_rl_tokens_that_turns_read_by_hand():
    sizes = rl_sampler.Sizes(rl_sampler.TINY, prompt=8, completion=2, reply=3)
    assert [sizes.cached(turns) for turns in (1, 2)] == [9, 14]
    assert [sizes.read_again(turns) for turns in (1, 2)] == [9, 9 + 14]


def test_rl_mismatch_drops_what_leaves_a_band():
    exact = np.zeros(8)
    measured = np.array([0, 0, 0, 0, 0.005, 0, 0, 2.0])
    row = rl_mismatch.rejected(measured, exact, sequences=2)
    assert row["tokens_outside_strict"] == "25.000"
    assert row["tokens_outside_1_01"] == row["tokens_outside_icepop"] == "12.500"
    assert row["sequences_dropped_every_token"] == "50.0"


def test_rl_rows_have_first_last_and_some_steps():
    class Step:
        def __init__(self, step):
            self.step, self.reward = step, step / 3

    rows = [*rl_learning.some_steps([*map(Step, range(1, 8))], {"a": 1}, ["reward"], 3)]
    assert [row["step"] for row in rows] == [1, 3, 6, 7]
    assert rows[0] == {"a": 1, "step": 1, "reward": 0.3333}


def test_rl_windows_are_means_of_thirds_by_seed():
    rewards = {0: [0, 1, 2, 3, 4, 5], 1: [1, 1, 1, 1, 1, 1]}
    rows = [
        {"config": "x", "token_fraction": 0.5, "draw": "uniform", "seed": seed,
         "step": step, "reward": reward}
        for seed, values in rewards.items()
        for step, reward in enumerate(values, start=1)
    ]  # fmt: skip
    found = list(rl_learning.windows(rows))
    assert [row["step"] for row in found] == ["1 to 2", "3 to 4", "5 to 6"]
    assert [row["reward"] for row in found] == [0.75, 1.75, 2.75]
    assert [row["lowest"] for row in found] == [0.5, 1, 1]
    assert [row["highest"] for row in found] == [1, 2.5, 4.5]


def test_rl_tokens_are_drawn_with_less_variance_by_bounds():
    for row in rl_tokens.variances(count=400, vocab_size=64):
        assert row["added_uniform"] == pytest.approx(
            1 / row["token_fraction"] - 1, abs=1e-4
        )
        assert row["added_importance"] < 0.8 * row["added_uniform"]
        # Kantorovich's inequality, for bounds within a factor of sqrt(2).
        assert row["added_importance"] < 1.031 * (1 + row["added_by_norm"]) - 1
        assert row["largest_weight"] <= 10 / row["token_fraction"] + 0.1


@pytest.mark.slow
@pytest.mark.parametrize(
    "question",
    [
        "mismatch --sequences=2 --length=128",
        "routes --rows=2 --tokens=4",
        "refill --slots 4 --rollouts=1",
        "turns --turns 2 --repetitions=1",
        "replay --steps=2",
        "fractions 0.5 1.0 --seeds=1 --config=grpo_arithmetic.gin",
        "entries --head recorded --seeds=1",
        "tokens --count=50 --vocab-size=32",
        "curves --seeds=1",
        "calculator --seeds=1 --text-steps=2 --rollouts=2",
        "passes --case=shared --rollouts=2 --tokens=16 --group=4 --minibatches 2",
    ],
)
def test_run_rl_writes_rows_of_each_question(question, tmp_path):
    out = tmp_path / "x.csv"
    policy = "grpo.prompts=4 grpo.group_size=4 model.hidden=16 model.ff=16".split()
    policy += ["optimizer.warmup_steps=1"]
    name = question.split()[0]
    if name == "curves":  # its slots need 128 completions
        policy = policy[2:]
    policy += ["run.steps=2"] if name != "replay" else []
    if name == "passes":
        policy = "model.layers=2 model.hidden=32 model.ff=32 model.heads=2".split()
        policy += "model.kv_heads=1 model.head_dim=16 model.vocab_size=64".split()
    learns = name in ("replay", "fractions", "entries", "curves", "passes")
    overrides = [f"--set={word}" for word in policy] if learns else []
    run_rl.main([*question.split(), *overrides, f"--out={out}"])
    rows = results.read(out)
    assert rows and all(row["date"] for row in rows)


# -------------------------------------------------------------------- offloading


def test_offload_counterpart_differs_in_offloading():
    texts = "full", "offload_attention", "offload_block save=q", "full last=2", "none"
    variants = {text: stack.read(text) for text in texts}
    found = {
        text: run_offload.on_device(variant, variants)
        for text, variant in variants.items()
    }
    assert found["full"] == found["offload_attention"] == "full"
    assert found["full last=2"] == "full last=2"
    assert found["offload_block save=q"] == found["none"] == ""


def test_offload_columns_are_ratios_within_a_round():
    row = run_offload.columns([2.0, 4.0, 9.0], [1.0, 2.0, 3.0])
    assert row == {"ms": 4000.0, "over_first": 2.0, "spread": 0.5, "rounds": 3}


def test_offload_gradient_error_is_largest_of_layers():
    norms = {"a": np.array([1.0, 2.0]), "b": np.array([4.0])}
    assert (
        run_offload.gradient_error(norms, {"a": norms["a"], "b": np.array([5.0])})
        == 0.2
    )


@pytest.mark.full
def test_offload_optimizer_forms_take_the_same_step(capsys):
    sent = {}
    for form in run_offload.FORMS:
        arguments = ["--worker=optimizer", f"--form={form}", "--gib=0", "--rounds=1"]
        ((sent[form],), _) = rows_of(capsys, run_offload.main, arguments)
    assert sent["slices"]["mean_square"] == pytest.approx(
        sent["device"]["mean_square"], rel=1e-6
    )


@pytest.mark.slow
def test_offload_steps_agree_between_policies(tmp_path, capsys):
    common = ["--sizes=tiny", "--rounds=2", "--variant=full", "--variant=offload_block"]
    facts, _ = rows_of(capsys, run_offload.main, ["--worker=compile", *common])
    assert [row["tokens"] for row in facts] == [64, 64]
    rows, _ = rows_of(
        capsys, run_offload.main, ["--worker=run", "--first=full", *common]
    )
    last = {row["variant"]: row for row in rows}
    assert float(last["offload_block"]["gradient_error"]) < 1e-3
    assert last["offload_block"]["over_first"] > 0 and last["full"]["rounds"] == 2


def test_offload_figure_has_a_point_per_policy(tmp_path):
    rows = [
        {"variant": name, "peak_gib": gib, "over_first": "1.0"}
        for name, gib in [("full", "2"), ("dots", "5"), ("full xla_flag=1", "2")]
    ]
    rows.append({"variant": "none", "peak_gib": "", "over_first": ""})
    assert [point[0] for point in plot_offload.points(rows)] == ["full", "dots"]
    results.save(tmp_path / "x.csv", rows)
    plot_offload.main([str(tmp_path / "x.csv"), f"--out={tmp_path / 'x.svg'}"])
    assert (tmp_path / "x.svg").read_text("utf-8").count("<path") > 10


# ------------------------------------------------------------------ distillation


@pytest.mark.parametrize(
    ("flags", "added"),
    [
        ("avx512f avx512_bf16 amx_bf16", " with amx_bf16"),
        ("avx512f avx512_bf16", " with avx512_bf16"),
        ("avx512f", ""),
    ],
)
def test_cpu_name_has_instructions_of_bfloat16(flags, added, tmp_path):
    core = f"processor : 0\nmodel name : Some CPU\nflags : fpu {flags}\n\n"
    (tmp_path / "cpuinfo").write_text(2 * core)
    assert results.cpu_name(tmp_path / "cpuinfo") == f"2 cores Some CPU{added}"


@pytest.mark.parametrize("name", ["h200", "h100", "cpu"])
def test_distill_verbs_have_a_path_per_recorded_row(name):
    rows = results.read(f"distill_verbs_{name}.csv")
    paths = distill_verbs.paths_of(1024, (4096, 8192))
    assert {row["path"] for row in rows} <= set(paths)
    of_d = {row["path"]: row["teacher_d"] for row in rows}
    for path, teacher_d in of_d.items():
        assert str(paths[path].operands.teacher_d or "") == teacher_d
    assert {paths[row["path"]].unit for row in rows} <= set(distill_verbs.UNITS)


def test_distill_verbs_of_one_word_omit_others():
    paths = distill_verbs.paths_of(16, (8,), ["topk_kl"])
    assert set(paths) == {
        "topk_kl with gradients", "topk_kl and token_loss with gradients",
        "topk_kl with gradients materialised",
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*distill_verbs.KINDS, "topk_kl"])
def test_distill_verbs_agree_with_materialised_ones(kind):
    paths = distill_verbs.paths_of(16, (8,), [kind, "divergence_loss"])
    paths = {k: x for k, x in paths.items() if f" {kind} with " in f" {k}"}
    exact = [path for name, path in paths.items() if "K=" not in name]
    values = []
    for path in exact:
        operands = path.operands.make((32, 16, 300), jnp.float32)
        values.append(float(jax.jit(path.call)(*operands)[0]))
    np.testing.assert_allclose(values, values[-1], rtol=1e-3)


@pytest.mark.slow
def test_run_distill_verbs_writes_units_and_memory(tmp_path):
    out = tmp_path / "x.csv"
    sizes = "verbs --shape=64,16,320 --dtype=float32 --chunk=16 --repetitions=1"
    run_distill.main([*sizes.split(), "--verb=topk", f"--out={out}"])
    fused, materialised = results.read(out)
    assert fused["path"] == "topk" and fused["unit"] == "stats"
    assert float(fused["over_unit"]) > 0 and float(materialised["temp_mib"]) > 0


@pytest.mark.slow
def test_run_distill_peers_agree_with_float64(tmp_path):
    pytest.importorskip("torch")
    out = tmp_path / "x.csv"
    sizes = "peers --shape=64,16,320 --dtype=float32 --repetitions=1"
    run_distill.main([*sizes.split(), "--teacher-depth=8", f"--out={out}"])
    by_path = {row["path"]: row for row in results.read(out)}
    assert float(by_path["jsd with gradients, torch"]["value_error"]) < 1e-5


def test_run_distill_counts_steps_to_a_margin():
    losses = {20: 5.0, 40: 4.0, 60: 4.5}
    assert run_distill.first_step(losses, 4.2) == 40
    assert run_distill.first_step(losses, 3.0) is None


@pytest.mark.slow
def test_run_distill_training_has_a_row_per_margin(tmp_path):
    out = tmp_path / "x.csv"
    sizes = "training --seeds=1 --steps=4 --every=2 --teacher-steps=2"
    run_distill.main([*sizes.split(), f"--folder={tmp_path}", f"--out={out}"])
    rows = results.read(out)
    assert [row["source"] for row in rows] == ["text"] * 3 + ["distill"] * 3
    assert all(float(row["last_loss"]) > 0 for row in rows)


# ----------------------------------------------------------------------- low bit


def test_run_engine_sums_seeds_up():
    facts = {"device": "a", "jax": "1", "jaxlib": "1", "date": "d"}
    rows = [
        {"max_staleness": 1, "correction": "tis", "seed": seed, "step": step,
         "reward": reward, "staleness_mean": 1.0, **facts}
        for seed, reward in enumerate((0.25, 0.75)) for step in (10, "last 20")
    ]  # fmt: skip
    (row,) = run_engine.summary(rows)
    assert row["seed"] == "all 2" and row["correction"] == "tis"
    assert (row["reward"], row["lowest"], row["highest"]) == (0.5, 0.25, 0.75)


@pytest.mark.full
def test_run_engine_trains_through_a_server(tmp_path):
    out = tmp_path / "steps.csv"
    sizes = ["grpo.prompts=2", "grpo.group_size=4", "model.attention=None"]
    command = ["steps", "--config=grpo_arithmetic.gin", "--count=3", "--cases", "1"]
    run_engine.main([*command, f"--folder={tmp_path}", f"--out={out}", "--set", *sizes])
    (row,) = results.read(out)
    assert row["case"] == "engine, adapters, max_staleness=1"
    assert float(row["staleness_mean"]) == 1 and float(row["waiting_seconds"]) >= 0


def test_run_low_bit_compares_seeds_with_16_bits():
    curves = {"bfloat16": {0: {0: 4.0, 2: 3.0}, 1: {0: 4.0, 2: 3.5}}}
    curves["nf4"] = {0: {0: 4.5, 2: 3.25}, 1: {0: 4.5, 2: 3.25}}
    own = {"bfloat16": 2.0, "nf4": 2.5}
    rows = {(row["base"], row["seed"]): row for row in run_low_bit.rows_of(curves, own)}
    assert rows["nf4", 1]["over_16_bits"] == -0.25
    mean = {"sources_loss": 2.5, "loss_at_0": 4.5, "loss_at_2": 3.25}
    mean |= {"base": "nf4", "seed": "mean", "over_16_bits": 0, "spread": 0}
    assert rows["nf4", "mean"] == mean
    assert rows["bfloat16", "mean"]["spread"] == 0.5


@pytest.mark.slow
def test_run_recorded_compares_with_exact_gradients(tmp_path):
    out = tmp_path / "x.csv"
    sizes = "--cpu --shape=32,32,512 --k=16 --chunk=32 --repetitions=1 --data=policy"
    run_recorded.main([*sizes.split(), f"--out={out}"])
    rows = {(row["path"], row["step"]): row for row in results.read(out)}
    name = "logprobs, recorded, forward and both gradients"
    for step in run_recorded.STEPS:
        row = rows[name, str(step)]
        assert row["lost"] == "0" and 0 < float(row["dh_deviation"]) < 1
        assert abs(float(row["lnz_rms"])) < 3 * float(row["lnz_told"])
    assert float(rows[name, "0.01"]["over_gemm"]) > 0
    assert "record_entries" in {path for path, _ in rows}


@pytest.mark.slow
def test_run_low_bit_writes_losses_of_each_base(tmp_path):
    out = tmp_path / "x.csv"
    sizes = "--tiny --seeds=1 --steps=2 --every=1 --decoder-steps=2 --files=8"
    run_low_bit.main([*sizes.split(), f"--folder={tmp_path}", f"--out={out}"])
    rows = results.read(out)
    assert [row["base"] for row in rows[::2]] == ["bfloat16", "int8", "nf4"]
    before = [float(row["loss_at_0"]) for row in rows]
    assert all(
        float(row["loss_at_2"]) < loss for row, loss in zip(rows, before, strict=True)
    )


# ------------------------------------------------------------------ integrations


@pytest.mark.slow
@pytest.mark.parametrize("loss", run_integrations.LOSSES)
def test_integrations_keep_the_value_of_tunix_losses(loss, tmp_path):
    pytest.importorskip("tunix")
    sizes = "--model=tiny --rows=2 --prompt=4 --completion=12 --chunk=8"
    out = tmp_path / "x.csv"
    arguments = [f"--loss={loss}", *sizes.split(), "--repetitions=1", f"--out={out}"]
    run_integrations.main(arguments)
    values = {row["head"]: float(row["loss_value"]) for row in results.read(out)}
    assert values["jaxmem"] == pytest.approx(values["tunix"], rel=1e-3)


def test_record_has_script_or_names_its_commit():
    """A record without a named commit has a script in the tree that writes it."""
    folder = ROOT / "benchmarks"
    page = (folder / "README.md").read_text("utf-8")
    named = "".join(
        row
        for script, row in re.findall(r"^(?:\| `(\w+\.py)` )(.*)$", page, re.MULTILINE)
        if (folder / script).exists()
    )
    patterns = re.findall(r"`([\w*]+\.csv)`", named)
    patterns += re.findall(r"--(?:out|phases|paper) (\w+\.csv)", page)
    written = re.compile(
        r"# Written by (benchmarks/\w+\.py), which is in commit \w{7}\."
    )
    for path in (folder / "results").glob("*.csv"):
        older = written.match(path.read_text("utf-8"))
        kept = any(fnmatch.fnmatch(path.name, pattern) for pattern in patterns)
        made_by_tests = path.name in MADE_BY_TESTS
        assert older or kept or made_by_tests, path.name
        assert kept or not older or not (ROOT / older[1]).exists(), path.name


# ------------------------------------------------------------- what is made of it


def test_merge_replaces_what_measures_the_same(tmp_path):
    out = tmp_path / "x.csv"
    row = {"n": 1, "d": 2, "v": 3, "dtype": "f", "path": "a", "device": "x", "ms": 1}
    results.merge(out, [row, {**row, "n": 2}])
    results.merge(out, [{**row, "ms": 5, "note": "again"}])
    rows = results.read(out)
    assert [(r["n"], r["ms"], r["note"]) for r in rows] == [
        ("1", "5", "again"),
        ("2", "1", ""),
    ]


def test_merge_loses_no_row(tmp_path):
    part, out = tmp_path / "part.csv", tmp_path / "x.csv"
    results.save(part, [{"loss": "a", "head": "x"}, {"loss": "a", "head": "y"}])
    with pytest.raises(ValueError, match="name what tells them apart"):
        results.main([str(out), str(part), "--key=loss"])
    assert not out.exists()
    results.main([str(out), str(part), "--key=loss", "--key=head"])
    assert [row["head"] for row in results.read(out)] == ["x", "y"]


def test_merge_keeps_rows_of_equal_keys(tmp_path):
    out, row = tmp_path / "x.csv", {"loss": "a", "head": "x"}
    results.save(out, [row, {**row, "head": "y"}])
    with pytest.raises(ValueError, match="name what tells them apart"):
        results.merge(out, [row], ["loss"])
    results.merge(out, [{"loss": "b"}], ["loss"])
    assert [row["loss"] for row in results.read(out)] == ["a", "a", "b"]


def test_merge_keeps_comment_while_old_row_stays(tmp_path):
    out, comment = tmp_path / "x.csv", "# Written by a script.\n"
    rows = [{"loss": "a"}, {"loss": "b"}]
    results.save(out, rows, comment)
    results.merge(out, [{"loss": "a", "ms": 1}], ["loss"])
    assert out.read_text().startswith(comment)
    assert [row["ms"] for row in results.read(out)] == ["1", ""]
    results.merge(out, [{"loss": "b", "ms": 2}, {"loss": "a", "ms": 1}], ["loss"])
    assert not out.read_text().startswith("#")


def test_unknown_path_is_refused_before_timing():
    with pytest.raises(SystemExit, match="--path must be of materialised, .*'jaxmem"):
        run_head.main(["--path=jaxmem chunk=512"])


def record(path, ratio, gemm_ms, n=8192, **columns):
    ms = ratio * gemm_ms if ratio else "out of memory"
    row = {"n": n, "d": 4096, "v": 128256, "dtype": "bfloat16", "path": path,
           "gemm_ms": gemm_ms, "jax": "1", "device": "x", "date": "d"}  # fmt: skip
    for name in ("forward", "forward_backward"):
        row |= {f"{name}_ms": ms, f"{name}_over_gemm": ratio or ""}
    row |= {"forward_backward_temp_mib": 1024.0 * n / 8192, **columns}
    return {name: str(value) for name, value in row.items()}


def test_unit_is_the_best_gemm_of_either_framework():
    ours = record("token_stats", 4.0, 15.0, compile_s=20, logprob_error="1.0e-05")
    peer = record(compare.LIGER, 5.0, 12.0, forward_backward_peak_mib=7, package="l 1")
    elsewhere = record("token_stats", 4.0, 5.0, n=4096)
    rows = compare.compare([ours, peer, elsewhere])
    assert [row["forward_backward_over_best"] for row in rows] == [5.0, 5.0, 4.0]
    assert [row["package"] for row in rows] == ["jaxmem", "l 1", "jaxmem"]
    assert [row["forward_backward_mib"] for row in rows] == ["1024.0", "7", "512.0"]
    reached = compare.goals(rows[:2], "token_stats")
    table = {what: (value, value <= goal) for what, value, goal in reached}
    assert table["forward + backward, of the best GEMM"] == (5.0, False)
    assert table["the same, of Liger SM90"] == (1.0, False)
    assert table["memory, MiB"] == (1024.0, False)  # 250 are a chunk's derivatives
    assert table["compilation, s"] == (20, False)
    assert table["logprob, nats"] == (1e-5, True)
    assert "half masked, of all" not in table  # it was not measured


def test_figure(tmp_path):
    rows = [record("token_stats", 4.0, n / 500, n) for n in (4096, 2048, 8192)]
    rows += [
        record("materialised", 6.0, 4.0, 2048),
        record("materialised", 0, 8.0, 4096),
    ]
    rows += [record("verl", 6.0, 4.0) | {"v": "7"}, record("unknown", 1.0, 4.0)]
    sampled = {"path": plot_head.SAMPLED, "n": "2048", "d": "4096", "v": "128256"}
    sampled |= {"ms": "3.0", "over_gemm": "1.2", "temp_mib": "128"}
    rows += [sampled | {"data": data} for data in ("policy", "flat")]
    figure = plot_head.figure(rows, 4096, 128256)
    ms, gib = figure.axes
    assert [line.get_label() for line in ms.lines] == [
        "jaxmem",
        "jaxmem, sampled (K=128)",
        "jax, materialised",
    ]
    assert [list(ax.lines[1].get_ydata()) for ax in (ms, gib)] == [[1.5], [0.125]]
    assert list(ms.lines[0].get_xdata()) == [2048, 4096, 8192]
    per_1024 = 4.0 * 1024 / 500
    np.testing.assert_allclose(ms.lines[0].get_ydata(), per_1024)
    np.testing.assert_allclose(gib.lines[0].get_ydata(), [0.25, 0.5, 1.0])
    assert [text.get_text().strip() for text in gib.texts] == ["out of memory"]
    results.save(tmp_path / "x.csv", rows)
    plot_head.main([str(tmp_path / "x.csv"), f"--out={tmp_path / 'x.svg'}"])
    assert (tmp_path / "x.svg").read_text("utf-8").count("<path") > 10


@pytest.mark.parametrize("page", ["docs/heads.md"])
def test_figure_of_head_shows_what_its_words_say(page):
    """The bars, and the words in their place, are the committed records."""
    rows = plot_first.rows_of()
    figure = plot_first.figure(rows)
    bars = [[bar.get_width() for bar in ax.patches] for ax in figure.axes]
    gib = [float(rows["torch.compile"]["forward_backward_peak_mib"]) / 1024]
    gib += [float(rows[path]["temp_mib"]) / 1024 for path in list(plot_first.BARS)[1:]]
    seconds = [float(row["forward_backward_ms"]) / 1000 for row in ordered(rows)]
    np.testing.assert_allclose(bars, [gib, seconds])
    text = (Path(__file__).parent.parent / page).read_text("utf-8")
    said = re.search(r"!\[([^]]*)\]\([^)]*first_h200.svg\)", text)
    shown = [(f"{a:.1f} GiB", f"{b:.2f} s") for a, b in zip(gib, seconds, strict=True)]
    assert said and all(f"{a} and {b}" in said[1] for a, b in shown)


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_figure_of_cards_shows_what_its_words_say(page):
    """The bars, and the words in their place, are the committed records."""
    rows = plot_cards.rows_of()
    (ax,) = plot_cards.figure(rows).axes
    bars = [bar.get_width() for bar in ax.patches]
    gib = [float(rows[key]["device_peak_gib"]) for key in plot_cards.BARS]
    np.testing.assert_allclose(bars, gib)
    text = (Path(__file__).parent.parent / page).read_text("utf-8")
    said = re.search(r"!\[([^]]*)\]\([^)]*cards_h200.svg\)", text)
    numbers = re.findall(r"(\d+) GiB", said[1]) if said else []
    assert [int(number) for number in numbers] == [round(x) for x in gib]


def ordered(rows):
    return [rows[path] for path in plot_first.BARS]
