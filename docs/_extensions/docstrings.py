"""Docstrings to reStructuredText: equations and examples keep their lines."""

import functools
import inspect
import operator
import re
import typing

import jax.typing
from sphinx.ext.autodoc.preserve_defaults import update_defvalue


def as_literal_blocks(app, what, name, obj, options, lines):
    """Mark indented paragraphs outside of sections as literal blocks.

    An equation or example in a docstring is a paragraph indented by four, under a
    paragraph that is not. Sections ("Args:") are left to napoleon, which runs later.
    """
    made: list[str] = []
    in_section = in_literal = False
    for i, line in enumerate(lines):
        if line and not line.startswith(" "):
            in_section, in_literal = bool(_SECTION.match(line)), False
        starts = line.startswith("    ") and i > 0 and not lines[i - 1].strip()
        before = next((x for x in reversed(made) if x.strip()), "")
        if starts and not in_section and before and not before.startswith(" "):
            made += ["::", ""]
            in_literal = True
        made.append(line if in_literal else _escaped(line))
    lines[:] = made


def _escaped(line: str) -> str:
    """Without what Python writes and reStructuredText takes for markup."""
    parts = line.split("`")
    parts[::2] = [re.sub(r"(?<!\*)\*(?=\w)", r"\\*", part) for part in parts[::2]]
    return re.sub(r"`(?=s\b)", r"`\\ ", "`".join(parts))  # plurals: `name`s


_SECTION = re.compile(
    r"(Args|Attributes|Returns|Yields|Raises|References?|Memory|Communication|Example)"
    r":\s*$"
)


def constructor_signature(app, what, name, obj, options, signature, returns):
    """The arguments of `__init__` where a metaclass takes any, as Flax's does.

    Those of a dataclass have no source: their defaults are named as they are.
    """
    if what != "class" or not signature:
        return None
    if signature != "(*args, **kwargs)":
        named = re.sub(r"=<(?:class|function) '?(.*?)'?>(?=[,)])", r"=\1", signature)
        named = re.sub(r", parent=<.*?>, name=None", "", named)  # of every Linen module
        return named.replace("<locals>.", ""), returns
    update_defvalue(app, obj.__init__, True)  # defaults as the source has them
    _, *parameters = inspect.signature(obj.__init__).parameters.values()
    bare = [each.replace(annotation=inspect.Parameter.empty) for each in parameters]
    return str(inspect.Signature(bare)), returns


class ArrayLike:
    """Stands in annotations for what `jax.typing.ArrayLike` is a union of."""


def named_unions(app, obj, bound_method):
    """Say ArrayLike in the annotations of a function, and not what it consists of."""
    parts = typing.get_args(jax.typing.ArrayLike)
    annotations = getattr(inspect.unwrap(obj), "__annotations__", {})
    for name, kind in annotations.items():
        given = typing.get_args(kind)
        if all(part in given for part in parts):
            others = [part for part in given if part not in parts]
            annotations[name] = functools.reduce(operator.or_, others, ArrayLike)


def is_alias(app, what, name, obj, skip, options):
    """Leave out a NamedTuple's fields: the docstring of its class has their meaning."""
    return True if (obj.__doc__ or "").startswith("Alias for field number") else None


def setup(app):
    """Run before napoleon, which parses the sections."""
    app.connect("autodoc-skip-member", is_alias)
    app.connect("autodoc-before-process-signature", named_unions)
    app.connect("autodoc-process-signature", constructor_signature)
    app.connect("autodoc-process-docstring", as_literal_blocks, priority=400)
    return {"parallel_read_safe": True}
