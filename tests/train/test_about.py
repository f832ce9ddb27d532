"""Facts of a run that its report shows."""

import subprocess
import sys

import pytest

from jaxmem.train import about


@pytest.mark.parametrize(
    "argv, expected",
    [
        (["/venv/bin/jaxmem", "train", "a b.gin"], "jaxmem train 'a b.gin'"),
        (["/x/jaxmem/__main__.py", "train"], "jaxmem train"),
        (["own.py", "--fast"], "python own.py --fast"),
        (["-c"], None),
        (["/x/ipykernel_launcher.py", "-f", "kernel.json"], None),
    ],
)
def test_command_is_what_a_user_would_type(argv, expected, monkeypatch):
    monkeypatch.setattr(sys, "argv", argv)
    assert about.command() == expected


def test_commit_is_of_the_current_directory(tmp_path, monkeypatch):
    def git(*arguments):
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *who, *arguments], check=True, capture_output=True)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert about.commit() is None
    git("init")
    assert about.commit() is None  # it has no commit yet
    (tmp_path / "own.py").write_text("a = 1\n")
    git("add", "own.py")
    git("commit", "-m", "a")
    head = about.commit()
    assert head is not None and len(head) == 40
    (tmp_path / "data.jsonl").write_text("")  # is in no commit
    assert about.commit() == head
    (tmp_path / "own.py").write_text("a = 2\n")
    assert about.commit() == f"{head} with uncommitted changes"


def test_commit_without_git_is_none(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert about.commit() is None
