"""A run replaces what a run has written, and nothing else."""

import dataclasses
import json
import pathlib
import shutil

import pytest
from rich.console import Console

from jaxmem.checkpoints import CheckpointError
from jaxmem.checkpoints.directories import new_directory
from jaxmem.commands import cli
from jaxmem.train import configuration, loop
from jaxmem.train.settings import RunConfig, Settings
from jaxmem.train.state import ownership
from tests.helpers import texts
from tests.helpers.adding import run_in

SIZES = (
    "model.layers=1", "model.hidden=16", "model.ff=16", "model.heads=2",
    "model.kv_heads=1", "model.head_dim=8", "data.source=words.txt", "data.streams=1",
    "data.vocab_size=300", "data.cache_dir=cache", "run.steps=1",
)  # fmt: skip


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("words.txt").write_text("some words\n\n" * 50)


def write(path, text="mine"):
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def contents(folder="."):
    paths = sorted(pathlib.Path(folder).rglob("*"))
    return {str(path): path.read_bytes() for path in paths if path.is_file()}


def refused(*arguments, capsys):
    """The message of a command that changes no file and compiles nothing."""
    before = contents()
    assert cli.main(list(arguments)) == 2
    assert contents() == before
    return capsys.readouterr().err.splitlines()[-1]


# Names of every kind: what a run replaces, adds to, and makes first.
@pytest.mark.parametrize(
    "name",
    [
        "model/mine.py", "model/config.json", "model", "report.html", "report.png",
        "settings.gin", "operative.gin", "summary.json", "metrics.jsonl",
        "tokenizer.json", "started.txt", "checkpoints/1/state/x", "best/1/x",
        "best/model/x.py", "eval.json", "samples.jsonl", "jaxmem_run.json", "lock",
    ],
)  # fmt: skip
def test_train_refuses_files_that_are_not_of_a_run(name, capsys):
    write(f"p/{name}")
    arguments = "train", "sft_stdlib.gin", *SIZES, "run.out_dir=p"
    said = refused(*arguments, capsys=capsys)
    named = name if name == "model/mine.py" else name.split("/")[0]
    assert "run.out_dir='p'" in said and f"p/{named}" in said and "move it" in said


@pytest.mark.parametrize(
    "name", ["notes.md", "logs/out.log", "tensorboard/events", "adapter/x", "text/x"]
)
def test_run_takes_a_directory_with_other_names(name):
    mine = write(f"p/{name}")
    assert run_in(pathlib.Path("p"), steps=2).error is None
    assert mine.read_text() == "mine"


def test_run_of_a_version_without_marks_resumes():
    out_dir = pathlib.Path("p")
    assert run_in(out_dir, steps=2).error is None
    mark = json.loads((out_dir / ownership.MARK).read_text())
    assert "metrics.jsonl" in mark["replaces"] and "model" in mark["replaces"]
    (out_dir / ownership.MARK).unlink()
    shutil.copytree(out_dir, "without checkpoints")
    shutil.rmtree("without checkpoints/checkpoints")
    again = run_in(out_dir, steps=4)
    assert again.error is None and "at step 2 of" in again.said
    assert ownership.is_run(out_dir) and (out_dir / ownership.MARK).exists()
    again = run_in(pathlib.Path("without checkpoints"), steps=2)
    assert again.error is None and "are now in" in again.said


def test_settings_of_a_run_are_a_trace_of_it():
    """As a version without marks has left them before the first step."""
    path = cli._find_config("sft_stdlib.gin")
    _, operative = configuration.load(path, ["run.out_dir=p"])
    write("p/operative.gin", operative)
    assert not ownership.is_run(pathlib.Path("p"))
    write("p/settings.gin")
    assert ownership.is_run(pathlib.Path("p"))
    assert run_in(pathlib.Path("p"), steps=2).error is None
    write("q/operative.gin", operative.replace("run.out_dir", "train.directory"))
    write("q/settings.gin")
    assert not ownership.is_run(pathlib.Path("q"))


def test_mark_names_what_a_run_may_replace():
    path = pathlib.Path("p")
    path.mkdir()
    model = ownership.RunDirectory(path, "run.out_dir='p'")
    adapter = dataclasses.replace(model, result="adapter")
    with model.claimed():
        assert ownership.is_run(path)
    assert not list(path.iterdir())  # this run has left nothing
    with model.claimed():
        write("p/metrics.jsonl")
    theirs = write("p/adapter/adapter_config.json")  # as another trainer names it
    model.check()
    message = "p/adapter was not written by a run; the run would replace it"
    with pytest.raises(ownership.OwnershipError, match=message):
        adapter.check()
    theirs.unlink()
    with adapter.claimed():
        write("p/adapter/adapter_config.json")
        write("p/model/config.json")
    model.check()  # what an earlier run may replace
    adapter.check()


def test_checkpoint_of_other_trainer_is_no_run():
    write("p/checkpoints/1000/model.pt")
    write("p/metrics.jsonl", '{"step": 1, "loss": 2.0}\n')
    assert not ownership.is_run(pathlib.Path("p"))
    error = run_in(pathlib.Path("p")).error
    assert "p/metrics.jsonl was not written by a run" in str(error)


def test_marked_run_keeps_additions_to_its_model():
    out_dir = pathlib.Path("p")
    run_in(out_dir, steps=2)
    card = write("p/model/README.md")
    assert "p/model/README.md was not written" in str(run_in(out_dir, steps=4).error)
    card.rename("README.md")
    write("p/model/config.json")
    assert run_in(out_dir, steps=4).error is None


@pytest.mark.parametrize("name", ["model", "best/model", "report.html"])
def test_replaceable_link_is_named_before_first_step(name, capsys):
    write("elsewhere/config.json")
    run_in(pathlib.Path("p"), steps=2)
    link = pathlib.Path("p", name)
    link.parent.mkdir(exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(pathlib.Path("elsewhere").absolute())
    arguments = "train", "sft_stdlib.gin", *SIZES, "run.out_dir=p"
    said = refused(*arguments, capsys=capsys)
    assert f"p/{name} is a symbolic link" in said


def test_checkpoints_may_lie_elsewhere():
    pathlib.Path("disk").mkdir()
    pathlib.Path("p").mkdir()
    pathlib.Path("p/checkpoints").symlink_to(pathlib.Path("disk").absolute())
    assert run_in(pathlib.Path("p"), steps=2).error is None
    assert pathlib.Path("disk/2").exists()


@pytest.mark.parametrize(
    "config, key, value",
    [
        ("sft_lora.gin", "model.checkpoint", "q/model"),
        ("sft_lora.gin", "model.checkpoint", "link"),
        ("distill_stdlib.gin", "distill.teacher", "q/model"),
        ("distill_stdlib.gin", "distill.teacher", "q"),
        ("sft_lora.gin", "data.source", "q/samples.jsonl"),
        ("sft_lora.gin", "data.source", "q/sam*.jsonl"),
        ("sft_lora.gin", "data.chat_template", "q/summary.json"),
    ],
)
def test_train_never_replaces_what_it_reads(config, key, value, tmp_path, capsys):
    run_in(pathlib.Path("q"), steps=2)  # so that its names are of a run
    texts.checkpoint("llama", tmp_path)
    shutil.copytree("llama", "q/model")
    pathlib.Path("link").symlink_to("q/model")
    for name in ("samples.jsonl", "summary.json"):
        write(f"q/{name}")
    sources = {"model.checkpoint": "llama", "data.source": "words.txt"}
    if config != "sft_lora.gin":
        del sources["model.checkpoint"]
    else:
        sources["model.lora_rank"] = "0"
    overrides = [f"{k}={v}" for k, v in (sources | {key: value}).items()]
    said = refused("train", config, *overrides, "run.out_dir=q", capsys=capsys)
    assert f"{key}='{value}' is among the files that run.out_dir='q' replaces" in said


def test_name_that_is_too_long_names_the_key(capsys):
    long = "x" * 300
    arguments = "train", "sft_stdlib.gin", *SIZES, f"run.out_dir={long}"
    said = refused(*arguments, capsys=capsys)
    assert "run.out_dir='xxx" in said and "File name too long" in said
    assert len(said) < 300
    config = RunConfig(out_dir=long)
    with pytest.raises(
        OSError, match="run.out_dir='xxx.* cannot be created: File name"
    ):
        with loop.open_run(config, Settings({}, {}), Console(quiet=True)):
            pass


def test_new_directory_replaces_checkpoint_files_only(tmp_path):
    def save(name, replace=True):
        with new_directory(tmp_path / name, replace) as unfinished:
            (unfinished / "config.json").write_text("new")

    save("a", replace=False)
    save("a")
    with pytest.raises(CheckpointError, match="a exists already; name another"):
        save("a", replace=False)
    mine = write(tmp_path / "a" / "mine.py")
    with pytest.raises(
        CheckpointError, match="a/mine.py is not a file of a checkpoint"
    ):
        save("a")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with pytest.raises(CheckpointError, match="b is a symbolic link"):
        save("b")
    assert mine.read_text() == "mine"
    with pytest.raises(CheckpointError, match="c exists already"):
        with new_directory(tmp_path / "c"):
            write(tmp_path / "c" / "mine.py")  # while the other is made
    assert contents(tmp_path / "c")
