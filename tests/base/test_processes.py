"""Several processes: their steps are those of one, and none outlives another for long.

The processes are real ones that meet over loopback.
"""

import dataclasses
import itertools
import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxmem.base import meeting, processes
from jaxmem.data import documents as data, streams
from jaxmem.train import agreement
from jaxmem.train.configuration import load
from tests.helpers.processes import (
    ROOT,
    as_of_one,
    end,
    environment,
    free_port,
    steps_of,
)

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
from jaxmem.commands import cli
from jaxmem.base import meeting, processes
try:
    cli.main(sys.argv[1:])
except SystemExit as stopped:
    print("exit code", stopped.code, flush=True)
processes.start = lambda *_, **__: None  # these have met
rest = [x for x in sys.argv[1:] if not x.startswith("run.steps=")]
sys.exit(cli.main([*rest, "run.steps=" + input()]))
"""


def spoken(commands, devices, timeout=200):
    """Exit statuses and all that processes say, one of these commands each."""
    all_ = [
        subprocess.Popen(
            [sys.executable, "-m", "jaxmem", *command], cwd=ROOT, text=True,
            env=environment(devices), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for command in commands
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=timeout)[0] for process in all_]
    finally:
        end(all_)
    return [process.returncode for process in all_], said


def started(arguments, out_dir, steps, port, program=("-m", "jaxmem")):
    """`jaxmem train` in two processes of one device."""
    command = [sys.executable, *program, "train", *arguments]
    command += [f"run.out_dir={out_dir}", f"run.steps={steps}"]
    command += [f"--coordinator=127.0.0.1:{port}", "--processes=2"]
    return [
        subprocess.Popen(
            [*command, f"--process-id={i}", f"--heartbeat={HEARTBEAT}"],
            cwd=ROOT,
            env=environment(1),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i in range(2)
    ]


def running(arguments, out_dir, steps, program=("-m", "jaxmem")):
    """Two processes that have taken so many steps, of no end of them."""
    pair = started(arguments, out_dir, 10**6, free_port(), program)
    deadline = time.monotonic() + 120
    while len(steps_of(out_dir)) < steps:
        assert time.monotonic() < deadline and pair[0].poll() is None
        time.sleep(0.02)
    return pair


@pytest.mark.full
def test_two_processes_stop_resume_and_equal_one(arguments, tmp_path):
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
@pytest.mark.parametrize("killed", [0, 1])
def test_killed_process_ends_the_other(killed, arguments, tmp_path):
    out_dir = tmp_path / "two"
    done = stopped_together(arguments, out_dir)
    pair = running(arguments, out_dir, done + 12)
    other = pair[1 - killed]
    try:
        pair[killed].kill()
        began = time.monotonic()
        said, _ = other.communicate(timeout=STOPS_WITHIN)
        assert time.monotonic() - began < HEARTBEAT
    finally:
        end(pair)
    assert other.returncode == 1
    *_, last = said.splitlines()
    assert last.startswith(f"jaxmem: error: process {killed} of 2 has ended, so ")
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


# ------------------------------------------------------------- the start


def each_with(arguments, tmp_path, *own):
    """The command of each of several processes of one run."""
    port = free_port()
    common = ["train", *arguments, f"run.out_dir={tmp_path}/run", "run.steps=2"]
    common += [f"--coordinator=127.0.0.1:{port}", f"--processes={len(own)}"]
    return [[*common, *words] for words in own]


@pytest.mark.slow
def test_processes_name_differing_settings_and_files(arguments, tmp_path):
    path, source, cache = arguments
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps({"text": "another text"}))
    commands = each_with(
        [path, cache], tmp_path,
        ["--process-id=0", source, "optimizer.learning_rate=0.001"],
        ["--process-id=1", f"data.source={other}", "optimizer.learning_rate=0.002",
         "mesh.data=1"],
    )  # fmt: skip
    statuses, said = spoken(commands, devices=2)
    assert statuses == [2, 2], said
    for words in said:
        *_, last = words.splitlines()
        assert last.startswith("jaxmem: error: the processes of a run must have the sa")
        assert "optimizer.learning_rate is 0.001 in process 0, 0.002 in process" in last


def test_facts_processes_must_agree_on(arguments, tmp_path, monkeypatch):
    """Every setting but the cache, versions, and what files have in them."""
    path, *overrides = arguments
    config, _ = load(path, overrides)
    found, source = agreement.facts(config), config.data.source
    assert found["jax"] == jax.__version__ and "data.cache_dir" not in found
    assert found["optimizer.learning_rate"] == repr(config.optimizer.learning_rate)
    copy = tmp_path / "words.jsonl"
    copy.write_bytes(Path(source).read_bytes()[:-1] + b" ")
    moved = dataclasses.replace(
        config, data=dataclasses.replace(config.data, source=str(copy))
    )
    contents = [
        next(v for k, v in facts.items() if k.startswith("the content of data.source"))
        for facts in (found, agreement.facts(moved))
    ]
    assert contents[0] != contents[1]


@pytest.mark.slow
@pytest.mark.parametrize("indices", [(0, 0), (0, 1, 1)])
def test_duplicate_process_id_is_refused(indices, arguments, tmp_path):
    ids = [[f"--process-id={i}"] for i in indices]
    began = time.monotonic()
    statuses, said = spoken(each_with(arguments, tmp_path, *ids), devices=2)
    assert statuses == [2] * len(ids) and time.monotonic() - began < 100
    twice = f"two processes have --process-id={indices[-1]}: give each its own"
    assert [words.splitlines() for words in said] == [
        [f"jaxmem: error: {twice}"] for _ in ids
    ]


def test_numbers_of_processes_that_differ():
    address, told = f"127.0.0.1:{free_port()}", []

    def meet(count, index):
        with pytest.raises(ValueError) as caught:
            meeting.meet(address, count, index, 20)
        told.append(str(caught.value))

    threads = [threading.Thread(target=meet, args=x) for x in ((3, 0), (2, 1))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert told == ["--processes is 3 in process 0 and 2 in process 1: it must be the "
                    "same"] * 2  # fmt: skip


def test_meet_names_missing_processes():
    with pytest.raises(ValueError, match="of 3 processes, 1, 2 did not connect"):
        meeting.meet(f"127.0.0.1:{free_port()}", 3, 0, 0.1)
    with pytest.raises(ValueError, match="process 0 does not answer at --coordinator"):
        meeting.meet(f"127.0.0.1:{free_port()}", 3, 1, 0.1)


# ------------------------------------------------------------- streams


@pytest.fixture(scope="module")
def described(arguments):
    path, *overrides = arguments
    config, _ = load(path, overrides)
    return config.data, data.load_tokenizer(config.data)


def test_process_reads_documents_of_its_rows_only(described, monkeypatch):
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


def test_one_stream_equals_plain_batches(described):
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
        "data.streams=2 must be 4 or a multiple of it that divides data.batch_size=4: "
        "each process reads its own rows of a batch (1 here), and a stream cannot be "
        "split between processes"
    )
    assert streams.batches(dataclasses.replace(config, streams=4), tokenizer, [1])
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
    with pytest.raises(ValueError, match="--cluster found no cluster that jax knows"):
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


class Failed(ValueError):
    """An exception that all processes raise."""


@pytest.mark.parametrize(
    ("index", "raised", "kind"),
    [
        (0, Failed("gone"), Failed), (1, Failed("gone"), Failed),
        (0, OSError("gone"), OSError), (1, OSError("gone"), ValueError),
        (1, ValueError("gone"), ValueError),
    ],
)  # fmt: skip
def test_by_first_raises_one_message_everywhere(index, raised, kind, monkeypatch):
    """The other process is this one, with the mapping that the first one shares."""
    shared = []
    monkeypatch.setattr(jax, "process_count", lambda: 2)

    def act():
        raise raised

    for process in (0, index):
        monkeypatch.setattr(jax, "process_index", lambda: process)  # noqa: B023

        def share(mapping):
            shared.append(json.loads(json.dumps(mapping)))
            return shared[0]

        monkeypatch.setattr(processes, "share", share)
        with pytest.raises((ValueError, OSError)) as caught:
            processes.by_first(act, Failed)
    assert type(caught.value) is kind and str(caught.value) == "gone"


def test_by_first_names_what_is_no_json(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(processes, "share", lambda mapping: mapping)
    with pytest.raises(ValueError, match="several processes share values as JSON: Obj"):
        processes.by_first(lambda: {1, 2})


def test_share_of_one_process():
    assert processes.share({"0": {"next": 3}}) == {"0": {"next": 3}}
    assert processes.is_first()
