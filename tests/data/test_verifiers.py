"""Shipped rewards: what is right, what is not, and what does not earn anything."""

import builtins
import os
import re
import time

import numpy as np
import pytest

from jaxmem.data.rewards import RewardArguments, RewardError, Scorer
from jaxmem.data.unit_tests import UnitTests, program_of
from jaxmem.data.verifiers import SHIPPED
from tests.helpers.cases import slow

CHAT = [{"role": "assistant", "content": "#### 4"}]
TRACE = "He sells 48 / 2 = <<48/2=24>>24 clips.\n#### "
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def scored(name, completions, **columns):
    count = len(completions)
    asked = RewardArguments([f"p.jsonl:{i + 1}" for i in range(count)],
                      ["p"] * count, completions, columns)  # fmt: skip
    return Scorer([name])(asked).total.tolist()


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("so\n#### 72", TRACE + "72", 1),
        ("#### 72.0", TRACE + "72", 1),
        ("#### $1,234", TRACE + "1234", 1),
        ("####-3", -3, 1),
        (CHAT, "4", 1),
        ("#### 72 then #### 71", TRACE + "72", 0),  # the last one counts
        ("#### 71 #### 72", TRACE + "72", 1),
        ("the answer is 72", TRACE + "72", 0),  # that is what `number` is for
        ("#### ?", TRACE + "72", 0),
        ("#### 7\n2", TRACE + "72", 0),
        ("\n\n\n", TRACE + "72", 0),
        ("#### 24", TRACE + "72", 0),
        ("#### 72\n#### unsure", TRACE + "72", 0),
        ("#### 72 ####", TRACE + "72 ####", 1),
        ("####" + " " * 200_000, TRACE + "72", 0),
        ("#### 1,2,3", "123", 0),
    ],
)
def test_gsm8k_reads_the_number(completion, answer, reward):
    assert scored("gsm8k", [completion], answer=[answer]) == [reward]


@pytest.mark.parametrize(
    ("name", "answer"),
    [("number", "no number"), ("gsm8k", "#### unsure"), ("gsm8k", "7\n####")],
)  # fmt: skip
def test_answers_without_a_number_are_errors(name, answer):
    with pytest.raises(RewardError) as raised:
        scored(name, ["#### 5", "#### 5"], answer=["5", answer])
    assert "prompt 'p' (p.jsonl:2): raised (line " in str(raised.value)
    assert str(raised.value).endswith(
        f"the column answer must be a number, or a text with a number, got {answer!r}"
    )


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ('{"a": 1}', 1),
        (' \n{"a": 1, "b": null}\n', 1),
        ('```json\n{"a": 1}\n```', 1),
        ([{"role": "assistant", "content": '{"a": 2}'}], 1),
        ('{"a": 1.5}', 0),
        ('{"b": 1}', 0),
        ('{"a": 1} as you wished', 0),
        ('{"a": NaN}', 0),
        ("[" * 100_000, 0),
        ("", 0),
    ],
)
def test_json_by_a_schema(completion, reward):
    assert scored("json_schema", [completion], schema=[SCHEMA]) == [reward]


def test_schemas_as_text_and_schemas_that_are_none(monkeypatch):
    assert scored("json_schema", ["3"], schema=['{"type": "integer"}']) == [1]
    with pytest.raises(RewardError, match=r"raised.*ValueError: schema: 'int' is not"):
        scored("json_schema", ["3"], schema=[{"type": "int"}])
    wrong = "the column schema must be an object, or an object as JSON text, got "
    assert scored("json_schema", ["3"], schema=[True]) == [1]
    for schema in (3, "{", "[]"):
        with pytest.raises(RewardError, match=re.escape(f"{wrong}{schema!r}")):
            scored("json_schema", ["3"], schema=[schema])
    # Nothing is fetched.
    with pytest.raises(RewardError, match=r"Unresolvable"):
        scored("json_schema", ["3"], schema=[{"$ref": "http://localhost/s.json"}])
    imported = builtins.__import__

    def absent(name, *rest):
        if name == "jsonschema":
            raise ImportError
        return imported(name, *rest)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(RewardError, match=r"pip install -e .*\[rewards\]"):
        scored("json_schema", ["3"], schema=[SCHEMA])


@pytest.mark.parametrize(
    ("name", "column", "entry", "completion"),
    [
        ("exact", "answer", "None", "None"),
        ("prefix", "answer", "None", "None"),
        ("number", "answer", "4", "4"),
        ("gsm8k", "answer", "#### 4", "#### 4"),
        ("regex", "pattern", "4", "4"),
        ("json_schema", "schema", {}, "4"),
        ("unit_tests", "tests", ["assert x"], "x = 4"),
    ],
)
def test_shipped_rewards_of_null_are_none(name, column, entry, completion):
    function, completions = SHIPPED[name], [completion] * 2
    assert function(["p"] * 2, completions, **{column: [None, entry]}) == [None, 1]
    assert function(["p"] * 2, completions, other=[1, 2]) == [None, None]


def test_records_of_two_kinds_share_a_run():
    asked = RewardArguments(["p:1", "p:2"], ["p"] * 2, ["#### 4", DOUBLE],
                      {"answer": ["4", None], "tests": [None, TESTS[0]]})  # fmt: skip
    made = Scorer(["gsm8k", "unit_tests"])(asked)
    assert made.total.tolist() == [1, 1]
    np.testing.assert_array_equal(made.parts["gsm8k"], [1, np.nan])


def test_long_completions_are_punished_as_in_dapo():
    # Dr. Yu et al., equation 13, with L_max = 20480 and L_cache = 4096.
    longest, cache = 20480, 4096
    lengths = [0, 16384, 16385, 18432, 20479, 20480]
    made = scored(
        "overlong",
        ["x"] * 6,
        completion_ids=[range(n) for n in lengths],
        max_new_tokens=[longest] * 6,
    )
    want = [0 if n <= longest - cache else ((longest - cache) - n) / cache
            for n in lengths]  # fmt: skip
    np.testing.assert_allclose(made, want, atol=1e-12)
    assert want[-1] == -1


def test_several_with_weights_and_each_by_name():
    asked = RewardArguments(["p:1"], ["p"], ["#### 4"],
                      {"answer": ["4"], "completion_ids": [[1] * 10],
                       "max_new_tokens": [10]})  # fmt: skip
    made = Scorer(["gsm8k", "overlong"], [1.0, 0.5])(asked)
    assert made.total.tolist() == [0.5]
    assert {k: v.tolist() for k, v in made.parts.items()} == {
        "gsm8k": [1],
        "overlong": [-1],
    }


# ------------------------------------------------------------------- unit tests

DOUBLE = "def double(x):\n    return 2 * x\n"
TESTS = ["assert double(2) == 4", "assert double(0) == 1", "assert double(-1) == -2"]
QUICK = UnitTests(seconds=3, memory_mib=256, file_mib=1)


def test_unit_tests_reward_is_share_that_passes():
    fenced = [{"role": "assistant", "content": f"Like this:\n```python\n{DOUBLE}```\n"}]
    other = "def triple(x): return 3 * x"
    made = scored("unit_tests", [DOUBLE, fenced, other], tests=[TESTS] * 3)
    np.testing.assert_allclose(made, [2 / 3, 2 / 3, 0])
    assert scored("unit_tests", [DOUBLE], tests=[TESTS[0]]) == [1]


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("```\na\n```\n```py\nb\n```", "b\n"),
        ("```python\na\n```\nIt prints\n```text\n4\n```\n", "a\n"),
        ("```python\na\n```\nIt prints\n```\n4\n```\n", "a\n"),
        ("It prints\n```text\n4\n```\n```\na\n```\n", "a\n"),
        ("So: ```python\na\n```", "a\n"),
        ("<answer>\n```python\na\n```</answer>", "a\n"),
        ("```python\na```", "a"),
        ("```python\na\n``` That is it.", "a\n"),
        ("```python\na\n```<|end|>", "a\n"),
        ("So: ```\na\n```\nDone", "a\n"),
        ("```markdown\n# T\n```python\na\n```\n```", "a\n"),
        ("```text\nunclosed\n\n```python\na\n```", "a\n"),
        ("\xa0```python\na\n```", "a\n"),
        ("```" + "a" * 200_000, "```" + "a" * 200_000),
        ("```" + " " * 200_000, "```" + " " * 200_000),
        ("```bash\npip\n```\nthen\n```python\na\n```", "a\n"),
        ("```js\nb\n```\nthat is all", "```js\nb\n```\nthat is all"),
        ("```python3\na\n```", "a\n"),
        ("``` Python\na\n```", "a\n"),
        ("~~~PY3\na\n~~~", "a\n"),
        ('```python title="a.py"\na\n```', "a\n"),
        ("```python{.numberLines}\na\n```", "a\n"),
        ("```python\r\nif a:\r\n    b\r\n```\r\n", "if a:\n    b\n"),
        ("1. So:\n    ```python\n    if a:\n        b\n    ```\n", "if a:\n    b\n"),
        ("  ```python\n  a\n b\n```\n", "a\nb\n"),
        ("````python\na = '''\n```\n'''\n````", "a = '''\n```\n'''\n"),
        ("~~~python\na = '''\n```\n'''\n~~~", "a = '''\n```\n'''\n"),
        ("```python\ndef a():\n    '''\n    ```\n    '''\n```",
         "def a():\n    '''\n    ```\n    '''\n"),
        ("```python\na\n``` \nSay ```b``` or\n``` c```\n", "a\n"),
        ("```python\na\n", "a\n"),  # cut off
        ("```python\na\n```\n```\n", "a\n"),
        ("`" * 100_000, "`" * 100_000),
        ("a = 1", "a = 1"),
    ],
)  # fmt: skip
def test_program_is_the_last_fence_of_python(text, program):
    assert program_of(text) == program


@pytest.mark.parametrize(
    "code",
    [
        "from __future__ import annotations\nimport dataclasses\n"
        "@dataclasses.dataclass\nclass A:\n    x: int\n"
        "import pickle\nassert pickle.loads(pickle.dumps(A(3))) == A(3)\n",
        "import sys\nassert sys.stdin.read() == '' and open(0).read() == ''\n",
        "try:\n    input()\nexcept EOFError:\n    pass\n",
        "import __main__\nassert not hasattr(__main__, 'token')\n",
    ],
)
def test_program_is_a_module_with_an_empty_stdin(code):
    assert QUICK(["p"], [code + DOUBLE], tests=["assert double(2) == 4"]) == [1]


def test_share_above_one_is_none():
    """A program that finds the harness's token, which nothing hides for good."""
    code = (
        "import os, sys\nknown = sys._getframe(1).f_locals\n"
        "os.write(known['report'], f\"{known['token']} 7\".encode())\nos._exit(0)\n"
    )
    assert QUICK(["p"], [code], tests=["pass"]) == [0]
    assert QUICK(["p"], [code.replace("7", "1")], tests=["pass"]) == [1]


@pytest.mark.parametrize(
    "code",
    [
        "import os; os._exit(0)",
        "import sys; sys.exit(0)",
        "print(3); raise SystemExit",
        "def double(x): return",
        "def double(x: return 2",
        slow("while True: pass"),
        "import time; time.sleep(60)",
        "import os, time\nif os.fork() == 0:\n    time.sleep(60)\nos._exit(0)",
        f"{DOUBLE}kept = bytearray(2 << 30)",
        f"{DOUBLE}open('big', 'wb').write(bytes(2 << 20))",
        f"{DOUBLE}files = [open(str(i), 'w') for i in range(99)]",
        "\n\n\n",
        "",
    ],
)
def test_unit_tests_end_and_earn_nothing(code):
    start = time.monotonic()
    made = QUICK(["p"], [code], tests=[["assert double(2) == 4"]])
    assert made == [0] and time.monotonic() - start < 30


def test_program_sees_no_environment_or_directory(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    code = "import os\nseen = 'HF_TOKEN' in os.environ, os.listdir(), os.getcwd()\n"
    tests = ["assert seen[:2] == (False, [])", f"assert seen[2] != {os.getcwd()!r}"]
    assert QUICK(["p"], [code], tests=[tests]) == [1]


@pytest.mark.parametrize("tests", [[3], [], "", ["assert True", " \n"]])
def test_tests_that_are_none(tests):
    with pytest.raises(RewardError, match="ValueError: tests must be Python source"):
        scored("unit_tests", ["a"], tests=[tests])


def test_limits_that_are_none():
    with pytest.raises(ValueError, match=r"UnitTests\.seconds must be above 0, got 0"):
        UnitTests(seconds=0)


def test_every_shipped_function_is_described():
    assert all(function.__doc__ for function in SHIPPED.values())
