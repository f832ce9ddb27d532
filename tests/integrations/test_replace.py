"""Replacing functions of a package that is known, refusing one that is not."""

import importlib.metadata
import sys
import threading
import types

import pytest

from jaxmem.integrations import _replace
from jaxmem.integrations._head import NotServed
from jaxmem.integrations._replace import (
    Integration,
    IntegrationError,
    Replacement,
    or_original,
)
from jaxmem.integrations._substitutes import holding

PARAMETERS = ("x", "y")


@pytest.fixture
def package(monkeypatch):
    """A package of two modules, the second of which imports a name of the first."""

    def function(x, y):
        return "original"

    made = {name: types.ModuleType(name) for name in ("pack", "pack.a", "pack.b")}
    made["pack.a"].function = made["pack.b"].imported = function
    made["pack.a"].Class = type("Class", (), {"method": lambda self, x, y: "old"})
    for name, module in made.items():
        monkeypatch.setitem(sys.modules, name, module)
    set_version(monkeypatch, "1.2.3")
    return types.SimpleNamespace(a=made["pack.a"], b=made["pack.b"])


def set_version(monkeypatch, version):
    def get(name):
        if name != "pack-dist" or version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", get)


def integration(where="pack.a:function", parameters=PARAMETERS, version="1.2.3"):
    def make(original, options, tally):
        @or_original(original, tally)
        def function(*args):
            if "refused" in args:
                raise NotServed("a reason")
            return f"replaced, chunk={options.chunk}"

        return function

    replacement = Replacement(where, make, parameters)
    known = {version: (replacement,)}
    return Integration("pack", {"other": known, "pack-dist": known})


def test_apply_replaces_everywhere_and_undo_restores(package, capsys):
    made = integration()
    original = package.a.function
    made.apply(chunk=7)
    assert package.a.function(1, 2) == package.b.imported(1, 2) == "replaced, chunk=7"
    assert package.a.function("refused", 2) == package.a.function("refused", 3)
    printed = capsys.readouterr().out.splitlines()
    assert printed == [
        "jaxmem: pack 1.2.3: pack.a:function is replaced",
        "jaxmem: pack: not patched: a reason",  # once
    ]
    package.b.later = package.a.function
    made.undo()
    assert package.a.function is package.b.imported is package.b.later is original


def test_apply_warns_of_other_holders(package, monkeypatch):
    users = types.ModuleType("users")
    monkeypatch.setitem(sys.modules, "users", users)
    users.theirs = original = package.a.function
    made = integration()
    with pytest.warns(RuntimeWarning, match=r"users\.theirs was imported before apply"):
        made.apply()
    assert users.theirs is original and package.a.function is not original
    del users.theirs
    users.imported_since = replaced = package.a.function
    message = r"users\.imported_since was imported before undo.*pack\.a:function"
    with pytest.warns(RuntimeWarning, match=message):
        made.undo()
    assert users.imported_since is replaced and package.a.function is original


def test_apply_warning_as_error_replaces_nothing(package, monkeypatch):
    users = types.ModuleType("users")
    monkeypatch.setitem(sys.modules, "users", users)
    users.theirs = original = package.a.function
    made = integration()
    with pytest.raises(RuntimeWarning, match="users"):  # as in the whole suite
        made.apply()
    assert package.a.function is package.b.imported is original
    with pytest.raises(RuntimeError, match="pack is not applied"):
        made.undo()


def test_class_is_replaced_wherever_it_is(package):
    package.b.Class = original = package.a.Class
    replacement = Replacement(
        "pack.a:Class", lambda kind, *_: type("C", (kind,), {}), None
    )
    made = Integration("pack", {"pack-dist": {"": (replacement,)}})
    with made.applied():
        assert package.a.Class is package.b.Class is not original
    assert package.a.Class is package.b.Class is original


def test_methods_and_a_while(package):
    made = integration("pack.a:Class.method", ("self", "x", "y"))
    with pytest.raises(ZeroDivisionError):
        with made.applied():
            assert package.a.Class().method(1, 2) == "replaced, chunk=1024"
            raise ZeroDivisionError
    assert package.a.Class().method(1, 2) == "old"


def test_once_at_a_time(package):
    made = integration()
    with pytest.raises(RuntimeError, match="pack is not applied"):
        made.undo()
    made.apply()
    with pytest.raises(RuntimeError, match="pack is already applied; call its undo"):
        made.apply()
    made.undo()


def test_another_package_than_the_known_one_is_refused(package, monkeypatch):
    message = r"a:function takes \(x, y\), but jaxmem expects \(x, z\)"
    with pytest.raises(IntegrationError, match=message):
        integration(parameters=("x", "z")).apply()
    with pytest.raises(IntegrationError, match="pack 1.2.3 has no pack.a:gone"):
        integration("pack.a:gone").apply()
    with pytest.raises(IntegrationError, match="pack 1.2.3 has no pack.c:function"):
        integration("pack.c:function").apply()
    with pytest.raises(
        IntegrationError, match="pack-dist 1.2.3 is installed, but .* only 1.2.4"
    ):
        integration(version="1.2.4").apply()
    integration(version="1.2").apply()  # a release of the known series
    set_version(monkeypatch, None)
    with pytest.raises(IntegrationError, match="other or pack-dist is not installed"):
        integration().apply()


def test_status_counts_calls_and_reasons(package, monkeypatch):
    monkeypatch.setattr(_replace, "_APPLIED", [])
    made = integration()
    assert _replace.status() == ()
    with made.applied():
        package.a.function(1, 2)
        for _ in range(2):
            package.a.function("refused", 2)
        (status,) = _replace.status()
    assert (status.name, status.version, status.is_applied) == ("pack", "1.2.3", True)
    (function,) = status.functions
    assert (function.served, function.refused) == (1, {"a reason": 2})
    assert str(made.status()) == (
        "pack 1.2.3: undone\n  pack.a:function: served 1; not served 2: a reason"
    )
    with made.applied():
        assert (
            str(made.status()) == "pack 1.2.3: applied\n  pack.a:function: not called"
        )


def test_strict_raises_where_a_call_is_not_served(package):
    made = integration()
    original = package.a.function
    with made.applied(strict=True):
        assert package.a.function(1, 2).startswith("replaced")
        kept = package.a.function
        message = "pack: pack.a:function is not served: a reason"
        with pytest.raises(IntegrationError, match=message):
            kept("refused", 2)
    assert kept("refused", 2) == original(1, 2)  # after undo, as the package has it
    with made.applied():
        assert package.a.function("refused", 2) == "original"


class Base:
    def method(self):
        return "own"


class Derived(Base):
    pass


def named(name):
    return lambda original, self: f"{name}, {original(self)}"


def test_contexts_in_any_order_restore_the_class():
    own = vars(Base)["method"]
    a, b = (holding(Base, "method", named(name)) for name in "ab")
    a.__enter__()
    b.__enter__()
    assert Base().method() == "b, a, own"
    a.__exit__(None, None, None)
    assert Base().method() == "b, own"
    b.__exit__(None, None, None)
    assert vars(Base)["method"] is own


def test_inherited_method_is_inherited_again():
    with holding(Derived, "method", named("a")):
        assert Derived().method() == "a, own" and Base().method() == "own"
    assert "method" not in vars(Derived)


def test_value_that_others_set_meanwhile_stays():
    class Other(Base):
        def method(self):
            return "old"

    with holding(Other, "method", named("a")):
        Other.method = lambda self: "theirs"
    assert Other().method() == "theirs"


def test_threads_replace_one_method_independently():
    own, barrier = vars(Base)["method"], threading.Barrier(3, timeout=20)
    results = {}

    def hold(name):
        with holding(Base, "method", named(name)):
            barrier.wait()  # all are inside
            results[name] = [Base().method() for _ in range(20)]
            barrier.wait()  # none has left
        barrier.wait()

    threads = [threading.Thread(target=hold, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    barrier.wait()
    assert Base().method() == "own"  # in a thread that holds nothing
    barrier.wait()
    barrier.wait()
    for thread in threads:
        thread.join()
    assert results == {name: [f"{name}, own"] * 20 for name in "ab"}
    assert vars(Base)["method"] is own
