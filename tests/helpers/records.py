"""Recorded outputs of tiny models of each family."""

import functools

import numpy as np

from tests.helpers import seeded

RECORDED = sorted(path.stem for path in seeded.RECORDS.glob("*.npz"))


@functools.cache
def record(name):
    return dict(np.load(seeded.RECORDS / f"{name}.npz"))


def forward(decoder, tokens, segment_ids, positions):
    return decoder.logits(decoder(tokens, segment_ids, positions))
