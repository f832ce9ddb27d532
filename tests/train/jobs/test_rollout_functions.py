"""A user's function that holds conversations: what it gets, returns, and fails by."""

import functools
import json
import pathlib
import time

import numpy as np
import pytest

from jaxmem.data.rewards import RewardError
from jaxmem.models.sampling import Samples
from jaxmem.train import configuration, jobs
from jaxmem.train.jobs.rollout import rollout_functions
from jaxmem.train.jobs.rollout.completing import TurnCompletion
from tests.helpers import runs, texts
from tests.helpers.cases import slow
from tests.helpers.markdown import blocks
from tests.helpers.runs import refused

pytestmark = pytest.mark.usefixtures("quick_compilation", "no_picture")
# Each conversation has as many turns as its record says.
AGENT = """
def play(record, complete):
    ids, parts, rewards = list(record["prompt_ids"]), [], []
    for turn in range(record["turns"]):
        if turn:
            parts.append(complete.encode("b" * turn))
        said = [i for part in parts for i in getattr(part, "ids", part)]
        parts.append(complete([*ids, *said]))
        rewards.append(complete.decode(parts[-1].ids).count("a") / 4)
    return {**complete.joined(*parts), "turn_rewards": rewards}
"""
GIN = """
model.checkpoint = "llama"
task.source = "records.jsonl"
task.rollout = "agent.py:play"
task.max_turns = 3
task.max_reply_tokens = 4
task.max_prompt_tokens = 4
sampling.max_new_tokens = 4
grpo.prompts = 2
grpo.group_size = 4
grpo.minibatches = 1
grpo.max_tokens_train = 128
grpo.max_tokens_forward = 128
grpo.loss = "dapo"
head.chunk = 32
optimizer.learning_rate = 2e-2
optimizer.warmup_steps = 0
run.job = "grpo"
run.steps = 2
run.compare_heads = False
run.out_dir = "run"
"""
A, B, END = texts.LETTERS.index("a") + 3, texts.LETTERS.index("b") + 3, 2


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    texts.checkpoint("llama", tmp_path)
    rows = [{"prompt": a, "turns": 1 + i % 3} for i, a in enumerate("abcdef")]
    runs.write("records.jsonl", rows)
    pathlib.Path("agent.py").write_text(AGENT)
    pathlib.Path("grpo.gin").write_text(GIN)
    return tmp_path


def write(body, header="def play(record, complete):"):
    """An agent of some lines."""
    lines = "\n".join(f"    {line}" for line in body.splitlines())
    pathlib.Path("agent.py").write_text(f"{header}\n{lines}\n")


def task_of(*overrides):
    return jobs.job_of(configuration.load("grpo.gin", overrides)[0]).reads.task


def samples_of(lengths, tokens=(A, END)):
    """A batch whose rows all sample the same tokens."""
    rows = np.zeros((len(lengths), 4), np.int32)
    rows[:, : len(tokens)] = tokens
    mask = np.arange(4) < np.where(lengths, len(tokens), 0)[:, None]
    logprobs = np.where(mask, np.float32(-1.5), 0)
    return Samples(rows, mask, logprobs, None, mask.sum(axis=1).astype("i4"))


def sampler(seen=None, tokens=(A, END)):
    def sample(prompts, lengths, turn):
        if seen is not None:
            pairs = zip(prompts, lengths, strict=True)
            seen.append([row[:n].tolist() for row, n in pairs])
        return samples_of(lengths, tokens)

    return sample


def at_once(tokens=(A, END), version=None):
    """A `complete` of an engine."""

    def complete(ids, max_tokens):
        said = list(tokens)[:max_tokens]
        versions = None if version is None else [(version, len(said))]
        ended = said[-1] == END
        return TurnCompletion(said, [-1.5] * len(said), ended, None, None, versions)

    return complete


def played(*overrides, tokens=(A, END)):
    """The conversations of three records, each twice."""
    task = task_of("task.shuffle=False", *overrides)
    prompts = task.ask(0, 3).repeated(2)
    return task.sampled(prompts, sampler(tokens=tokens))


def test_turns_are_completed_in_batches():
    task, seen = task_of("task.shuffle=False"), []
    prompts = task.ask(0, 3).repeated(2)
    made = task.sampled(prompts, sampler(seen))
    assert len(seen) == 3 and [sum(map(bool, x)) for x in seen] == [6, 4, 2]
    for i, item in enumerate(prompts.items):
        own, turns = item.ids.tolist(), 1 + i // 2
        assert [batch[i] for batch in seen] == [
            own if turn == 0
            else [] if turn >= turns
            else [*own, A, END, *[B] * 1, *[A, END, B, B][: 4 * (turn - 1)]]
            for turn in range(3)
        ]  # fmt: skip
        length = made.samples.lengths[i]
        said = [A, END, B, A, END, B, B, A, END][: [2, 5, 9][turns - 1]]
        assert made.samples.tokens[i, :length].tolist() == said
        assert made.samples.mask[i, :length].tolist() == [x != B for x in said]
        assert made.graded.rewards[i] == 0.25 * turns
    assert made.turns.tolist() == [1, 1, 2, 2, 3, 3] and not made.truncated.any()


def test_conversation_at_once_equals_that_in_batches():
    task = task_of("task.shuffle=False")
    prompts = task.ask(0, 3).repeated(2)
    together = task.sampled(prompts, sampler()).transcripts
    for item, made in zip(prompts.items, together, strict=True):
        alone = task.transcript(item, at_once(version=7))
        assert alone.versions == [[7, len(alone.completion_ids)]]
        assert alone.to_json() | {"versions": None} == made.to_json() | {
            "versions": None
        }


def test_async_function_plays_alike():
    before = played().transcripts
    text = AGENT.replace("def play", "async def play")
    text = text.replace("parts.append(complete(", "parts.append(await complete(")
    pathlib.Path("agent.py").write_text("import asyncio\n" + text)
    after = played().transcripts
    assert [x.to_json() for x in after] == [x.to_json() for x in before]
    write("raise OSError('gone')", "async def play(record, complete):")
    with pytest.raises(RewardError, match=r"raised \(line 2\) OSError: gone"):
        played()


def test_function_of_the_page_is_played():
    """A wrong answer and a right one, of records whose answers are known."""
    page = pathlib.Path(__file__).parents[3] / "docs" / "rollouts.md"
    code = next(x.text for x in blocks(page.read_text("utf-8")) if "def play" in x.text)
    pathlib.Path("agent.py").write_text(code.replace(" No. Again: ", "b"))
    rows = [{"prompt": a, "answer": answer} for a, answer in ("aa", "bb", "ca")]
    runs.write("records.jsonl", rows)
    made = played()
    assert made.graded.rewards.tolist() == [1, 1, 0, 0, 1, 1]
    assert made.turns.tolist() == [1, 1, 2, 2, 1, 1]


TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] + m.content }}{% if m.role == 'assistant' %}"
    "{{ '</s>' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ 'a' }}"
    "{% endif %}"
)
REPLYING = (
    "first = complete(record['prompt_ids'])\n"
    "reply = complete.reply([{'role': 'tool', 'content': 'b'}])\n"
    "last = complete([*record['prompt_ids'], *first.ids, *reply])\n"
    "return {**complete.joined(first, reply, last), 'reward': 0}"
)


def test_reply_is_rendered_by_the_template():
    pathlib.Path("t.jinja").write_text(TEMPLATE)
    message = {"role": "user", "content": "b"}
    runs.write("records.jsonl", [{"prompt": [message]}] * 3)
    write(REPLYING)
    made = played("task.chat_template=t.jinja")
    rendered = [texts.LETTERS.index(c) + 3 for c in "tba"]
    for transcript in made.transcripts:
        assert transcript.completion_ids == [A, END, *rendered, A, END]
        assert transcript.mask == [1, 1, 0, 0, 0, 1, 1]
    write(REPLYING.replace("'b'}", "'bbbb'}"))
    with pytest.raises(
        RewardError, match="a reply has 6 tokens; raise task.max_reply_t"
    ):
        played("task.chat_template=t.jinja")
    dependent = TEMPLATE.replace("'a' }}", "messages[0].content }}")
    pathlib.Path("t.jinja").write_text(dependent)
    write(REPLYING)
    with pytest.raises(
        RewardError, match="task.rollout .* depends on the messages bef"
    ):
        played("task.chat_template=t.jinja")


def test_reply_needs_messages():
    write(REPLYING)
    with pytest.raises(RewardError, match="complete.reply needs a prompt of messages"):
        played()


def test_max_tokens_cut_a_completion():
    write(
        "first = complete(record['prompt_ids'], 2)\n"
        "assert not first.ended and complete.eos_ids == (2,)\n"
        "return {**complete.joined(first), 'reward': complete.max_tokens}"
    )
    made = played(tokens=(A, A, END))
    assert (made.samples.lengths == 2).all() and made.truncated.all()
    assert (made.graded.rewards == 4).all()


def test_arrays_are_values_of_fields():
    write("import numpy as np\n"
          "c = complete(np.array(record['prompt_ids']))\n"
          "return {'completion_ids': np.array(c.ids), 'mask': [True, np.bool_(True)],\n"
          "        'logprobs': np.float32(c.logprobs), 'reward': np.float32(0.1),\n"
          "        'rewards': {'f': np.float32(1), 'g': None}}")  # fmt: skip
    made = played()
    assert (made.graded.rewards == np.float32(0.1)).all()
    assert (made.graded.right == 1).all() and list(made.graded.parts) == ["f", "g"]
    assert made.completions.own[:, :2].all()


OWN = "c = complete(record['prompt_ids'])\nout = {**complete.joined(c), 'reward': 1}\n"
RECORD = r"rollout agent.py:play (records.jsonl:1): "


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return [1]", "the function returned [1], not a dict with completion_ids, lo"),
        (OWN + "return out | {'logprob': 1}", "the key 'logprob' is not one of comple"),
        (OWN + "del out['logprobs']\nreturn out", 'no "logprobs"'),
        (OWN + "del out['reward']\nreturn out", 'no "reward", which is None for a'),
        (OWN + "return out | {'reward': 'x'}", "reward must be a finite number or nul"),
        (OWN + "return out | {'reward': 1e19}", "reward is 1e+19; advantages are comp"),
        (OWN + "return out | {'logprobs': [-1.0, float('nan')]}",
         "logprobs must be 2 log-probabilities, one per token of completion_ids"),
        (OWN + "return out | {'logprobs': [-1.0, 0.1]}", "logprobs must be 2 log-prob"),
        (OWN + "return out | {'completion_ids': [4, 99]}",
         "completion_ids must be ids in [0, "),
        (OWN + "return out | {'prompt_ids': [3]}", "prompt_ids must be those of the"),
        (OWN + "return out | {'mask': [1]}",
         "mask must be 2 numbers 0 or 1, one per token of completion_ids"),
        (OWN + "return {**complete.joined(*[c] * 4), 'reward': 1}",
         "4 turns; at most task.max_turns=3 are possible"),
        ("complete([])", "ValueError: complete: ids must be a list of at least one id"),
        ("complete([99])", "ValueError: complete: ids must be a list of at least one"),
        ("complete([4] * 21)", "ValueError: complete: ids has 21 ids; at most 20 are "),
        ("complete([4], 5)", "complete: max_tokens must be an integer in [1, 4], of s"),
        ("1 / 0", "the function raised (line 2) ZeroDivisionError: division by"),
        ("raise SystemExit(3)", "SystemExit: 3"),
    ],
)  # fmt: skip
def test_function_that_fails_ends_a_run_by_name(body, message):
    write(body)
    task = task_of("task.shuffle=False")
    item = task.ask(0, 1).items[0]
    for play in (
        functools.partial(played),
        functools.partial(task.transcript, item, at_once()),
    ):
        with pytest.raises(RewardError) as raised:
            play()
        text = str(raised.value)
        assert text.startswith(RECORD) and message in text and "\n" not in text


def test_oldest_version_is_that_of_fields_without_versions():
    write(
        "first = complete(record['prompt_ids'])\n"
        "last = complete(record['prompt_ids'])\n"
        "return {'completion_ids': last.ids, 'logprobs': last.logprobs, 'reward': 0}"
    )
    task, versions = task_of(), iter([7, 8])

    def complete(ids, max_tokens):
        return at_once(version=next(versions))(ids, max_tokens)

    made = task.transcript(task.ask(0, 1).items[0], complete)
    assert made.versions == [(7, 2)] and made.mask == [1, 1]


def test_names_of_rewards_do_not_change():
    write(OWN + "return out | {'rewards': {record['prompt']: 1}}")
    with pytest.raises(RewardError, match=r"rewards has the names \['b'\], but other"):
        played()


def test_function_has_a_time_between_completions(monkeypatch):
    monkeypatch.setattr(rollout_functions, "_SECONDS_TO_END", 0.1)
    write("import time\n" + OWN + "time.sleep(60)")
    started = time.monotonic()
    for play in (played, lambda *x: task_of(*x).transcript(
        task_of(*x).ask(0, 1).items[0], at_once())):  # fmt: skip
        with pytest.raises(
            RewardError, match=r"took longer than task.timeout=0.2 s wi"
        ):
            play("task.timeout=0.2")
    assert time.monotonic() - started < 30


def test_time_between_completions_begins_with_each():
    text = AGENT.replace("def play", "import time\n\ndef play")
    text = text.replace("        if turn:", "        time.sleep(0.4)\n        if turn:")
    pathlib.Path("agent.py").write_text(text)
    assert played("task.timeout=1").turns.max() == 3


@pytest.mark.parametrize("prefix", ["", "async "])
def test_sampler_that_fails_ends_waiting_functions(prefix):
    """They have time to release what they hold."""
    pathlib.Path("agent.py").write_text(
        f"import asyncio, time\nENDED = []\n\n{prefix}def play(record, complete):\n"
        f"    try:\n        {prefix and 'await '}complete(record['prompt_ids'])\n"
        f"    finally:\n        {'await asyncio' if prefix else 'time'}.sleep(0.3)\n"
        "        ENDED.append(record['prompt'])\n"
    )
    task = task_of("task.shuffle=False")
    ended = task._function.code.__globals__["ENDED"]

    def fail(*_):
        raise ConnectionError("gone")

    with pytest.raises(ConnectionError, match="gone"):
        task.transcript(task.ask(0, 1).items[0], fail)
    assert ended == ["a"]
    with pytest.raises(ConnectionError, match="gone"):
        task.sampled(task.ask(0, 3), fail)
    assert sorted(ended) == ["a", "a", "b", "c"]


@pytest.mark.parametrize("is_async", [False, True])
def test_calls_at_the_same_time_are_completed(is_async):
    threads = (
        "import concurrent.futures\n"
        "with concurrent.futures.ThreadPoolExecutor(3) as threads:\n"
        "    tries = [*threads.map(complete, [record['prompt_ids']] * 3)]\n"
    )
    coroutines = (
        "import asyncio\n"
        "tries = [complete(record['prompt_ids']) for _ in range(3)]\n"
        "tries = await asyncio.gather(*tries)\n"
    )
    end = "return {**complete.joined(tries[-1]), 'reward': len(tries)}"
    header = "async def play(record, complete):"
    if is_async:
        write(coroutines + end, header)
    else:
        write(threads + end)
    made = played()
    assert (made.graded.rewards == 3).all() and (made.turns == 1).all()


def test_each_turn_reads_its_whole_conversation():
    program = runs.job_with("grpo.gin").program
    (line,) = [x for x in program.lines() if "again, because no cache" in x]
    assert line.endswith("with task.rollout") and not program.keeps_cache
    assert program.prompts[0].shape == (8, 4 + 3 * 4 + 2 * 4 - 4)
    (phase,) = program.rollout_phases({})
    assert phase.runs == 3


def test_column_with_the_name_of_a_field_is_refused():
    runs.write("records.jsonl", [{"prompt": "a", "prompt_ids": [1], "turns": 1}])
    with pytest.raises(ValueError, match="the column 'prompt_ids' has the name of a f"):
        task_of().check()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["task.environment=calculator"], "environment must be left out, or None, wit"),
        (["task.reward=number"], "task.reward must be left out, or 'exact', with task"),
        (["task.source=arithmetic"], "rollout must be None for task.source='arithmeti"),
        (["task.recorded=True"], "task.rollout must be left out, or None, if rollouts"),
        (["task.workers=3"], "task.workers must be left out, or 64, without an enviro"),
    ],
)
def test_settings_that_do_not_go_together(overrides, message):
    refused("grpo.gin", overrides, message)


REPEATED = (
    "run.out_dir=again", "run.save_rollouts=False", "task.recorded=True",
    "task.source=run/rollouts", "task.rollout=None", "task.held_out=0.0",
    "eval.every=None", "eval.samples=None", "sampling.slots=None",
)  # fmt: skip


EVALUATED = ["task.held_out=0.3", "eval.every=2", "eval.samples=2"]
ROUTED = ["model.checkpoint=qwen3_moe", "grpo.replay_routing=True", "sampling.slots=3",
          "task.held_out=0.3", "eval.every=2"]  # fmt: skip


@pytest.mark.parametrize("more", [[], slow(EVALUATED), slow(ROUTED)], ids=str)
def test_run_learns_from_a_function_and_is_repeated(more, tmp_path):
    if more is ROUTED:
        more_words = [f"#{i}" for i in range(24)]  # ids that the model can sample
        texts.checkpoint("qwen3_moe", tmp_path, more=more_words)
    settings = ["run.checkpoint_every=None", "sampling.top_k=5"]
    settings += ["grpo.turn_rewards=True", *more]
    made, _ = runs.train("grpo.gin", "run.save_rollouts=True", *settings)
    first = made.history[0]
    assert first.mismatch_max < 2e-5 and 1 < max(x.turns for x in made.history) <= 3
    assert (made.history[1].held_out_reward is not None) == bool(more)
    files = sorted(pathlib.Path("run/rollouts").iterdir())
    rows = [json.loads(x) for x in files[1].read_text().splitlines()]
    assert all(row["versions"] == [[1, len(row["completion_ids"])]] for row in rows)
    assert {len(row["turn_rewards"]) for row in rows} > {1} or len(rows) == 8
    assert all(("routes" in row) == (more is ROUTED) for row in rows)
    again, _ = runs.train("grpo.gin", *settings, *REPEATED)
    ours, theirs = (runs.reproducible(each.history) for each in (again, made))
    for one, other in zip(ours, theirs, strict=True):
        for name in ("loss", "grad_norm", "reward", "turns", "mismatch_max"):
            assert one[name] == other[name], name
    one, other = (
        (tmp_path / run / "model" / "model.safetensors").read_bytes()
        for run in ("run", "again")
    )
    assert one == other


@pytest.mark.slow
def test_failure_saves_a_checkpoint(tmp_path):
    text = AGENT.replace("def play(record, complete):", (
        "CALLS = []\n\ndef play(record, complete):\n    CALLS.append(1)\n"
        "    if len(CALLS) > 8: raise OSError('down')"))  # fmt: skip
    pathlib.Path("agent.py").write_text(text)
    with pytest.raises(RewardError, match="OSError: down"):
        runs.train("grpo.gin", "run.checkpoint_every=100")
    pathlib.Path("agent.py").write_text(AGENT)
    result, said = runs.train("grpo.gin", "run.checkpoint_every=100")
    assert [x.step for x in result.history] == [1, 2]
