"""Kernels without a GPU: lowered for one, and in the interpreter."""

from tests.helpers.interpreter import (
    all_rows_interpreted as all_rows_interpreted,
    interpreted as interpreted,
    lowered_anywhere as lowered_anywhere,
    rows_interpreted as rows_interpreted,
)
