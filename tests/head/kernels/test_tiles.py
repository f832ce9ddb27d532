"""Tiles that the chip cannot hold or multiply are refused by name."""

import dataclasses

import pytest

from jaxmem.head.kernels.tiles import Tiles


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"rows": 128}, "rows=128 must be 64"),
        ({"columns": 320}, "columns=320 must be 64, 128, 192 or 256"),
        ({"depth": 32}, "depth=32 must be a multiple of 64"),
        ({"stages": 1}, "stages=1 must be at least 2"),
        ({"group": 0}, "group=0"),
        ({"stored": 96}, "stored=96 must be a multiple of 32 that divides"),
        ({"stored": 128, "slots": 4, "stages": 2}, "slots=4 of stored=128 must hold"),
        ({"stages": 8}, "bytes of shared memory, a block has 232448"),
    ],
)
def test_tiles_say_what_does_not_fit(wrong, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(Tiles(), **wrong)
