"""Sphinx directive `gin-keys`: the keys of one section of a gin file, as a table."""

import dataclasses
import inspect

from docutils.statemachine import StringList
from sphinx.util.docutils import SphinxDirective

from jaxmem.base import fields, user_code
from jaxmem.train import configuration


class GinKeys(SphinxDirective):
    """The table of a section: key, type, default and help."""

    required_arguments = 1

    def run(self):
        """Parse the table as Markdown, where the directive stands."""
        lines = table(self.arguments[0])
        nodes = self.parse_text_to_nodes(StringList(lines, source=__file__))
        for node in nodes:  # on a phone, one cell stands below another
            node["classes"].append("gin-keys")
        return nodes


def table(section: str) -> list[str]:
    """Lines of Markdown, one row per setting of the section and of its groups."""
    lines = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for path, group in fields.groups(configuration.sections()[section]).items():
        for setting in fields.fields(group):
            if setting.group is not None:
                continue
            kind = inspect.formatannotation(setting.annotation).replace("typing.", "")
            kind = user_code.choices(setting) or kind
            key = ".".join(filter(None, (section, path, setting.path)))
            cells = f"`{key}`", f"`{kind}`", _default(setting), setting.help
            row = [cell.replace("|", "\\|") for cell in cells]
            lines.append(f"| {' | '.join(row)} |")
    return lines


def _default(setting: fields.Setting) -> str:
    is_required = setting.default is dataclasses.MISSING
    return "required" if is_required else f"`{setting.default!r}`"


def setup(app):
    """Register the directive."""
    app.add_directive("gin-keys", GinKeys)
    return {"parallel_read_safe": True}
