"""Documents, vocabularies and tasks: from files to packed batches."""

from jaxmem import _imports

_imports.require(__name__, "train", "grain", "tokenizers")

__getattr__, __dir__ = _imports.lazy(
    __name__, "chat", "documents", "streams", "tasks", "vocabulary"
)
