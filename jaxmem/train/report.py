"""Deprecated path of `jaxmem.train.output.report`."""

import warnings

from jaxmem.train.output.report import (
    ReportPage as ReportPage,
    Steps as Steps,
    finish as finish,
    write as write,
)

warnings.warn(
    "jaxmem.train.report is deprecated and will be removed in the next version: "
    "import jaxmem.train.output.report",
    DeprecationWarning,
    stacklevel=2,
)
