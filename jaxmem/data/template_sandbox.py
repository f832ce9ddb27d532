"""A Jinja sandbox in which a rendering ends: turns, time and texts are bounded.

Operations of a template pass four hooks: operators (`call_binop`), calls (`call`),
filters (`call_filter`, to which the syntax tree is rewritten) and pieces of output
(`concat`). If a result can be larger than its operands, a hook bounds its size, and
refuses the operation before it runs; afterwards it adds the result's size to the sum of
the rendering. Operations without a known bound are absent.
"""

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from types import BuiltinMethodType
from typing import Any

import jinja2
import jinja2.sandbox
from jinja2 import ext, filters, meta, nodes, visitor
from jinja2.utils import Namespace

from jaxmem.data.rendering_budget import RenderingBudget, size, text_size

_COUNTED_AT_ONCE = 2**16  # characters of pieces of a text
_SPECIFIED = 400  # characters of a number by "%f" or "{:f}", beside its width

_ABSENT_FILTERS = "urlize", "wordwrap", "pprint"
_ABSENT_METHODS = "encode", "expandtabs", "to_bytes", "translate"
# Filters that make no text of their value, or have a bound of their own.
_TEXTLESS = frozenset(
    "abs attr batch count d default dictsort filesizeformat first float groupby int "
    "items last length list map max min random reject rejectattr reverse round select "
    "selectattr slice sort sum tojson unique".split()
)
# Filters and methods whose numbers and texts multiply the size of their value.
_WIDE = frozenset("batch center indent ljust rjust slice zfill".split())
_GROWING = _WIDE | {"format", "round", "strftime"}
_WIDTHS = re.compile(r"[%)]([-+ #\d.*]+)")
_BUDGET = RenderingBudget()


# ------------------------------------------------------- bounds of single operations


def _check_operator(operator: str, left: Any, right: Any) -> None:
    """Raise if the result of an operator is too large."""
    sized = str, list, tuple
    if operator == "%" and isinstance(left, str):
        values = right if isinstance(right, tuple) else (right,)
        _check_printf(left, values)
    elif operator == "+" and isinstance(left, sized) and isinstance(right, sized):
        _BUDGET.check(size(left) + size(right))
    elif isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length(), right.bit_length()
        if operator == "**":
            _BUDGET.check_bits(bits[0] * max(right, 0))
        elif operator == "*":
            _BUDGET.check_bits(sum(bits))
    elif operator == "*":
        for items, times in ((left, right), (right, left)):
            if isinstance(items, sized) and isinstance(times, int):
                _BUDGET.check(size(items) * max(times, 0))


def _check_printf(text: str, values: Sequence[Any]) -> None:
    """Raise if a text of `%` and its values is too long."""
    if len(values) == 1 and isinstance(values[0], Mapping):
        values = list(values[0].values())
    count = text.count("%")
    specified = "".join(_WIDTHS.findall(text))
    widths = sum(map(_number, re.findall(r"\d+", specified)))
    if "*" in specified:
        widths += count * sum(abs(x) for x in values if isinstance(x, int))
    longest = max(map(text_size, values), default=0)
    _BUDGET.check(len(text) + count * (longest + _SPECIFIED) + widths)


def _number(digits: str) -> int:
    """The number of some digits; 10^20 for 20 or more, which `int` may refuse."""
    return int(digits) if len(digits) < 20 else 10**20


def _check_named(name: str, value: Any, arguments: Sequence[Any]) -> None:
    """Raise if the result of a filter or method, by its name, is too large."""
    if name not in _GROWING:
        return
    numbers = sum(abs(x) for x in arguments if isinstance(x, int))
    texts = sum(len(x) for x in arguments if isinstance(x, str))
    if name in _WIDE:
        _BUDGET.check((text_size(value) + 1) * (1 + numbers + texts))
    elif name == "format":
        _check_printf(str(value), arguments)
    elif name == "round":
        _BUDGET.check_bits(4 * numbers)
    elif name == "strftime":
        _BUDGET.check(256 * texts)  # as many as CPython allocates


def _check_joined(separator: str, parts: Collection[Any]) -> None:
    """Raise if joined texts are too long."""
    _BUDGET.check(len(separator) * len(parts) + sum(map(text_size, parts)))


def _check_replaced(text: str, old: str, new: str) -> None:
    """Raise if a text in which something is replaced is too long."""
    _BUDGET.check(len(text) + text.count(old) * len(new))


def _check_method(name: str, owner: Any, values: Sequence[Any]) -> None:
    """Raise if the result of a method of a built-in type is too large."""
    if isinstance(owner, str) and name == "replace" and len(values) > 1:
        _check_replaced(owner, *map(str, values[:2]))
    elif (
        isinstance(owner, str) and name == "join" and isinstance(values[0], Collection)
    ):
        _check_joined(owner, values[0])
    else:
        _check_named(name, owner, values)


# --------------------------------------------------------------------------- filters


def _counted(items: Iterable[Any]) -> Iterator[Any]:
    """Yield the items of a loop, and count its turns."""
    for item in items:
        _BUDGET.turn()
        yield item


@jinja2.pass_context
def _applied(context, value, name, *arguments, **named):
    """The result of a filter, called by its name."""
    return context.environment.call_filter(name, value, arguments, named, context)


@jinja2.pass_eval_context
def _join(context, value, d="", attribute=None):
    value = _BUDGET.add(list(value))
    _check_joined(str(d), value)
    return filters.do_join(context, value, d, attribute)


@jinja2.pass_eval_context
def _replace(context, s, old, new, count=None):
    _check_replaced(*map(str, (s, old, new)))
    return filters.do_replace(context, s, old, new, count)


@jinja2.pass_environment
def _sum(environment, iterable, attribute=None, start=0):
    if attribute is not None:
        getter = filters.make_attrgetter(environment, attribute)
        iterable = map(getter, iterable)
    return sum(_summed(iterable), start)


def _summed(items: Iterable[Any]) -> Iterator[Any]:
    """Yield the items of a sum, and check the size of the lists among them."""
    total = 0
    for item in items:
        total += size(item)
        _BUDGET.check(total)
        yield item


def _to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    """JSON without the HTML escapes of jinja2's own filter."""
    per_entry = 12 + sum(map(len, separators or ()))  # "\\ud83d\\ude00" is longest
    _BUDGET.check(per_entry * text_size(value))
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators,
        sort_keys=sort_keys,
    )  # fmt: skip
    if indent is None:
        return _BUDGET.add(encoder.encode(value))
    # Python's depth of calls bounds that of the value.
    _BUDGET.check(1000 * (indent if isinstance(indent, int) else len(indent)))
    return _concatenated(encoder.iterencode(value))


def _concatenated(pieces: Iterable[str]) -> str:
    """Join pieces of a text, and count their characters as they come."""
    kept, size = [], 0
    for piece in pieces:
        kept.append(piece)
        size += len(piece)
        if size > _COUNTED_AT_ONCE:
            _BUDGET.spend(size)
            size = 0
    _BUDGET.spend(size)
    return "".join(kept)


def _raise(message: Any) -> None:
    """End the rendering with a message of the template's author."""
    _BUDGET.check_texts(message)
    raise jinja2.TemplateError(message)


# ----------------------------------------------------------------- the environment


class _BriefNamespace(Namespace):
    """A namespace whose values are not in its text."""

    def __repr__(self) -> str:
        return "<Namespace>"


class _BoundedFields:
    """Fields of `str.format` that are counted."""

    def convert_field(self, value: Any, conversion: Any) -> Any:
        _BUDGET.check_texts(value)
        return super().convert_field(value, conversion)  # pyright: ignore

    def format_field(self, value: Any, format_spec: str) -> Any:
        widths = sum(map(_number, re.findall(r"\d+", format_spec)))
        _BUDGET.spend(text_size(value) + _SPECIFIED * bool(format_spec) + widths)
        return super().format_field(value, format_spec)  # pyright: ignore


class _BoundedFormatter(_BoundedFields, jinja2.sandbox.SandboxedFormatter):
    pass


class _BoundedEscapeFormatter(_BoundedFields, jinja2.sandbox.SandboxedEscapeFormatter):
    pass


class _BoundedTemplate(jinja2.Template):
    def render(self, *arguments: Any, **named: Any) -> str:
        _BUDGET.start()
        return super().render(*arguments, **named)


class _Hooked(visitor.NodeTransformer):
    """The syntax tree of a template whose loops, filters and slices are counted."""

    def __init__(self, known: Collection[str]):
        self.known = known

    def visit_For(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _filter(node.iter, "counted")
        return node

    def visit_Concat(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        return _applied_to(_filter(nodes.List(node.nodes), "join"))

    def visit_Filter(self, node: nodes.Filter) -> nodes.Node:
        self.generic_visit(node)
        # Of another name jinja2 says that there is no such filter.
        return _applied_to(node) if node.name in self.known else node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:
        self.generic_visit(node)
        return _filter(node, "added") if isinstance(node.arg, nodes.Slice) else node

    def visit_List(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        is_long = len(node.items) > 16  # shorter ones are bounded by the turns
        return _filter(node, "added") if is_long else node

    visit_Dict = visit_List

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        return node if node.ctx == "store" else self.visit_List(node)


def _filter(node: nodes.Expr, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _applied_to(node: nodes.Filter) -> nodes.Filter:
    """Rewrite a filter to a call of `call_filter`."""
    name = nodes.Const(node.name, lineno=node.lineno)
    node.name, node.args = "applied", [name, *node.args]
    return node


class _Generation(ext.Extension):
    """`{% generation %} ... {% endgeneration %}`, around text that is trained on."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("mark")
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def mark(self, caller):
        start, end = self.environment.generation_marks  # pyright: ignore
        return f"{start}{caller()}{end}"


class _BoundedEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """A sandbox like that of transformers, with bounds of turns, time and characters.

    Attributes:
        generation_marks: the texts before and after what `{% generation %}` encloses.
    """

    template_class = _BoundedTemplate
    intercepted_binops = frozenset(("+", "-", "*", "**", "//", "%"))
    concat = staticmethod(_concatenated)

    def __init__(self, generation_marks: tuple[str, str]):
        self.generation_marks = generation_marks
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, finalize=_written,
            extensions=[_Generation, ext.loopcontrols],
        )  # fmt: skip
        for name in _ABSENT_FILTERS:
            del self.filters[name]
        self.filters.update(join=_join, replace=_replace, sum=_sum, tojson=_to_json)
        self._hooked = _Hooked(frozenset(self.filters))
        self.filters.update(counted=_counted, applied=_applied, added=_BUDGET.add)
        for name in ("upper", "lower"):
            self.tests[name] = _of_text(self.tests[name])
        del self.globals["lipsum"]
        self.globals.update(namespace=_BriefNamespace, raise_exception=_raise)

    def from_string(self, source: Any, *arguments: Any, **named: Any) -> Any:
        _BUDGET.start()
        tree = self._hooked.visit(self.parse(source))
        return super().from_string(tree, *arguments, **named)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        is_safe = super().is_safe_attribute(obj, attr, value)
        return is_safe and attr not in _ABSENT_METHODS

    def getitem(self, obj: Any, argument: Any) -> Any:
        if isinstance(argument, tuple):
            _BUDGET.check_texts(argument)  # the error for an absent key quotes it
        return super().getitem(obj, argument)

    def wrap_str_format(self, value: Any) -> Any:
        if super().wrap_str_format(value) is None:
            return None
        text, is_map = value.__self__, value.__name__ == "format_map"
        escape = getattr(text, "escape", None)
        if escape is not None:
            formatter = _BoundedEscapeFormatter(self, escape=escape)
        else:
            formatter = _BoundedFormatter(self)

        def formatted(*arguments: Any, **named: Any) -> str:
            if is_map:
                (named,), arguments = arguments, ()  # pyright: ignore
            return type(text)(formatter.vformat(text, arguments, named))

        return formatted

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        _check_operator(operator, left, right)
        return _BUDGET.add(super().call_binop(context, operator, left, right))

    def call(__self, __context: Any, __obj: Any, *arguments: Any, **named: Any) -> Any:
        _BUDGET.check()
        owner = getattr(__obj, "__self__", None)
        if isinstance(__obj, BuiltinMethodType):
            values = [*arguments, *named.values()]
            _BUDGET.check_texts(*values)  # errors of methods quote them
            _check_method(__obj.__name__, owner, values)
        result = super().call(__context, __obj, *arguments, **named)
        # Other texts are entries of a container, or were counted by `concat`.
        is_new = not isinstance(result, str) or isinstance(owner, str)
        return _BUDGET.add(result) if is_new and result is not owner else result

    def call_filter(
        self,
        name: str,
        value: Any,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        context: Any = None,
        eval_ctx: Any = None,
    ) -> Any:
        arguments = [*(args or ()), *(kwargs or {}).values()]
        _BUDGET.check_texts(name, *arguments)
        if name not in _TEXTLESS:
            _BUDGET.check_texts(value)
        _check_named(name, value, arguments)
        result = super().call_filter(name, value, args, kwargs, context, eval_ctx)
        is_new = not isinstance(result, str) or name not in _TEXTLESS
        return _BUDGET.add(result) if is_new and result is not value else result


def _written(value: Any) -> Any:
    """The value of an expression in the output, once its size is checked."""
    _BUDGET.check_texts(value)
    return value


def _of_text(test: Any) -> Any:
    """A test that converts its value to text, once its size is checked."""

    def bounded(value: Any) -> bool:
        _BUDGET.check_texts(value)
        return test(value)

    return bounded


def bounded_environment(generation_marks: tuple[str, str]) -> _BoundedEnvironment:
    """Return a sandbox like that of transformers, for which templates are written.

    `render` of its templates raises a RenderingBoundError beyond a bound.
    """
    return _BoundedEnvironment(generation_marks)


def variables(environment: jinja2.Environment, source: str) -> set[str]:
    """Variables that a template reads and does not set first."""
    return meta.find_undeclared_variables(environment.parse(source))
