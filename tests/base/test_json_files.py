"""JSON within limits: what is read, and what each refusal says."""

import json
import os

import pytest

from jaxmem.base import json_files


@pytest.mark.parametrize(
    "text",
    [
        '{"a": [1, 2.5, null, true, "é"], "b": {}}', "1", '"\\ud83d\\ude00"', "-0.0",
        "[" * 101 + "]" * 101, "1" * 308, "-" + "9" * 308, "1e-9999", " [1]\r",
    ],
)  # fmt: skip
def test_parse_equals_json_loads(text):
    assert json_files.parse(text) == json.loads(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not valid JSON: Expecting value (column 1)"),
        ("{\n 'a'}", "not valid JSON: Expecting property name enclosed in double "),
        ("[1] 2", "not valid JSON: Extra data (column 5)"),
        ("NaN", "NaN is not JSON; write null, or leave the key out"),
        ('{"a": [-Infinity]}', "-Infinity is not JSON; write null, or leave the key"),
        ("1e999", "the number 1e999 is too large"),
        ("1" * 400 + ".5", "the number 1111111111111111111111111111111111111... is"),
        ("-" + "1" * 309, "an integer of 309 digits is too large"),
        ("1" * 5000, "an integer of 5,000 digits is too large"),
        ("[" * 102 + "]" * 102, "nested deeper than 100"),
        ("[" * 100_000, "nested deeper than 100"),
        ('{"a":' * 100_000, "nested deeper than 100"),
        ('{"a": 1, "b": 2, "b": 3}', "the key 'b' is there twice"),
        (r'[{"a": ["x", "\ud800"]}]', r"'\ud800' holds half of a surrogate pair"),
        (r'{"\udfff": 1}', r"'\udfff' holds half of a surrogate pair"),
    ],
)
def test_parse_refuses(text, message):
    with pytest.raises(json_files.JsonError) as raised:
        json_files.parse(text)
    assert str(raised.value).startswith(message)


def test_long_text_is_refused_before_parsing(monkeypatch):
    monkeypatch.setattr(json_files, "MAX_BYTES", 2**20)
    with pytest.raises(json_files.JsonError, match="longer than 1 MiB"):
        json_files.parse("[" * (2**20 + 1))


def test_files(tmp_path, monkeypatch):
    path = tmp_path / "a.json"

    def refused(message):
        with pytest.raises(json_files.JsonError) as raised:
            json_files.read_object(path)
        assert str(raised.value) == f"{path}: {message}"

    refused("cannot be read: No such file or directory")
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}')
    assert json_files.read_object(path) == {"a": 1}
    path.write_bytes(b'{"a": "\xff"}')
    refused("not UTF-8 text (byte 7)")
    path.write_bytes('{"a": 1}'.encode("utf-16"))
    refused("not UTF-8 text (byte 0)")
    path.write_text("[1, 2]")
    refused("expected a JSON object, got [1, 2]")
    monkeypatch.setattr(json_files, "MAX_BYTES", 2**20)
    path.write_text(" " * 2**20 + "{}")
    refused("larger than 1 MiB")
    path.unlink()
    path.mkdir()
    refused("not a file")


@pytest.mark.timeout(20)
def test_read_does_not_wait_for_a_pipe(tmp_path):
    os.mkfifo(tmp_path / "a.json")
    with pytest.raises(json_files.JsonError, match="a.json: not a file"):
        json_files.read_object(tmp_path / "a.json")
