"""Limits on files that the kernel enforces."""

import contextlib
import resource


@contextlib.contextmanager
def no_file_above(size):
    """The kernel refuses what would make a file longer, after writing what fits."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
