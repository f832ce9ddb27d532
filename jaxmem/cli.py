"""Deprecated path of `jaxmem.commands.cli`."""

import warnings

from jaxmem.commands.cli import (
    UsageError as UsageError,
    main as main,
)

warnings.warn(
    "jaxmem.cli is deprecated and will be removed in the next version: "
    "import jaxmem.commands.cli",
    DeprecationWarning,
    stacklevel=2,
)
