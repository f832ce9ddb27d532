"""`jaxmem data` and `jaxmem train --keys`: what a user looks at before a run."""

import dataclasses
import json
import pathlib

import pytest

from jaxmem.commands import cli
from jaxmem.train import configuration, keys
from jaxmem.train.jobs import passes
from jaxmem.train.settings import RunConfig
from tests.helpers import texts

TEMPLATE = "{% for m in messages %}{{ m.role[0] + ' ' + m.content }}</s>{% endfor %}"


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = texts.checkpoint("llama", tmp_path)
    named = {"eos_token": "</s>", "chat_template": TEMPLATE}
    (model / "tokenizer_config.json").write_text(json.dumps(named))
    pathlib.Path("a.gin").write_text(
        'model.checkpoint = "llama"\ndata.sequence_length = 8\ndata.batch_size = 2\n'
    )


def write(name, *rows):
    pathlib.Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def shown(capsys, *words):
    assert cli.main(["data", "a.gin", *words]) == 0
    return capsys.readouterr().out


def test_documents_show_what_the_loss_counts(capsys):
    write("t.jsonl", {"prompt": "ab", "response": "cd"}, {"text": "e" * 20})
    said = shown(capsys, "data.source=t.jsonl", "--show", "1")
    assert "t.jsonl:1: 6 tokens, the loss counts 3\n" in said
    assert "<s> a b⟦c d </s>⟧" in said and "e e" not in said
    assert "2 documents, 28 tokens; the loss counts 85.7% of them; 6 to 22" in said
    assert "1 is longer than data.sequence_length=8 and is cut into rows" in said
    assert "an epoch packs 28 tokens into 4 rows of 8, 12.5% padding: 2 micro" in said
    assert "run.steps=60 is 30 epochs: each record is seen 30 times\n" in said
    said = shown(capsys, "data.source=t.jsonl", "run.epochs=1.5")
    assert "run.epochs=1.5: each record is seen 1 or 2 times\n" in said
    said = shown(capsys, "data.source=t.jsonl", "run.steps=8001")
    assert "run.steps=8,001 is 4,000.5 epochs: each record is seen 4,000 or" in said


def test_preview_counts_held_out_documents(capsys):
    write("t.jsonl", *({"text": "ab" * i} for i in range(1, 9)))
    words = "data.source=t.jsonl", "data.held_out=0.2"
    assert "micro-batches of 2; 1 document held out\n" in shown(capsys, *words)
    assert "held out" not in shown(capsys, words[0])


def test_preview_shows_first_block_of_stream(capsys, monkeypatch):
    monkeypatch.setattr("jaxmem.data.block_files.BLOCK_BYTES", 30)
    write("t.jsonl", *({"text": "ab" * i} for i in range(1, 9)))
    said = shown(capsys, "data.source=t.jsonl", "data.streaming=True", "--show", "1")
    assert "t.jsonl: line at byte 0: 4 tokens, the loss counts 3\n" in said
    assert "2 documents of first blocks, 10 tokens" in said and "packs" not in said
    assert (
        "jaxmem would have to read all data to count how often run.steps=60 trains on a"
        in said
    )
    write("u.jsonl", {"text": "a", "stars": 1})
    path = pathlib.Path("u.jsonl")
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    both = ["data.source=('t.jsonl', 'u.jsonl')", "data.streaming=True"]
    said = shown(capsys, *both)
    assert "first block of each source: read as texts, 3 records" in said
    assert "the column 'stars' is not used: 1 (first u.jsonl: line at byte 0)" in said
    said = shown(capsys, *both, "data.weights=(1, 2)", "run.epochs=2")
    assert "how often run.epochs=2 trains on a record by data.weights\n" in said
    assert cli.main(["data", "a.gin", *both, 'data.columns={"text": "txet"}']) == 2
    assert "data.columns names 'txet', but no record has" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["data", "train"])
@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([{"text": "ab"}], "is one document, which jaxmem does not divide"),
        (
            [{"input_ids": [1, 9 + i], "labels": [-100, -100]} for i in range(3)],
            "data.held_out=0.5 keeps no token that the loss counts",
        ),
    ],
)
def test_held_out_text_is_checked_by_data_and_train(command, records, message, capsys):
    write("t.jsonl", *records)
    words = "data.source=t.jsonl", "data.held_out=0.5"
    assert cli.main([command, "a.gin", *words]) == 2
    assert message in capsys.readouterr().err


def test_conversations_are_rendered(capsys):
    pytest.importorskip("jinja2")
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "bc"}]
    write("t.jsonl", {"messages": talk})
    said = shown(capsys, "data.source=t.jsonl")
    assert "u   a </s> a  ⟦b c </s>⟧" in said


@pytest.mark.parametrize("job", ["sft", "dpo", "grpo"])
def test_sources_by_weights_are_seen_by_their_weights(job, capsys):
    for name, count in {"a": 6, "b": 2}.items():
        rows = [
            {"prompt": f"{name}b", "chosen": "cdef" + "c" * i, "rejected": "dd"}
            for i in range(count)
        ]
        if job == "sft":
            rows = [{"prompt": row["prompt"], "response": "cdef"} for row in rows]
        write(f"{name}.jsonl", *rows)
    section = "task" if job == "grpo" else "data"
    more = ["data.sequence_length=None", "data.batch_size=None"] * (job == "grpo")
    said = shown(
        capsys, f"run.job={job}", f"{section}.source=('a.jsonl', 'b.jsonl')",
        f"{section}.weights=(1.0, 1.0)", "run.steps=24", *more,
        *(["data.sequence_length=16"] if job == "dpo" else []),
        *(["grpo.prompts=2"] if job == "grpo" else []),
    )  # fmt: skip
    each = "4 times in a.jsonl, 12 times in b.jsonl"
    assert f"run.steps=24: each record is seen {each}\n" in said


def test_of_all_counts_the_micro_batches_of_steps():
    run = RunConfig(steps=10, accumulate=4)
    assert passes.of_all(run, lambda: 8.0) == (
        "run.steps=10 is 5 epochs: each record is seen 5 times"
    )


def test_of_sources_mixes_items_by_weights():
    sources = [passes.SourceSize("a", 10, 40, 1.0), passes.SourceSize("b", 10, 10, 2.0)]
    run = RunConfig(steps=12, accumulate=3)
    # 144 rows: 16 of a with 4 items each, and 128 of b.
    assert passes.of_sources(run, 5.0, sources).endswith(
        "1.6 times in a, 12.8 times in b"
    )


def test_pairs_and_prompts(capsys):
    write("p.jsonl", {"prompt": "ab", "chosen": "c", "rejected": "d", "answer": "c"})
    said = shown(capsys, "run.job=dpo", "data.source=p.jsonl")
    assert "p.jsonl:1 chosen: 5 tokens, the loss counts 2" in said
    assert "1 pairs to train on, 0 held out; 37.5% of the rows is padding" in said
    said = shown(capsys, "run.job=grpo", "task.source=p.jsonl",
                 "data.sequence_length=None", "data.batch_size=None")  # fmt: skip
    assert "p.jsonl:1: 3 tokens, columns chosen, rejected, answer" in said
    assert "<s> a b" in said and "1 prompts to train on, 0 held out; 3 to 3" in said


def test_preview_errors_are_one_line(capsys):
    write("t.jsonl", {"body": "a"})
    assert cli.main(["data", "a.gin", "data.source=t.jsonl"]) == 2
    said = capsys.readouterr().err
    assert (
        said.startswith("jaxmem: error: t.jsonl:1: expected") and said.count("\n") == 1
    )


# ---------------------------------------------------------------------- keys


def test_every_key_is_described(capsys):
    assert cli.main(["train", "--keys"]) == 0
    lines = capsys.readouterr().out.splitlines()
    fields = [line for line in lines if not line.startswith("# ")]
    assert all(len(line.partition("; ")[2]) > 3 for line in fields), fields
    names = [line.partition(" = ")[0] for line in fields]
    assert len(set(names)) == len(names) > 100 and "dpo.beta" in names
    assert cli.main(["train", "--keys", "dpo"]) == 0
    said = capsys.readouterr().out
    assert (
        "dpo.gamma = None  # float or None; SimPO's margin. "
        "None: the loss's own value, 0.5\n"
    ) in said
    assert cli.main(["train", "--keys", "dop"]) == 2
    assert "--keys: no section 'dop'; the sections are" in capsys.readouterr().err


@pytest.mark.parametrize(
    "overrides, unread",
    [
        (["model.lora_alpha=8.0"], "model.lora_alpha"),
        (["data.vocab_size=300"], "data.vocab_size"),
        (["data.shuffle_window=7"], "data.shuffle_window"),
        (["run.steps=7", "run.epochs=2"], "run.steps"),
        (["eval.keep_best=False"], "eval.keep_best"),
        (["run.keep=9", "run.checkpoint_every=None"], "run.keep"),
    ],
)
def test_settings_without_effect_are_no_differences(overrides, unread):
    text = keys.differing(configuration.load("a.gin", overrides)[0])
    assert unread not in text
    needed = ["model.lora_rank=4", "data.streaming=True", "eval.every=2"]
    read = keys.differing(configuration.load("a.gin", [overrides[0], *needed])[0])
    assert unread in read or unread == "data.vocab_size"


def test_differences_from_defaults_load_to_same(tmp_path):
    config, _ = configuration.load("a.gin", ["run.seed=3", "optimizer.clip_norm=None"])
    text = keys.differing(config)
    assert text.splitlines() == [
        "data.sequence_length = 8", "data.batch_size = 2", "model.checkpoint = 'llama'",
        "optimizer.clip_norm = None", "run.seed = 3",
    ]  # fmt: skip
    pathlib.Path("b.gin").write_text(text)
    again, _ = configuration.load("b.gin")
    assert dataclasses.asdict(again) == dataclasses.asdict(config)
