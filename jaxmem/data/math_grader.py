"""The program of a process that compares answers by math-verify.

A line of stdin is a JSON object {"expected": LaTeX, "answer": LaTeX, "seconds": limit},
and the line of stdout that answers it is one of OUTCOMES. A comparison that exceeds its
limit ends the process. Nothing of jaxmem is imported.
"""

import functools
import json
import logging
import signal
import sys

RIGHT, WRONG, UNREADABLE, NOT_EXPECTED = OUTCOMES = (
    "right", "wrong", "answer unreadable", "expected answer unreadable",
)  # fmt: skip
_MEMORY = 4 * 2**30  # bytes of the process, since 10^10^10 is an answer, too


def main() -> None:
    """Compare until stdin ends."""
    import math_verify

    config = [math_verify.LatexExtractionConfig(boxed_match_priority=0)]

    @functools.lru_cache(maxsize=4096)
    def read(latex: str) -> list:
        # Limits of math-verify's own would use the alarm that ends this process.
        parsed = math_verify.parse(
            f"\\boxed{{{latex}}}", extraction_config=config, parsing_timeout=0
        )
        return [] if not parsed or isinstance(parsed[0], str) else parsed

    def compare(expected: str, answer: str) -> str:
        if not (right := read(expected)):
            return NOT_EXPECTED
        try:
            given = read(answer)
        except (MemoryError, RecursionError):
            given = []
        if not given:
            return UNREADABLE
        equal = math_verify.verify(right, given, timeout_seconds=0)
        return RIGHT if equal else WRONG

    replies, sys.stdout = sys.stdout, sys.stderr  # prints of a library are no replies
    logging.disable()
    _limit_memory()
    compare(r"\frac{x}{2}", "x = 1")  # the first comparison builds the parser
    print("ready", file=replies, flush=True)
    for line in sys.stdin:
        pair = json.loads(line)
        # Without a handler the signal ends the process, also inside of an operation
        # that Python cannot interrupt.
        signal.setitimer(signal.ITIMER_REAL, pair["seconds"])
        outcome = compare(pair["expected"], pair["answer"])
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(outcome, file=replies, flush=True)


def _limit_memory() -> None:
    import resource

    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = _MEMORY if hard == resource.RLIM_INFINITY else min(_MEMORY, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


if __name__ == "__main__":
    main()
