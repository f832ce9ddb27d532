"""The policy's loss against plain numpy; runs that learn, resume, never recompile."""

import functools
import json
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxmem import losses
from jaxmem.data import tasks
from jaxmem.train.configuration import load
from jaxmem.train.jobs.grpo import job as grpo, policy_report
from jaxmem.train.jobs.grpo.minibatches import Minibatch
from jaxmem.train.jobs.grpo.policy_program import PolicyProgram
from jaxmem.train.jobs.policy_losses import POLICY_LOSSES
from jaxmem.train.jobs.policy_objective import (
    GrpoConfig,
    PolicyBatch,
    PolicyHeadOptions,
    average,
    policy_loss,
)
from jaxmem.train.jobs.rollout.nested_rows import take
from jaxmem.train.metrics import PolicyMetrics
from jaxmem.train.output.history import read_history
from tests.helpers.cases import slow
from tests.helpers.grpo import (
    CONFIGS,
    SMALL,
    completions,
    curve,
    dense,
    head_and_hidden,
    job_with,
    random_micro_batch,
    train,
)
from tests.helpers.hlo import shapes_of, vocabulary_gemms
from tests.helpers.kills import kill_before
from tests.helpers.runs import changed, drawn, steps

pytestmark = pytest.mark.usefixtures("quick_compilation", "no_picture")


# -------------------------------------------------------------------- pieces


def test_sequence_predicts_sampled_tokens():
    made, prompts = completions()
    labels = made.spread(made.sampled, -1)
    for i, (tokens, wanted) in enumerate(zip(made.tokens, labels, strict=True)):
        n, length = made.first[i] + 1, made.lengths[i]
        assert len(tokens) == len(wanted) == n + length - 1
        said = [*prompts[i, :n], *made.sampled[i, :length]]
        np.testing.assert_array_equal(tokens, said[:-1])
        np.testing.assert_array_equal(wanted[: n - 1], -1)
        np.testing.assert_array_equal(wanted[n - 1 :], said[n:])


def test_values_of_sampled_tokens_survive_packing():
    made, _ = completions()
    values = np.random.default_rng(1).normal(size=made.sampled.shape).astype("f4")
    packed = made.pack(16, (8, 16), 0.0)
    back = made.collect(packed.unpack(packed.place(made.spread(values))))
    live = np.arange(3) < made.lengths[:, None]
    np.testing.assert_array_equal(back, np.where(live, values, 0))
    part = take(made, np.array([4, 1]))
    np.testing.assert_array_equal(part.tokens[1], made.tokens[1])
    np.testing.assert_array_equal(
        part.collect(part.spread(values[[4, 1]])), back[[4, 1]]
    )


@pytest.mark.parametrize(
    ("loss", "share"),
    [
        ("grpo", lambda length, lengths: 1 / length / len(lengths)),
        ("dr_grpo", lambda length, lengths: 1 / (8 * len(lengths))),
        ("dapo", lambda length, lengths: 1 / sum(lengths)),
        ("cispo", lambda length, lengths: 1 / sum(lengths)),
        ("ppo_clip", lambda length, lengths: 1 / sum(lengths)),
        ("gspo", lambda length, lengths: 1 / length / len(lengths)),
        ("sapo", lambda length, lengths: 1 / length / len(lengths)),
    ],
)
def test_how_much_a_token_counts(loss, share):
    lengths = [1, 5, 2]
    weights, normalizer = average(GrpoConfig(loss=loss), lengths, 8)
    expected = [share(length, lengths) for length in lengths]
    np.testing.assert_allclose(weights / normalizer, expected, rtol=1e-6)


# ---------------------------------------------------------------------- loss


def test_loss_has_the_name_of_its_function():
    for name, loss in POLICY_LOSSES.items():
        function = getattr(loss.surrogate, "func", loss.surrogate)
        assert function is getattr(losses, name), name


@pytest.mark.parametrize("logits", ["fused", slow("materialised")])
@pytest.mark.parametrize(
    "loss",
    ["ppo_clip", "gspo", *map(slow, ["grpo", "dr_grpo", "dapo", "cispo", "sapo"])],
)  # the surrogates' own tests have each of them
def test_grpo_loss_and_metrics_equal_papers(loss, logits):
    config = GrpoConfig(
        loss=loss, kl_coefficient=0.1, entropy_coefficient=0.05,
        **({} if loss != "cispo" else dict(clip_low=0.3, clip_high=0.4)),
    )  # fmt: skip
    made, (head, hidden) = random_micro_batch(), head_and_hidden()
    if loss == "gspo":
        rng = np.random.default_rng(4)
        ratios = rng.normal(scale=5e-4, size=made.advantages.shape).astype("f4")
        made = made._replace(sequence_log_ratio=ratios)
    call = PolicyHeadOptions(0.7, logits)
    got, told = jax.jit(
        lambda made: policy_loss(head, hidden, made, 7.0, config, call)
    )(made)
    want, metrics = dense(config, np.asarray(head(hidden)) / 0.7, made, 7.0)
    np.testing.assert_allclose(got, want, rtol=2e-5)
    assert told.keys() == metrics.keys()
    for name, value in metrics.items():
        np.testing.assert_allclose(told[name], value, atol=2e-6, err_msg=name)
        assert not np.asarray(told[name])[made.batch.labels < 0].any()
    clipped = metrics["clip_fraction"].sum()
    assert 0 < clipped < (made.batch.labels >= 0).sum() or loss == "sapo"


@functools.partial(jax.jit, static_argnames=("definition", "config", "logits"))
def value_and_gradients(definition, weights, hidden, made, config, logits):
    def loss(weights, hidden):
        module, call = nnx.merge(definition, weights), PolicyHeadOptions(0.7, logits)
        return policy_loss(module, hidden, made, 7.0, config, call)[0]

    return jax.value_and_grad(loss, (0, 1))(weights, hidden)


def gradients(made, logits, config=None):
    config = config or GrpoConfig(kl_coefficient=0.1, entropy_coefficient=0.05)
    head, hidden = head_and_hidden()
    definition, weights = nnx.split(head)
    return value_and_gradients(definition, weights, hidden, made, config, logits)


def test_both_heads_give_one_gradient():
    fused, materialised = (
        gradients(random_micro_batch(), name) for name in ("fused", "materialised")
    )
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), fused, materialised
    )
    assert max(float(jnp.abs(x).max()) for x in jax.tree.leaves(fused[1])) > 1e-3


@pytest.mark.parametrize("logits", ["fused", "materialised"])
def test_loss_ignores_masked_tokens(logits):
    made = random_micro_batch()
    masked = made.batch.labels < 0
    poisoned = PolicyBatch(
        made.batch, *(np.where(masked, np.nan, x).astype("f4") for x in made[1:5])
    )
    jax.tree.map(
        np.testing.assert_array_equal,
        gradients(poisoned, logits),
        gradients(made, logits),
    )


@pytest.mark.parametrize(
    ("loss", "logits"),
    [
        ("grpo", "materialised"),
        *(slow(loss, "fused") for loss in ("cispo", "grpo", "dr_grpo", "dapo")),
    ],
)  # the weights of tokens are all in which dr_grpo and dapo differ from grpo
def test_gradient_is_zero_without_advantages(loss, logits):
    made = random_micro_batch()
    made = made._replace(advantages=np.zeros_like(made.advantages), ref_logprob=None)
    config = GrpoConfig(loss=loss)
    for leaf in jax.tree.leaves(gradients(made, logits, config)):
        np.testing.assert_array_equal(leaf, 0)


# ------------------------------------------------------------------ programs


@pytest.mark.slow
def test_three_gemms_of_the_vocabulary_a_chunk():
    config = changed(SMALL, model=dict(vocab_size=640), grpo=dict(max_tokens_train=64))
    program = PolicyProgram(config)
    (shape,) = program.shapes(64)
    assert shape == (4, 16) and config.head.chunk == 16  # four chunks
    text = program.compile_gradients(shape, config.head).as_text()
    assert vocabulary_gemms(text, 640) == 3


@pytest.mark.full
def test_after_the_first_step_nothing_compiles(finished):
    program = grpo.PolicyProgram(finished[0])  # that of the finished run
    job = job_with(program, program.compile())
    job.config = changed(job.config, run=dict(steps=6))
    state, _ = job.step(1, job.initial_state())
    compiled, seen = [], set()

    def listen(event, *_, **__):
        if "compile" in event:
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    for number in range(2, 7):
        state, told = job.step(number, state)
        seen.add((told.response_length, told.tokens))
    assert not compiled
    jax.jit(lambda x: x + len(seen))(0.5)
    assert compiled  # the listener listens
    assert len(seen) > 2


# ---------------------------------------------------------------------- runs


@pytest.fixture(scope="module")
def finished(tmp_path_factory, programs_of_module):
    """A run of four steps, what it returned and what it said; not to be changed."""
    config = changed(
        SMALL,
        sampling=dict(temperature=0.8),
        # Eight completions of each prompt: half of the groups differ in reward, so that
        # there is a gradient whichever way a processor rounds.
        grpo=dict(kl_coefficient=0.05, group_size=8, minibatches=1),
        run=dict(seed=1),
    )
    out_dir = tmp_path_factory.mktemp("finished") / "run"
    return config, *train(config, out_dir)


def test_run_leaves_everything_it_promises(finished):
    _, result, said = finished
    history = read_history(result.out_dir / "metrics.jsonl", PolicyMetrics)
    assert result.history == history and [s.step for s in history] == [1, 2, 3, 4]
    assert {p.name for p in result.out_dir.iterdir()} == {
        "about.json", "checkpoints", "jaxmem_run.json", "metrics.jsonl", "model",
        "operative.gin",
        "report.html",
        "report.png", "samples.jsonl", "settings.gin", "started.txt", "summary.json",
        "tensorboard",
    }  # fmt: skip
    for step in history:
        assert step.mismatch_max < 1e-5
        assert 1 <= step.response_length <= 3 and 0 <= step.degenerate <= 1
        assert step.kl is not None and step.kl >= 0
        parts = step.rollout_seconds + step.old_seconds + step.reference_seconds
        assert step.seconds == pytest.approx(parts + step.update_seconds)
        assert 0 < step.entropy <= np.log(14) and 0 < step.sum_pi_squared < 1
        assert step.grad_norm > 0
        assert step.peak_gib is None
    assert history[0].kl < 1e-3 < history[-1].kl
    assert "step 4/4  reward" in said and "rollout" in said and "reference" in said
    assert said.count("right)") + said.count("wrong)") == 3
    summary = json.loads((result.out_dir / "summary.json").read_text())
    assert summary["last_reward"] == history[-1].reward
    assert set(summary["phases"]) == {"rollout", "reference", "update"}
    operative = (result.out_dir / "operative.gin").read_text()
    assert operative == "run.steps = 4\n"


@pytest.mark.full
def test_summary_has_memory_of_both_heads(finished, tmp_path):
    result, _ = train(finished[0], tmp_path / "run", compare_heads=True)
    assert set(result.summary["memory"]) == {"fused", "materialised"}


@pytest.mark.full
@pytest.mark.parametrize("by_limit", [slow(True), False])
def test_host_moments_and_limit_change_no_number(by_limit, finished, tmp_path):
    config, wanted, _ = finished
    lean = dict(policy="fit", memory_limit=1.0) if by_limit else {}
    config = changed(config, optimizer=dict(offload=True), remat=lean)
    result, said = train(config, tmp_path / "run")
    names = "loss", "grad_norm", "reward", "entropy"
    np.testing.assert_allclose(
        curve(result, *names), curve(wanted, *names), rtol=1e-3, atol=1e-5
    )
    chosen = re.search("^none .* chosen$", said, re.MULTILINE)
    assert bool(chosen) == by_limit, said
    moments = jax.tree.leaves(PolicyProgram(config).state_shapes.optimizer)
    assert {x.sharding.memory_kind for x in moments} == {"pinned_host"}
    with pytest.raises(ValueError, match="optimizer.offload was True, is absent"):
        train(changed(config, optimizer=dict(offload=False)), tmp_path / "run", steps=5)


@pytest.mark.slow
def test_loss_of_routers_is_learned():
    mixed = {
        "feed_forwards": ("experts",), "experts.count": 4, "experts.ff": 48,
        "experts.per_token": 2, "router.renormalised": True, "embedding.scaled": False,
    }  # fmt: skip
    made, _ = completions()
    advantages = np.linspace(-1, 1, len(made.lengths), dtype="f4")
    old = np.full(made.sampled.shape, -2.0, "f4")
    found = []
    for factor in (0.0, 5.0):
        model = {**mixed, "router_aux_loss_coef": factor}
        program = PolicyProgram(changed(SMALL, model=model))
        learned = Minibatch(made, advantages, old, None, None)
        rows, normalizer = next(learned.micro_batches(program.config))
        shape = rows.batch.tokens.shape
        run = program.compile_gradients(shape, program.config.head)
        zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), program.sums())
        weights = drawn(program.new_model)[1]
        sums, _ = run(weights, {}, zeros, rows, normalizer)
        found.append(sums)
    assert found[0].loss == found[1].loss  # that of tokens alone is recorded
    norms = [
        np.sqrt(sum(np.sum(x**2) for x in jax.tree.leaves(sums.gradients)))
        for sums in found
    ]
    assert 0 < norms[0] < norms[1]


@pytest.mark.slow  # own models learn, too, and gradients are the papers'
def test_shipped_config_learns(tmp_path):
    config, _ = load(CONFIGS / "grpo_arithmetic.gin", ["run.steps=60"])
    result, _ = train(config, tmp_path / "run")
    rewards = curve(result, "reward")[:, 0]
    assert rewards[:5].mean() < 0.15 and rewards[-5:].mean() > 0.5
    assert all(step.response_length == 1 for step in result.history)


# The 8B config, with everything small but what it is about.
REAL = CONFIGS / "grpo_qwen3_8b_h200.gin"
TINY = (
    "model.layers=2 model.hidden=32 model.ff=40 model.heads=4 model.kv_heads=2 "
    "model.head_dim=24 model.vocab_size=640 task.digits=1 sampling.max_new_tokens=6 "
    "grpo.row_lengths=(16,) grpo.max_tokens_train=64 grpo.max_tokens_forward=128 "
    "head.chunk=16"
).split()


def test_8b_job_trains_only_attention_in_float32():
    program = PolicyProgram(load(REAL)[0])
    params, frozen = program.state_shapes.params, program.frozen_shapes
    trained, rest = (
        sum(leaf.size for leaf in jax.tree.leaves(tree)) for tree in (params, frozen)
    )
    assert trained == pytest.approx(1.51e9, rel=0.01)
    assert trained + rest == pytest.approx(8.19e9, rel=0.005)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    assert {leaf.dtype for leaf in jax.tree.leaves(frozen)} == {jnp.dtype("bfloat16")}
    assert set(frozen) == {"blocks", "embed", "head", "norm"} and program.head_is_frozen
    sums = jax.eval_shape(program._make_zeros)
    assert jax.tree.structure(sums.gradients) == jax.tree.structure(params)


@pytest.mark.full
def test_frozen_trunk_has_no_gradient():
    config, _ = load(REAL, TINY)
    program = PolicyProgram(config)
    compiled = program.compile_gradients((4, 16), config.head)
    # No product is as large as a frozen matrix: of the feed-forward or the vocabulary.
    shapes = shapes_of(compiled.as_text())
    products = re.findall(r"%?([\w.-]+) = [^\n]*? dot\(", compiled.as_text())
    made = {shapes[name] for name in products}
    trained = {"32,96", "96,32", "32,48", "48,32"}  # query, output, key and value
    frozen = {"32,40", "40,32", "32,640", "640,32"}
    assert trained & made
    assert not frozen & made
    assert vocabulary_gemms(compiled.as_text(), 640) == 2  # of three, where it is not
    sizes = compiled.memory_analysis()
    weights = sum(leaf.size for leaf in jax.tree.leaves(program.state_shapes.params))
    assert sizes.output_size_in_bytes < 4 * weights + 1000
    # The sums given are used again for those returned.
    assert sizes.output_size_in_bytes - sizes.alias_size_in_bytes < 1000


def test_killed_run_resumes_bitwise(finished, tmp_path, monkeypatch):
    config, whole, _ = finished
    check_resumption(config, whole.out_dir, tmp_path / "killed", monkeypatch)


@pytest.mark.full
@pytest.mark.usefixtures("programs_of_module")
def test_killed_run_with_every_draw_resumes_bitwise(tmp_path, monkeypatch):
    config = changed(
        SMALL,
        grpo=dict(kl_coefficient=0.02, epochs=2),
        optimizer=dict(trainable="blocks|head"),
        sampling=dict(slots=5),
        model=dict(dtype="bfloat16"),
        head=dict(gradient=("sample", 4, "int8")),
    )
    train(config, tmp_path / "whole", checkpoint_every=None)
    whole = check_resumption(
        config, tmp_path / "whole", tmp_path / "killed", monkeypatch
    )
    assert {s["gradient_samples"] for s in whole} == {4}
    assert all(0 < s["forward_error"] < 1e-2 for s in whole)
    busy = [s["busy"] for s in whole]
    assert all(0.5 < share <= 1 for share in busy) and min(busy) < 1


def check_resumption(config, whole, killed, monkeypatch):
    """A run killed before its last step writes the steps of the whole one."""

    def start():
        return train(config, killed, checkpoint_every=2)

    kill_before(4, grpo.Grpo, monkeypatch, start)
    assert "at step 2 of" in start()[1]
    expected, resumed = (steps(path, PolicyMetrics) for path in (whole, killed))
    assert resumed == expected and len(expected) == 4
    return expected


ADAPTED = changed(SMALL, model=dict(lora_rank=2), grpo=dict(kl_coefficient=0.1))


def test_adapter_reference_shares_weights():
    job = grpo.Grpo(ADAPTED)
    job.program = program = job.make_program(job.vocabulary())
    params, frozen = program.state_shapes.params, program.frozen_shapes
    paths = [jax.tree_util.keystr(p) for p, _ in jax.tree.leaves_with_path(params)]
    assert paths and all("lora" in path for path in paths)
    reference = program.initial_params()
    assert jax.tree.structure(reference) == jax.tree.structure(params)
    small, large = (sum(x.size for x in jax.tree.leaves(t)) for t in (params, frozen))
    assert small < large / 3
    for phase in policy_report.phases_of(program):
        assert phase.held.get("reference weights", params) is params


@pytest.mark.slow
def test_reference_of_adapters_stays_what_it_was(tmp_path):
    result, _ = train(ADAPTED, tmp_path / "run", steps=2)
    first, last = result.history
    assert first.kl < 1e-3 < last.kl


def test_resume_refuses_other_task_model_or_seed(finished):
    config, result, _ = finished
    for changes, message in (
        (dict(task=dict(seed=1)), "task.seed was 0, is 1"),
        (dict(model=dict(hidden=16)), "model.hidden was 32, is 16"),
        (dict(run=dict(seed=2)), "run.seed was 1, is 2"),
        (dict(optimizer=dict(trainable="blocks")), "optimizer.trainable was None, is"),
        (dict(grpo=dict(minibatches=2)), "grpo.minibatches was 1, is 2"),
    ):
        with pytest.raises(ValueError, match=message):
            train(changed(config, **changes), result.out_dir)
    assert read_history(result.out_dir / "metrics.jsonl", PolicyMetrics)


def test_resume_refuses_another_backend(finished, monkeypatch):
    config, result, _ = finished
    monkeypatch.setattr(PolicyProgram, "backend", "hopper")
    with pytest.raises(ValueError, match="^head.implementation was 'xla' in run"):
        train(config, result.out_dir, steps=5)


@pytest.mark.parametrize(("rows", "shown"), [(2, 2), (3, 3), (8, 3)])
def test_samples_show_a_few_completions(rows, shown):
    made = SimpleNamespace(
        advantages=np.zeros(rows), prompts=None, completions=None,
        graded=SimpleNamespace(right=np.ones(rows, bool)),
    )  # fmt: skip
    task = SimpleNamespace(shown=lambda asked, completions, i: (str(i), "a"))
    assert len(list(policy_report.examples(task, made))) == shown


def test_complete_run_compiles_nothing(finished, monkeypatch):
    config, result, _ = finished
    monkeypatch.setattr(grpo.Grpo, "build", None)
    again, said = train(config, result.out_dir)
    assert again == result
    assert said == (
        f"{result.out_dir} is complete (4 of 4 steps); raise run.steps, or name "
        "another run.out_dir\n"
    )


# -------------------------------------------------------------------- config


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["sampling.max_new_tokens=2"], "max_new_tokens=2 must be 1 for task.answer="),
        (["task.answer=sum"], "sampling.max_new_tokens=1 must be at least 3"),
        (["run.accumulate=2"], "'run.accumulate=2': run.accumulate=2 must stay 1"),
        (["grpo.row_lengths=(2,)"], "grpo.row_lengths=(2,) must reach 4, the longest"),
        (["grpo.row_lengths=(8, 4)"], "row_lengths must be increasing positive integ"),
        (["grpo.row_lengths=[4]"], "grpo.row_lengths must be tuple or None, got [4]"),
        (["grpo.max_tokens_train=8"],
         "max_tokens_train=8 must hold a row of 64 tokens"),
        (["grpo.group_size=1"], "grpo.group_size must be at least 2, got 1"),
        (["grpo.minibatches=5"], "minibatches must divide prompts x group_size"),
        (["grpo.loss=a2c"], "grpo.loss must be one of 'grpo', 'dr_grpo', 'dapo', 'ppo"),
        (["grpo.clip_low=2.0"], "grpo.clip_low must be in [0, 1], or None, got 2.0"),
        (["grpo.clip_high=-1"], "grpo.clip_high must be 0 or more, or None, got -1"),
        (["grpo.kl_coefficient=-1"], "grpo.kl_coefficient must be at least 0, got -1"),
        (["run.job=sft"], "is of the job 'grpo', but run.job is 'sft', whose sections"),
        (["run.job=ppo"], "run.job must be one of 'sft', 'grpo', 'dpo', 'distill'"),
        (["data.seed=1"], "'data.seed=1': data.seed is of the job 'sft', but run.job"),
        (["data.shuffle=False"], "eval; for prompts it is task.shuffle"),
        (["remat.policy=half"], "remat.policy must be one of 'none', 'full', 'dots'"),
        (["remat.policy=fit"], "memory_limit=None cannot be combined with policy"),
        (["remat.last=2"], "remat.last=2 cannot be combined with policy='none'"),
        (["remat.last=-1"], "remat.last must be 0 or more, got -1"),
        (["remat.policy=fit", "remat.memory_limit=9", "remat.last=1"],
         "remat.last=1 cannot be combined with policy='fit', which chooses it"),
        (["remat.memory_limit=40"], "memory_limit=40 cannot be combined with"),
        (["remat.policy=fit", "remat.memory_limit=0"], "memory_limit must be above 0"),
        (["remat.policy=fit", "remat.memory_limit=all"], "must be 'auto' or float or"),
        (["sampling.top_p=0.9"], "sampling.support must be given for a top_p or"),
    ],
)  # fmt: skip
def test_grpo_config_errors_are_one_line(overrides, expected):
    with pytest.raises(ValueError, match=re.escape(expected)) as caught:
        load(CONFIGS / "grpo_arithmetic.gin", overrides)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (dict(sampling=dict(slots=33)), "at most grpo.prompts x grpo.group_size = 32"),
        (dict(sampling=dict(slots=4), mesh=dict(data=2)),
         "sampling.slots=4 must stay None on a mesh of several devices"),
    ],
)  # fmt: skip
def test_slots_that_cannot_be_refilled_are_refused(changes, expected):
    with pytest.raises(ValueError, match=expected):
        PolicyProgram(changed(SMALL, **changes))


def test_plan_counts_the_cache_of_the_slots():
    sizes, turns = [], []
    for slots in (None, 8):
        program = PolicyProgram(changed(SMALL, sampling=dict(slots=slots)))
        (phase,) = program.rollout_phases({})
        sizes.append(phase.parts["keys and values"])
        turns.append(phase.turns)
        assert phase.tokens == 32 * 3
    assert sizes[0] == 4 * sizes[1] and turns == [2, 1]


def test_vocabulary_below_the_task_s_is_refused(tmp_path):
    with pytest.raises(ValueError, match="model.vocab_size=9 is below .* 14 entries"):
        train(changed(SMALL, model=dict(vocab_size=9)), tmp_path / "run")


def test_task_vocabulary_is_the_models():
    shape = PolicyProgram(SMALL).state_shapes.params["head"]["kernel"].shape
    assert shape == (32, len(tasks.VOCABULARY))
