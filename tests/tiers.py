"""Print the tests that a tier alone runs, from their markers.

    python -m tests.tiers slow
    python -m tests.tiers full

A line is a file, then its test functions whose cases all have the marker; "(3 of 5)"
follows a function of which only some cases have it.
"""

import collections
import contextlib
import io
import sys
from collections.abc import Iterable

import pytest

TIERS = ("slow", "full")  # a case that has both markers is slow


class _Collected:
    """A plugin that keeps the collected tests."""

    items: list[pytest.Item]

    def pytest_collection_finish(self, session):
        self.items = session.items


def tier_of(item: pytest.Item) -> str | None:
    """The tier of a test: "slow", "full", or None for a quick one."""
    markers = {marker.name for marker in item.iter_markers()}
    return next((tier for tier in TIERS if tier in markers), None)


def lines(items: Iterable[pytest.Item], tier: str) -> list[str]:
    """One line for each file that has tests of the tier."""
    marked, cases = collections.Counter(), collections.Counter()
    for item in items:
        file, _, name = item.nodeid.partition("[")[0].partition("::")
        cases[file, name] += 1
        marked[file, name] += tier_of(item) == tier
    files = collections.defaultdict(list)
    for (file, name), count in marked.items():
        of = "" if count == cases[file, name] else f" ({count} of {cases[file, name]})"
        if count:
            files[file].append(name.removeprefix("test_") + of)
    return [f"{file}: {', '.join(names)}" for file, names in files.items()]


def main() -> int:
    tier = sys.argv[1] if sys.argv[1:] else ""
    if tier not in TIERS:
        print(f"error: name a tier, one of {', '.join(TIERS)}", file=sys.stderr)
        return 2
    collected = _Collected()
    with contextlib.redirect_stdout(io.StringIO()) as report:
        status = pytest.main(["--collect-only", "-m", "", "-n", "0"], [collected])
    print("\n".join(lines(collected.items, tier)) if status == 0 else report.getvalue())
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
