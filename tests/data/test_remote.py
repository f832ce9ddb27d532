"""Data elsewhere: file systems and data sets that stand in for a network's."""

import json
import os
import subprocess
import sys
import types

import pytest

from jaxmem.data.texts import DataError, load_documents
from tests.helpers import hub

fsspec = pytest.importorskip("fsspec")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture
def bucket(monkeypatch):
    """A bucket of gs:// in this process's memory."""
    from fsspec.implementations.memory import MemoryFileSystem

    class Bucket(MemoryFileSystem):
        protocol = "gs"

        @classmethod
        def _strip_protocol(cls, path):
            return super()._strip_protocol(path.removeprefix("gs:/"))

    known = sys.modules["fsspec.registry"]._registry
    monkeypatch.setitem(known, "gs", Bucket)
    system = Bucket()
    yield system
    system.rm("/bucket", recursive=True)


def put(system, name, *texts):
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    system.pipe(name, lines.encode())


def read(source):
    return [made.text for made in load_documents(source)]


def test_files_of_a_bucket_are_copied_once(bucket, monkeypatch):
    put(bucket, "/bucket/a/2.jsonl", "c")
    put(bucket, "/bucket/a/1.jsonl", "a", "b")
    assert read("gs://bucket/a/1.jsonl") == ["a", "b"]
    assert read("gs://bucket/a/*.jsonl") == ["a", "b", "c"]
    monkeypatch.setattr(type(bucket), "get_file", None)  # nothing is copied again
    assert read("gs://bucket/a/*.jsonl") == ["a", "b", "c"]


def test_file_that_changed_is_copied_anew(bucket):
    put(bucket, "/bucket/a.jsonl", "a")
    assert read("gs://bucket/a.jsonl") == ["a"]
    put(bucket, "/bucket/a.jsonl", "changed")
    assert read("gs://bucket/a.jsonl") == ["changed"]


def test_unreadable_url_is_named(bucket):
    put(bucket, "/bucket/a.jsonl", "a")
    with pytest.raises(
        DataError, match=r"data.source: cannot read gs://bucket/b.jsonl"
    ):
        read("gs://bucket/b.jsonl")
    with pytest.raises(DataError, match=r"gs://bucket/\*.json matches no file"):
        read("gs://bucket/*.json")
    with pytest.raises(DataError, match="data.source: cannot read nowhere://a.jsonl: "):
        read("nowhere://a.jsonl")


def test_missing_library_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"datasets.*; run: pip install .*\[remote"):
        read("hf://owner/name")


def datasets_like(length, **attributes):
    """An object with some attributes of a `datasets.Dataset`, of some records."""
    return type("Records", (), {"__len__": lambda _: length, **attributes})()


@pytest.mark.parametrize(
    ("address", "asked"),
    [
        ("hf://owner/name", ("owner/name", None, "train", None)),
        ("hf://owner/name/main:test", ("owner/name", "main", "test", None)),
        ("hf://o/n@v1:train[:10%]", ("o/n", None, "train[:10%]", "v1")),
    ],
)
def test_read_dataset_of_hub(address, asked, monkeypatch):
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    calls = []

    def load_dataset(name, config, *, split, revision):
        calls.append((name, config, split, revision))
        table = pa.Table.from_pylist([{"text": "a"}, {"text": "b"}])
        write = lambda _, path: parquet.write_table(table, path)  # noqa: E731
        return datasets_like(2, _fingerprint="f", to_parquet=write)

    stand_in = types.SimpleNamespace(load_dataset=load_dataset)
    monkeypatch.setitem(sys.modules, "datasets", stand_in)
    assert read(address) == ["a", "b"] and calls == [asked]


READ = """
import json, sys
from jaxmem.data import remote, texts
for address in sys.argv[1:]:
    try:
        said = [document.text for document in texts.load_documents(address)]
    except ValueError as error:
        said = str(error)
    print(json.dumps(said))
"""


@pytest.mark.full
def test_hub_of_data_sets(tmp_path):
    """The real client reads sets of a stand-in for the Hub."""
    pytest.importorskip("datasets")
    lines = lambda *texts: "".join(json.dumps({"text": x}) + "\n" for x in texts)  # noqa: E731
    files = {"train.jsonl": lines("a", "b"), "test.jsonl": lines("c")}
    with hub.serve() as server:
        old = server.add("o/d", files, kind="datasets")
        server.add("o/d", {**files, "train.jsonl": lines("new")}, kind="datasets")
        server.add("o/private", files, kind="datasets", private=True)
        environment = {
            **os.environ, "HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path / "home"),
            "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1",
            "HF_TOKEN": hub.TOKEN, "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
            "XDG_CACHE_HOME": str(tmp_path),
        }  # fmt: skip
        addresses = (
            "hf://o/d", "hf://o/d:test", f"hf://o/d@{old}", "hf://o/private:test",
            "hf://datasets/o/d/*.jsonl", "hf://o/d:nope", "hf://o/none",
        )  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-c", READ, *addresses],
            env=environment, capture_output=True, text=True, check=True, timeout=300,
        )  # fmt: skip
    *read, split, absent = map(json.loads, done.stdout.splitlines())
    assert read == [["new"], ["c"], ["a", "b"], ["c"], ["c", "new"]]
    assert 'cannot read hf://o/d:nope: Unknown split "nope"' in split
    assert (
        "'o/none' doesn't exist on the Hub or cannot be accessed; a private" in absent
    )
    assert done.stderr.count("jaxmem: datasets reads hf://o/d, and downloads") == 1
    assert "jaxmem: writing 1 records to" in done.stderr
    assert "jaxmem: copying datasets/o/d/test.jsonl (14 bytes) to" in done.stderr
