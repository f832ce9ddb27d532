"""Functions that stand for an attribute of a class or module within a context.

Several threads may trace calls of one class at once, and contexts may end in another
order than they began in. So the attribute is set once, to a function that looks up the
substitutes of the context in which it is called: other threads call the original, and
leaving a context removes its own substitute alone.
"""

import contextlib
import contextvars
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any


@dataclasses.dataclass(frozen=True, eq=False)
class _Substitute:
    """A function that stands for one attribute, and the function it is set by."""

    dispatcher: "_Dispatcher"
    function: Callable


_ACTIVE: contextvars.ContextVar[tuple[_Substitute, ...]] = contextvars.ContextVar(
    "substitutes", default=()
)
_LOCK = threading.Lock()
_DISPATCHERS: dict[tuple[int, str], "_Dispatcher"] = {}  # by the owner's id and name


class _Dispatcher:
    """The value of an attribute while any context substitutes it."""

    def __init__(self, owner: Any, name: str):
        self._owner, self._name, self._contexts = owner, name, 0
        self._original = original = getattr(owner, name)
        self._is_own = name in vars(owner)  # else a base class has it

        @functools.wraps(original)
        def dispatch(*args: Any, **kwargs: Any) -> Any:
            active = _ACTIVE.get()
            mine = [each for each in active if each.dispatcher is self]
            if not mine:
                return original(*args, **kwargs)
            # Within the function the attribute is what this one stands for.
            below = tuple(each for each in active if each is not mine[-1])
            token = _ACTIVE.set(below)
            try:
                return mine[-1].function(dispatch, *args, **kwargs)
            finally:
                _ACTIVE.reset(token)

        self._function = dispatch

    def enter(self) -> None:
        """Count one more context, and set the attribute for the first one."""
        self._contexts += 1
        if self._contexts == 1:
            setattr(self._owner, self._name, self._function)

    def leave(self) -> bool:
        """Count one context less, and restore the attribute; True after the last."""
        self._contexts -= 1
        if self._contexts:
            return False
        # A value that somebody else has set meanwhile is theirs.
        if vars(self._owner).get(self._name) is self._function:
            if self._is_own:
                setattr(self._owner, self._name, self._original)
            else:
                delattr(self._owner, self._name)
        return True


@contextlib.contextmanager
def holding(owner: Any, name: str, function: Callable) -> Iterator[None]:
    """Within this context and thread, a function stands for an attribute.

    It is called with the function that it stands for, which may be another substitute,
    before the arguments of the call.
    """
    key = id(owner), name
    with _LOCK:
        if key not in _DISPATCHERS:
            _DISPATCHERS[key] = _Dispatcher(owner, name)
        dispatcher = _DISPATCHERS[key]
        dispatcher.enter()
    substitute = _Substitute(dispatcher, function)
    _ACTIVE.set((*_ACTIVE.get(), substitute))
    try:
        yield
    finally:
        _ACTIVE.set(tuple(each for each in _ACTIVE.get() if each is not substitute))
        with _LOCK:
            if dispatcher.leave():
                del _DISPATCHERS[key]
