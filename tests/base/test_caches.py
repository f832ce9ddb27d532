"""Directories of vocabularies and copies, on machines of every kind."""

import os

import pytest

from jaxmem.base import caches


@pytest.fixture(autouse=True)
def no_temporary_directory_yet():
    caches._temporary_directory.cache_clear()
    yield
    caches._temporary_directory.cache_clear()


def test_directory_follows_desktop_specification(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    assert caches.directory() == tmp_path / "own" / "jaxmem"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert caches.directory() == tmp_path / ".cache" / "jaxmem"
    assert caches.directory("~/other") == tmp_path / "other"
    assert caches.directory(str(tmp_path / "x")).is_dir()


@pytest.mark.parametrize("home", [None, "a file", "read-only"])
def test_directory_without_a_home_is_temporary(home, tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "a file").write_text("")

    def expanded(path):
        if home is None:
            raise RuntimeError("Could not determine home directory.")
        return tmp_path / home

    def is_writable(path, mode):  # also for a user who may write everywhere
        return access(path, mode) and path != tmp_path / "read-only/.cache/jaxmem"

    access = os.access
    monkeypatch.setattr("os.access", is_writable)
    monkeypatch.setattr("pathlib.Path.home", classmethod(expanded))
    first, second = caches.directory(), caches.directory()
    assert first == second and first.parent == tmp_path and os.access(first, os.W_OK)
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and f"are kept in {first} (" in said
    assert "set XDG_CACHE_HOME or data.cache_dir" in said


def test_errors_name_the_key(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(caches.CacheError) as raised:
        with caches.errors(str(tmp_path / "file")):
            caches.directory(str(tmp_path / "file"))
    named = f"data.cache_dir={str(tmp_path / 'file')!r}"
    assert str(raised.value) == (
        f"{named}: vocabularies cannot be kept there: File exists; name a directory "
        "that can be written"
    )
