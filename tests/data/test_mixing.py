"""Several sources in proportion to weights, in every kind of data; resumable."""

import dataclasses
import itertools
import json
from collections import Counter

import numpy as np
import pytest

from jaxmem.data import documents, mixing, pairs, prompts, tasks
from jaxmem.data.config import DataConfig
from jaxmem.data.record_reader import RecordReader
from jaxmem.data.records import DataError
from jaxmem.head.maths.random_streams import Stream

LETTERS = "abc"  # of the sources


def test_shares_and_turns_of_sources():
    sources = [0] * 4 + [1] * 15 + [2]
    order = mixing.Mixed(sources, (3.0, 1.0, 0.5), seed=0)
    taken = [order[number] for number in range(9000)]
    shares = Counter(sources[item] for item in taken)
    assert shares == {0: 6000, 1: 2000, 2: 1000}
    for source, size in ((0, 4), (1, 15)):  # every item once before any again
        own = [item for item in taken if sources[item] == source]
        epochs = [own[i : i + size] for i in range(0, len(own), size)]
        assert all(len({*epoch}) == len(epoch) for epoch in epochs)
        assert len({*map(tuple, epochs)}) > 1  # in orders of their own
    # At no place is a source ahead of its share by as much as one item.
    for n in range(1, 500):
        first = sum(sources[item] == 0 for item in taken[:n])
        assert abs(first - n * 6 / 9) <= 1


def test_odd_weights_are_shares_to_a_thousandth():
    order = mixing.Mixed([0, 1], (np.pi, np.e), seed=0)
    share = np.mean([order[n] == 0 for n in range(10**4)])
    assert abs(share - np.pi / (np.pi + np.e)) < 1e-3


@pytest.mark.full
@pytest.mark.parametrize("least", [0.00101, np.pi / 1000, 1 / 30])
def test_small_weights_are_shares_to_five_per_cent(least):
    order = mixing.Mixed([0, 1], (1 - least, least), seed=0)
    share = np.mean([order[n] == 1 for n in range(4 * 10**4)])
    assert abs(share / least - 1) <= 0.05


def test_weights_too_small_for_a_share_are_refused():
    with pytest.raises(ValueError, match="weights must be at least a thousandth of th"):
        DataConfig(source=("a.jsonl", "b.jsonl"), weights=(1.0, 1e-10))


def test_source_without_items_is_named():
    with pytest.raises(DataError, match="source 2 of 2 has nothing to train on"):
        mixing.Mixed([0, 0], (1.0, 1.0), seed=0)


def test_order_without_weights_is_epochs():
    order = mixing.order([0] * 5, None, 0, Stream.PAIRS)
    epochs = [[order[n] for n in range(5 * e, 5 * e + 5)] for e in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(5))] * 3
    assert epochs[0] != epochs[1]


def test_order_without_shuffling_is_that_of_files():
    order = mixing.order([0] * 3, None, 0, Stream.PAIRS, shuffle=False)
    assert [order[n] for n in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_weighted_sources_without_shuffling_keep_their_orders():
    sources = [1, 0, 1, 0, 1]
    order = mixing.Mixed(sources, (3.0, 1.0), seed=0, shuffle=False)
    taken = [order[number] for number in range(40)]
    assert [item for item in taken if sources[item]] == [0, 2, 4, 0, 2, 4, 0, 2, 4, 0]
    assert [item for item in taken if not sources[item]] == [1, 3] * 15


def test_shuffle_is_recorded_where_it_is_off():
    for section in (DataConfig(), tasks.TaskConfig(source="a.jsonl")):
        assert "shuffle" not in section.fixed() and not mixing.lines(section, "data")
        unshuffled = dataclasses.replace(section, shuffle=False)
        assert unshuffled.fixed()["shuffle"] is False
        assert mixing.lines(unshuffled, "data") == [
            "data.shuffle=False: each epoch reads the records in the order of the files"
        ]


def test_shuffle_where_nothing_is_shuffled_is_refused():
    with pytest.raises(ValueError, match="shuffle must be left out, or True, for task"):
        tasks.TaskConfig(shuffle=False)
    with pytest.raises(ValueError, match="shuffle_window must stay 4096 with shuffle"):
        DataConfig(shuffle=False, streaming=True, shuffle_window=8)


@pytest.mark.parametrize(
    "source, weights",
    [
        ("a.jsonl", (1.0,)), (("a.jsonl", "b.jsonl"), (1.0,)),
        (("a.jsonl", "b.jsonl"), (1.0, 0.0)), (("a.jsonl", "b.jsonl"), (1.0, True)),
        (("a.jsonl", "b.jsonl"), (1.0, float("inf"))),
    ],
)  # fmt: skip
@pytest.mark.parametrize("section", [DataConfig, tasks.TaskConfig])
def test_impossible_weights(section, source, weights):
    with pytest.raises(ValueError, match="weights must be a positive number for eac"):
        section(source=source, weights=weights)


def test_recorded_rollouts_have_none():
    with pytest.raises(ValueError, match="weights must be left out, or None, if r"):
        tasks.TaskConfig(source=("a", "b"), weights=(1.0, 2.0), recorded=True)


# ---------------------------------------------------------------- kinds of data


@pytest.fixture
def write(tmp_path):
    """Writes files of records of a letter, and names them."""

    def write(count, record):
        for letter in LETTERS[:2]:
            rows = [json.dumps(record(f"{letter}{i:03d}")) for i in range(count)]
            (tmp_path / f"{letter}.jsonl").write_text("\n".join(rows))
        return tuple(str(tmp_path / f"{letter}.jsonl") for letter in LETTERS[:2])

    return write


def config_of(source, tmp_path, **more):
    return DataConfig(
        source, vocab_size=270, sequence_length=8, batch_size=2, weights=(3.0, 1.0),
        cache_dir=str(tmp_path), **more,
    )  # fmt: skip


def letters(batches, tokenizer, count):
    found = Counter()
    for batch in itertools.islice(batches, count):
        text = tokenizer.decode(batch.tokens[batch.segment_ids > 0].tolist())
        found.update(x for x in text if x in LETTERS)
    return found


@pytest.mark.full
@pytest.mark.parametrize("streaming", [False, True])
def test_documents(streaming, write, tmp_path, monkeypatch):
    monkeypatch.setattr("jaxmem.data.block_files.BLOCK_BYTES", 64)
    source = write(200, lambda word: {"text": word})
    config = config_of(source, tmp_path, streaming=streaming, shuffle_window=64)
    tokenizer = documents.load_tokenizer(config)
    found = letters(documents.batches(config, tokenizer), tokenizer, 800)
    share = found["a"] / found.total()
    assert abs(share - 0.75) < (0.02 if streaming else 0.002)
    made = documents.batches(config, tokenizer)
    for _ in range(300):  # into further epochs
        next(made)
    state = json.loads(json.dumps(made.get_state()))
    want = [next(made).tokens for _ in range(5)]
    again = documents.batches(config, tokenizer)
    again.set_state(state)
    np.testing.assert_array_equal([next(again).tokens for _ in range(5)], want)
    other = dataclasses.replace(config, weights=(1.0, 3.0))
    with pytest.raises(DataError, match="belongs to other data"):
        documents.batches(other, tokenizer).set_state(state)
    once = documents.batches(config, tokenizer, epochs=1)  # everything, whatever weighs
    assert letters(once, tokenizer, None) == {"a": 200, "b": 200}


def test_pairs(write, tmp_path):
    source = write(20, lambda x: {"prompt": x, "chosen": x, "rejected": x + "!"})
    config = config_of(source, tmp_path)
    tokenizer = documents.load_tokenizer(
        dataclasses.replace(config, columns={"text": "prompt"}, ignored=("chosen",
                            "rejected"))
    )  # fmt: skip
    training, _ = pairs.load_pairs(config, tokenizer)
    reference = np.zeros((len(training), 2))
    made = pairs.PairBatches(training, reference, config)
    found = letters(made, tokenizer, 200)
    assert found["a"] == 3 * found["b"] == 2 * 300
    state = made.get_state()
    want = next(made).tokens
    again = pairs.PairBatches(training, reference, config)
    again.set_state(state)
    np.testing.assert_array_equal(next(again).tokens, want)


def test_prompts(write, tmp_path):
    source = write(20, lambda word: {"prompt": word})
    tokenizer = documents.load_tokenizer(
        config_of(source, tmp_path, columns={"text": "prompt"})
    )
    task = tasks.TaskConfig(source=source, weights=(1.0, 3.0))
    training, _ = prompts.load_prompts(task, (tokenizer, RecordReader()))
    assert Counter(prompt.source for prompt in training) == {0: 20, 1: 20}
    order = mixing.order([p.source for p in training], task.weights, 0, Stream.PROMPTS)
    asked = Counter(training[order[n]].prompt[0] for n in range(400))
    assert asked == {"a": 100, "b": 300}


def test_shares_of_sources():
    config = DataConfig(("a.jsonl", "b.jsonl"), weights=(3.0, 1.0))
    assert mixing.lines(config, "data") == [
        "data.weights: 75.0% of a.jsonl, 25.0% of b.jsonl"
    ]
    assert not mixing.lines(DataConfig("a.jsonl"), "data")
