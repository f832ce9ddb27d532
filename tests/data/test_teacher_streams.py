"""A teacher's columns by row groups: the same tokens, resumed anywhere, little held."""

import collections
import dataclasses
import itertools
import json
import weakref

import numpy as np
import pytest

from jaxmem.data import packed, teacher_files, teacher_streams
from jaxmem.data.documents import DataConfig
from jaxmem.data.records import DataError
from tests.helpers.cases import slow

pa = pytest.importorskip("pyarrow")
K, WINDOW = 3, 6


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(packed, "ROWS_OPEN", 4)


def table(count, seed=0, drawn=False, **options):
    """Documents of random lengths, some of a prompt alone, as jaxmem score has them."""
    rng, rows = np.random.default_rng(seed), []
    for number in range(count):
        prompt, scored = int(rng.integers(1, 4)), int(rng.integers(0, 30))
        scored = 0 if number % 7 == 3 else scored + 1
        ids = rng.integers(0, 50, (scored, K)).tolist()
        columns = {"sampled_ids": ids}
        if not drawn:
            logprobs = rng.normal(size=(scored, K)).astype("f4").tolist()
            columns = {"top_ids": ids, "top_logprobs": logprobs}
        rows.append({
            "prompt_ids": rng.integers(0, 50, prompt).tolist(),
            "token_ids": rng.integers(0, 50, scored).tolist(), **columns,
            "temperature": 1.0, "vocabulary": "v", **options,
        })  # fmt: skip
    ids, floats = pa.list_(pa.int32()), pa.list_(pa.float32())
    types = {
        "prompt_ids": ids, "token_ids": ids, "top_ids": pa.list_(ids),
        "top_logprobs": pa.list_(floats), "sampled_ids": pa.list_(ids),
        "temperature": pa.float64(), "vocabulary": pa.string(),
    }  # fmt: skip
    schema = pa.schema([(name, types[name]) for name in types if name in rows[0]])
    return pa.Table.from_pylist(rows, schema)


def write(path, *tables, size=5):
    from pyarrow import parquet

    with parquet.ParquetWriter(path, tables[0].schema) as writer:
        for part in tables:
            writer.write_table(part, row_group_size=size)
        writer.write_table(tables[0].slice(0, 0))  # as jaxmem score may end


@pytest.fixture
def config(tmp_path):
    write(tmp_path / "a.parquet", table(40))
    write(tmp_path / "b.parquet", table(13, seed=1))
    return DataConfig(
        source=str(tmp_path / "*.parquet"), sequence_length=16, batch_size=2, seed=3,
        streaming=True, shuffle_window=WINDOW,
    )  # fmt: skip


def batches(config, part="train", epochs=1):
    file = teacher_streams.opened(config)
    return teacher_streams.examples(file, config, part, epochs)


def tokens_of(examples):
    """Counts of each input with its label and columns; masked tokens have none."""
    seen = collections.Counter()
    for batch, ids, logprobs in examples:
        columns = [ids] if logprobs is None else [ids, logprobs]
        live, filled = batch.labels >= 0, batch.segment_ids > 0
        assert (ids[~live] == -1).all() and (ids[live] >= 0).all()
        assert not live[~filled].any()
        parts = [x[filled] for x in (batch.tokens, batch.labels, batch.positions)]
        parts += [np.where(live[..., None], x, -1)[filled] for x in columns]
        seen.update(tuple(np.hstack(row).tolist()) for row in zip(*parts, strict=True))
    return seen


@pytest.mark.parametrize("drawn", [slow(False), True])
def test_epoch_equals_columns_in_memory(drawn, config, tmp_path):
    if drawn:
        write(tmp_path / "a.parquet", table(40, drawn=True))
        write(tmp_path / "b.parquet", table(13, seed=1, drawn=True))
    wanted = tokens_of(batches(dataclasses.replace(config, streaming=False)))
    assert tokens_of(batches(config)) == wanted and wanted.total() > 500
    twice = tokens_of(batches(config, epochs=2))
    assert twice == collections.Counter({k: 2 * v for k, v in wanted.items()})
    one, other = (next(batches(config)) for _ in range(2))
    np.testing.assert_array_equal(one.ids, other.ids)


def test_resumes_bitwise_from_every_point(config):
    examples, states, seen = batches(config, epochs=2), [], []
    while True:
        states.append(json.loads(json.dumps(examples.get_state())))
        try:
            seen.append(next(examples))
        except StopIteration:
            break
    assert len(seen) > 40
    for i in [*range(0, len(seen), 5), len(seen)]:
        resumed = batches(config, epochs=2)
        resumed.set_state(states[i])
        for made, wanted in zip(itertools.islice(resumed, 3), seen[i:], strict=False):
            for a, b in zip(
                (*made[0], *made[1:]), (*wanted[0], *wanted[1:]), strict=True
            ):
                np.testing.assert_array_equal(a, b)
    with pytest.raises(StopIteration):
        next(resumed)
    with pytest.raises(DataError, match="belongs to other data"):
        batches(dataclasses.replace(config, seed=4)).set_state(states[0])


@pytest.mark.parametrize("times", [1, slow(4)])
def test_memory_independent_of_file_size(times, config, tmp_path, monkeypatch):
    from pyarrow import parquet

    write(tmp_path / "a.parquet", table(40 * times))
    alive, most, cut = weakref.WeakSet(), [], teacher_streams._pieces

    class Columns(np.ndarray):
        __hash__ = object.__hash__  # for the set of weak references

    def pieces(*arguments):
        for piece in cut(*arguments):
            piece["ids"] = piece["ids"].view(Columns)
            alive.add(piece["ids"])
            yield piece

    def whole(*arguments, **options):
        raise AssertionError("the whole file is read")

    monkeypatch.setattr(teacher_streams, "_pieces", pieces)
    monkeypatch.setattr(parquet.ParquetFile, "read", whole)
    for example in batches(config):
        del example
        most.append(len(alive))
    # A window, and the pieces of a row group.
    assert len(most) > 15 * times and max(most) <= WINDOW + 5 * 3


def test_row_groups_are_held_out_whole(config):
    config = dataclasses.replace(config, held_out=0.25)
    parts = [tokens_of(batches(config, part)) for part in ("train", "evaluation")]
    whole = tokens_of(batches(dataclasses.replace(config, held_out=0.0)))
    assert parts[0] + parts[1] == whole
    assert 0.1 < parts[1].total() / whole.total() < 0.4
    few = dataclasses.replace(config, held_out=0.01)  # at least one
    assert tokens_of(batches(few, "evaluation"))


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (
            lambda: [table(5), table(5, temperature=2.0)],
            "with different teachers or opt",
        ),
        (
            lambda: [table(5, vocabulary="w")],
            "with different teachers or options: {'to",
        ),
        (
            lambda: [table(5, temperature=None)],
            "row group 1: 'temperature' must be one",
        ),
        (lambda: [table(0 + 1).drop(["vocabulary"])], "has no column 'vocabulary'"),
    ],
)
def test_row_group_that_differs_is_named(made, message, config, tmp_path):
    write(tmp_path / "b.parquet", *made())
    with pytest.raises(DataError) as raised:
        collections.deque(batches(config), maxlen=0)
    assert message in str(raised.value) and "\n" not in str(raised.value)


def test_files_without_documents_are_named(config, tmp_path):
    for name in "ab":
        write(tmp_path / f"{name}.parquet", table(1).slice(0, 0))
    with pytest.raises(DataError, match="contains no"):
        batches(config)
    (tmp_path / "c.jsonl").write_text('{"text": "a"}\n')
    with pytest.raises(DataError, match=r"c.jsonl must be a .parquet file"):
        batches(dataclasses.replace(config, source=str(tmp_path / "c.jsonl")))


def test_column_of_learned_tokens_is_refused(tmp_path):
    given = table(13)
    masks = pa.array([[1]] * len(given))
    path = tmp_path / "a.parquet"
    write(path, given.append_column("loss_mask", masks))
    with pytest.raises(
        DataError, match="a.parquet: .* does not use the column 'loss_m"
    ):
        teacher_files.read_part(path)
