"""Documents, vocabularies and tasks: from files to packed batches."""

import typing

from jaxmem.base import imports

imports.require(__name__, "train", "grain", "tokenizers")

if typing.TYPE_CHECKING:
    from jaxmem.data import (
        chat as chat,
        documents as documents,
        streams as streams,
        tasks as tasks,
        vocabulary as vocabulary,
    )
else:
    __getattr__, __dir__ = imports.lazy(
        __name__, "chat", "documents", "streams", "tasks", "vocabulary"
    )
