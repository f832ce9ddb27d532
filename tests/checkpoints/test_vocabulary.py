"""The tokenizer of a checkpoint, and its disagreements with the model."""

import json

import pytest
import tokenizers
from tokenizers import models, normalizers

from jaxmem.checkpoints import CheckpointError, load_vocabulary
from jaxmem.data.config import DataConfig
from jaxmem.data.record_reader import RecordReader
from jaxmem.data.records import DataError, RawRecord
from tests.helpers import texts


def test_ids_of_texts_and_the_tokens_around_them(tmp_path):
    made = load_vocabulary(texts.checkpoint("llama", tmp_path))
    assert (made.start, made.eos) == ((1,), 2)
    assert made.encode(["cab", "a</s>"]) == [[5, 3, 4], [3, 2]]


def test_tokenizer_without_start(tmp_path):
    made = load_vocabulary(texts.checkpoint("qwen3", tmp_path, start=False))
    assert made.start == ()


def test_eos_from_model_without_tokenizers_own(tmp_path):
    directory = texts.checkpoint("llama", tmp_path)
    (directory / "tokenizer_config.json").unlink()
    assert load_vocabulary(directory).eos == 2
    config = json.loads((directory / "config.json").read_text())
    config["eos_token_id"] = [0, 2]
    (directory / "config.json").write_text(json.dumps(config))
    assert load_vocabulary(directory).eos == 0


def test_token_beyond_embedding_fails_when_used(tmp_path):
    """As Gemma 3's <image_soft_token>, one past the rows of a text model."""
    directory = texts.checkpoint("llama", tmp_path)
    made = texts.tokenizer()
    made.add_special_tokens(["<image>"])
    assert made.token_to_id("<image>") == 40  # of 40 rows
    made.save(str(directory / "tokenizer.json"))
    vocabulary = load_vocabulary(directory)
    assert vocabulary.absent == ("<image>",)
    assert vocabulary.encode(["ab"]) == [[3, 4]]
    with pytest.raises(
        CheckpointError, match="the text has the token '<image>', for whic"
    ):
        vocabulary.encode(["ab", "a<image>b"])
    config = DataConfig("data.jsonl")
    reader = RecordReader.for_job(config, str(directory), vocabulary.tokenizer)
    assert reader.document(RawRecord("data.jsonl:1", {"text": "ab"})).text == "ab"
    said = "data.jsonl:2: the text has the token '<image>', for which the model has no"
    with pytest.raises(DataError, match=said):
        reader.document(RawRecord("data.jsonl:2", {"text": "a<image>b"}))
    with pytest.raises(DataError, match=said):
        reader.prompt(RawRecord("data.jsonl:2", {"prompt": "<image>"}))


def test_id_beyond_model_names_both_files(tmp_path):
    directory = texts.checkpoint("llama", tmp_path, more=["word"])
    message = (
        "tokenizer.json: token 'word' has the id 40, but model.embed_tokens.weight "
        r"has only 40 rows \(vocab_size of .*config.json\)"
    )
    with pytest.raises(CheckpointError, match=message):
        load_vocabulary(directory)


@pytest.mark.parametrize(
    "ids", [-5, 2.5, [], {"a": 1}, 10**12, 40, "2", True, [[2]], [2, -1], ["</s>"]]
)
def test_ids_that_end_no_text(ids, tmp_path):
    directory = texts.checkpoint("llama", tmp_path)
    (directory / "tokenizer_config.json").unlink()
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"eos_token_id": ids}))
    message = "config.json: eos_token_id must be an id of tokenizer.json, a list of"
    with pytest.raises(CheckpointError, match=message):
        load_vocabulary(directory)
    (directory / "config.json").write_text(json.dumps(config | {"eos_token_id": None}))
    assert load_vocabulary(directory).eos is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"eos_token": 5}', "eos_token must be str or dict or NoneType, got 5"),
        (
            '{"eos_token": ["a"]}',
            r"eos_token must be str or dict or NoneType, got \['a",
        ),
        ('{"eos_token": {"content": 7}}', "content must be str, got 7"),
        ('{"eos_token": {}}', "content is missing"),
        ("[1]", r"expected a JSON object, got \[1\]"),
        ("[" * 100_000, "nested deeper than 100"),
        (
            '{"eos_token": "' + "x" * 10_000 + '"}',
            "eos_token 'xxx.*xxx' is not a token",
        ),
    ],
)
def test_tokenizer_configs_that_name_no_end(text, message, tmp_path):
    directory = texts.checkpoint("llama", tmp_path)
    (directory / "tokenizer_config.json").write_text(text)
    with pytest.raises(CheckpointError, match="tokenizer_config.json: " + message) as e:
        load_vocabulary(directory)
    assert len(str(e.value)) < 600


@pytest.mark.parametrize("text", ["[" * 100_000, "\x00", '{"model": 5}', "\ufeff"])
def test_tokenizers_that_are_none(text, tmp_path):
    directory = texts.checkpoint("llama", tmp_path)
    (directory / "tokenizer.json").write_text(text)
    with pytest.raises(CheckpointError, match="tokenizer.json: cannot be read: ") as e:
        load_vocabulary(directory)
    assert "\n" not in str(e.value)


def test_exploding_normalizer_is_named(tmp_path):
    directory = texts.checkpoint("llama", tmp_path)
    tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    longer = [normalizers.Replace("a", "a" * 1000)] * 3
    tokenizer.normalizer = normalizers.Sequence(longer)
    tokenizer.save(str(directory / "tokenizer.json"))
    with pytest.raises(
        CheckpointError, match=r"tokenizer.json: its normalizer may mak"
    ):
        load_vocabulary(directory)


def test_tokenizer_without_tokens_is_refused(tmp_path):
    directory = texts.checkpoint("llama", tmp_path)
    tokenizers.Tokenizer(models.BPE()).save(str(directory / "tokenizer.json"))
    with pytest.raises(
        CheckpointError, match="tokenizer.json: the vocabulary is empty"
    ):
        load_vocabulary(directory)


def test_missing_and_broken_tokenizers(tmp_path):
    directory = texts.checkpoint("llama", tmp_path)
    (directory / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    with pytest.raises(CheckpointError, match="_config.json: eos_token '<end>' is no"):
        load_vocabulary(directory)
    (directory / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="tokenizer.json: cannot be read"):
        load_vocabulary(directory)
    (directory / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match="tokenizer.json: missing; only this"):
        load_vocabulary(directory)
