"""Several processes: their steps are those of one, and none outlives another for long.

The processes are real ones that meet over loopback.
"""

import dataclasses
import io
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import load_file

from jaxmem.core import processes
from jaxmem.data import documents as data, streams
from jaxmem.train import jobs
from jaxmem.train.config import load

ROOT = Path(__file__).parents[2]
HEARTBEAT = 8  # seconds
STOPS_WITHIN = HEARTBEAT + 25  # seconds, on a machine that has other things to do

CONFIG = """
data.vocab_size = 300
data.sequence_length = 32
data.batch_size = 4
data.streams = 2
model.layers = 1
model.hidden = 16
model.ff = 16
model.heads = 2
model.kv_heads = 1
model.head_dim = 8
head.chunk = 32
optimizer.warmup_steps = 2
optimizer.final_fraction = 1.0
run.checkpoint_every = 10
run.compare_heads = False
mesh.data = 2
"""


pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture(scope="module")
def arguments(tmp_path_factory):
    """A config file, and where its data is."""
    folder = tmp_path_factory.mktemp("run")
    words = "the head of a model maps each hidden state to a token of its text".split()
    rng = np.random.default_rng(0)
    rows = [" ".join(rng.choice(words, 30)) + str(i) for i in range(200)]
    text = "\n".join(json.dumps({"text": row}) for row in rows)
    (folder / "words.jsonl").write_text(text)
    (folder / "tiny.gin").write_text(CONFIG)
    overrides = [f"data.source={folder}/words.jsonl", f"data.cache_dir={folder}"]
    return [str(folder / "tiny.gin"), *overrides]


# `jaxmem train` twice, without the start of another process in between. The number of
# steps that the second run has is read from stdin.
TWICE = """
import sys
from jaxmem import cli
from jaxmem.core import processes
try:
    cli.main(sys.argv[1:])
except SystemExit as stopped:
    print("exit code", stopped.code, flush=True)
processes.start = lambda *_, **__: None  # these have met
rest = [x for x in sys.argv[1:] if not x.startswith("run.steps=")]
sys.exit(cli.main([*rest, "run.steps=" + input()]))
"""


def started(arguments, out_dir, steps, port, program=("-m", "jaxmem")):
    """`jaxmem train` in two processes of one device."""
    environment = os.environ | {
        "JAX_NUM_CPU_DEVICES": "1",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    }
    command = [sys.executable, *program, "train", *arguments]
    command += [f"run.out_dir={out_dir}", f"run.steps={steps}"]
    command += [f"--coordinator=127.0.0.1:{port}", "--processes=2"]
    return [
        subprocess.Popen(
            [*command, f"--process-id={i}", f"--heartbeat={HEARTBEAT}"],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i in range(2)
    ]


def free_port():
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return made.getsockname()[1]


def steps_of(out_dir):
    path = Path(out_dir) / "metrics.jsonl"
    return path.read_text().splitlines() if path.exists() else []


def running(arguments, out_dir, steps, program=("-m", "jaxmem")):
    """Two processes that have taken so many steps, of no end of them."""
    pair = started(arguments, out_dir, 10**6, free_port(), program)
    deadline = time.monotonic() + 120
    while len(steps_of(out_dir)) < steps:
        assert time.monotonic() < deadline and pair[0].poll() is None
        time.sleep(0.02)
    return pair


def end(pair):
    for process in pair:
        process.kill()
        process.communicate()


def test_two_processes_stop_together_and_resume_and_match_one(arguments, tmp_path):
    out_dir = tmp_path / "two"
    pair = running(arguments, out_dir, 3, ("-c", TWICE))
    try:
        pair[1].send_signal(signal.SIGTERM)  # to one of them
        for process in pair:
            said = list(itertools.takewhile("exit code 143\n".__ne__, process.stdout))
            assert process.poll() is None, said
            if process is pair[0]:
                done = len(steps_of(out_dir))
                assert f"stopped by SIGTERM after step {done} of 1000000, " in said[-1]
        assert (out_dir / "checkpoints" / str(done)).exists()
        for process in pair:
            process.stdin.write(f"{done + 4}\n")
            process.stdin.flush()
        outputs = [process.communicate(timeout=120)[0] for process in pair]
    finally:
        end(pair)
    resumed(pair, outputs)
    as_of_one(arguments, out_dir, done + 4, tmp_path)


@pytest.mark.slow
def test_of_two_processes_one_is_killed_and_the_other_ends(arguments, tmp_path):
    out_dir = tmp_path / "two"
    done = stopped_together(arguments, out_dir)
    first, second = pair = running(arguments, out_dir, done + 12)
    try:
        second.kill()
        began = time.monotonic()
        said, _ = first.communicate(timeout=STOPS_WITHIN)
        assert time.monotonic() - began < STOPS_WITHIN
    finally:
        end(pair)
    assert first.returncode != 0 and "rror" in said
    steps = len(steps_of(out_dir)) + 4
    again = started(arguments, out_dir, steps, free_port())
    resumed(again, [process.communicate(timeout=120)[0] for process in again])
    as_of_one(arguments, out_dir, steps, tmp_path)


def stopped_together(arguments, out_dir):
    """The number of steps that both have taken and saved."""
    pair = running(arguments, out_dir, 3)
    try:
        pair[1].send_signal(signal.SIGTERM)  # to one of them
        said = [process.communicate(timeout=STOPS_WITHIN)[0] for process in pair]
    finally:
        end(pair)
    assert [process.returncode for process in pair] == [143, 143], said
    done = len(steps_of(out_dir))
    assert f"stopped by SIGTERM after step {done} of 1000000, which is saved" in said[0]
    assert (out_dir / "checkpoints" / str(done)).exists()
    return done


def resumed(pair, outputs):
    assert [process.returncode for process in pair] == [0, 0], outputs
    assert "resuming" in outputs[0] and "resuming" not in outputs[1]


def as_of_one(arguments, out_dir, steps, tmp_path):
    path, *overrides = arguments
    overrides += [f"run.out_dir={tmp_path}/one", f"run.steps={steps}"]
    config, _ = load(path, overrides)
    alone = jobs.train(config, "", Console(file=io.StringIO()))
    told = [json.loads(line) for line in steps_of(out_dir)]
    assert [step["step"] for step in told] == list(range(1, steps + 1))
    for got, want in zip(told, alone.history, strict=True):
        assert got["tokens"] == want.tokens
        assert got["loss"] == pytest.approx(want.loss, rel=1e-5)
        assert got["grad_norm"] == pytest.approx(want.grad_norm, rel=1e-4)
    left = [load_file(run / "model" / "model.safetensors")
            for run in (out_dir, tmp_path / "one")]  # fmt: skip
    assert left[0].keys() == left[1].keys()
    for name, weight in left[0].items():
        np.testing.assert_allclose(weight, left[1][name], rtol=1e-2, atol=1e-4)


# ------------------------------------------------------------- streams


@pytest.fixture(scope="module")
def described(arguments):
    path, *overrides = arguments
    config, _ = load(path, overrides)
    return config.data, data.load_tokenizer(config.data)


def test_a_process_reads_only_the_documents_of_its_rows(described, monkeypatch):
    config, tokenizer = described
    whole = streams.batches(config, tokenizer, range(4))
    read, encode = [], data.encode_documents

    def listening(documents, tokenizer):
        read.extend(documents)
        return encode(documents, tokenizer)

    monkeypatch.setattr(data, "encode_documents", listening)
    part = streams.batches(config, tokenizer, [2, 3])
    assert len(read) == 100  # of 200
    for _ in range(3):
        for all_rows, own in zip(next(whole), next(part), strict=True):
            np.testing.assert_array_equal(all_rows[2:], own[2:])
            assert all_rows[:2].any() and not own[:2].any()
    state = json.loads(json.dumps(whole.get_state()))
    again = streams.batches(config, tokenizer, [2, 3])
    again.set_state(state)
    np.testing.assert_array_equal(next(again).tokens, next(part).tokens)


def test_one_stream_is_what_it_always_was(described):
    config, tokenizer = described
    config = dataclasses.replace(config, streams=1)
    made = streams.batches(config, tokenizer, range(4))
    for got, want in zip(
        next(made), next(data.batches(config, tokenizer)), strict=True
    ):
        np.testing.assert_array_equal(got, want)


def test_refusals(described, monkeypatch):
    config, tokenizer = described
    with pytest.raises(data.DataError) as caught:
        streams.batches(config, tokenizer, [1])
    assert str(caught.value) == (
        "data.streams=2 must be more: this process needs 1 of the 4 rows of a batch, "
        "and would read the documents of 2"
    )
    with pytest.raises(ValueError) as caught:
        dataclasses.replace(config, streams=3)
    assert str(caught.value) == (
        "DataConfig.streams must divide batch_size, got streams=3 for batch_size=4"
    )
    made = streams.batches(config, tokenizer, range(4))
    with pytest.raises(data.DataError, match="the saved position has no stream 0"):
        made.set_state({})
    with pytest.raises(ValueError) as caught:
        processes.start("127.0.0.1:1", None, 0)
    assert str(caught.value) == (
        "--processes must be given too: pass all three: coordinator address, number "
        "of processes, process id"
    )

    def nothing_there(**_):
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr(jax.distributed, "initialize", nothing_there)
    with pytest.raises(ValueError, match="--cluster found none that jax knows"):
        processes.start(None, None, None)


@pytest.mark.parametrize(
    "given, message",
    [
        (("nonsense", 1, 0), "--coordinator must be HOST:PORT, as in 10.0.0.1:1234, g"),
        (("host:port", 1, 0), "--coordinator must be HOST:PORT"),
        (("host:1", 0, 0), "--processes must be at least 1, got 0"),
        (("host:1", 2, 2), "--process-id must be from 0 to --processes - 1 = 1, got 2"),
        (("host:1", 2, 1, 0), "--heartbeat must be at least 1 second, got 0"),
    ],
)
def test_impossible_processes_are_refused_by_flag(given, message):
    with pytest.raises(ValueError, match=message):
        processes.start(*given)


def test_one_process_shares_with_itself():
    assert processes.share({"0": {"next": 3}}) == {"0": {"next": 3}}
    assert processes.is_first()
