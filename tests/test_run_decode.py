"""The benchmark of decoding: its variants, its counts, and both sides at tiny sizes."""

import importlib.util
import json

import pytest

from benchmarks import decode_jax, results, run_decode, trace_summary, workers
from jaxmem.models.decoder import ModelConfig
from tests.helpers import decoders

pytestmark = pytest.mark.usefixtures("quick_compilation")

TINY = [
    "--shrink=16", "--part=2", "--parts=2", "--rows=4", "--only=top_k",
    "model.layers=2", "model.hidden=16", "model.ff=24", "model.heads=2",
    "model.kv_heads=1", "model.head_dim=8", "model.vocab_size=300",
]  # fmt: skip


def test_bytes_of_step_and_operations_of_prefill():
    sizes = ModelConfig(
        layers=3, hidden=8, ff=16, heads=4, kv_heads=2, head_dim=4, vocab_size=32,
        tied=False, dtype="bfloat16",
    )  # fmt: skip
    decoder = decoders.drawn(sizes)
    layer = 8 * 16 + 2 * 8 * 8 + 16 * 8 + 3 * 8 * 16  # q; k, v; output; feed-forward
    assert decode_jax.matrices(decoder, 0) == (3 * layer, 8 * 32)
    keys_and_values = 3 * 5 * 10 * 2 * 2 * 4  # layers, rows, tokens, both, heads, width
    read = decode_jax.read_bytes(decoder, rows=5, tokens=10)
    assert read == 2 * (3 * layer + 8 * 32 + keys_and_values)
    sparse = sizes.replaced(
        {
            "feed_forwards": ("experts",),
            "experts.count": 4,
            "experts.per_token": 2,
            "experts.ff": 6,
        }
    )
    mixed = decoders.drawn(sparse)
    expert = 3 * 8 * 6
    chosen = 4 * (1 - 0.5**5)  # of five rows
    routed = layer - 3 * 8 * 16 + 8 * 4 + chosen * expert
    more = decode_jax.read_bytes(mixed, rows=5, tokens=10) - read
    assert more == pytest.approx(2 * 3 * (routed - layer))
    scores_and_mixing = 3 * 5 * 4 * (2 * 2 * 4 * 10 * 10 // 2)  # half of them, causal
    computed = decode_jax.prefill_operations(decoder, rows=5, width=10)
    assert computed == 2 * 5 * (10 * 3 * layer + 8 * 32) + scores_and_mixing


def rows_of(monkeypatch, tmp_path, module, arguments):
    """The rows that one side's worker makes, run in this process."""

    def start(name, environment, arguments):
        assert name == module.__name__
        with pytest.MonkeyPatch.context() as patch:
            sent = []
            patch.setattr(workers, "send", sent.append)
            module.main(*arguments)
        return json.loads(json.dumps(sent))

    monkeypatch.setattr(workers, "start", start)
    out = tmp_path / "decode.csv"
    run_decode.main([f"--out={out}", *arguments])
    return results.read(out)


def test_transformers_side(monkeypatch, tmp_path):
    for package in ("torch", "transformers"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    from benchmarks import decode_torch

    monkeypatch.setattr(decode_torch, "CACHES", {"transformers": "dynamic"})
    rows = rows_of(monkeypatch, tmp_path, decode_torch, [*TINY, "--side=torch"])
    assert [row["path"] for row in rows] == ["transformers"]
    assert float(rows[0]["step_ms"]) > 0 and rows[0].get("note", "") == ""


@pytest.mark.slow
def test_no_variant_starts_when_no_time_is_left(monkeypatch, tmp_path, capsys):
    out = tmp_path / "decode.csv"
    monkeypatch.setattr(run_decode.results, "merge", None)  # nothing is written
    monkeypatch.setattr(
        workers, "start", lambda _, __, job: decode_jax.main(*job) or ()
    )
    run_decode.main([f"--out={out}", *TINY, "--side=jax", "--seconds=-1"])
    assert "no time is left for top_k=50" in capsys.readouterr().out


def test_unknown_variant_is_refused():
    with pytest.raises(SystemExit, match="no variant is left; there are: temperature,"):
        run_decode.main(["--only=top_q"])


def test_summary_of_longest_kernels():
    events = [
        (f"nvjet_{name} ", "jit(advance)/while/body/dot_general", start, duration)
        for name, start, duration in (("a", 0, 4e6), ("b", 5e6, 6e6), ("a", 12e6, 4e6))
    ]
    made = trace_summary.kernels(events, steps=2, most=1)
    assert made == [
        {
            "class": "products", "ms": 4.0, "share": 0.5714, "kernels": 1.0,
            "kernel": "nvjet_a | jit(advance)/while/body/dot_general",
        }
    ]  # fmt: skip
    assert len(trace_summary.kernels(events, steps=2)) == 2
