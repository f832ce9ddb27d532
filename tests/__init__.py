"""The tests. Assertions of their helpers show values, as those of test files do."""

import pytest

pytest.register_assert_rewrite("tests.helpers")
