"""Outputs of cells in one piece: IPython sends what a shell prints in pieces.

A piece may end inside the code of a colour, which no lexer reads.
"""

import traitlets
from nbclient import client


class WholeOutputs(client.NotebookClient):
    """Execution that joins the pieces of a cell's output."""

    coalesce_streams = traitlets.Bool(True)


def setup(app):
    """Let the executor of notebooks use it."""
    client.NotebookClient = WholeOutputs
    return {"parallel_read_safe": True}
