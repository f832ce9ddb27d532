"""Packed rows: how full they are, and how often a document comes in the first epoch.

python -m benchmarks.run_packing --commit 1234abcd --out PART.csv
"""

import argparse
import collections
import itertools

import numpy as np

from benchmarks import results
from jaxmem.data.config import DataConfig
from jaxmem.data.documents import packed_batches

EPOCHS = 4  # whose batches are measured
LENGTHS = {  # tokens of a document, as fractions of a row
    "short": lambda rng, n: rng.lognormal(np.log(0.1), 0.8, n),
    "any": lambda rng, n: rng.uniform(0.02, 1.0, n),
}


def measure(lengths, documents, sequence_length, batch_size):
    """One row: the share of slots that hold a token, and documents by their count."""
    rng = np.random.default_rng(0)
    tokens = np.ceil(LENGTHS[lengths](rng, documents) * sequence_length)
    tokens = np.clip(tokens, 2, sequence_length).astype(int)
    pieces = [
        {"tokens": np.full(n, i, np.int32), "labels": np.full(n, i, np.int32)}
        for i, n in enumerate(tokens)
    ]
    config = DataConfig(sequence_length=sequence_length, batch_size=batch_size)
    sources = [0] * documents
    epoch = sum(1 for _ in packed_batches(pieces, config, 1, sources))
    filled, seen, again = 0, collections.Counter(), 0
    made = packed_batches(pieces, config, None, sources)
    for number, batch in enumerate(itertools.islice(made, EPOCHS * epoch)):
        filled += int((batch.segment_ids > 0).sum())
        if number == epoch:
            missed = documents - len(seen)
        if len(seen) < documents:
            again = sum(count > 1 for count in seen.values())
        # A document begins where its position is 0.
        begins = (batch.positions == 0) & (batch.segment_ids > 0)
        seen.update(batch.tokens[begins].tolist())
    slots = EPOCHS * epoch * batch_size * sequence_length
    return {
        "lengths": lengths,
        "documents": documents,
        "sequence_length": sequence_length,
        "batch_size": batch_size,
        "rows_per_epoch": round(tokens.sum() / sequence_length, 1),
        "efficiency_percent": round(100 * filled / slots, 2),
        # in the batches of the first epoch
        "never_seen_percent": round(100 * missed / documents, 2),
        # before every document had come once
        "seen_again_percent": round(100 * again / documents, 2),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commit", required=True, help="of the code that is measured")
    parser.add_argument("--out", default="packing_cpu.csv")
    arguments = parser.parse_args()
    sizes = {"short": (200, 800, 2400, 8000), "any": (60, 210, 600, 2000)}
    rows = [
        {"commit": arguments.commit, **measure(lengths, documents, length, 8)}
        for lengths, some in sizes.items()
        for documents in some
        for length in (256, 2048)
    ]
    print(*rows, "wrote", results.write(arguments.out, rows), sep="\n")
