"""Commands that read a directory run none of the code that only the directory names."""

import pathlib
import shutil

import pytest

from jaxmem.checkpoints import CheckpointError
from jaxmem.commands import cli
from jaxmem.train import configuration, jobs, saved
from tests.helpers import texts

# Whatever of it is imported leaves a file.
EVIL = """
import pathlib
pathlib.Path("{ran}").write_text("")
f = None
"""
PROMPTS = """
run.job = "grpo"
task.source = "prompts.jsonl"
"""
REWARD = 'task.reward = "evil.py:f"\n'
ENVIRONMENT = 'task.environment = "evil.py:f"\n'
LLAMA = 'model.checkpoint = "../llama"\n'
READING = {
    "generate": ("abc",),
    "score": ("docs.jsonl", "--out", "scores.jsonl"),
    "export": ("--out", "out"),
}


@pytest.fixture
def ran(tmp_path, monkeypatch):
    """A file that is there once code of `evil` has run."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    pathlib.Path("docs.jsonl").write_text('{"text": "abc"}\n')
    return tmp_path / "ran"


@pytest.fixture
def evil(ran, tmp_path):
    """Make a run whose settings have more lines, beside a module of any code."""

    def make(lines):
        run = tmp_path / "evil"
        (run / "checkpoints" / "1").mkdir(parents=True)
        texts.checkpoint("llama", tmp_path)
        shutil.copy(tmp_path / "llama" / "tokenizer.json", run)
        (run / "operative.gin").write_text(lines)
        for path in (run, run / "evil_package", pathlib.Path()):
            path.mkdir(exist_ok=True)
            for name in ("evil.py", "__init__.py"):
                (path / name).write_text(EVIL.format(ran=ran))
        return run

    return make


FACTORIES = [
    ('model.factory = "evil.py:f"', "evil.py"),
    ('model.factory = "evil_package.evil:f"', "the module evil_package.evil"),
    ('NAME = "evil.py:f"\nmodel.factory = %NAME', "evil.py"),
    (PROMPTS + REWARD + LLAMA + 'model.factory = "evil.py:f"', "evil.py"),
]


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])
@pytest.mark.parametrize("command", READING)
@pytest.mark.parametrize("lines, code", FACTORIES)
def test_reading_a_run_imports_nothing_that_it_names(
    lines, code, command, inside, evil, ran, monkeypatch, capsys
):
    run = evil(lines)
    if inside:
        shutil.copy("docs.jsonl", run)
        monkeypatch.chdir(run)
    where = "." if inside else str(run)
    assert cli.main([command, where, *READING[command]]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert "operative.gin: model.factory=" in said and f"{code}: name your own" in said
    assert "--factory evil" in said and "--trust-code" in said
    assert not ran.exists()


@pytest.mark.parametrize(
    "lines, message",
    [
        ("import evil", "cannot import"),
        ("model.factory = @evil.f", "not a value"),
        ('run.job = "evil.py:f"', "run.job='evil.py:f' would run "),
        ('run.job = "evil_package.evil:f"', "run the module evil_package.evil: allow"),
        ('run.job = %NAME\nNAME = "evil.py:f"', "allow the code of the run with --tr"),
        (PROMPTS + REWARD + LLAMA, "checkpoints/1 cannot be used"),
        (PROMPTS + ENVIRONMENT + LLAMA, "checkpoints/1 cannot be used"),
    ],
)
def test_other_names_of_code_are_not_run(lines, message, evil, ran, capsys):
    run = evil(lines)
    assert cli.main(["generate", str(run), "abc"]) == 2
    assert message in capsys.readouterr().err
    assert not ran.exists()


@pytest.mark.parametrize(
    "config, key",
    [("sft_lora.gin", "model.checkpoint"), ("distill_stdlib.gin", "distill.teacher")],
)
def test_run_to_start_from_imports_nothing(config, key, evil, ran):
    run = evil('model.factory = "evil.py:f"')
    path = cli._find_config(config)
    loaded, _ = configuration.load(path, [f"{key}={run}", "data.source=docs.jsonl"])
    with pytest.raises((ValueError, OSError), match="evil"):
        jobs.job_of(loaded)
    assert not ran.exists()


@pytest.mark.parametrize("code", [("--trust-code",), ("--factory", "evil.py:f")])
def test_code_runs_when_allowed(code, evil, ran, capsys):
    run = evil('model.factory = "evil.py:f"')
    assert cli.main(["generate", str(run), "abc", *code]) == 2
    assert (
        "model.factory: evil.py:f must be a function, got None"
        in capsys.readouterr().err
    )
    assert ran.exists()


def test_factory_is_named_for_models_that_have_one(evil, ran, tmp_path, capsys):
    evil("")
    command = ["generate", str(tmp_path / "llama"), "abc", "--factory", "evil.py:f"]
    assert cli.main(command) == 2
    said = capsys.readouterr().err
    assert "--factory=evil.py:f is for a run with model.factory" in said
    with pytest.raises(CheckpointError, match="llama has none"):
        with saved.opened(tmp_path / "llama", code=saved.Code(factory="evil.py:f")):
            pass
    assert not ran.exists()
