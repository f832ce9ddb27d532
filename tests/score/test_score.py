"""Scores against torch's logits, and files that a kill cannot spoil."""

import json
import os
import pathlib
import shutil
import signal

import jax
import numpy as np
import pytest
from rich.console import Console

from jaxmem import checkpoints, score
from jaxmem.base import files, locks
from jaxmem.commands import cli
from jaxmem.score import ScoreConfig, document_windows, journal, run
from jaxmem.score.fingerprint import Fingerprint
from tests.helpers import texts
from tests.helpers.cases import slow
from tests.helpers.files import no_file_above

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return texts.checkpoint("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture
def directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(records, path="data.jsonl"):
    pathlib.Path(path).write_text("".join(json.dumps(r) + "\n" for r in records))


def documents(count=12, seed=0):
    rng = np.random.default_rng(seed)
    letters = np.array(list(texts.LETTERS))
    return [
        {"text": "".join(rng.choice(letters, rng.integers(0, 14)))}
        for _ in range(count)
    ]


def scored(model, **options):
    options = dict(max_tokens=32, dtype="float32", data="data.jsonl") | options
    with open("log.txt", "w") as log:
        console = Console(file=log, width=80)
        config = ScoreConfig(str(model), **options)
        summary = score.score(config, console)
    out = pathlib.Path(options.get("out", "scores.jsonl"))
    assert not out.with_name(out.name + ".unfinished").exists()
    if out.suffix == ".jsonl":
        return summary, [json.loads(line) for line in out.read_text().splitlines()]
    return summary, out


# ------------------------------------------------------------------ numbers


def test_scores_are_those_of_torchs_logits(directory, tmp_path_factory):
    expected = np.load(texts.TINY / "gemma2" / "expected.npz")
    model = texts.checkpoint("gemma2", tmp_path_factory.mktemp("gemma"), start=False)
    vocabulary = checkpoints.load_vocabulary(model)
    words = [vocabulary.tokenizer.id_to_token(i) for i in range(40)]
    rows = list(zip(expected["tokens"], expected["logits"], strict=True))
    write([{"text": "".join(words[i] for i in row)} for row, _ in rows])
    _, records = scored(model)
    for (row, logits), record in zip(rows, records, strict=True):
        logp = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        picked = logp[np.arange(len(row) - 1), row[1:]]
        entropy = -(np.exp(logp) * logp).sum(axis=-1)[: len(row) - 1]
        assert record["token_ids"] == row[1:].tolist()
        np.testing.assert_allclose(record["logprobs"], picked, atol=5e-4)
        np.testing.assert_allclose(record["entropies"], entropy, atol=5e-4)
        perplexity = np.exp(-picked.mean())
        np.testing.assert_allclose(record["perplexity"], perplexity, rtol=1e-5)


def one_by_one(model, ids):
    """Log-probability of each token, from logits of the whole sequence."""
    decoder = checkpoints.load(model, dtype="float32", param_dtype="float32")
    ids = np.array([ids])
    places = np.arange(ids.shape[1])[None]
    hidden = jax.jit(lambda d, *x: d(*x))(decoder, ids, np.ones_like(ids), places)
    logp = jax.nn.log_softmax(decoder.logits(hidden))[0]
    return np.asarray(logp)[np.arange(ids.shape[1] - 1), ids[0, 1:]]


@pytest.mark.slow
def test_score_responses_with_optional_ends(model, directory):
    write([{"prompt": "ab", "response": "cad"}, {"prompt": "", "response": "a"}])
    _, records = scored(model, eos=True)
    # <s> a b | c a d </s>
    assert records[0]["token_ids"] == [5, 3, 6, 2]
    expected = one_by_one(model, [1, 3, 4, 5, 3, 6, 2])[2:]
    np.testing.assert_allclose(records[0]["logprobs"], expected, atol=1e-5)
    assert records[1]["token_ids"] == [3, 2]
    assert records[0]["document"] == "data.jsonl:1"


def test_packing_changes_no_number_and_no_order(model, directory):
    write(documents())
    _, together = scored(model)
    _, alone = scored(model, max_tokens=16, out="alone.jsonl")
    assert [r["document"] for r in together] == [r["document"] for r in alone]
    for a, b in zip(together, alone, strict=True):
        assert a["token_ids"] == b["token_ids"]
        np.testing.assert_allclose(a["logprobs"], b["logprobs"], atol=1e-5)


def test_summary_is_the_sum_of_the_records(model, directory):
    write(documents())
    summary, records = scored(model)
    logprobs = np.concatenate([r["logprobs"] for r in records])
    assert summary.documents == len(records)
    assert summary.tokens == len(logprobs) == sum(summary.histogram)
    np.testing.assert_allclose(summary.mean_logprob, logprobs.mean())
    np.testing.assert_allclose(summary.perplexity, np.exp(-logprobs.mean()))
    assert summary.histogram[0] == np.sum(-logprobs < 0.01)
    shown = pathlib.Path("log.txt").read_text()
    assert f"tokens scored │ {summary.tokens} │" in " ".join(shown.split())
    assert "█" in shown and "tokens/s" in shown and "documents 12/12" in shown


def test_parquet_holds_the_same(model, directory):
    parquet = pytest.importorskip("pyarrow.parquet")
    write(documents())
    _, records = scored(model)
    _, out = scored(model, out="scores.parquet")
    table = parquet.read_table(out).to_pylist()
    for a, b in zip(records, table, strict=True):
        assert (a["document"], a["token_ids"]) == (b["document"], b["token_ids"])
        np.testing.assert_array_equal(
            np.float32(a["logprobs"]), np.float32(b["logprobs"])
        )
        assert a["perplexity"] == b["perplexity"]


# ------------------------------------------------------------------ windows


def test_windows_score_each_token_once():
    ids = np.arange(100, 123, dtype=np.int32)
    made = document_windows.cut(
        0, document_windows.EncodedDocument("x", ids, 3), length=8, stride=3
    )
    labels = np.concatenate([w.labels[w.labels >= 0] for w in made])
    np.testing.assert_array_equal(labels, ids[3:])
    for window in made:
        assert len(window.tokens) <= 8
        counted = np.flatnonzero(window.labels >= 0)
        np.testing.assert_array_equal(
            window.labels[counted], window.tokens[counted] + 1
        )
    # All but the first have at least length - stride tokens before what they score.
    assert all((w.labels[:5] < 0).all() for w in made[1:])
    prompt = document_windows.cut(
        0, document_windows.EncodedDocument("x", ids, 20), length=8, stride=8
    )
    assert len(prompt) == 1  # what only holds prompt is not run


def test_score_stride_equals_windows(model, directory):
    text = "abcabdabeabf" * 3
    write([{"text": text}])
    _, (record,) = scored(model, max_tokens=16, stride=8)
    ids = [1, *(texts.LETTERS.index(c) + 3 for c in text)]
    assert record["token_ids"] == ids[1:]
    first = one_by_one(model, ids[:17])
    second = one_by_one(model, ids[8:25])
    expected = np.concatenate([first, second[8:]])
    np.testing.assert_allclose(record["logprobs"][:24], expected, atol=1e-5)


def test_long_documents_are_named(model, directory):
    write([{"text": "abc"}, *({"text": "a" * n} for n in (40, 33, 32, 50, 60, 70, 80))])
    message = (
        r"6 of 8 documents are longer than --max-tokens, 32 tokens: "
        r"data.jsonl:2 \(40 tokens\), data.jsonl:3 \(33 tokens\).* and 1 more; "
        "raise --max-tokens, to 64 at most, or score them in windows with --stride$"
    )
    with pytest.raises(document_windows.TooLong, match=message):
        scored(model)


def test_models_own_context_is_the_limit(model, directory):
    write([{"text": "a" * 65}])
    message = (
        r"longer than the model's longest input, 64 tokens: data.jsonl:1 \(65 "
        r"tokens\); score them in windows with --stride$"
    )
    with pytest.raises(document_windows.TooLong, match=message):
        scored(model, max_tokens=128)


# ----------------------------------------------------------------- to resume


def killed_after(appends, monkeypatch, model, **options):
    """A run that dies in the middle of a write, after so many that were whole."""
    count, whole = 0, journal.Journal.append

    def append(self, made):
        nonlocal count
        if count == appends:
            with open(self.path, "ab") as file:
                file.write(b'{"document": "half')
            raise KeyboardInterrupt
        count += 1
        whole(self, made)

    with monkeypatch.context() as patched:
        patched.setattr(journal.Journal, "append", append)
        with pytest.raises(KeyboardInterrupt):
            scored(model, **options)


@pytest.mark.parametrize("appends", [slow(0), 1, slow(2)])
def test_killed_score_repeats_and_loses_nothing(appends, model, directory, monkeypatch):
    monkeypatch.setattr(run, "_GROUP", 1)
    write(documents(20))
    _, whole = scored(model, out="whole.jsonl")
    killed_after(appends, monkeypatch, model)
    assert not pathlib.Path("scores.jsonl").exists()
    _, records = scored(model)
    assert records == whole
    if appends:
        assert "resuming after document" in pathlib.Path("log.txt").read_text()


def test_kill_between_the_last_document_and_the_file(model, directory, monkeypatch):
    write(documents(5))
    with monkeypatch.context() as patched:
        patched.setattr(journal.Journal, "finish", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            scored(model)
    monkeypatch.setattr(run, "_Work", None)  # nothing is left to score
    summary, records = scored(model)
    assert len(records) == summary.documents == 5


@pytest.mark.parametrize("out", ["scores.jsonl", "scores.parquet"])
def test_kill_between_file_and_end_of_journal(out, model, directory, monkeypatch):
    write(documents(5))
    with monkeypatch.context() as patched:
        patched.setattr(files, "sync_directory", lambda _: 1 / 0)  # then, unlink
        with pytest.raises(ZeroDivisionError):
            scored(model, out=out)
    made, other = pathlib.Path(out).read_bytes(), pathlib.Path(out + ".unfinished")
    assert other.exists()
    pathlib.Path(out).write_bytes(made + b" ")
    with pytest.raises(
        ValueError, match=f"{out} exists, and differs from the results in {other}"
    ):
        scored(model, out=out)
    pathlib.Path(out).write_bytes(made)
    summary, _ = scored(model, out=out)
    assert summary.documents == 5 and pathlib.Path(out).read_bytes() == made


def test_journal_of_version_0_2_is_continued(model, directory, monkeypatch):
    monkeypatch.setattr(run, "_GROUP", 1)
    model = pathlib.Path(shutil.copytree(model, directory / "model"))
    for path in model.iterdir():
        os.utime(path, (10**9, 10**9))
    write([{"text": "the cat on"}, {"text": "a hat"}])
    options = dict(top_k=2, temperature=2.0)
    _, whole = scored(model, out="whole.jsonl", **options)
    head = {"fingerprint": "d3a6f88e610482a2468fda9f", "source": "data.jsonl"}
    monkeypatch.setattr(run, "_group_documents", lambda *_: [(0, 1), (1, 2)])
    write([head, whole[0] | {"tokens": -1}], "scores.jsonl.unfinished")
    with open("scores.jsonl.unfinished", "a") as file:
        file.write('{"document": "cut')
    first, second = scored(model, **options)[1]
    assert first["tokens"] == -1 and second == whole[1]


def test_resume_with_data_named_otherwise(model, directory, monkeypatch):
    monkeypatch.setattr(run, "_GROUP", 1)
    write(documents(40))
    _, whole = scored(model, out="whole.jsonl")
    killed_after(1, monkeypatch, model)
    for source in (directory / "data.jsonl", "x/../data.jsonl", "./data.jsonl"):
        pathlib.Path("x").mkdir(exist_ok=True)
        killed_after(1, monkeypatch, model, data=str(source))
    assert scored(model)[1] == whole


@pytest.mark.parametrize("kind", ["jsonl", "txt"])
def test_documents_of_several_files_are_told_apart(kind, model, directory, monkeypatch):
    monkeypatch.setattr(run, "_GROUP", 1)
    for name in ("two/a", "two/b/a"):
        pathlib.Path(name).parent.mkdir()
        if kind == "jsonl":
            write([{"text": "the cat on"}] * 9, f"{name}.jsonl")
        else:
            pathlib.Path(f"{name}.txt").write_text("the cat on\n\n" * 9)
    source = f"two/**/*.{kind}"
    _, whole = scored(model, data=source, out="whole.jsonl")
    assert [record["document"] for record in whole] == [
        f"two/{name}.{kind}:{line * (1 if kind == 'jsonl' else 2) - (kind == 'txt')}"
        for name in ("a", "b/a") for line in range(1, 10)
    ]  # fmt: skip
    killed_after(1, monkeypatch, model, data=source)
    assert scored(model, data=str(directory / source))[1] == whole
    killed_after(1, monkeypatch, model, data=source, out="other.jsonl")
    os.rename(f"two/b/a.{kind}", f"two/b/c.{kind}")
    with pytest.raises(ValueError, match="unfinished results of other inputs"):
        scored(model, data=source, out="other.jsonl")


def test_records_without_a_token_to_score_are_counted(model, directory):
    write([{"text": "the"}, {"text": "t"}, {"text": ""}])
    scored(model)
    said = " ".join(pathlib.Path("log.txt").read_text().split())
    assert "1 of 3 records have no scored token; the first of them" in said
    masked = {"input_ids": [5, 6, 7], "completion_mask": [0, 0, 0]}
    write([masked, masked])
    with pytest.raises(ValueError, match="^DATA: 2 of 2 records have no scored token"):
        scored(model, out="other.jsonl")
    assert not pathlib.Path("other.jsonl").exists()


def test_signal_ends_after_current_documents(model, directory, monkeypatch):
    monkeypatch.setattr(run, "_GROUP", 1)
    write(documents(20))
    _, whole = scored(model, out="whole.jsonl")
    with monkeypatch.context() as patched:
        collect = run._collect
        patched.setattr(
            run, "_collect", lambda *a: signal.raise_signal(15) or collect(*a)
        )
        with pytest.raises(SystemExit) as caught:
            scored(model)
    assert caught.value.code == 143
    said = pathlib.Path("log.txt").read_text()
    journal = pathlib.Path("scores.jsonl.unfinished")
    done = len(journal.read_text().splitlines()) - 1
    assert 0 < done < 20
    said = " ".join(said.split())
    assert f"stopped by SIGTERM after document {done} of 20, all recorded in" in said
    assert scored(model)[1] == whole


def test_full_disk_is_named_and_records_are_kept(model, directory, monkeypatch):
    monkeypatch.setattr(run, "_GROUP", 1)
    write(documents(20))
    _, whole = scored(model, out="whole.jsonl")
    size = pathlib.Path("whole.jsonl").stat().st_size
    for limit, name in (
        (size // 2, "scores.jsonl.unfinished"),
        (size - 9, "scores.jsonl.unfinished"),
        (size + 1000, "scores.parquet"),
    ):
        out = name.removesuffix(".unfinished")
        with no_file_above(limit), monkeypatch.context() as patched:
            if out == "scores.parquet":
                patched.setattr(run, "write_parquet", too_much)
            with pytest.raises(OSError) as caught:
                scored(model, out=out)
        assert str(caught.value).startswith(f"{name}: cannot be written: File too lar")
        assert not pathlib.Path(out + ".made").exists()
    assert len(scored(model, out="scores.parquet")[0].histogram) > 0
    assert scored(model)[1] == whole


def too_much(file, _):
    file.write(bytes(10**6))


def test_zeros_at_the_end_of_a_journal_are_cut(model, directory, monkeypatch):
    monkeypatch.setattr(run, "_GROUP", 1)
    write(documents(12))
    _, whole = scored(model, out="whole.jsonl")
    killed_after(2, monkeypatch, model)
    path = pathlib.Path("scores.jsonl.unfinished")
    content = path.read_bytes()
    path.write_bytes(content[: content.rindex(b"\n") - 20] + bytes(500) + b"\n")
    assert scored(model)[1] == whole


def test_two_at_once_are_refused(model, directory):
    write(documents(5))
    with locks.exclusive(directory / "scores.jsonl.lock", "", print):
        with pytest.raises(ValueError, match="--out scores.jsonl is in use by another"):
            scored(model)
    scored(model)
    assert not list(directory.glob("scores.jsonl.*"))


def test_truncated_header_starts_anew(model, directory):
    write(documents(3))
    pathlib.Path("scores.jsonl.unfinished").write_text('{"finger')
    assert len(scored(model)[1]) == 3


@pytest.mark.parametrize("suffix", ["", ".unfinished", ".made", ".lock"])
def test_files_of_others_are_not_replaced(suffix, tmp_path):
    mine = tmp_path / f"scores.jsonl{suffix}"
    mine.write_text("mine")
    out = tmp_path / "scores.jsonl"
    message = rf"scores.jsonl{suffix}(:| exists| contains| was) "
    with pytest.raises((ValueError, OSError), match=message):
        lock = out.with_name("scores.jsonl.lock")
        with locks.exclusive(lock, f"--out {out}", print):
            journal.Journal(out, Fingerprint("digest"), "", [0, 3])
    assert mine.read_text() == "mine" and len(list(tmp_path.iterdir())) <= 2


@pytest.mark.parametrize("change", ["data", "options", "weights", "time"])
def test_unfinished_run_of_other_input_is_refused(
    change, model, directory, monkeypatch
):
    write(documents(5))
    monkeypatch.setattr(run, "_GROUP", 1)
    model = pathlib.Path(shutil.copytree(model, directory / "model"))
    killed_after(1, monkeypatch, model)
    if change == "data":
        write(documents(5, seed=1))
    if change == "weights":
        weights = bytearray((model / "model.safetensors").read_bytes())
        weights[-1] ^= 1
        (model / "model.safetensors").write_bytes(weights)
    if change == "time":  # of weights that may differ where nothing reads them
        os.utime(model / "model.safetensors", (0, 0))
    options = {"stride": 4} if change == "options" else {}
    message = "other inputs, another checkpoint or other options; delete it"
    if change == "options":
        message = r"other options: --stride left out \(now 4\); give the options as"
    with pytest.raises(ValueError, match=f"unfinished results of {message}"):
        scored(model, **options)


def test_run_that_scored_nothing_is_replaced(model, directory, monkeypatch):
    write(documents(5))
    killed_after(0, monkeypatch, model)
    write(documents(3, seed=1))
    assert len(scored(model)[1]) == 3


# ------------------------------------------------------------------- errors


def test_score_refuses_bad_arguments(model, directory):
    write(documents(2))
    with pytest.raises(ValueError, match=r"--out must be a .jsonl or .parquet file"):
        scored(model, out="scores.csv")
    pathlib.Path("there.jsonl").touch()
    with pytest.raises(ValueError, match="there.jsonl exists already; delete it, or n"):
        scored(model, out="there.jsonl")
    with pytest.raises(ValueError, match="--stride must be from 1 to --max-tokens=32"):
        scored(model, stride=33)
    with pytest.raises(ValueError, match="--stride must be at most 64, the model's lo"):
        scored(model, stride=65, max_tokens=128)
    with pytest.raises(ValueError, match="--chunk must be at least 1, or auto, got 0"):
        scored(model, chunk=0)
    with pytest.raises(ValueError, match="^DATA: cannot read absent.jsonl"):
        score.score(ScoreConfig(str(model), "absent.jsonl"))
    with pytest.raises(ValueError, match="--max-tokens must be at least 1, got 0"):
        scored(model, max_tokens=0)
    with pytest.raises(
        ValueError, match="DATA must be a .jsonl, .json, .csv, .tsv, .pa"
    ):
        score.score(ScoreConfig("model", "a.xlsx"))


def test_score_turns_as_the_loss_counts_them(model, directory):
    """Each is a document; its logprobs are those of the whole text at its tokens."""
    pytest.importorskip("jinja2")
    shutil.copytree(model, "chat")
    template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    pathlib.Path("chat/chat_template.jinja").write_text(template)
    words = "the a on the".split()
    turns = [
        {"role": role, "content": word}
        for role, word in zip(["user", "assistant"] * 2, words, strict=True)
    ]
    pathlib.Path("data.jsonl").write_text(json.dumps({"messages": turns}))
    score.score(ScoreConfig("chat", "data.jsonl", "turns.jsonl", 32))
    score.score(ScoreConfig("chat", "data.jsonl", "all.jsonl", 32, everything=True))
    parts, (whole,) = (
        [json.loads(line) for line in pathlib.Path(name).read_text().splitlines()]
        for name in ("turns.jsonl", "all.jsonl")
    )
    assert [part["document"] for part in parts] == [
        "data.jsonl:1, turn 1",
        "data.jsonl:1, turn 2",
    ]
    found = 0
    for part in parts:
        ids, logprobs = part["token_ids"], part["logprobs"]
        starts = [
            i
            for i in range(found, len(whole["token_ids"]))
            if whole["token_ids"][i : i + len(ids)] == ids
        ]
        found = starts[0] + len(ids)
        np.testing.assert_allclose(
            logprobs, whole["logprobs"][starts[0] : found], rtol=1e-4, atol=1e-5
        )


def test_refused_column_names_no_key_of_a_job(model, directory, capsys):
    pathlib.Path("data.jsonl").write_text('{"text": "the", "chosen": "a"}\n')
    assert cli.main(["score", str(model), "data.jsonl"]) == 2
    said = capsys.readouterr().err
    assert said.endswith('do not use "chosen"; remove it\n'), said


def test_turns_of_which_a_template_leaves_out_text(model, directory, capsys):
    pytest.importorskip("jinja2")
    shutil.copytree(model, "strips")
    template = (
        "{% for m in messages %}{{ m.content if loop.last else "
        "m.content.replace('a on', '') }} {% endfor %}"
    )
    pathlib.Path("strips/chat_template.jinja").write_text(template)
    turns = [("user", "the"), ("assistant", "a on the")] * 2
    turns = [{"role": role, "content": content} for role, content in turns]
    pathlib.Path("data.jsonl").write_text(json.dumps({"messages": turns}))
    arguments = ["score", "strips", "data.jsonl", "--max-tokens", "32"]
    with pytest.raises(ValueError, match="leaves out 'a on' of messages.1..content"):
        score.score(ScoreConfig("strips", "data.jsonl", "all.jsonl", 32))
    assert cli.main([*arguments, "--out", "all.jsonl"]) == 2
    said = capsys.readouterr().err
    assert '--stripped="mask" (such' in said and "data.stripped" not in said
    assert cli.main([*arguments, "--stripped", "mask", "--out", "made.jsonl"]) == 0
    lines = pathlib.Path("made.jsonl").read_text().splitlines()
    assert len(lines) == 1  # of the last turn


def test_broken_weight_is_not_a_score(model, directory):
    write(documents(2))
    broken = checkpoints.load(model)
    broken.norm.scale[...] = broken.norm.scale[...] * np.nan
    checkpoints.save("broken", broken, like=model)
    with pytest.raises(FloatingPointError, match="data.jsonl:1: a score is not finite"):
        scored("broken")


@pytest.mark.full
def test_score_with_codes_is_near(model, directory):
    write(documents(4))
    _, plain = scored(model)
    _, coded = scored(model, base="int8", out="coded.jsonl")
    first, second = (
        np.concatenate([record["logprobs"] for record in records])
        for records in (plain, coded)
    )
    assert (first != second).any()
    np.testing.assert_allclose(first, second, rtol=0.03)


def test_score_command(model, directory, capsys):
    write(documents(4))
    arguments = ["score", str(model), "data.jsonl", "--max-tokens", "32", "--eos"]
    assert cli.main([*arguments, "--out", "made/scores.jsonl"]) == 0
    assert "perplexity of all tokens" in capsys.readouterr().out
    assert pathlib.Path("made/scores.jsonl").exists()
    assert cli.main([*arguments, "--out", "made/scores.jsonl"]) == 2
    assert "jaxmem: error: made/scores.jsonl exists" in capsys.readouterr().err
    assert cli.main(["score", "nowhere", "data.jsonl"]) == 2
    assert "nowhere: no such checkpoint, adapter or run" in capsys.readouterr().err


# ---------------------------------------------------------------- teachers


@pytest.mark.full
def test_teacher_columns_are_largest_logits(model, directory):
    pytest.importorskip("pyarrow")
    from pyarrow import parquet

    write([{"prompt": "ab", "response": "cdefgh"}, {"text": ""}, {"text": "xyz"}])
    _, out = scored(model, out="scores.parquet", top_k=5, temperature=2.0, eos=True)
    first, empty, last = parquet.read_table(out).to_pylist()
    decoder = checkpoints.load(model, dtype="float32", param_dtype="float32")
    for record in (first, last):
        ids = np.array(record["prompt_ids"] + record["token_ids"])
        given = ids[None, :-1], np.ones((1, len(ids) - 1), int), np.arange(len(ids) - 1)
        hidden = decoder(given[0], given[1], given[2][None])
        z = np.asarray(decoder.logits(hidden)[0], np.float64) / 2.0
        logp = z - np.log(np.exp(z).sum(-1, keepdims=True))
        logp = logp[len(record["prompt_ids"]) - 1 :]
        largest = np.argsort(-logp, axis=-1)[:, :5]
        assert record["top_ids"] == largest.tolist()
        picked = np.take_along_axis(logp, largest, -1)
        np.testing.assert_allclose(record["top_logprobs"], picked, atol=2e-5)
    assert first["token_ids"][-1] == 2 and len(first["token_ids"]) == 7
    assert empty["top_ids"] == [[*empty["top_ids"][0]]]  # of the end alone
    assert {r["temperature"] for r in (first, empty, last)} == {2.0}
    vocabulary = checkpoints.load_vocabulary(model).tokenizer
    assert first["vocabulary"] == checkpoints.vocabulary_digest(vocabulary)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            dict(top_k=2, sample_ids=2),
            "--sample-ids=2 cannot be combined with --top-k=2",
        ),
        (dict(top_k=0), "--top-k must be at least 1, got 0"),
        (dict(top_k=41), "--top-k must be at most 40, the entries of the vocabulary"),
        (dict(sample_ids=2, temperature=0.0), "--temperature must be positive and f"),
        (dict(temperature=2.0), "--temperature and --seed need --top-k or --sam"),
    ],
)
def test_columns_that_cannot_be(model, directory, options, message):
    write([{"text": "ab"}])
    with pytest.raises(ValueError) as raised:
        scored(model, **options)
    assert message in str(raised.value) and "\n" not in str(raised.value)
    assert not list(pathlib.Path().glob("**/*.unfinished"))
