"""Values that nobody should write into a file or an argument, for properties of errors.

What a reader or a verb may do with them is its job, or an error of ours: raised by a
line of jaxmem, of one line, short, and with the name of what is wrong in it.
"""

import json
import linecache
import pathlib
import traceback

import hypothesis
import hypothesis.strategies as st

import jaxmem

PACKAGE = pathlib.Path(jaxmem.__file__).parent
LONGEST = 1000  # characters of an error, without the path that it names


def profile(examples):
    return hypothesis.settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )


def check_ours(error, *named):
    """An error that a user can act on, and that no other library wrote."""
    if any("raised by loss_fn" in note for note in getattr(error, "__notes__", ())):
        return  # a test's own, of numbers that it does not expect
    last = traceback.extract_tb(error.__traceback__)[-1]
    assert pathlib.Path(last.filename).is_relative_to(PACKAGE), error
    line = linecache.getline(last.filename, last.lineno).strip()
    assert line.startswith("raise"), (line, error)
    message = str(error)
    assert message and "\n" not in message
    assert any(name in message for name in named), (named, message)
    assert len(message.replace(named[0], "")) < LONGEST, len(message)


def outcome(load, *named):
    """(True, what is loaded), or (False, None) after an error of ours."""
    try:
        return True, load()
    except (ValueError, TypeError, OSError, NotImplementedError) as error:
        check_ours(error, *named)
        return False, None


# ------------------------------------------------------------------------- JSON


class Raw(str):
    """Text that stands where a JSON value should."""


RAW = [
    "NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1e-400", "01", "1.", "nul", "",
    "'a'", "{'a': 1}", '{"a": 1, "a": 2}', r'"\ud800"', r'{"\udfff": 1}', r'"\u0000"',
    "1" * 5000, "-" + "1" * 400, "1" * 309, "0." + "3" * 5000, '"' + "x" * 20_000 + '"',
    "[" * 100_000, '{"a":' * 100_000, "[" * 60 + "]" * 60, "[" * 300 + "]" * 300,
    '{"a": ' * 70 + "1" + "}" * 70, "[" + "1, " * 5000 + "1]", "1]", "1, 2", "// 1",
]  # fmt: skip
SCALARS = [
    None, True, False, 0, 1, -1, 2, 3, 7, 64, 2**15, 10**7, 2**31 - 1, 2**31, 2**63,
    -(2**63), 10**30, 10**307, 0.0, -0.0, 0.5, 1.5, -2.5, 1e-8, 1e-300, 1e30, 1e300,
    "", " ", "a", "0", "10", "None", "\x00", "\n", "é", "a" * 5000, "../x", "/x",
]  # fmt: skip
atoms = st.sampled_from([*SCALARS, *map(Raw, RAW)])
values = st.one_of(
    atoms,
    atoms.map(lambda x: [x]),
    atoms.map(lambda x: [5, x, [x]]),
    atoms.map(lambda x: {"content": x}),
    atoms.map(lambda x: {"\n": {"a": x}}),
)


def text(value):
    """JSON, but for what is `Raw`."""
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, dict):
        pairs = (f"{json.dumps(k)}: {text(v)}" for k, v in value.items())
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(text, value)) + "]"
    return json.dumps(value)


def _paths(thing, before=()):
    for key, value in thing.items():
        yield (*before, key)
        if isinstance(value, dict):
            yield from _paths(value, (*before, key))


@st.composite
def objects(draw, good, more_keys=(), likely=values):
    """A good object of JSON in which up to three values are nasty, or are gone."""
    base = json.loads(json.dumps(draw(st.sampled_from(good))))
    paths = [*_paths(base), *((key,) for key in more_keys)]
    for path in draw(st.lists(st.sampled_from(paths), max_size=3)):
        inside = base
        for key in path[:-1]:
            inside = inside.get(key) if isinstance(inside, dict) else None
        if not isinstance(inside, dict):
            continue
        if draw(st.integers(0, 4)) == 0:
            inside.pop(path[-1], None)
        else:
            inside[path[-1]] = draw(likely | values)
    return base


@st.composite
def files(draw, documents):
    """Bytes of a document, sometimes damaged, sometimes something else as a whole."""
    data = text(draw(documents)).encode()
    kind = draw(st.sampled_from(["whole"] * 12 + ["cut", "flip", "bom", "16", "else"]))
    if kind == "cut":
        return data[: draw(st.integers(0, len(data)))]
    if kind == "flip" and data:
        place, byte = draw(st.integers(0, len(data) - 1)), draw(st.integers(0, 255))
        return data[:place] + bytes([byte]) + data[place + 1 :]
    if kind == "bom":
        return b"\xef\xbb\xbf" + data
    if kind == "16":
        return data.decode().encode("utf-16")
    return text(draw(values)).encode() if kind == "else" else data
