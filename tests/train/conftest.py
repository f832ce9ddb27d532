"""Runs share orders of documents and, where a test says so, programs."""

from tests.helpers import orders as orders
from tests.helpers.shared_programs import (
    one_program as one_program,
    programs_of_module as programs_of_module,
)
