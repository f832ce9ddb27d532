"""Completions against transformers and the distribution; files that kills interrupt."""

import dataclasses
import datetime
import json
import math
import os
import pathlib
import re
import signal

import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from rich.console import Console
from tokenizers import decoders

from jaxmem import generate
from jaxmem.commands import cli
from jaxmem.data.record_reader import RecordReader
from jaxmem.data.records import DataError, read_records
from jaxmem.generate import GenerateConfig, Generator, conversation
from jaxmem.generate.completions import EncodedPrompt, unreached
from jaxmem.generate.grading import Grading
from jaxmem.score.journal import ResumableOutput
from tests.helpers import runs, seeded, texts
from tests.helpers.cases import slow

pytestmark = pytest.mark.usefixtures("quick_compilation")

GREEDY = np.load(seeded.CHECKPOINTS / "greedy.npz")
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }},{{ m.content }}.{% endfor %}"
    "{% if add_generation_prompt %}a,{% endif %}"
)


def checkpoint(name, directory):
    """A tiny checkpoint whose tokens are letters, decoded without spaces."""
    made = texts.checkpoint(name, directory)
    path = str(made / "tokenizer.json")
    tokenizer = tokenizers.Tokenizer.from_file(path)
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(path)
    (made / "chat_template.jinja").write_text(TEMPLATE)
    return made


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return checkpoint("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def model(directory):
    return generate.load(directory, dtype="float32")


@pytest.fixture(scope="module")
def greedy(model):
    return Generator(
        model, GenerateConfig(max_new_tokens=12, temperature=0, batch_size=4)
    )


@pytest.fixture(scope="module")
def sampled(model):
    return Generator(model, GenerateConfig(max_new_tokens=12, seed=3, batch_size=3))


# ------------------------------------------------------------------ tokens


@pytest.mark.parametrize("name", ["qwen3", slow("mistral"), slow("llama")])
def test_greedy_tokens_are_those_of_transformers(name, directory, tmp_path):
    if name != "llama":
        directory = checkpoint(name, tmp_path)
    config = GenerateConfig(max_new_tokens=12, temperature=0, batch_size=4)
    generator = Generator(generate.load(directory, dtype="float32"), config)
    rows = zip(GREEDY["prompts"].tolist(), GREEDY["lengths"], strict=True)
    prompts = [EncodedPrompt("", ids[:n], i, 12) for i, (ids, n) in enumerate(rows)]
    made = generator.complete(prompts)
    expected = [row[row >= 0].tolist() for row in GREEDY[name]]
    assert [x.ids for x in made] == expected
    ends = ["length" if len(row) == 12 and row[-1] != 2 else "eos" for row in expected]
    assert [x.finish for x in made] == ends


def test_load_codes_the_base(directory):
    loaded = generate.load(directory, dtype="float32", base="int8")
    assert loaded.decoder.config.base == "int8"


@pytest.mark.slow
def test_batch_equals_each_prompt_alone(sampled):
    prompts = [
        sampled.prompt(text, "", i) for i, text in enumerate(["ab", "hello you", "z"])
    ]
    together = sampled.complete(prompts)
    assert together == [sampled.complete([prompt])[0] for prompt in prompts]
    assert together[1:] == sampled.complete(prompts[1:])  # filled up to the batch
    assert len({made.text for made in together}) == 3


@pytest.mark.slow
def test_frequencies_follow_truncated_distribution(model):
    rows, config = 2048, GenerateConfig(
        max_new_tokens=1, temperature=1.5, top_p=0.8, min_p=0.04, batch_size=2048
    )  # fmt: skip
    generator = Generator(model, config)
    prompt = generator.prompt("the", "")
    made = generator.complete([prompt._replace(number=i) for i in range(rows)])
    counts = np.bincount([x.ids[0] for x in made], minlength=40)

    ids = jnp.array([prompt.ids])
    hidden = model.decoder(ids, None, jnp.arange(len(prompt.ids))[None])
    z = np.asarray(model.decoder.logits(hidden[0, -1]), np.float64) / 1.5
    p = np.exp(z - z.max())
    p /= p.sum()
    order = np.argsort(-p)
    before = np.cumsum(p[order]) - p[order]
    kept = order[(before < 0.8) & (p[order] >= 0.04 * p.max())]
    expected = np.zeros(40)
    expected[kept] = p[kept] / p[kept].sum()
    assert 3 < len(kept) < 30 and (counts[expected == 0] == 0).all()
    noise = np.sqrt(expected * (1 - expected) / rows)
    assert (np.abs(counts / rows - expected) <= 4.5 * noise).all()


# ------------------------------------------------------------------- ends


@pytest.mark.slow
def test_stop_string_ends_where_it_starts(model, greedy):
    (whole,) = greedy(["hello"])
    stop = whole.text[3:5]
    config = dataclasses.replace(greedy.config, stop=("zzz", stop))
    stopping = Generator(model, config)
    decode, place = model.vocabulary.tokenizer.decode, whole.text.index(stop)
    parts = [whole.ids[:n] for n in range(13)]
    through = next(part for part in parts if stop in decode(part))
    pieces = []
    (made,) = stopping.complete([stopping.prompt("hello", "")], pieces.append)
    assert made == (whole.text[:place], through, "stop", stop)
    assert len(through) < len(whole.ids)
    assert "".join(pieces) == made.text
    assert unreached(config.stop, [made.finish]) is None


def test_unreached_stop_strings_are_reported():
    ends = ["length", "eos"]
    assert unreached((), ends) is None
    assert unreached(("#", "\n"), ends) == (
        "1 of 2 completions reached the maximum length without a stop string "
        "('#', '\\n')"
    )


@pytest.mark.full
def test_stop_string_may_be_a_special_token(directory):
    model = generate.load(directory, dtype="float32")._replace(eos_ids=())
    config = GenerateConfig(
        max_new_tokens=12, temperature=0, stop=("</s>",), batch_size=4
    )
    ids = GREEDY["prompts"][2, :1].tolist()
    (made,) = Generator(model, config).complete([EncodedPrompt("", ids, 0, 12)])
    assert made.ids == [8, 8, 8, 2] and made[2:] == ("stop", "</s>")
    assert "<" not in made.text


def test_prompt_without_room_is_refused(model, greedy):
    with pytest.raises(DataError, match="PROMPT: the prompt's 58 tokens and --max-new"):
        greedy.prompt("a" * 57, "PROMPT")
    default = Generator(model, GenerateConfig())
    assert default.prompt("a" * 57, "").room == 6
    message = "p:1: the prompt's 64 tokens and one token of a completion exceed"
    with pytest.raises(DataError, match=message):
        default.prompt("a" * 63, "p:1")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(max_new_tokens=0), "--max-new-tokens must be at least 1, got 0"),
        (dict(temperature=-1.0), "--temperature must be 0 or more, .*got -1.0"),
        (dict(top_p=0.0), r"--top-p must be in \(0, 1\], got 0.0"),
        (dict(min_p=2.0), r"--min-p must be in \(0, 1\], got 2.0"),
        (dict(stop=("",)), "--stop must be a text of at least one character"),
        (dict(top_k=41), "--top-k must be at most 40, the vocabulary, got 41"),
    ],
)
def test_impossible_options_are_refused_by_flag(options, message, model):
    with pytest.raises(ValueError, match=message):
        Generator(model, GenerateConfig(**options))


# ------------------------------------------------------------------- files


@pytest.fixture
def prompts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    records = [{"prompt": "ab" + "c" * i, "id": i} for i in range(6)]
    records.append({"prompt": [{"role": "user", "content": "hi"}], "id": 7})
    pathlib.Path("in.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return records


def written(generator, out="out.jsonl"):
    with open("log.txt", "w") as log:
        console = Console(file=log, width=200)
        generate.generate_file(generator, "in.jsonl", out, console)
    lines = pathlib.Path(out).read_text().splitlines()
    return [json.loads(line) for line in lines], pathlib.Path("log.txt").read_text()


@pytest.mark.full
def test_generate_file_resumes_after_a_kill(sampled, prompts, monkeypatch):
    whole, log = written(sampled, "whole.jsonl")
    assert [{k: row[k] for k in ("prompt", "id")} for row in whole] == prompts
    assert "7 completions" in log and "saved in whole.jsonl" in log
    complete, calls = sampled.complete, []

    def killed(batch, show=None):
        calls.append(len(batch))
        if len(calls) == 2:
            raise OSError("killed")
        return complete(batch, show)

    monkeypatch.setattr(sampled, "complete", killed)
    with pytest.raises(OSError, match="killed"):
        written(sampled)
    assert not pathlib.Path("out.jsonl").exists()
    again, log = written(sampled)
    assert again == whole and calls == [3, 3, 3, 1]
    assert "resuming after prompt 3" in log
    with pytest.raises(ValueError, match="out.jsonl exists already; delete it, or n"):
        written(sampled)


def test_unfinished_file_belongs_to_its_options(model, sampled, prompts):
    journal = pathlib.Path("out.jsonl.unfinished")
    line = json.dumps({"fingerprint": "other", "source": ""}) + "\n"
    journal.write_text(line + json.dumps({"prompt": "ab"}) + "\n")
    with pytest.raises(ValueError, match="unfinished results of other inputs"):
        written(sampled)


def test_unfinished_file_of_other_options_names_their_flags(
    model, sampled, prompts, monkeypatch
):
    with monkeypatch.context() as patched:
        patched.setattr(
            ResumableOutput, "record", lambda *_: signal.raise_signal(signal.SIGINT)
        )
        with pytest.raises(KeyboardInterrupt):
            written(sampled)
    journal = pathlib.Path("out.jsonl.unfinished")
    with open(journal, "a") as file:
        file.write("{}\n")
    config = dataclasses.replace(sampled.config, seed=4, stop=("x",), top_k=2)
    with pytest.raises(ValueError) as raised:
        written(Generator(model, config))
    assert str(raised.value) == (
        "out.jsonl.unfinished contains unfinished results of other options: --top-k "
        "left out (now 2), --stop left out (now 'x'), --seed 3 (now 4); give the "
        "options as they were to continue it, delete the file, or name another --out"
    )


def test_unfinished_file_of_version_0_2_is_continued(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = texts.checkpoint("llama", tmp_path)
    for path in made.iterdir():
        os.utime(path, (10**9, 10**9))
    runs.write("in.jsonl", [{"prompt": "ab", "id": 0}, {"prompt": "abc", "id": 1}])
    config = GenerateConfig(max_new_tokens=4, batch_size=1, stop=("zz",))
    generator = Generator(generate.load(made, dtype="float32"), config)
    done = {"prompt": "ab", "completion": "x", "tokens": 1, "finish": "eos", "id": 0}
    head = {"fingerprint": "84940b528731a7162dc99c04", "source": ""}
    runs.write("out.jsonl.unfinished", [head, done])
    rows, log = written(generator)
    assert rows[0] == done and rows[1]["id"] == 1
    assert "resuming after prompt 1" in log


def test_signal_ends_after_current_prompts(sampled, prompts, monkeypatch):
    complete = sampled.complete

    def stopped(batch, show=None):
        monkeypatch.setattr(sampled, "complete", complete)
        signal.raise_signal(signal.SIGTERM)
        return complete(batch, show)

    monkeypatch.setattr(sampled, "complete", stopped)
    with pytest.raises(SystemExit) as caught:
        written(sampled)
    assert caught.value.code == 143
    said = " ".join(pathlib.Path("log.txt").read_text().split())
    assert "stopped by SIGTERM after prompt 3 of 7, all recorded in" in said
    assert len(pathlib.Path("out.jsonl.unfinished").read_text().splitlines()) == 4


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"text": "a"}, 'in.jsonl:1: expected "conversations" or "messages" or'),
        ({"prompt": "a", "stop": 1}, "in.jsonl:1: the column 'stop' would be replaced"),
        ({"prompt": [{"content": "a"}]}, 'in.jsonl:1: "prompt".0. must be an object'),
        ({"prompt": "a" * 60}, "in.jsonl:1: the prompt's 61 tokens"),
    ],
)
def test_prompt_that_cannot_be_completed_is_named(record, message, sampled, prompts):
    pathlib.Path("in.jsonl").write_text(json.dumps(record) + "\n")
    with pytest.raises(DataError, match=message):
        written(sampled)


@pytest.mark.parametrize(
    "value, shown",
    [(datetime.date(2026, 1, 2), "datetime.date"), (b"a", "b'a'"), (math.nan, "nan")],
)
def test_column_that_json_cannot_hold_is_refused(value, shown, sampled, prompts):
    """Before anything is sampled."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = {"prompt": ["a", "b"], "when": [None, value]}
    pq.write_table(pa.table(rows), "in.parquet")
    message = rf"^in.parquet: row 2: .* 'when' must be a JSON value.*got {shown}"
    with pytest.raises(DataError, match=message):
        generate.generate_file(sampled, "in.parquet", "out.jsonl")
    assert not pathlib.Path("out.jsonl.unfinished").exists()


REWARD = """
def score(prompts, completions, id, completion_ids, max_new_tokens, **columns):
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [None if i == 1 else t.count("a") + t.count("b") + 0.0
            for i, t in zip(id, texts)]
"""


@pytest.fixture
def graded(model, prompts):
    """Writes four completions of each prompt, and rewards; returns lines and log."""
    pathlib.Path("reward.py").write_text(REWARD)
    del prompts[2]  # the last batch is whole, so that no program has fewer rows
    runs.write("in.jsonl", prompts)
    config = GenerateConfig(max_new_tokens=6, seed=3, batch_size=3, samples=4)
    generator = Generator(model, config)

    def graded(out="out.jsonl", **options):
        grading = Grading("reward.py:score", **options)
        with open("log.txt", "w") as log:
            console = Console(file=log, width=200)
            generate.generate_file(generator, "in.jsonl", out, console, grading)
        lines = pathlib.Path(out).read_text().splitlines()
        return [json.loads(line) for line in lines], pathlib.Path("log.txt").read_text()

    graded.generator = generator
    return graded


def test_samples_of_prompts_have_rewards(graded, prompts):
    rows, log = graded()
    assert [(row["id"], row["sample"]) for row in rows] == [
        (prompt["id"], i) for prompt in prompts for i in range(4)
    ]
    for row in rows:
        count = row["completion"].count("a") + row["completion"].count("b")
        assert row["reward"] == (None if row["id"] == 1 else count)
    own = [row["completion"] for row in rows if row["id"] == 0]
    assert len(set(own)) > 1  # of draws of their own
    known = [row["reward"] for row in rows if row["reward"] is not None]
    assert (
        f"mean reward {np.mean(known):.3f} of 20 completions; 4 have no reward" in log
    )


def test_best_samples_are_kept(graded, monkeypatch):
    rows, _ = graded("all.jsonl")
    by_id = {row["id"]: [r for r in rows if r["id"] == row["id"]] for row in rows}
    best = [max(group, key=lambda r: r["reward"]) for i, group in by_id.items()
            if i != 1]  # fmt: skip
    complete, calls = graded.generator.complete, []

    def killed(batch, show=None):
        calls.append(len(batch))
        if len(calls) == 4:
            raise OSError("killed")
        return complete(batch, show)

    monkeypatch.setattr(graded.generator, "complete", killed)
    with pytest.raises(OSError, match="killed"):
        graded("best.jsonl", keep_best=True)
    kept, log = graded("best.jsonl", keep_best=True)
    assert kept == best and "resuming after completion 9" in log
    assert "4 have no reward; kept 5 of 24" in log
    least = max(row["reward"] for row in best)
    assert graded("least.jsonl", min_reward=least)[0] == [
        row for row in rows if row["reward"] == least
    ]


def test_kept_samples_are_trained_on(graded):
    """Rejection sampling: the output is read as prompts and completions."""
    rows, _ = graded(keep_best=True)
    reader = RecordReader()
    documents = [
        reader.document(record)
        for record in read_records(pathlib.Path("out.jsonl"), "data.source")
        if isinstance(record.fields["prompt"], str)
    ]
    strings = [row for row in rows if isinstance(row["prompt"], str)]
    assert [d.text for d in documents] == [row["completion"] for row in strings]


def test_reward_that_cannot_be_used_is_named(graded):
    pathlib.Path("reward.py").write_text("def score(completions, answer, **_): ...")
    said = (
        "^--reward: reward.py:score requires the argument 'answer', which is not a col"
    )
    with pytest.raises(ValueError, match=said + "umn of --in; rename one, or give"):
        graded()
    pathlib.Path("in.jsonl").write_text('{"prompt": "a", "reward": 1}\n')
    with pytest.raises(DataError, match="the column 'reward' would be replaced"):
        graded()


def test_text_file_of_prompts_is_refused(sampled, prompts):
    pathlib.Path("in.txt").write_text("a")
    with pytest.raises(
        DataError, match="^--in: in.txt is a text file, which has no rec"
    ):
        generate.generate_file(sampled, "in.txt", "out.jsonl")


# -------------------------------------------------------------------- chat


@pytest.mark.full
def test_chat_keeps_its_history(greedy, monkeypatch, capsys):
    lines = iter(["hi", "", "u", "a" * 60, "/reset", "hi", "/exit", "never"])
    monkeypatch.setattr("builtins.input", lambda _: next(lines))
    asked, prompt = [], greedy.prompt

    def spied(turns, *rest):
        asked.append([turn["content"] for turn in turns])
        return prompt(turns, *rest)

    monkeypatch.setattr(greedy, "prompt", spied)
    conversation.chat(greedy, system="b")
    out, err = capsys.readouterr()
    first, second, again = out.splitlines()
    assert asked[0] == asked[-1] == ["b", "hi"] and first == again
    assert asked[1] == ["b", "hi", first, "u"]
    assert asked[2] == [*asked[1], second, "a" * 60]  # too long, and forgotten
    assert "positions of the model" in err and next(lines) == "never"


# ------------------------------------------------------------- command line


def run(capsys, *arguments):
    status = cli.main(["generate", *map(str, arguments)])
    out, err = capsys.readouterr()
    return status, out, err


def test_command_prints_a_completion(directory, greedy, capsys):
    options = "--temperature", "0", "--max-new-tokens", "12", "--dtype", "float32"
    status, out, err = run(capsys, directory, "hello", *options, "--stop", "##")
    (made,) = greedy(["hello"])
    assert (status, out) == (0, made.text + "\n")
    assert made.finish == "length" and "without a stop string ('##')" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("nowhere/m", "a"),
            "hf://nowhere/m: HF_HUB_OFFLINE=1 is set, and .* or run `hf",
        ),
        (("runs/sft", "a"), "runs/sft: no such checkpoint, adapter or run .run.out_d"),
        (("empty/m", "a"), "empty/m: no such .* .run.out_dir.; a .* is hf://empty/m"),
        (("empty", "a"), "empty is not a checkpoint .with config.json., an adapter"),
        (("unsaved", "a"), "unsaved: this run has not saved a checkpoint"),
        (("empty",), "generate needs one of PROMPT, --in FILE.jsonl and --chat"),
        (("empty", "a", "--chat"), "PROMPT cannot be combined with --chat: jaxmem com"),
        (("empty", "--in", "a.jsonl", "--chat"), "generate needs one of PROMPT, --in"),
        (("empty", "--in", "a.jsonl"), "--in FILE.jsonl and --out FILE.jsonl need"),
        (("empty", "a", "--system", "b"), "--system needs --chat"),
        (("empty", "a", "--samples", "2"), "--samples needs --in FILE.jsonl"),
        (
            ("empty", "--in", "a.jsonl", "--out", "b.jsonl", "--keep-best"),
            "--keep-best compares rewards; add --reward NAME",
        ),
        (
            ("empty", "a", "--samples", "2", "--temperature", "0"),
            "--samples must be 1 at --temperature 0, got 2",
        ),
    ],
)
def test_generate_errors_are_one_line(
    arguments, message, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    for name in ("empty", "unsaved"):
        pathlib.Path(name).mkdir()
    pathlib.Path("unsaved/metrics.jsonl").touch()
    status, out, err = run(capsys, *arguments)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert re.search(message, err)
