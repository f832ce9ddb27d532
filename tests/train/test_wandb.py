"""Weights & Biases: what it gets, and that its failures are nobody else's."""

import json
import struct
import sys
import threading
import time
import types
from pathlib import Path

import pytest

from jaxmem.train import configuration, jobs
from jaxmem.train.output import wandb_writer
from jaxmem.train.settings import RunConfig
from tests.helpers.adding import Adding, run_in


def stand_in(monkeypatch, init, mode="online", key=True):
    """A module in the place of wandb, for what the real one does without a network."""
    module = types.ModuleType("wandb")
    module.Settings, module.init = dict, init
    module.login = lambda prompt, verify: key
    settings = types.SimpleNamespace(mode=mode)
    module.setup = lambda: types.SimpleNamespace(settings=settings)
    monkeypatch.setitem(sys.modules, "wandb", module)


class Board:
    """A run of wandb, as far as it is used."""

    def __init__(self, action=lambda: None):
        self.steps, self.finished, self._action = [], False, action
        self.tables = []

    def log(self, values, step):
        self._action()
        self.steps.append((step, values["loss"]))
        if "samples" in values:
            self.tables.append((step, values["samples"]))

    def finish(self):
        self.finished = True


def test_steps_arrive_and_resumed_run_continues(tmp_path, monkeypatch):
    boards, options = [], []

    def init(**given):
        options.append(given)
        boards.append(Board())
        return boards[-1]

    stand_in(monkeypatch, init)
    ran = run_in(tmp_path / "run", wandb="p")
    assert ran.error is None and boards[0].finished
    assert [step for step, _ in boards[0].steps] == [1, 2, 3, 4, 5, 6]
    assert options[0]["config"]["data"] == {"source": "a.txt"}
    assert options[0]["config"]["optimizer"] == {"learning_rate": 0.1}
    run_in(tmp_path / "run", steps=8, wandb="p")
    assert [step for step, _ in boards[1].steps] == [7, 8]
    assert options[0]["id"] == options[1]["id"] and options[1]["resume"] == "allow"
    run_in(tmp_path / "other", wandb="p")
    assert options[2]["id"] != options[0]["id"] and options[2]["name"] == "other"


GIN = Path(__file__).parents[2] / "configs" / "sft_stdlib.gin"


class Sampling(Adding):
    """`Adding` with completions of each step."""

    def samples(self, count=8):
        names = "prompt", "tokens", "reward", "length"
        rows = [("1+1=", ["2", "."], 1.0, 2), ("2+2=", ["5"], None, 300)]
        return [dict(zip(names, row, strict=True)) for row in rows[:count]]


ROWS = [["1+1=", "2.", 1.0, 2], ["2+2=", "5", None, 300]]


@pytest.mark.parametrize("count", [1, 2])
def test_logged_steps_have_tables_of_samples(count, tmp_path, monkeypatch):
    board = Board()
    stand_in(monkeypatch, lambda **_: board)
    sys.modules["wandb"].Table = lambda columns, data: (columns, data)
    run = dict(steps=7, wandb="p", wandb_samples=count, log_every=3)
    ran = run_in(tmp_path / "run", job=Sampling(), **run)
    assert ran.error is None
    columns = ["prompt", "completion", "reward", "length"]
    assert board.tables == [(step, (columns, ROWS[:count])) for step in (3, 6, 7)]
    assert [step for step, _ in board.steps] == [1, 2, 3, 4, 5, 6, 7]


def test_no_table_without_samples(tmp_path, monkeypatch):
    board = Board()
    stand_in(monkeypatch, lambda **_: board)
    assert run_in(tmp_path / "run", job=Sampling(), wandb="p").error is None
    assert not board.tables


def test_samples_for_no_project_are_refused():
    with pytest.raises(ValueError, match="^RunConfig.wandb_samples=8 needs run.wandb"):
        RunConfig(wandb_samples=8)


def test_samples_of_a_job_without_any_are_refused(tmp_path):
    overrides = "run.wandb='p'", "run.wandb_samples=8", f"run.out_dir={tmp_path / 'r'}"
    config, _ = configuration.load(GIN, overrides)
    with pytest.raises(ValueError, match="^run.wandb_samples=8 shows sampled comple"):
        jobs.train(config)
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize("where", ["init", "log"])
def test_failures_warn_once_and_lose_no_step(where, tmp_path, monkeypatch):
    def fail(**_):
        raise SystemExit("no network")

    stand_in(monkeypatch, fail if where == "init" else lambda **_: Board(fail))
    ran = run_in(tmp_path / "run", wandb="p")
    assert ran.error is None and ran.steps == [1, 2, 3, 4, 5, 6]
    assert ran.said.count("Weights & Biases: SystemExit: no network; training") == 1


def test_hanging_service_blocks_nothing(tmp_path, monkeypatch):
    stuck = threading.Event()
    stand_in(monkeypatch, lambda **_: stuck.wait())
    monkeypatch.setattr(wandb_writer, "_FINISH_SECONDS", 0.05)
    monkeypatch.setattr(wandb_writer, "_MAX_PENDING", 4)
    start = time.perf_counter()
    ran = run_in(tmp_path / "run", wandb="p")
    assert time.perf_counter() - start < 60
    assert ran.error is None and ran.steps == [1, 2, 3, 4, 5, 6]
    assert ran.said.count("Weights & Biases: step 5 is left out: 4 steps wait") == 1
    assert ran.said.count("Weights & Biases") == 1
    stuck.set()


@pytest.mark.parametrize(
    ("installed", "message"),
    [
        (False, "run.wandb='p' needs wandb, which is not installed; run: pip install"),
        (True, "run.wandb='p': wandb has no API key; run `wandb login`, or set"),
    ],
)
def test_run_that_could_send_nothing_does_not_start(
    installed, message, tmp_path, monkeypatch
):
    stand_in(monkeypatch, None, key=False)
    if not installed:
        monkeypatch.setitem(sys.modules, "wandb", None)
    ran = run_in(tmp_path / "run", wandb="p")
    assert message in str(ran.error) and not (tmp_path / "run").exists()


def records(content):
    """Records of wandb's file: LevelDB's log format, whose blocks are of 32 KiB."""
    place, whole = 7, b""  # after wandb's own header
    while place + 7 <= len(content):
        _, length, kind = struct.unpack_from("<IHB", content, place)
        whole += content[place + 7 : place + 7 + length]
        if kind in (1, 4):  # full, or the last part
            yield whole
            whole = b""
        place += 7 + length
        left = -place % 2**15
        place += left if left < 7 else 0


def test_offline_files_hold_every_step(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="wandb is not installed: jaxmem[wandb]")
    from wandb.proto.wandb_internal_pb2 import Record

    monkeypatch.setenv("WANDB_MODE", "offline")
    ran = run_in(tmp_path / "run", job=Sampling(), wandb="p", wandb_samples=2)
    assert ran.error is None and "Weights & Biases" not in ran.said
    tables = sorted(
        (tmp_path / "run" / "wandb").glob("offline-run-*/files/media/table/*.json")
    )
    assert [json.loads(path.read_text())["data"] for path in tables] == [ROWS] * 3
    (path,) = (tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")
    assert path.stem == "run-" + (tmp_path / "run" / "wandb_id").read_text().strip()
    # Its process writes the last block soon after the run is finished.
    for _ in range(300):
        content = [Record.FromString(x) for x in records(path.read_bytes())]
        if content and content[-1].HasField("exit"):
            break
        time.sleep(0.1)
    steps = [
        {(i.key or i.nested_key[0]): json.loads(i.value_json) for i in x.history.item}
        for x in content
        if x.HasField("history")
    ]
    assert [(s["_step"], s["loss"]) for s in steps] == [(i, 2.5) for i in range(1, 7)]
