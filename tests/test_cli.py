"""The command line, from outside: exit codes, clean lines, a run and its resumption."""

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from jaxmem._version import __version__
from jaxmem.base import imports, locks
from jaxmem.commands import cli
from tests.helpers.cases import slow

pytestmark = pytest.mark.usefixtures("quick_compilation")

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "configs"
TRAIN_EXTRA = ("flax", "gin", "grain", "optax", "orbax", "rich", "tokenizers")
TINY = """
data.source = "text.txt"
data.vocab_size = 280
data.sequence_length = 16
data.batch_size = 2
data.cache_dir = "cache"
model.layers = 1
model.hidden = 16
model.ff = 16
model.heads = 2
model.kv_heads = 1
model.head_dim = 8
head.chunk = 8
optimizer.warmup_steps = 1
run.steps = 4
run.checkpoint_every = 2
run.log_every = 1
run.out_dir = "run"
run.compare_heads = False
"""


def python(*arguments, cwd):
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )


WITHOUT_TRAIN_EXTRA = f"""
import contextlib, io, json, sys
for name in {TRAIN_EXTRA}: sys.modules[name] = None
from jaxmem.commands.cli import main
for arguments in json.loads(sys.argv[1]):
    out, error = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        try:
            status = main(arguments)
        except SystemExit as exit:
            status = exit.code
    print(json.dumps([status, out.getvalue(), error.getvalue()]))
"""


@pytest.fixture
def directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 40)
    Path("tiny.gin").write_text(TINY)
    return tmp_path


# --------------------------------------------------------- without the extra


WARNS = """
import warnings
from jaxmem.commands import cli
cli._run = lambda arguments: warnings.warn("2 of 8 calls failed") or 0
cli.main(["doctor"])
warnings.warn("elsewhere")
"""


def test_warnings_of_a_command_are_one_line(tmp_path):
    first, second, *_ = python("-c", WARNS, cwd=tmp_path).stderr.splitlines()
    assert first == "jaxmem: warning: 2 of 8 calls failed"
    assert second.endswith("UserWarning: elsewhere")  # as Python writes it


def test_every_argument_has_a_help_text():
    (commands,) = cli._parser()._subparsers._group_actions
    for name, command in commands.choices.items():
        for action in command._actions:
            assert action.help, f"{name}: {action.dest}"


def test_version_and_help_need_the_core_only(directory):
    helps = [[name, "--help"] for name in cli._COMMANDS]
    commands = [["--version"], ["train", "--help"], ["train", "tiny.gin"], *helps]
    done = python("-c", WITHOUT_TRAIN_EXTRA, json.dumps(commands), cwd=directory)
    version, usage, training, *usages = map(json.loads, done.stdout.splitlines())
    assert version[:2] == [0, f"jaxmem {__version__}\n"]
    assert usage[0] == 0 and "section.field=value" in usage[1]
    assert len(usages) == len(helps)
    assert all(status == 0 and "--help" in out for status, out, _ in usages)
    assert training[0] == 2
    assert training[2].startswith("jaxmem: error: training needs '")
    clone = shlex.quote(f"{Path(__file__).parents[1]}[train]")
    assert training[2].endswith(f"not installed; run: pip install -e {clone}\n")
    assert "Traceback" not in training[2]


@pytest.mark.parametrize(
    ("record", "requirement"),
    [
        (None, "'jaxmem[train]'"),  # of an index
        (
            {
                "url": "https://example.org/jaxmem",
                "vcs_info": {"vcs": "git", "commit_id": "0a1b"},
            },
            "'jaxmem[train] @ git+https://example.org/jaxmem@0a1b'",
        ),
        (
            {"url": "file:///jaxmem-1.whl", "archive_info": {}},
            "'jaxmem[train] @ file:///jaxmem-1.whl'",
        ),
    ],
)
def test_extra_outside_a_clone_names_what_was_installed(
    record, requirement, monkeypatch, tmp_path
):
    monkeypatch.setattr(
        imports, "__file__", str(tmp_path / "jaxmem" / "base" / "imports.py")
    )
    installed = tmp_path / "jaxmem-0.0.1.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Name: jaxmem\nVersion: 0.0.1\n")
    if record is not None:
        (installed / "direct_url.json").write_text(json.dumps(record))
    monkeypatch.syspath_prepend(tmp_path)
    assert imports.how_to_install("train") == f"pip install {requirement}"


# ------------------------------------------------------------- user's errors


@pytest.mark.slow
def test_users_error_is_one_line_and_exit_code_2(directory):
    done = python("-m", "jaxmem", "train", "tiny.gin", "model.hiden=8", cwd=directory)
    assert done.returncode == 2
    assert done.stderr == (
        "jaxmem: error: override 'model.hiden=8': unknown key 'model.hiden'; "
        "did you mean model.hidden?\n"
    )


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ["absent.gin"],
            "no such file: absent.gin; shipped configs: distill_offline.gin, ",
        ),
        (
            ["qwen3_8b_24g.gin"],
            "file: qwen3_8b_24g.gin; did you mean recipes/qwen3_8b_24g.gin?",
        ),
        (["elsewhere/sft_stdlib.gin"], "no such file: elsewhere/sft_stdlib.gin"),
        (["tiny.gin", "data.source=absent.txt"], "data.source: cannot read absent.txt"),
        (["tiny.gin", "data.source=bad.jsonl"], "bad.jsonl:2: not valid JSON"),
        (["tiny.gin", "data.vocab_size=9000"], "set data.vocab_size="),
        (
            ["tiny.gin", "data.source=deep.jsonl"],
            "deep.jsonl:1: nested deeper than 100",
        ),
        (["tiny.gin", "data.held_out=0.1"], "data.held_out=0.1: 'text.txt' is one doc"),
        (
            ["tiny.gin", "model.checkpoint=hostile"],
            "config.json: nested deeper than 100",
        ),
        (["tiny.gin", "run.steps=" + "-" * 100_000], "run.steps must be int, got '---"),
        (["tiny.gin", "optimizer.warmup_steps=9"], "must be below run.steps=4"),
        (["tiny.gin", "run.out_dir=text.txt"], "text.txt"),
    ],
)
def test_other_errors_of_the_users_are_one_line_too(
    directory, capsys, arguments, expected
):
    Path("bad.jsonl").write_text('{"text": "fine"}\n{"text": \n')
    Path("deep.jsonl").write_text("[" * 100_000)
    Path("hostile").mkdir()
    Path("hostile/config.json").write_text("[" * 100_000)
    assert cli.main(["train", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("jaxmem: error: ") and error.count("\n") == 1
    assert expected in error


def test_bench_refuses_what_it_would_ignore(capsys):
    assert cli.main(["bench", "--kernel=dlogits"]) == 2
    assert "--kernel and --out are for --tune" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["bench", "--repetitions=0"])
    assert "--repetitions: invalid" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["score", "m", "d", "--chunk=foo"],
            "--chunk: invalid value 'foo': must be a p",
        ),
        (["score", "m", "d", "--chunk=0"], "positive number of tokens, or auto"),
        (["bench", "--chunk=" + "9" * 5000], "positive number of tokens, or auto"),
        (["bench", "--shape=1,2"], "--shape: invalid value '1,2': must be three posit"),
        (
            ["bench", "--shape=1,x,3"],
            "must be three positive integers, as in 4096,1024",
        ),
        (["bench", "--repetitions=two"], "invalid value 'two': must be a positive int"),
    ],
)
def test_options_that_are_no_numbers(arguments, message, capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.main(arguments)
    error = capsys.readouterr().err
    assert exit_.value.code == 2 and message in error
    assert len(error.splitlines()[-1]) < 300


@pytest.mark.parametrize(
    ("raised", "message"),
    [
        (
            MemoryError(),
            "host memory: name fewer records, read them with data.streaming",
        ),
        (
            MemoryError("Unable to allocate 9 GiB"),
            "host memory (Unable to allocate 9 GiB): ",
        ),
        (
            jax.errors.JaxRuntimeError(
                "INTERNAL: Error dispatching computation: Out of memory allocating 9 "
                "bytes.\nMore."
            ),
            "computation: Out of memory allocating 9 bytes): lower the model's sizes, ",
        ),
        (
            jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no"),
            "device memory (RESOURCE_EXHAUSTED: n",
        ),
    ],
)
def test_out_of_memory_is_one_line(directory, monkeypatch, capsys, raised, message):
    from jaxmem.train import jobs

    def train(*_):
        raise raised

    monkeypatch.setattr(jobs, "train", train)
    assert cli.main(["train", "tiny.gin"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("jaxmem: error: out of ") and message in error
    assert error.count("\n") == 1
    says_plan = "`jaxmem plan CONFIG --device h200 --fit` prints what takes" in error
    assert says_plan is not isinstance(raised, MemoryError)


def test_command_is_required(capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.main([])
    assert exit_.value.code == 2
    assert "COMMAND" in capsys.readouterr().err


def test_bug_keeps_its_traceback(directory, monkeypatch):
    from jaxmem.train import jobs

    def train(*_):
        json.loads("{")  # raised in somebody else's code

    monkeypatch.setattr(jobs, "train", train)
    with pytest.raises(json.JSONDecodeError):
        cli.main(["train", "tiny.gin"])


def test_interrupt_is_one_line(directory, monkeypatch, capsys):
    from jaxmem.train import jobs

    def train(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(jobs, "train", train)
    assert cli.main(["train", "tiny.gin"]) == 130
    assert capsys.readouterr().err == "\njaxmem: interrupted\n"


# ---------------------------------------------------------------------- runs


def test_shipped_config_is_found_anywhere(directory, monkeypatch, capsys):
    from jaxmem.train import jobs

    seen = []
    monkeypatch.setattr(jobs, "train", lambda *arguments: seen.append(arguments))
    for name in ("sft_stdlib.gin", "configs/sft_stdlib.gin"):
        assert cli.main(["train", name, "run.steps=7"]) == 0
        assert str(CONFIGS / "sft_stdlib.gin") in capsys.readouterr().err
    assert [config.run.steps for config, _ in seen] == [7, 7]


def test_overrides_may_follow_flags(directory, monkeypatch, capsys):
    from jaxmem.train import jobs

    seen = []
    monkeypatch.setattr(jobs, "train", lambda *arguments: seen.append(arguments))
    overrides = ["run.seed=3", "--heartbeat", "9", "run.steps=7"]
    assert cli.main(["train", "tiny.gin", *overrides]) == 0
    ((config, _),) = seen
    assert (config.run.seed, config.run.steps) == (3, 7)
    for wrong in (["train", "tiny.gin", "--beat=9"], ["bench", "run.steps=7"]):
        with pytest.raises(SystemExit):
            cli.main(wrong)
        assert f"unrecognized arguments: {wrong[-1]}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (
            ["--lr=1e-4"],
            "lr is optimizer.learning_rate, as in optimizer.learning_rate=",
        ),
        (["--learning_rate", "1e-4"], "is optimizer.learning_rate, as in"),
        (["--learning-rate=1e-4"], "optimizer.learning_rate=1e-4\n"),
        (["--output_dir=x"], "output_dir is run.out_dir, as in run.out_dir=x\n"),
        (["--beta=1"], "settings have no dashes: section.field=value\n"),
        (["--run.steps=3"], "settings have no dashes: run.steps=3\n"),
        (["--packing"], "settings have no dashes: section.field=value\n"),
    ],
)
def test_setting_with_dashes_is_shown_without(words, hint, directory, capsys):
    with pytest.raises(SystemExit):
        cli.main(["train", "tiny.gin", *words])
    assert hint in capsys.readouterr().err


def test_train_takes_job_from_file(directory, monkeypatch):
    from jaxmem.train import jobs

    taken = []
    monkeypatch.setattr(jobs, "train", lambda config, _: taken.append(config.run.job))
    for file in ("grpo_arithmetic.gin", "tiny.gin"):
        assert cli.main(["train", file]) == 0
    assert taken == ["grpo", "sft"]


def test_train_prints_settings_after_verbose(directory, monkeypatch, capsys):
    from jaxmem.train import jobs

    monkeypatch.setattr(jobs, "train", lambda *_: None)
    assert cli.main(["train", "tiny.gin", "run.steps=7"]) == 0
    assert capsys.readouterr().out == "# tiny.gin run.steps=7\n"
    assert cli.main(["train", "tiny.gin", "--verbose", "run.steps=7"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("# tiny.gin run.steps=7\n# settings that differ from the")
    assert "\nrun.steps = 7\n" in said and "model.norm.eps" not in said


@pytest.mark.slow
def test_train_saves_on_sigterm_and_resumes(directory, monkeypatch, capfd):
    from jaxmem.train.jobs.sft import Sft

    step = Sft.step
    with monkeypatch.context() as patched:
        patched.setattr(Sft, "step", lambda *a: signal.raise_signal(15) or step(*a))
        with pytest.raises(SystemExit) as caught:
            cli.main(["train", "tiny.gin"])
    assert caught.value.code == 143
    said, error = capfd.readouterr()
    operative = Path("run/operative.gin").read_text()
    assert "\nrun.steps = 4\n" in operative and "\nmodel.norm.eps = " in operative
    assert error.strip() == (
        "jaxmem: SIGTERM: stopping after this step; send it again a "
        "second later to stop at once"
    )
    assert said.endswith(
        "stopped by SIGTERM after step 1 of 4, which is saved: the same command "
        "resumes run\n"
    )
    with locks.exclusive(Path("run/lock"), "", print):
        assert cli.main(["train", "tiny.gin"]) == 2
    assert "run.out_dir='run' is in use by another process" in capfd.readouterr().err
    assert cli.main(["train", "tiny.gin"]) == 0
    resuming = "resuming run at step 1 of 4 (data position and optimizer restored)\n"
    assert resuming in capfd.readouterr().out
    lines = Path("run/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4]
    Path("run/metrics.jsonl").unlink()  # a requeued command ends even so
    assert cli.main(["train", "tiny.gin"]) == 0
    assert "run is complete (4 of 4 steps); raise run.st" in capfd.readouterr().out


# ------------------------------------------------ streams and arguments


@pytest.mark.slow
def test_output_that_nobody_reads_ends_quietly(tmp_path):
    command = f"{sys.executable} -m jaxmem train --keys; echo status $? >&2"
    done = subprocess.run(
        ["sh", "-c", f"(sleep 0.2; {command}) | true"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=120, cwd=tmp_path,
    )  # fmt: skip
    assert done.stderr == "status 141\n"


@pytest.mark.full
@pytest.mark.parametrize("words", [["train", "é.gin"], slow(["train", "--keys", "é"])])
def test_terminal_of_ascii_gets_escapes(words, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "jaxmem", *words],
        env={**os.environ, "PYTHONPATH": str(ROOT), "LC_ALL": "C", "PYTHONUTF8": "0",
             "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"},
        capture_output=True, text=True, timeout=120, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert r"\udcc3\udca9" in done.stderr  # the bytes of é, as Python reads them


@pytest.mark.parametrize("words", [["-" * 10**5], ["--hosts", "x" * 10**5]])
def test_long_arguments_are_not_echoed_whole(words, capsys):
    with pytest.raises(SystemExit):
        cli.main(["plan", "a.gin", "--device", "h200", *words])
    assert len(capsys.readouterr().err) < 2500


def test_panic_of_rust_is_one_line(monkeypatch, capsys):
    class PanicException(BaseException):
        pass

    def panic(*, as_json):
        raise PanicException("empty pattern")

    monkeypatch.setattr("jaxmem.commands.doctor.run", panic)
    assert cli.main(["doctor"]) == 2
    assert capsys.readouterr().err == (
        "jaxmem: error: a library failed on its input: empty pattern\n"
    )


# ------------------------------------------------------------------ stdout


def shell(command, cwd):
    """A command of a shell, as its status and what it says on stderr."""
    program = f"exec {sys.executable} -P -m jaxmem {command}"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    env.pop("PYTHONUNBUFFERED", None)  # what is printed is written at the end
    ended = subprocess.run(
        ["sh", "-c", program], cwd=cwd, env=env, text=True, timeout=120,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip
    return ended.returncode, ended.stderr


@pytest.mark.full
@pytest.mark.parametrize("closed", [">&-", ">&- 2>&-", slow(">&- <&-")])
def test_command_works_without_stdout(closed, tmp_path):
    assert shell(f"train --keys eval {closed}", tmp_path) == (0, "")


@pytest.mark.full
def test_full_disk_behind_stdout_is_named(tmp_path):
    status, said = shell("train --keys eval > /dev/full", tmp_path)
    assert (status, said) == (2, "jaxmem: error: stdout: No space left on device\n")


@pytest.mark.slow
def test_log_on_a_full_disk_ends_no_run(tmp_path):
    (tmp_path / "text.txt").write_text("some words of text\n\n" * 40)
    (tmp_path / "tiny.gin").write_text(TINY)
    command = "train tiny.gin run.steps=2 data.vocab_size=262 > /dev/full"
    status, said = shell(command, tmp_path)
    assert status == 0, said
    assert "jaxmem: stdout: No space left on device; the run goes on" in said
    assert (tmp_path / "run" / "report.html").exists()
