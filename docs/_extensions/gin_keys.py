"""Sphinx directive `gin-keys`: the keys of one section of a gin file, as a table."""

import dataclasses
import inspect
import io
import tokenize

from docutils.statemachine import StringList
from sphinx.util.docutils import SphinxDirective

from jaxmem.base import user_code
from jaxmem.train import configuration


class GinKeys(SphinxDirective):
    """The table of a section: key, type, default, and the comment of its field."""

    required_arguments = 1

    def run(self):
        """Parse the table as Markdown, where the directive stands."""
        lines = table(self.arguments[0])
        nodes = self.parse_text_to_nodes(StringList(lines, source=__file__))
        for node in nodes:  # on a phone, one cell stands below another
            node["classes"].append("gin-keys")
        return nodes


def table(section: str) -> list[str]:
    """Lines of Markdown, one row per field of the section's dataclass."""
    made = configuration.sections()[section]
    comments = field_comments(made)
    lines = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for field in dataclasses.fields(made):
        kind = inspect.formatannotation(field.type).replace("typing.", "")
        kind = user_code.choices(field) or kind
        cells = f"`{section}.{field.name}`", f"`{kind}`", _default(field)
        row = [cell.replace("|", "\\|") for cell in (*cells, comments[field.name])]
        lines.append(f"| {' | '.join(row)} |")
    return lines


def _default(field) -> str:
    if field.default is not dataclasses.MISSING:
        return f"`{field.default!r}`"
    if field.default_factory is not dataclasses.MISSING:
        return f"`{field.default_factory()!r}`"
    return "required"


def field_comments(made: type) -> dict[str, str]:
    """The comment beside each field of a dataclass, or in the lines above it."""
    found: dict[str, str] = {}
    names = {field.name for field in dataclasses.fields(made)}
    above: list[str] = []
    name, depth = "", 0
    for token in tokenize.generate_tokens(
        io.StringIO(inspect.getsource(made)).readline
    ):
        starts_line = token.line[: token.start[1]].strip() == ""
        if token.type == tokenize.COMMENT:
            text = token.string.lstrip("# ")
            if starts_line and depth == 0:
                above.append(text)
            elif name:
                found[name] = f"{found[name]} {text}".strip()
        elif token.type == tokenize.OP:
            depth += (token.string in "([{") - (token.string in ")]}")
        elif token.type == tokenize.NAME and starts_line and depth == 0:
            name = token.string if token.string in names else ""
            if name:
                found.setdefault(name, " ".join(above))
            above = []
    return {name: found.get(name, "") for name in names}


def setup(app):
    """Register the directive."""
    app.add_directive("gin-keys", GinKeys)
    return {"parallel_read_safe": True}
