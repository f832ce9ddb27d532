"""The figure of the sweep over tokens: milliseconds and GiB, from the committed CSVs.

    python -m benchmarks.plot_head head_h200.csv peers_h200.csv sampled_h200.csv \
        --d 4096 --v 128256 --out head_h200.svg

Sampled gradients have been timed at fewer sizes: theirs may be a single point. Colours
and greys are such that it reads on a light page and on a dark one.
"""

import argparse
import inspect

from benchmarks import compare, results
from jaxmem.base.timing import OUT_OF_MEMORY

GREY = "#8b949e"
SAMPLED = "logprobs, K=128, forward and both gradients"
# path: (label, colour, line); those that a CSV lacks are left out
LINES = {
    "token_stats": ("jaxmem", "#2f81f7", "o-"),
    SAMPLED: ("jaxmem, sampled (K=128)", "#e3405f", "*-"),
    "token_stats implementation=xla": ("jaxmem, backend xla", "#58a6ff", "o--"),
    "materialised": ("jax, materialised", "#d29922", "s-"),
    "torch.compile": ("torch.compile, materialised", "#db6d28", "s--"),
    "Liger SM90 scaled CE": ("Liger SM90", "#3fb950", "^-"),
    "verl": ("verl Triton", "#a371f7", "v-"),
    "CCE filtered": ("CCE, filtered", "#f778ba", "D-"),
    "tokamax chunked_xla": ("tokamax chunked_xla", "#39c5cf", "P-"),
}


def ms_per_1024(row):
    return float(row["forward_backward_ms"]) * 1024 / int(row["n"])


def gib(row):
    return float(compare.mib(row, "forward_backward")) / 1024


PANELS = (
    ("forward + backward, ms per 1,024 tokens", ms_per_1024),
    ("memory beyond inputs and gradients, GiB", gib),
)


def as_timed(row):
    """The row of a sweep; one of `run_sampled.py` under the sweep's column names."""
    if "over_gemm" not in row:
        return row
    names = ("ms", "over_gemm", "temp_mib")
    return row | {f"forward_backward_{name}": row[name] for name in names}


def lines(rows, d, v):
    """Path to its rows, of one D and V, by tokens."""
    made = {path: [] for path in LINES}
    for row in map(as_timed, rows):
        if row.get("data", "policy") != "policy":  # as peaked as a trained policy's
            continue
        if row["path"] in made and (row["d"], row["v"]) == (str(d), str(v)):
            made[row["path"]].append(row)
    by_tokens = {k: sorted(x, key=lambda row: int(row["n"])) for k, x in made.items()}
    return {path: points for path, points in by_tokens.items() if any(map(ran, points))}


def ran(row):
    return row["forward_backward_over_gemm"] != ""


def draw(ax, path, points, value):
    """A line where the path ran; a word where it ran out of memory."""
    label, color, line = LINES[path]
    there = [row for row in points if ran(row)]
    x, y = [int(row["n"]) for row in there], [value(row) for row in there]
    wide = 2.4 if path == "token_stats" else 1.3
    size = 11 if path == SAMPLED else 4
    ax.plot(x, y, line, color=color, label=label, linewidth=wide, markersize=size)
    beyond = [row for row in points if row["forward_backward_ms"] == OUT_OF_MEMORY]
    if beyond and value is gib:
        ax.annotate(
            f" {OUT_OF_MEMORY}", (x[-1], y[-1]), color=color, fontsize=7, va="center",
            xytext=(4, 0), textcoords="offset points",
        )  # fmt: skip


def style(ax, tokens, title):
    ax.set_title(title, color=GREY, fontsize=9, loc="left")
    ax.set_xscale("log", base=2)
    ax.set_xticks(tokens, [f"{n // 1024}k" for n in tokens])
    ax.minorticks_off()
    ax.set_xlabel("tokens", color=GREY, fontsize=8)
    ax.tick_params(colors=GREY, labelsize=8)
    ax.grid(color=GREY, alpha=0.25, linewidth=0.6)
    for side, spine in ax.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(GREY)


def figure(rows, d, v):
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "jaxmem"  # the same file from the same rows
    import matplotlib.pyplot as plt

    drawn = lines(rows, d, v)
    tokens = sorted({int(row["n"]) for points in drawn.values() for row in points})
    fig, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for ax, (title, value) in zip(axes, PANELS, strict=True):
        for path, points in drawn.items():
            draw(ax, path, points, value)
        style(ax, tokens, title)
    axes[0].set_ylim(bottom=0)
    axes[1].set_yscale("log")
    axes[1].yaxis.set_major_formatter("{x:g}")
    axes[1].minorticks_off()
    handles, labels = axes[0].get_legend_handles_labels()
    legend = fig.legend(
        handles, labels, loc="outside lower center", ncols=4, fontsize=8, frameon=False
    )
    for text in legend.get_texts():
        text.set_color(GREY)
    return fig


def main(arguments=None):
    parser = argparse.ArgumentParser(description=inspect.cleandoc(__doc__ or ""))
    parser.add_argument("csv", nargs="+")
    parser.add_argument("--d", type=int, default=4096)
    parser.add_argument("--v", type=int, default=128256)
    parser.add_argument("--out", default="head.svg", help="in benchmarks/results")
    args = parser.parse_args(arguments)
    rows = [row for name in args.csv for row in results.read(name)]
    path = results.in_folder(args.out)
    metadata = {"Date": None} if path.suffix == ".svg" else None
    figure(rows, args.d, args.v).savefig(
        path, dpi=160, transparent=True, metadata=metadata
    )
    print("wrote", path)


if __name__ == "__main__":
    main()
