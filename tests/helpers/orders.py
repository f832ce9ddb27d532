"""Orders of documents, which several runs and streams of a test module share."""

import contextlib
import functools

with contextlib.suppress(ImportError):  # only time is lost without it
    from grain._src.python.experimental.index_shuffle.python import (
        index_shuffle_module,
    )

    # A pure function of integers. Where there are few documents, each call
    # takes milliseconds, which were a tenth of the jobs' tests.
    index_shuffle_module.index_shuffle = functools.cache(
        index_shuffle_module.index_shuffle
    )
