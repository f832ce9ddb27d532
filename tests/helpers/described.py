"""Verbs whose head is described by keywords, for tests with dictionaries of options."""

import dataclasses
import functools
import inspect

from jaxmem.head.maths.head import as_head

FIELDS = ("bias", "softcap", "vocab_size", "layout")


def described(verb):
    """The verb, with the fields of a head among its keywords: softcap=5.0, say."""

    @functools.wraps(verb)
    def run(*args, **options):
        own = {k: options.pop(k) for k in FIELDS if k in options}
        call = inspect.signature(verb).bind(*args, **options)
        if own:
            head = as_head(call.arguments["W"])
            call.arguments["W"] = dataclasses.replace(head, **own)
        return verb(*call.args, **call.kwargs)

    return run
