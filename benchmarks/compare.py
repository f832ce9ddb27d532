"""jaxmem and its peers in one unit, the best GEMM of either framework; and the goals.

    python -m benchmarks.compare head_h200.csv peers_h200.csv --out compare_h200.csv \
        --goals goals_h200.csv

A path was timed beside the GEMM of its own framework. Its ratio to that one, times that
one's milliseconds over the best one's at the same shape, is its ratio to the best. Rows
count together that have the same shape, type, kind of device and day: another day's
GEMM is another card's. Measure them in one session.
"""

import argparse
import inspect

from benchmarks import results
from jaxmem.head.kernels import block_sizes

SHAPE = ("n", "d", "v", "dtype", "device", "date")
RATIOS = ("forward", "forward_backward")
LIGER, COMPILED = "Liger SM90 scaled CE", "torch.compile"
CHUNK, CLUSTERS = 1024, 66  # the default one; of an H100 or H200


def key(row):
    return tuple(row[name] for name in SHAPE)


def compare(rows):
    """A row each, with its ratios to the best GEMM and its memory, best first."""
    best = {}
    for row in rows:
        best[key(row)] = min(float(row["gemm_ms"]), best.get(key(row), float("inf")))
    made = []
    for row in rows:
        unit = best[key(row)]
        scale = float(row["gemm_ms"]) / unit
        columns = {name: row[name] for name in (*SHAPE[:4], "path")}
        columns |= {"package": row.get("package") or "jaxmem", "best_gemm_ms": unit}
        if row["path"].startswith("materialised"):
            columns["package"] = f"jax {row['jax']}"
        for name in RATIOS:
            ratio = row[f"{name}_over_gemm"]
            columns[f"{name}_ms"] = row[f"{name}_ms"]
            columns[f"{name}_over_best"] = (
                round(float(ratio) * scale, 3) if ratio else ""
            )
            columns[f"{name}_mib"] = mib(row, name)
        same = ("compile_s", "logprob_error", "entropy_error", "dh_error", "dw_error")
        columns |= {name: row.get(name) or "" for name in same}
        columns |= {f"{k}_std20": row.get(f"{k}_std20") or "" for k in same[1:]}
        made.append(columns | {name: row[name] for name in SHAPE[4:]})
    return made


def mib(row, name):
    """The allocator's peak where it was measured, otherwise the compiler's account."""
    return row.get(f"{name}_peak_mib") or row.get(f"{name}_temp_mib") or ""


def workspace_mib(row):
    """Derivatives of a chunk, and float32 sums of W's where launches add up to them."""
    n, d, v = (int(row[name]) for name in ("n", "d", "v"))
    rows, _ = block_sizes.backward_rows(n, CHUNK, v, d, False, CLUSTERS)
    return (2 * CHUNK * v + (4 * v * d if rows < n else 0)) / 2**20


def goals(rows, path):
    """(what, reached, goal) of one shape's rows; what was not measured is left out."""
    table = {row["path"]: row for row in rows}

    def of(name, column):
        text = table.get(name, {}).get(column, "")
        return float(text) if text not in ("", None) else None

    def over(a, b):
        return a / b if a is not None and b is not None else None

    fwd, both = "forward_over_best", "forward_backward_over_best"
    loss, half = of("token_loss", both), f"{path} where=half"
    made = [
        ("forward, of the best GEMM", of(path, fwd), 1.00),
        ("forward + backward, of the best GEMM", of(path, both), 4.00),
        ("the same, of Liger SM90", over(of(path, both), of(LIGER, both)), 0.93),
        ("token_loss, of the best GEMM", loss, 3.10),
        ("the same, of torch.compile", over(loss, of(COMPILED, both)), 1.00),
        ("half masked, of all", over(of(half, both), of(path, both)), 0.55),
        ("memory, MiB", of(path, "forward_backward_mib"), workspace_mib(rows[0])),
        ("compilation, s", of(path, "compile_s"), 15),
    ]  # fmt: skip
    for name in ("logprob", "entropy"):
        made.append((f"{name}, nats", of(path, f"{name}_error"), 2e-5))
        made.append((f"{name} at std 20", of(path, f"{name}_error_std20"), 2e-4))
    for name in ("dh", "dw"):
        error = f"{name}_error"
        for other in ("materialised_stats", COMPILED):  # jax's and torch's
            whose = other.removesuffix("_stats")
            made.append(
                (f"error of {name}, of {whose}'s", of(path, error), of(other, error))
            )
    return [goal for goal in made if goal[1] is not None and goal[2] is not None]


def main(arguments=None):
    parser = argparse.ArgumentParser(description=inspect.cleandoc(__doc__ or ""))
    parser.add_argument("csv", nargs="+")
    parser.add_argument("--path", default="token_stats", help="the one with goals")
    parser.add_argument("--out", default="compare.csv", help="in benchmarks/results")
    parser.add_argument("--goals", help="CSV of goals met and missed, likewise")
    args = parser.parse_args(arguments)
    rows = [row for name in args.csv for row in results.read(name)]
    made = compare(rows)
    print("wrote", results.save(args.out, made))
    judged = []
    for shape in dict.fromkeys(key(row) for row in made):
        print("N={} D={} V={} {} on {}, {}".format(*shape))
        here = [row for row in made if key(row) == shape]
        for what, reached, goal in goals(here, args.path):
            met = "met" if reached <= goal else "missed"
            print(f"  {what:40s} {reached:8.3g}  goal {goal:<8.3g} {met}")
            judged.append(
                dict(zip(SHAPE, shape, strict=True))
                | {"what": what, "reached": f"{reached:.3g}", "goal": f"{goal:.3g}"}
                | {"verdict": met}
            )
    if args.goals:
        print("wrote", results.save(args.goals, judged))


if __name__ == "__main__":
    main()
