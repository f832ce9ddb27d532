"""Programs that one run of the tests compiled are found by the next."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import compilation

_COMPILE = """
import sys
from pathlib import Path
import jax
from tests import compilation
shared = Path(sys.argv[1])
folder = compilation.make_folder(shared)
compilation.use(folder)
jax.jit(lambda x: 2 * x + 1)(1.0)
compilation.merge(folder, shared)
"""


def programs(folder):
    return {path.name for path in folder.iterdir() if path.name.endswith("-cache")}


@pytest.mark.slow
def test_another_process_finds_them(tmp_path):
    """A key that depended on a process's own folder would add programs each time."""
    found = []
    for _ in range(2):
        command = [sys.executable, "-c", _COMPILE, tmp_path]
        subprocess.run(command, check=True, cwd=Path(__file__).parents[1])
        found.append(programs(tmp_path))
    assert found[0]
    assert found[1] == found[0]


def test_folder_over_the_limit_starts_anew(tmp_path, monkeypatch):
    (tmp_path / "program-cache").write_bytes(b"12345")
    monkeypatch.setattr(compilation, "_LIMIT", 5)
    assert programs(compilation.make_folder(tmp_path))
    monkeypatch.setattr(compilation, "_LIMIT", 4)
    assert not programs(compilation.make_folder(tmp_path))
    assert not programs(tmp_path)
