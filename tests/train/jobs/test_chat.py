"""Supervised training on streamed conversations: what it learns, keeps and resumes."""

import functools
import json
import pathlib

import pytest

from jaxmem.data import block_files
from jaxmem.data.records import DataError
from jaxmem.train.jobs import sft
from tests.helpers import runs, texts
from tests.helpers.kills import kill_before
from tests.helpers.runs import steps, write

pytestmark = pytest.mark.usefixtures("quick_compilation", "no_picture")
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role[0] + ' ' + m.content }}</s>"
    "{% endfor %}{% if add_generation_prompt %}{{ 'a ' }}{% endif %}"
)
GIN = """
data.source = "chat.jsonl"
data.sequence_length = 32
data.batch_size = 2
data.held_out = 0.2
data.streaming = True
data.shuffle_window = 32
head.chunk = 32
optimizer.learning_rate = 1e-2
optimizer.warmup_steps = 0
run.steps = 8
run.accumulate = 2
run.checkpoint_every = 3
run.compare_heads = False
run.out_dir = "run"
eval.every = 2
"""


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    """A checkpoint, and conversations of two turns that answer with the question."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(block_files, "BLOCK_BYTES", 1000)
    model = texts.checkpoint("llama", tmp_path)
    named = {"eos_token": "</s>", "bos_token": "<s>", "chat_template": TEMPLATE}
    (model / "tokenizer_config.json").write_text(json.dumps(named))
    words = [a + b for a in "bcdefghi" for b in "rstuvwxy"]
    turns = [
        [
            {"role": role, "content": word if role == "user" else word[0] * 3}
            for _ in range(2)
            for role in ("user", "assistant")
        ]
        for word in words
    ]
    write("chat.jsonl", [{"messages": each} for each in turns])
    pathlib.Path("sft.gin").write_text(GIN + f'model.checkpoint = "{model}"\n')
    return tmp_path


train = functools.partial(runs.train, "sft.gin")


def best_step(path):
    (kept,) = (p.name for p in pathlib.Path(path, "best").iterdir() if p.name.isdigit())
    return int(kept)


@pytest.mark.slow
@pytest.mark.usefixtures("one_program")
def test_chat_run_learns_and_resumes_bitwise(monkeypatch):
    result, said = train()
    first, last = result.history[0], result.history[-1]
    assert last.loss < first.loss - 0.5
    held_out = {s.step: s.held_out_loss for s in result.history if s.held_out_loss}
    assert (
        list(held_out) == [2, 4, 6, 8]
        and result.summary["held_out_loss"] == held_out[8]
    )
    assert f"held-out loss {held_out[8]:.4f}" in said
    assert best_step("run") == min(held_out, key=held_out.__getitem__)

    kill_before(6, sft.Sft, monkeypatch, lambda: train("run.out_dir=cut"))
    assert len(steps("cut")) == 5 and best_step("cut") == 4  # not saved: 4 and 5
    _, said = train("run.out_dir=cut")
    assert "resuming cut at step 3" in said
    assert steps("cut") == steps("run") and best_step("cut") == best_step("run")


def without_weight(but=None):
    """The conversations, of whose answers the loss counts those of one, or none."""
    records = [
        json.loads(x) for x in pathlib.Path("chat.jsonl").read_text().split("\n")[:-1]
    ]
    for i, record in enumerate(records):
        for turn in record["messages"][1::2]:
            turn["weight"] = int(i == but)
    write("chat.jsonl", records)


def test_data_without_counted_tokens_are_refused(monkeypatch):
    without_weight()
    monkeypatch.setattr(sft.SftProgram, "compile_step", lambda *_: None)  # takes none
    nothing = (
        "no token that the loss counts: every token belongs to a prompt or has weight 0"
    )
    with pytest.raises(DataError, match=f"^data.held_out=0.2 keeps {nothing}"):
        train()
    with pytest.raises(DataError, match=f"^data.source='chat.jsonl' has {nothing}"):
        train("data.held_out=0")
    assert not steps("run")


@pytest.mark.full  # a step without labels is quick in test_sft
def test_first_step_may_count_no_tokens():
    without_weight(but=63)
    result, said = train("data.held_out=0", "run.steps=1")
    assert [step.tokens for step in result.history] == [0]
    assert said.count("evaluates nothing: nothing is held out; see data.held_out") == 1
