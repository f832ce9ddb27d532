"""Verbs whose head is described by keywords, for tests with dictionaries of options."""

import dataclasses
import functools
import inspect

from jaxmem.core.head import as_head

FIELDS = ("bias", "softcap", "vocab_size", "layout")
_PREFIXES = ("", "reference_")


def described(verb):
    """The verb, with fields of its heads among its keywords: softcap=5.0, say.

    A reference has the policy's softcap and vocab_size, if none of its own is given.
    """

    @functools.wraps(verb)
    def run(*args, **options):
        own, other = (_taken(options, prefix) for prefix in _PREFIXES)
        call = inspect.signature(verb).bind(*args, **options)
        if "reference_W" in call.arguments:
            other = {k: own[k] for k in ("softcap", "vocab_size") if k in own} | other
        for name, fields in (("W", own), ("reference_W", other)):
            if fields:
                head = as_head(call.arguments[name])
                call.arguments[name] = dataclasses.replace(head, **fields)
        return verb(*call.args, **call.kwargs)

    return run


def _taken(options, prefix):
    names = {f"{prefix}{field}": field for field in FIELDS}
    return {field: options.pop(k) for k, field in names.items() if k in options}
