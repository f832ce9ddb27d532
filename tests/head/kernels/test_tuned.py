"""The table of measured tiles: what it holds, and what it may change."""

import dataclasses
import json

import pytest

from jaxmem.head.kernels import tuned
from jaxmem.head.kernels.tiles import MAX_CLUSTER_ROWS, SampledLaunch, Tiles

HEAD = tuned.TunedKey("NVIDIA H200", 4096, 151936, "vd")


@pytest.fixture
def table(monkeypatch):
    """Puts entries in the place of the shipped ones."""

    def put(entries):
        read = dict(tuned._read_entry(i, entry) for i, entry in enumerate(entries))
        monkeypatch.setattr(tuned, "table", lambda: read)

    return put


def test_shipped_table_can_be_read():
    for (kernel, _), tiles in tuned.table().items():
        expected = SampledLaunch if kernel in tuned.LAUNCHES else Tiles
        assert isinstance(tiles, expected)


def test_entry_serves_its_head_only(table):
    better = dataclasses.replace(tuned.DEFAULTS["derivative"], panel=16, stages=3)
    entry = tuned.entry_of("derivative", HEAD, better, {"ms": 1.0, "date": "today"})
    assert entry["tiles"] == {"panel": 16, "stages": 3}
    table([json.loads(json.dumps(entry))])
    assert tuned.tiles_for("derivative", HEAD) == better
    for other in (
        dataclasses.replace(HEAD, depth=2048),
        dataclasses.replace(HEAD, layout="dv"),
        dataclasses.replace(HEAD, device="NVIDIA H100"),
    ):
        assert tuned.tiles_for("derivative", other) == tuned.DEFAULTS["derivative"]
    assert tuned.tiles_for("to_W", HEAD) == tuned.DEFAULTS["to_W"]


def test_launch_for_takes_an_entry_of_its_head_alone(table):
    better = SampledLaunch(at_once=4, unroll=4, sums=16)
    entry = tuned.entry_of("sampled_to_W", HEAD, better, {"ms": 1.0})
    assert entry["tiles"] == {"at_once": 4, "sums": 16}
    table([json.loads(json.dumps(entry))])
    assert tuned.launch_for("sampled_to_W", HEAD) == better
    wider, default = dataclasses.replace(HEAD, depth=8192), tuned.LAUNCHES
    assert tuned.launch_for("sampled_to_W", wider) == default["sampled_to_W"]
    assert tuned.launch_for("sampled_pieces", HEAD) == default["sampled_pieces"]


@pytest.mark.parametrize(
    "launch, message",
    [
        ({"at_once": 3}, "at_once=3 must be 1, 2, 4 or 8"),
        ({"unroll": 64}, "unroll=64 must be a power of two and at most 32"),
        ({"sums": 0}, "sums=0 must be at least 1"),
        ({"panel": 4}, "panel"),
    ],
)
def test_launch_that_no_kernel_has_is_named(launch, message):
    default = tuned.LAUNCHES["sampled_to_W"]
    entry = tuned.entry_of("sampled_to_W", HEAD, default, {}) | {"tiles": launch}
    with pytest.raises(ValueError, match=f"tuned.json: entry 0.*{message}"):
        tuned._read_entry(0, entry)


@pytest.mark.parametrize("depth, columns", [(4096, 256), (640, 128), (576, 192)])
def test_product_tiles_cover_few_extra_columns(depth, columns):
    head = dataclasses.replace(HEAD, depth=depth)
    assert tuned.tiles_for("to_hidden", head).columns == columns
    assert tuned.tiles_for("to_W", head).columns == columns
    # Columns of W's gradient are those of the vocabulary there, in blocks of 256.
    across = dataclasses.replace(head, layout="dv")
    assert tuned.tiles_for("to_W", across).columns == 256


def test_statistics_and_exps_add_up_in_one_order(table):
    """Storing exponentials for the derivative must not change a bit of the result."""
    grouped = dataclasses.replace(tuned.DEFAULTS["statistics"], group=2)
    table([tuned.entry_of("statistics", HEAD, grouped, {})])
    assert tuned.tiles_for("exps", HEAD).group == 2


@pytest.mark.parametrize(
    "change, message",
    [
        ({"kernel": "sort"}, "no kernel 'sort'"),
        ({"tiles": {"columns": 320}}, "columns=320"),
        ({"tiles": {"colour": 1}}, "colour"),
        ({"tiles": {"stages": 9}}, "bytes of shared memory"),
    ],
)
def test_unusable_entry_is_named(change, message):
    entry = tuned.entry_of("to_W", HEAD, tuned.DEFAULTS["to_W"], {})
    with pytest.raises(ValueError, match=f"tuned.json: entry 3.*{message}"):
        tuned._read_entry(3, entry | change)
    with pytest.raises(ValueError, match="entry 0.*'layout'"):
        tuned._read_entry(0, {k: v for k, v in entry.items() if k != "layout"})


@pytest.mark.parametrize("kernel", tuned.DEFAULTS)
def test_blocks_of_rows_are_whole_clusters(kernel):
    assert MAX_CLUSTER_ROWS % tuned.DEFAULTS[kernel].cluster_rows == 0
