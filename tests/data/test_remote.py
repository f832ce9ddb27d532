"""Data elsewhere: file systems and data sets that stand in for a network's."""

import json
import sys
import types

import pytest

from jaxmem.data.texts import DataError, load_documents

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
        write = lambda path: parquet.write_table(table, path)  # noqa: E731
        return types.SimpleNamespace(_fingerprint="f", to_parquet=write)

    stand_in = types.SimpleNamespace(load_dataset=load_dataset)
    monkeypatch.setitem(sys.modules, "datasets", stand_in)
    assert read(address) == ["a", "b"] and calls == [asked]
