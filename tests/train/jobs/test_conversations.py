"""Several turns with an environment: what is read, learned, replayed, and refused."""

import concurrent.futures
import functools
import json
import pathlib
import re
import shutil
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxmem import losses
from jaxmem.data.environments import Episode
from jaxmem.data.records import DataError
from jaxmem.data.rewards import RewardError
from jaxmem.data.tasks import TaskConfig
from jaxmem.train import configuration, jobs
from jaxmem.train.jobs import advantages
from jaxmem.train.jobs.grpo import job as grpo
from jaxmem.train.jobs.grpo.minibatches import Minibatch
from jaxmem.train.jobs.rollout import shown_samples as shown
from jaxmem.train.jobs.rollout.completing import TurnCompletion
from jaxmem.train.jobs.rollout.conversations import Replies
from jaxmem.train.jobs.rollout.nested_rows import join, take
from jaxmem.train.jobs.rollout.packed import Completions
from jaxmem.train.jobs.rollout.prompts import Graded
from jaxmem.train.jobs.rollout.samples import Sampled, SlotUse, select_groups
from jaxmem.train.jobs.rollout.sampling_program import SamplingProgram
from jaxmem.train.metrics import PolicyMetrics
from tests.helpers import runs, texts
from tests.helpers.cases import slow
from tests.helpers.kills import kill_before
from tests.helpers.runs import refused

pytestmark = pytest.mark.usefixtures("quick_compilation", "no_picture")
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role[0] + ' ' + m.content }}"
    "{% if m.role == 'assistant' %}{{ '</s>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ ' a ' }}{% endif %}"
)
# A tokenizer without a decoder puts spaces between letters.
ENVIRONMENT = """
class Vowels:
    def reset(self, record):
        self.turn, self.record = 0, record
        text = record["word"]
        return text if record["plain"] else [{"role": "user", "content": text}]

    def step(self, said):
        self.turn += 1
        last = said[-1] if self.record["plain"] else said[-1]["content"]
        reward = last.count("a") / 4
        done = self.turn == self.record["turns"]
        reply = "more" if self.record["plain"] else [
            {"role": "user", "content": "more"}]
        return reply, reward, done
"""
GIN = """
task.source = "records.jsonl"
task.environment = "envs.py:Vowels"
task.max_turns = 3
task.max_reply_tokens = 10
task.max_prompt_tokens = 12
sampling.max_new_tokens = 4
grpo.prompts = 4
grpo.group_size = 8
grpo.minibatches = 2
grpo.max_tokens_train = 256
grpo.max_tokens_forward = 256
grpo.loss = "dapo"
head.chunk = 32
optimizer.learning_rate = 2e-2
optimizer.warmup_steps = 0
optimizer.weight_decay = 0.0
run.job = "grpo"
run.steps = 8
run.checkpoint_every = 3
run.compare_heads = False
run.out_dir = "run"
"""


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = texts.checkpoint("llama", tmp_path)
    named = {"eos_token": "</s>", "bos_token": "<s>", "chat_template": TEMPLATE}
    (model / "tokenizer_config.json").write_text(json.dumps(named))
    rows = [
        {"word": a + b, "plain": b in "wx", "turns": 1 + "wxyz".index(b)}
        for a in "abcd"
        for b in "wxyz"
    ]
    runs.write("records.jsonl", rows)
    pathlib.Path("envs.py").write_text(ENVIRONMENT)
    pathlib.Path("grpo.gin").write_text(GIN + f'model.checkpoint = "{model}"\n')
    return tmp_path


train = functools.partial(runs.train, "grpo.gin")


def encoded(text):
    special = {"<": 1}
    return [special.get(c, texts.LETTERS.find(c) + 3) for c in text]


class Reader:
    """The task of a configuration, and completions that are given."""

    def __init__(self, *overrides, **samples):
        config = configuration.load("grpo.gin", overrides)[0]
        self.task = jobs.job_of(config).reads.task
        self.config, self.seen = config, []

    def play(self, asked, completions):
        """Each turn, all rows say what is given for it."""

        def sample(prompts, lengths, turn):
            self.seen.append((prompts.copy(), lengths.copy()))
            count, ids = len(lengths), np.array(completions[turn], np.int32)
            row = np.zeros(4, np.int32)
            row[: len(ids)] = ids
            return SimpleNamespace(
                tokens=np.tile(row, (count, 1)), lengths=np.full(count, len(ids)),
                logprobs=np.full((count, 4), -1.0 - turn), support_ids=None,
                routes=np.full((count, 3, 1, 1), turn), entries=None,
            )  # fmt: skip

        return self.task.play(asked, sample)


A, B, END = texts.LETTERS.index("a") + 3, texts.LETTERS.index("b") + 3, 2


def test_turns_append_tokens_and_learn_the_models():
    reader = Reader("task.held_out=0.0")
    asked = reader.task.ask(0, 16)
    turns = [[A, END], [A, B, END], [B, END]]
    played, graded = reader.play(asked, turns)
    for i, item in enumerate(asked.items):
        record, samples = item.columns, played.samples
        count = min(record["turns"], 3)
        between = encoded("more") if record["plain"] else encoded("u more a ")
        want, own = [], []
        for turn in range(count):
            want += turns[turn] + between * (turn < count - 1)
            own += [True] * len(turns[turn]) + [False] * len(between) * (
                turn < count - 1
            )
        length = samples.lengths[i]
        assert samples.tokens[i, :length].tolist() == want
        assert samples.mask[i, :length].tolist() == own
        assert not samples.mask[i, length:].any()
        assert (samples.logprobs[i][~samples.mask[i]] == 0).all()
        assert (samples.routes[i] == count - 1).all()  # of all that it read
        assert played.turns[i] == count and not played.truncated[i]
        assert graded.rewards[i] == pytest.approx([0.25, 0.5, 0.5][count - 1])
        # What was read in the last turn is the prompt and all before it.
        prompts, lengths = reader.seen[count - 1]
        read = prompts[i, : lengths[i]].tolist()
        assert read == [*item.ids, *want[: len(want) - len(turns[count - 1])]]
    assert {int(x) for x in played.turns} == {1, 2, 3}
    # In a report, what the environment said has no log-probability.
    said = played.samples
    made = Completions.of(*asked[:2], said.tokens, said.lengths, said.mask)
    rows = shown.table(reader.task, asked, made, None, said.logprobs, 8)
    for row, mask, length in zip(rows, said.mask[::2], said.lengths[::2], strict=True):
        assert [x is not None for x in row["logprobs"]] == mask[:length].tolist()
        assert row["length"] == length
    fewer = shown.table(reader.task, asked, made, None, said.logprobs, 2)
    assert fewer == [rows[0], rows[4]]


def said_of(turns, every=1.0):
    """A `complete` that says what is given for each turn."""
    remaining = iter(enumerate(turns))

    def complete(ids, max_tokens):
        turn, said = next(remaining)
        return TurnCompletion(
            list(said), [-every - turn] * len(said), said[-1] == END,
            [[i, 0] for i in said], np.full((len(ids) + len(said) - 1, 1, 1), turn),
            [(turn, len(said))],
        )  # fmt: skip

    return complete


def in_threads(reader, asked, turns):
    """Each conversation in a thread of its own."""

    def hold(item):
        return reader.task.transcript(item, said_of(turns))

    with concurrent.futures.ThreadPoolExecutor(len(asked.items)) as threads:
        return [*threads.map(hold, asked.items)]


def test_conversations_in_threads_equal_those_in_turn():
    reader = Reader("task.held_out=0.0", "task.workers=3")
    asked = reader.task.ask(0, 16)
    turns = [[A, END], [A, B, END], [B, END]]
    played, graded = reader.play(asked, turns)
    for i, made in enumerate(in_threads(reader, asked, turns)):
        length = played.samples.lengths[i]
        assert made.prompt_ids == asked.items[i].ids.tolist()
        assert made.completion_ids == played.samples.tokens[i, :length].tolist()
        assert made.sampled.tolist() == played.samples.mask[i, :length].tolist()
        assert made.logprobs == played.samples.logprobs[i, :length].tolist()
        assert made.turn_count == played.turns[i] and made.where == asked.items[i].where
        assert np.float32(made.reward) == graded.rewards[i]
        rewards = played.by_turn.rewards[i, : played.turns[i]]
        np.testing.assert_array_equal(np.float32(made.turn_rewards), rewards)
        assert set(made.turn_of_token[made.sampled]) == set(range(played.turns[i]))
        supports = [[x, 0] if own else [] for x, own
                    in zip(made.completion_ids, made.sampled, strict=True)]  # fmt: skip
        assert made.supports == supports
        assert (made.routes == played.turns[i] - 1).all()
        versions = np.repeat(*np.transpose(made.versions))
        np.testing.assert_array_equal(versions[made.sampled], made.turn_of_token[
            made.sampled
        ])  # fmt: skip
    item = next(x for x in asked.items if x.columns["turns"] > 1)
    unended = reader.task.transcript(item, said_of([[A, A, A, A]]))
    assert unended.completion_ids == [A] * 4 and unended.reward == 1


def test_workers_bound_the_calls_of_conversations_in_threads():
    counted = ENVIRONMENT.replace("class Vowels:", (
        "import threading, time\nLOCK, ACTIVE, COUNTS = threading.Lock(), [], []\n\n"
        "class Vowels:"
    )).replace("        self.turn += 1\n", (
        "        self.turn += 1\n        with LOCK:\n            ACTIVE.append(self)\n"
        "            COUNTS.append(len(ACTIVE))\n        time.sleep(0.02)\n"
        "        with LOCK:\n            ACTIVE.remove(self)\n"
    ))  # fmt: skip
    pathlib.Path("envs.py").write_text(counted)
    reader = Reader("task.held_out=0.0", "task.workers=3")
    in_threads(reader, reader.task.ask(0, 16), [[A, END], [A, B, END], [B, END]])
    counts = reader.task._environments._class.step.__globals__["COUNTS"]
    assert max(counts) == 3 and len(counts) > 16


@pytest.mark.parametrize(
    ("on_error", "rewards"),
    [("raise", None), ("end", [0.25, 0.0]), ("mask", [0.25, None])],
)
def test_failure_in_a_thread_is_that_of_the_conversation(on_error, rewards):
    text = ENVIRONMENT.replace("self.turn += 1", "self.turn += 1; 1 / (2 - self.turn)")
    pathlib.Path("envs.py").write_text(text)
    reader = Reader("task.held_out=0.0", f"task.environment_errors={on_error}")
    items = [x for x in reader.task.ask(0, 16).items if x.columns["turns"] > 1]
    message = "step raised .* ZeroDivisionError"
    if rewards is None:
        with pytest.raises(RewardError, match=message):
            reader.task.transcript(items[0], said_of([[A, END]] * 3))
        return
    with pytest.warns(UserWarning, match=message):
        made = reader.task.transcript(items[0], said_of([[A, END]] * 3))
    assert made.turn_rewards == rewards
    assert made.reward == (None if None in rewards else 0.25)


def test_errors_of_samplers_are_not_those_of_environments():
    reader = Reader("task.held_out=0.0", "task.environment_errors=mask")

    def complete(ids, max_tokens):
        assert max_tokens == 4
        raise ConnectionError("gone")

    with pytest.raises(ConnectionError, match="gone"):
        reader.task.transcript(reader.task.ask(0, 1).items[0], complete)


def test_turns_are_compared_by_what_follows_from_each():
    reader = Reader("task.held_out=0.0", "grpo.turn_rewards=True")
    asked = reader.task.ask(0, 16)
    played, graded = reader.play(asked, [[A, END], [A, B, END], [B, END]])
    rng = np.random.default_rng(0)
    drawn = rng.random(played.by_turn.rewards.shape).astype("f4")
    by_turn = played.by_turn._replace(
        rewards=np.where(np.arange(3) < played.turns[:, None], drawn, 0)
    )
    np.testing.assert_allclose(played.by_turn.returns[:, 0], graded.rewards)
    samples, lengths = played.samples, played.samples.lengths
    made = Completions.of(*asked[:2], samples.tokens, lengths, samples.mask)
    sampled = Sampled(
        asked, made, samples, graded, played.truncated, played.turns, SlotUse(0, 0),
        by_turn,
    )  # fmt: skip
    sampled = join([take(sampled, np.arange(8)), take(sampled, np.r_[8:16])])
    got = sampled.advantages(8, advantages.load("grpo"))
    assert sampled.rewards_differ(8).all() and got.shape == samples.tokens.shape
    for i in range(16):
        group = [j for j in range(16) if j // 8 == i // 8]
        for turn in range(played.turns[i]):
            after = [
                by_turn.rewards[j, turn:].sum(dtype=float)
                for j in group
                if played.turns[j] > turn
            ]
            own = by_turn.rewards[i, turn:].sum(dtype=float)
            spread = np.std(after, ddof=1) if len(after) > 1 else 1
            here = samples.mask[i] & (by_turn.of_token[i] == turn)
            assert here.sum() == [2, 3, 2][turn]
            wanted = (own - np.mean(after)) / (spread + 1e-6)
            np.testing.assert_allclose(got[i, here], wanted, atol=1e-4)
    # Each token of a micro-batch has its own.
    learned = Minibatch(made, got, samples.logprobs, None, None)
    placed = []
    for rows, _ in learned.micro_batches(reader.config):
        placed += rows.advantages[rows.batch.labels >= 0].tolist()
    np.testing.assert_allclose(sorted(placed), sorted(got[samples.mask]))


SCHEMA = [{"type": "function", "function": {"name": "bc", "parameters": {}}}]


def test_schemas_of_tools_reach_the_template():
    template = TEMPLATE.replace(
        "{{ bos_token }}",
        "{{ bos_token }}{% if tools %}{{ tools[0].function.name }}{% endif %}",
    )
    pathlib.Path("tools.jinja").write_text(template)
    words = ENVIRONMENT.replace('if record["plain"] else', "if False else")
    words = words.replace('if self.record["plain"] else', "if False else")
    pathlib.Path("envs.py").write_text(words + f"    tools = {SCHEMA}\n")
    reader = Reader("task.chat_template=tools.jinja", "task.held_out=0.0")
    asked = reader.task.ask(0, 8)
    for item in asked.items:
        said = f"bcu {item.prompt[0]['content']} a "
        assert item.ids.tolist() == [1, *encoded(said)]
    played, _ = reader.play(asked, [[A, END]] * 3)
    assert (played.turns == [min(x.columns["turns"], 3) for x in asked.items]).all()
    # A template may write them in every turn.
    every = template.replace("{{ ' a ' }}", "{{ tools | tojson }}")
    pathlib.Path("tools.jinja").write_text(every)
    reader = Reader("task.chat_template=tools.jinja", "task.max_prompt_tokens=200")
    with pytest.raises(RewardError, match="a reply has .* tokens"):
        reader.play(reader.task.ask(0, 8), [[A, END]] * 3)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("tools = {'name': 'bc'}", "envs.py:Vowels.tools must be a list of schemas"),
        (f"tools = {SCHEMA}", "returned a string; with tools it must be messages"),
    ],
)
def test_tools_that_no_template_gets_are_refused(line, message):
    pathlib.Path("envs.py").write_text(f"{ENVIRONMENT}    {line}\n")
    with pytest.raises(RewardError, match=message):
        Reader()


def test_unended_completion_ends_conversation():
    reader = Reader()
    played, graded = reader.play(reader.task.ask(0, 8), [[A, A, A, A]] * 3)
    assert played.truncated.all() and (played.turns == 1).all()
    assert (graded.rewards == 1).all() and (played.samples.lengths == 4).all()


def test_labels_are_model_tokens_in_micro_batches():
    reader = Reader()
    asked = reader.task.ask(0, 8)
    played, _ = reader.play(asked, [[A, END], [A, B, END], [B, END]])
    samples = played.samples
    made = Completions.of(*asked[:2], samples.tokens, samples.lengths, samples.mask)
    packed = made.pack(64, (64,), 0.0)
    labels = np.concatenate([b.labels.ravel() for b in made.batches(packed)])
    assert (labels >= 0).sum() == samples.mask.sum() == made.counts.sum()
    values = np.where(samples.mask, samples.logprobs, 7.0).astype("f4")
    back = made.measured(packed, [(x, None) for x in packed.place(made.spread(values))])
    np.testing.assert_array_equal(back.known, samples.mask)
    kept = made.keeping(samples.mask & (samples.tokens == A))
    labels = np.concatenate([b.labels.ravel() for b in kept.batches(packed)])
    assert set(labels.tolist()) == {-1, A}


@pytest.mark.slow
@pytest.mark.usefixtures("one_program")
@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["sampling.top_k=5"],
        ["grpo.turn_rewards=True"],
        ["grpo.token_fraction=0.7", "grpo.loss=gspo"],
    ],
    ids=str,
)
def test_runs_learn_over_turns_and_resume_bitwise(overrides, monkeypatch):
    result, _ = train("eval.every=4", "task.held_out=0.25", *overrides)
    history = result.history
    assert np.mean([s.reward for s in history[-2:]]) > history[0].reward + 0.1
    for step in history:
        # The trainer reads what the sampler read, in every turn.
        assert step.mismatch_max < 2e-5 and step.ratios_inside_strict == 1
        assert 1 <= step.turns <= 3
    assert max(step.turns for step in history) > 1
    assert history[3].held_out_reward is not None
    assert 'class="samples"' in (result.out_dir / "report.html").read_text()
    again = ["eval.every=4", "task.held_out=0.25", "run.out_dir=cut", *overrides]
    kill_before(5, grpo.Grpo, monkeypatch, lambda: train(*again))
    train(*again)
    assert runs.steps("cut", PolicyMetrics) == runs.steps("run", PolicyMetrics)


job_with = functools.partial(runs.job_with, "grpo.gin")
rolled_out = functools.partial(runs.rolled_out, "grpo.gin")


MESH = (
    "mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2", "grpo.max_tokens_train=192",
    "grpo.max_tokens_forward=192",
)  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize(("keeps", "overrides"), [(False, ()), slow(True, MESH)])
def test_cache_kept_over_turns_changes_nothing(keeps, overrides, monkeypatch):
    job, kept = rolled_out("sampling.top_k=5")
    assert job.program.keeps_cache and 1 < kept.sampled["turns"] < 3
    (line,) = job.program.lines()  # none about a prompt that is read again
    assert "are trained in float32" in line
    # A turn reads the end of a completion and a reply, not the prompt again.
    assert [x.shape[1] for x, _ in (job.program.prompts, job.program.replies)] == [
        12, 11,
    ]  # fmt: skip
    program = job_with("sampling.slots=8").program  # which reads all of it again
    assert program.prompts[0].shape[1] == 12 + 2 * (4 + 10)
    assert (
        len([line for line in program.lines() if "again, because no cache" in line])
        == 1
    )
    monkeypatch.setattr(SamplingProgram, "keeps_cache", keeps)
    job, again = rolled_out("sampling.top_k=5", *overrides)
    width = 12 if keeps else 12 + 2 * (4 + 10)
    assert job.program.prompts[0].shape[1] == width
    assert_same(kept, again)
    np.testing.assert_array_equal(kept.supports.csr.ids, again.supports.csr.ids)


@pytest.mark.full
def test_entries_are_recorded_in_every_turn(monkeypatch):
    """A turn that continues a cache records those of one that reads all again."""
    recorded = 'head.gradient=("recorded", 8)'
    job, kept = rolled_out(recorded)
    own, numbers = np.asarray(kept.samples.mask), kept.entries.numbers
    assert job.program.keeps_cache and kept.sampled["turns"] > 1
    logprobs = np.asarray(kept.samples.logprobs)
    np.testing.assert_allclose(kept.entries.logprobs[own], logprobs[own], atol=1e-5)
    assert not kept.entries.logprobs[~own].any()  # of replies
    monkeypatch.setattr(SamplingProgram, "keeps_cache", False)
    _, again = rolled_out(recorded)
    assert_same(kept, again)
    for ours, theirs in zip(kept.entries.recorded, again.entries.recorded, strict=True):
        np.testing.assert_allclose(ours[numbers[own]], theirs[numbers[own]], atol=2e-5)


def assert_same(kept, again):
    for name in ("tokens", "mask", "lengths"):
        ours, theirs = getattr(kept.samples, name), getattr(again.samples, name)
        np.testing.assert_array_equal(ours, theirs)
    ours, theirs = kept.samples.logprobs, again.samples.logprobs
    np.testing.assert_allclose(ours, theirs, atol=1e-5)
    np.testing.assert_array_equal(kept.graded.rewards, again.graded.rewards)


@pytest.mark.slow
def test_own_model_keeps_extendable_cache():
    sizes = "model.layers=1 model.hidden=16 model.ff=16 model.heads=2 model.head_dim=8"
    made = []
    for name, why in (
        ("OursCached", "with a model.factory without extend, no cache is kept"),
        ("Ours", None), ("OursExtended", None),
    ):  # fmt: skip
        factory = f"model.factory=tests.helpers.own_models:{name}"
        program = job_with(factory, *sizes.split()).program
        said = [line for line in program.lines() if "again, because no cache" in line]
        assert [why in line for line in said] == [True] * bool(why)
        assert program.keeps_cache == (why is None)
        if why is None:
            made.append(rolled_out(factory, *sizes.split())[1])
    assert_same(*made)
    assert 1 < made[0].sampled["turns"] < 3


def test_plan_has_further_turns():
    program = job_with().program
    first, further = program.rollout_phases({})
    assert (first.runs, further.name, further.runs) == (1, "further turns", 2)
    # The cache goes in and out, in place.
    memory = further.traced.lower().compile().memory_analysis()
    assert memory.alias_size_in_bytes >= program._cache_bytes()


# ----------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return 1 / 0", r"envs.py:Vowels \(records.jsonl:\d+\): step raised"),
        ("return '', 0, False", "replied nothing, although the conversation goes on"),
        ("return 'x' * 11, 0, False",
         "a reply has 11 tokens; raise task.max_reply_tokens=10, or shorten the"),
    ],
)  # fmt: skip
def test_environment_that_fails_ends_a_run_by_name(body, message):
    head = ENVIRONMENT.partition("    def step")[0].replace(
        "[{", "text if True else [{"
    )
    pathlib.Path("envs.py").write_text(
        f"{head}    def step(self, said):\n        {body}\n"
    )
    reader = Reader()
    with pytest.raises(RewardError, match=message):
        reader.play(reader.task.ask(0, 4), [[A, END]] * 3)


def test_reward_sums_beyond_float32_are_named():
    text = ENVIRONMENT.replace('last.count("a") / 4', "6e17")
    pathlib.Path("envs.py").write_text(text)
    reader = Reader("task.held_out=0.0")
    asked, turns = reader.task.ask(0, 16), [[A, END]] * 3
    for play in (reader.play, functools.partial(in_threads, reader)):
        with pytest.raises(RewardError) as raised:
            play(asked, turns)
        assert re.fullmatch(
            r"environment envs.py:Vowels \(records.jsonl:\d+\): the sum of its rewards "
            r"is 1\.\d+e\+18; advantages are computed in float32, for rewards of .* "
            r"1e\+18",
            str(raised.value),
        )


@pytest.mark.parametrize(
    ("old", "new", "reward", "turns", "message"),
    [
        ("self.turn += 1", "self.turn += 1; 1 / (2 - self.turn)", 0.25, {1, 2},
         "step raised .* ZeroDivisionError"),
        # A reply that is too long comes with a reward, which counts.
        ('"more"', '"x" * 11', 0.25, {1}, "a reply has 11 tokens; raise task.max_rep"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("on_error", ["end", "mask"])
def test_failures_may_end_conversations_instead(
    old, new, reward, turns, message, on_error
):
    text = ENVIRONMENT.replace(old, new).replace('self.record["plain"]', "True")
    text = text.replace('record["plain"]', "True")
    pathlib.Path("envs.py").write_text(text)
    reader = Reader(f"task.environment_errors={on_error}")
    with pytest.warns(UserWarning, match=message):
        played, graded = reader.play(reader.task.ask(0, 12), [[A, END]] * 3)
    # Where a step fails, it is the second; a record of one turn has no reply.
    once = np.array([x.columns["turns"] == 1 for x in reader.task.ask(0, 12).items])
    failed = np.logical_and(on_error == "mask", ~once)
    wanted = np.where(failed, np.nan, reward)
    np.testing.assert_array_equal(graded.rewards, wanted)
    np.testing.assert_array_equal(np.isnan(graded.right), failed)
    assert set(played.turns.tolist()) == turns


def test_completions_of_a_prompt_share_it():
    pathlib.Path("envs.py").write_text(
        "import itertools\nCOUNT = itertools.count()\n"
        + ENVIRONMENT.replace(
            'text = record["word"]', 'text = "abcdefgh"[next(COUNT) % 8]'
        )
    )
    reader = Reader()
    with pytest.raises(RewardError, match="reset returned two prompts for one record"):
        reader.play(reader.task.ask(0, 4), [[A, END]] * 3)


def replies(template, end="</s>"):
    tokenizer = texts.tokenizer()
    rendered = SimpleNamespace(render=lambda messages, **_: template(messages))
    config = TaskConfig(source="x.jsonl", environment="calculator")
    made = Replies(config, tokenizer, lambda: rendered, (2,))
    made._ends = [end]
    return made


def test_template_that_looks_back_is_refused():
    prompt = [{"role": "user", "content": "a"}]
    said = [*prompt, {"role": "assistant", "content": "b"}]
    conversation, reply = Episode("p:1", None, prompt, said), [
        {"role": "user", "content": "c"}
    ]  # fmt: skip

    def plain(messages):
        return "".join(m["content"] + "</s>" for m in messages)

    assert replies(plain).ids(conversation, reply) == encoded("c") + [2]
    with pytest.raises(DataError, match="depends on the messages before it"):
        replies(lambda m: plain(m) + m[0]["content"]).ids(conversation, reply)
    with pytest.raises(DataError, match="the chat template ends a completion with"):
        replies(plain, "<end>").ids(conversation, reply)
    with pytest.raises(DataError, match="leaves out the model's text"):
        replies(lambda m: "c").ids(conversation, reply)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["task.reward=number"], "task.reward must be left out, or 'exact', with an"),
        (
            ["task.environment=None"],
            "max_turns must be left out, or None, without an envi",
        ),
        (["task.source=arithmetic"], "environment must be None for task.source='arit"),
        (["task.environment_errors=ignore"], "environment_errors must be 'raise' or"),
        (["task.max_turns=0"], "task.max_turns must be"),
        (
            [
                "grpo.turn_rewards=True",
                "task.environment=None",
                "task.max_turns=4",
                "task.max_reply_tokens=64",
            ],
            "grpo.turn_rewards=True needs a task.environment, a task",
        ),
        (["grpo.row_lengths=(32,)"], "grpo.row_lengths=(32,) must reach 43, the long"),
        (
            ["mesh.data=2"],
            "grpo.max_tokens_train=256 holds 5 rows of 48 tokens, which "
            "mesh.data=2 x mesh.fsdp=1 must divide; grpo.max_tokens_train=288 works",
        ),
        (
            ["mesh.fsdp=4", "grpo.row_lengths=(44,64)", "grpo.max_tokens_train=257"],
            "must divide; grpo.max_tokens_train=528 works",
        ),
        (
            ["mesh.data=2", "grpo.max_tokens_train=288"],
            "grpo.max_tokens_forward=256 holds 5 rows of 48 tokens, which "
            "mesh.data=2 x mesh.fsdp=1 must divide; grpo.max_tokens_forward=288 works",
        ),
    ],
)
def test_settings_that_do_not_go_together(overrides, message):
    refused("grpo.gin", overrides, message)


def test_environments_close_with_conversations():
    """However a rollout ends: here by its sampler, or by the last turn."""
    lists = "OPEN, COUNTS = [], []\n\nclass Vowels:"
    counted = ENVIRONMENT.replace("class Vowels:", lists)
    start = "self.turn, self.record"
    added = f"OPEN.append(self); COUNTS.append(len(OPEN)); {start}"
    counted = counted.replace(start, added, 1)
    pathlib.Path("envs.py").write_text(
        counted + "\n    def close(self):\n        OPEN.remove(self)\n"
    )
    reader = Reader("task.held_out=0.0", "task.workers=3")
    module = reader.task._environments._class.step.__globals__
    still_open, asked = module["OPEN"], reader.task.ask(0, 16)
    # Prompts of all records have been read, few at a time.
    assert not still_open and len(module["COUNTS"]) == 16 and max(module["COUNTS"]) <= 3
    counts = []

    def sample(prompts, lengths, turn):
        counts.append(len(still_open))
        assert (lengths > 0).sum() == len(still_open)
        if len(counts) == 5:
            raise KeyboardInterrupt
        rows = np.tile(np.array([A, END, 0, 0], np.int32), (16, 1))
        return SimpleNamespace(
            tokens=rows, lengths=np.full(16, 2), logprobs=np.zeros((16, 4)),
            support_ids=None, routes=None, entries=None,
        )  # fmt: skip

    reader.task.play(asked, sample)
    assert counts == [16, 12, 8] and not still_open
    with pytest.raises(KeyboardInterrupt) as interrupted:
        reader.task.play(asked, sample)
    # Not because the last reference is gone: the error's frames have one.
    assert interrupted.tb is not None and not still_open
    assert counts[3:] == [16, 12]
    # Of held-out prompts, those that only fill up the rows have no environment.
    played, graded = reader.task.play(asked, lambda *x: counts.clear() or sample(*x), 3)
    assert len(played.turns) == len(graded.rewards) == 3


def test_left_out_conversation_is_not_compared():
    reader = Reader("task.held_out=0.0", "grpo.turn_rewards=True")
    asked = reader.task.ask(0, 2).repeated(4)
    played, graded = reader.play(asked, [[A, END], [A, B, END], [B, END]])
    drawn = np.random.default_rng(0).random((8, 3)).astype("f4")
    turns = np.array([3, 2, 1, 2, 1, 1, 1, 1])
    drawn = np.where(np.arange(3) < turns[:, None], drawn, 0)
    drawn[[1, 4, 5, 6, 7], turns[[1, 4, 5, 6, 7]] - 1] = np.nan
    by_turn = played.by_turn._replace(rewards=drawn)
    graded = graded._replace(rewards=by_turn.returns[:, 0])
    made = Sampled(
        asked, None, None, graded, played.truncated, turns, SlotUse(0, 0), by_turn
    )
    assert made.rewards_differ(4).tolist() == [True, False]
    assert made.rewarded(4).tolist() == [True, False]
    of_whole = made._replace(by_turn=None)
    assert of_whole.rewards_differ(4).tolist() == [True, False]
    got = made.advantages(4, advantages.load("grpo"))
    assert np.isfinite(got).all() and not got[[1, 4, 5, 6, 7]].any()
    compare = jax.jit(losses.grpo_advantages)
    wanted = np.asarray(compare(by_turn.returns[[0, 2, 3], 0]))
    for i, row in enumerate((0, 2, 3)):
        first = by_turn.of_token[row] == 0
        np.testing.assert_allclose(got[row][first], wanted[i], rtol=1e-5)


def test_environment_that_does_not_start_is_left_out():
    fails = "OPEN = []\n\nclass Vowels:\n    def reset(self, record):\n"
    fails += '        if record["word"] in OPEN: raise OSError("no container")\n'
    text = ENVIRONMENT.replace("class Vowels:\n    def reset(self, record):\n", fails)
    pathlib.Path("envs.py").write_text(text)
    reader = Reader("task.held_out=0.0", "task.environment_errors=mask")
    asked = reader.task.ask(0, 3)
    module = reader.task._environments._class.step.__globals__
    module["OPEN"].append(asked.items[1].columns["word"])
    with pytest.warns(
        UserWarning, match="no container; conversations left out because of"
    ):
        played, graded = reader.play(asked, [[A, END]] * 3)
    assert np.isnan(graded.rewards).tolist() == [False, True, False]
    assert played.turns[1] == 1


def test_groups_without_a_reward_are_taken_last():
    asked = Reader("task.held_out=0.0").task.ask(0, 2).repeated(2)
    nothing, ends = np.zeros(4, bool), np.ones(4, int)
    parts = [
        Sampled(asked, None, None, Graded(np.array(rewards), nothing), nothing, ends,
                SlotUse(0, 0))
        for rewards in ([np.nan, np.nan, 3.0, 3.0], [np.nan, 4.0, 5.0, 6.0])
    ]  # fmt: skip
    chosen = select_groups(parts, 2, 2).graded.rewards
    np.testing.assert_array_equal(chosen, [3, 3, 5, 6])
    chosen = select_groups(parts, 3, 2).graded.rewards
    np.testing.assert_array_equal(chosen, [3, 3, np.nan, 4, 5, 6])


REPEATED = (
    "run.out_dir=again", "run.save_rollouts=False", "task.recorded=True",
    "task.source=run/rollouts", "task.environment=None",
)  # fmt: skip


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", ["grpo.turn_rewards=True", "sampling.top_k=5"]),
        slow("llama", ["grpo.loss=dr_grpo", "grpo.share_prompts=True",
                       "grpo.max_tokens_train=512", "grpo.max_tokens_forward=512"]),
        slow("qwen3_moe", ["grpo.replay_routing=True"]),
    ],
    ids=str,
)  # fmt: skip
def test_run_is_repeated_from_its_own_conversations(family, overrides, tmp_path):
    if family != "llama":
        more = [f"#{i}" for i in range(24)]  # ids that the model can sample
        other = texts.checkpoint(family, tmp_path, more=more)
        shutil.copy(tmp_path / "llama" / "tokenizer_config.json", other)
        overrides = [*overrides, f"model.checkpoint={family}"]
    settings = ["run.steps=2", "run.checkpoint_every=None", *overrides]
    made, _ = train("run.save_rollouts=True", *settings)
    again, _ = train(*settings, *REPEATED)
    assert max(step.turns for step in made.history) > 1
    ours, theirs = (runs.reproducible(each.history) for each in (again, made))
    for one, other in zip(ours, theirs, strict=True):
        del one["busy"], other["busy"]  # slots of the sampler
        assert one == other
    first, second = (
        tmp_path / run / "model" / "model.safetensors" for run in ("run", "again")
    )
    assert first.read_bytes() == second.read_bytes()
