"""Files and modules of the user: what is loaded, and what an error says of them."""

import abc
import dataclasses
import os
import pathlib
import pickle
import sys
import typing
from typing import Annotated

import pytest

from jaxmem.base import user_code
from jaxmem.base.user_code import UserCodeError


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    """Modules that a test imports from its directory are forgotten after it."""
    monkeypatch.chdir(tmp_path)
    path, before = list(sys.path), dict(sys.modules)
    yield tmp_path
    sys.path[:] = path
    for name in sys.modules.keys() - before.keys():
        if getattr(sys.modules[name], "__file__", None) and str(tmp_path) in str(
            sys.modules[name].__file__
        ):
            del sys.modules[name]


def write(name, text):
    pathlib.Path(name).parent.mkdir(parents=True, exist_ok=True)
    pathlib.Path(name).write_text(text)


def test_load_finds_files_and_modules():
    write("own.py", "def f():\n    return 1\n")
    write("own_package/inner.py", "def g():\n    return 2\n")
    absolute = pathlib.Path("own.py").absolute()
    for name, value in {
        "own.py:f": 1,
        f"{absolute}:f": 1,
        "own_package.inner:g": 2,
    }.items():
        assert user_code.load(name, "x.y")() == value
    assert user_code.load("own.py:f", "x.y") is user_code.load(f"{absolute}:f", "z")
    shipped = {"mine": len}
    assert user_code.load("mine", "x.y", shipped) is len


def test_load_executes_changed_file_again(monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    write("own.py", "made = []\ndef f():\n    return 1\n")
    first = user_code.load("own.py:f", "x.y")
    stamp = os.stat("own.py").st_mtime_ns
    write("own.py", "made = []\ndef f():\n    return 2\n")
    os.utime("own.py", ns=(stamp, stamp))  # as of an edit within the clock's resolution
    second = user_code.load("own.py:f", "x.y")
    assert (first(), second()) == (1, 2)
    assert not pathlib.Path("__pycache__").exists()


def test_load_of_files_with_one_name_keeps_both_apart():
    for folder in "ab":
        write(f"{folder}/own.py", f"class Kind:\n    folder = {folder!r}\n")
    first, second = (user_code.load(f"{f}/own.py:Kind", "x.y") for f in "ab")
    assert (first.folder, second.folder) == ("a", "b")
    for kind in (first, second):
        assert type(pickle.loads(pickle.dumps(kind()))) is kind


def test_load_resolves_annotations_of_a_dataclass():
    lines = "from __future__ import annotations", "import dataclasses", ""
    lines += "class Inner: ...", "@dataclasses.dataclass", "class Outer:"
    write("own.py", "\n".join([*lines, "    inner: Inner = Inner()\n"]))
    outer = user_code.load("own.py:Outer", "x.y")
    assert typing.get_type_hints(outer)["inner"].__name__ == "Inner"


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("", "absent.py:f", "cannot import absent.py: no such file"),
        ("", "folder.py:f", "cannot import folder.py: Is a directory"),
        ("", "own.py:f", "own.py has no 'f'"),
        ("f = 3", "own.py:f", "own.py:f must be a function, got 3"),
        ("\n1 / 0", "own.py:f", "import own.py (line 2): ZeroDivisionError: div"),
        ("def f(:", "own.py:f", "import own.py: SyntaxError: invalid syntax (own."),
        ("import sys\nsys.exit(0)", "own.py:f", "own.py (line 2): SystemExit: 0"),
        ("import os\nos.chdir('/')", "own.py:f", "Misbehaved: changed the working "),
        ("", "no.such:f", "import no.such: ModuleNotFoundError: No module "),
        ("", "own", "must be one of 'mine', or \"file.py:name\" or \"pack"),
        ("", "own.py:", "must be one of 'mine', or"),
        ("", ":f", "must be one of 'mine', or"),
    ],
)  # fmt: skip
def test_load_names_the_key_the_file_and_the_line(text, name, message):
    write("own.py", text)
    pathlib.Path("folder.py").mkdir()
    with pytest.raises(UserCodeError) as raised:
        user_code.load(name, "task.reward", {"mine": len})
    said = str(raised.value)
    assert said.startswith("task.reward") and message in said and "\n" not in said


def test_load_says_the_kind_that_the_key_can_use():
    write("own.py", "def f(): ...\n")
    is_class = "a class", lambda value: isinstance(value, type)
    with pytest.raises(
        UserCodeError, match="^run.job: own.py:f must be a class, got <f"
    ):
        user_code.load("own.py:f", "run.job", None, *is_class)


def test_file_that_fails_is_executed_again():
    write("own.py", "import pathlib\npathlib.Path('ready').read_text()\nf = len\n")
    with pytest.raises(UserCodeError, match=r"\(line 2\): FileNotFoundError"):
        user_code.load("own.py:f", "x.y")
    write("ready", "")
    assert user_code.load("own.py:f", "x.y") is len


def test_load_current_directory_shadows_no_module(monkeypatch):
    here = {"", os.getcwd()}
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in here])
    for name in ("chunk_of_mine", "colorsys", "rich"):
        write(f"{name}.py", "def f(): ...\n")
    for name in ("colorsys", "rich.table"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.delitem(sys.modules, "rich", raising=False)
    user_code.load("chunk_of_mine:f", "x.y")
    assert user_code.load("colorsys:rgb_to_hsv", "x.y")
    assert user_code.load("rich.table:Table", "x.y", None, "a class")
    assert sys.path[-1] == os.getcwd()
    with pytest.raises(UserCodeError, match=r"has no 'f' \(.*lib.*colorsys\.py\)"):
        user_code.load("colorsys:f", "x.y")


def test_checked_forbids_code_before_it_runs():
    write("own.py", "import pathlib\npathlib.Path('ran').touch()\nf = len\n")

    def forbid(key, name):
        raise PermissionError(f"{key}={name}")

    with user_code.checked(forbid), user_code.checked(lambda *_: None):
        assert user_code.load("mine", "x.y", {"mine": len}) is len
        with pytest.raises(PermissionError, match="x.y=own.py:f"):
            user_code.load("own.py:f", "x.y")
    assert not pathlib.Path("ran").exists()
    assert user_code.load("own.py:f", "x.y") is len


class Base(user_code.Hooked):
    page = "docs/page.md"

    @abc.abstractmethod
    def first(self): ...

    @abc.abstractmethod
    def second(self): ...


def test_hooked_names_all_hooks_that_a_class_lacks():
    class Half(Base):
        def first(self): ...

    class Whole(Half):
        def second(self): ...

    assert Whole() and not user_code.missing_hooks(Whole)
    assert user_code.missing_hooks(Base) == "has no first, second: see docs/page.md"
    with pytest.raises(
        UserCodeError, match=r"Half \(.*test_user_code.py\) has no second:"
    ):
        Half()


def test_described_names_line_of_definition():
    write("helper.py", "def fail():\n    raise KeyError('width')\n")
    lines = "from helper import fail", "", "def f():", "    fail()", "", "class K:"
    lines += "    def __call__(self):", "", "        fail()"
    write("own.py", "\n".join(lines))
    sys.path.append(os.getcwd())
    expected = " (line 4) KeyError: 'width'", " (line 9) KeyError: 'width'"
    kind = user_code.load("own.py:K", "x.y")
    codes = user_code.load("own.py:f", "x.y"), kind()
    for code, said in zip(codes, expected, strict=True):
        with pytest.raises(KeyError) as raised:
            code()
        assert user_code.described(raised.value, code) == said
    assert user_code.described(raised.value, kind) == expected[1]
    assert user_code.described(raised.value, len) == " KeyError: 'width'"


@dataclasses.dataclass
class Section:
    several: Annotated[tuple[str, ...] | str, user_code.Named()] = "shipped"
    one: Annotated[str | None, user_code.Named()] = None
    source: str = "data.py:x"  # names no code


def test_names_in_yields_code_alone():
    section = Section(("shipped", "own.py:f", "package.module:g"), "own.py:h")
    assert list(user_code.names_in("x", section)) == [
        ("x.several", "own.py:f"),
        ("x.several", "package.module:g"),
        ("x.one", "own.py:h"),
    ]
    assert not list(user_code.names_in("x", Section()))


def test_changes_names_what_is_not_as_saved():
    write("own.py", "def f(): ...\ndef g(): ...\n")
    write("own_module.py", "def f(): ...\n")
    names = "own.py:f", "own.py:g", "own_module:f"

    def digests():
        return {name: user_code.digest(name, "x.y") for name in names}

    saved = digests()
    assert not user_code.changes(saved, digests())
    for file in ("own.py", "own_module.py"):
        write(file, "def f(): ...\n\n")
    first, second = user_code.changes(saved, digests())  # one line a file
    assert first.startswith(
        f"own.py has changed (SHA-256 {saved['own.py:f'][:12]}…, is "
    )
    assert second.startswith("own_module has changed")
    assert not user_code.changes({}, saved) and not user_code.changes(saved, {})
    with pytest.raises(
        UserCodeError, match="x.y: cannot import absent.py: no such file"
    ):
        user_code.digest("absent.py:f", "x.y")
