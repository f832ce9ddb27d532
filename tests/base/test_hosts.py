"""The commands of docs/hosts.md start as printed; two axes that cross processes."""

import contextlib
import json
import socket
import subprocess
import sys

import pytest

from tests.helpers.markdown import commands
from tests.helpers.processes import (
    ROOT,
    as_of_one,
    end,
    environment,
    free_port,
    steps_of,
)

# test_processes has two processes that meet and train.
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_compilation")]

# Small sizes, which eight devices divide.
SMALL = (
    "data.vocab_size=300 data.sequence_length=32 data.held_out=0 model.layers=1 "
    "model.hidden=16 model.ff=16 model.heads=4 model.kv_heads=4 model.head_dim=8 "
    "head.chunk=32 run.log_every=1 run.compare_heads=False "
    "eval.every=None optimizer.warmup_fraction=0.0"
).split()


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    folder = tmp_path_factory.mktemp("words")
    lines = (f"the hidden state of token {i} and of the next" for i in range(200))
    rows = [json.dumps({"text": line}) for line in lines]
    (folder / "words.jsonl").write_text("\n".join(rows))
    return [*SMALL, f"data.source={folder}/words.jsonl", f"data.cache_dir={folder}"]


def together(each, devices, **variables):
    """Outputs of processes, one for each command; all of them must succeed."""
    started = [
        subprocess.Popen(
            [sys.executable, "-m", *command], cwd=ROOT, text=True,
            env=environment(devices) | {k: str(v[i]) for k, v in variables.items()},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for i, command in enumerate(each)
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=240)[0] for process in started]
    finally:
        end(started)
    assert [process.returncode for process in started] == [0] * len(each), said
    return said


def is_free(port):
    with contextlib.closing(socket.socket()) as made:
        return made.connect_ex(("127.0.0.1", port)) != 0


def slurm(tasks):
    """Variables that srun sets for its tasks on one host, at a port that is free."""
    lowest = 2**16 - 2**12  # jax adds the job's number
    port = next(p for p in range(lowest, 2**16) if is_free(p))
    return {
        "SLURM_JOB_ID": [port - lowest] * tasks,
        "SLURM_STEP_NODELIST": ["localhost"] * tasks,
        "SLURM_NTASKS": [tasks] * tasks,
        "SLURM_PROCID": range(tasks),
        "SLURM_LOCALID": range(tasks),
    }


@pytest.mark.parametrize("way", ["given", "found"])
def test_commands_of_the_page(way, small, tmp_path):
    page = (ROOT / "docs" / "hosts.md").read_text("utf-8")
    printed = [words for words in commands(page) if words[:2] == ["jaxmem", "train"]]
    address = f"127.0.0.1:{free_port()}"
    *each, of_cluster = [
        [address if word == "10.0.0.1:1234" else word for word in words]
        for words in printed
    ]
    assert [words[-1] for words in each] == ["0", "1"] and "--cluster" in of_cluster
    pair, variables = each, {}
    if way == "found":
        pair, variables = [of_cluster, of_cluster], slurm(2)
    own = [*small, "run.steps=3", f"run.out_dir={tmp_path}"]
    together([[*words, *own] for words in pair], 4, **variables)
    assert len(steps_of(tmp_path)) == 3
    assert (tmp_path / "model" / "config.json").exists()


def test_sequence_and_tensor_axes_over_two_processes(small, tmp_path):
    (tmp_path / "pair.gin").write_text('include "sft_stdlib.gin"\n')
    arguments = [str(tmp_path / "pair.gin"), *small]
    met = [f"--coordinator=127.0.0.1:{free_port()}", "--processes=2"]
    axes = ["mesh.sequence=2", "mesh.tensor=2", f"run.out_dir={tmp_path}/pair"]
    together(
        [["jaxmem", "train", *arguments, *axes, "run.steps=3", *met,
          f"--process-id={i}"] for i in range(2)], 2,
    )  # fmt: skip
    as_of_one(arguments, tmp_path / "pair", 3, tmp_path)
