"""The figure of sampled gradients: time against K.

    python -m benchmarks.plot_sampled --out sampled_h200.svg

It reads `sampled_h200.csv` and, for other packages, `compare_h200.csv`. Colours and
greys are such that they read on a light page and on a dark one.
"""

import argparse
import inspect

from benchmarks import results
from benchmarks.plot_head import GREY

BLUE, GREEN, ORANGE = "#2f81f7", "#3fb950", "#db6d28"
MAIN, CHUNK = {"n": "8192", "d": "4096", "v": "151936"}, "1024"
# (file, path, column, label, colour) of a horizontal line
LEVELS = (
    ("sampled_h200.csv", "logprobs, exact, forward and both gradients", "over_gemm",
     "jaxmem, exact", BLUE),
    ("compare_h200.csv", "Liger SM90 scaled CE", "forward_backward_over_best",
     "Liger SM90", GREEN),
    ("compare_h200.csv", "torch.compile", "forward_backward_over_best",
     "torch.compile, logits kept", ORANGE),
    ("sampled_h200.csv", "logprobs, exact, forward", "over_gemm",
     "jaxmem, forward only", GREY),
)  # fmt: skip


def times(rows):
    """(K, GEMMs) of the sweep over K, in order."""
    for row in sorted(rows, key=lambda row: int(row["slots"] or 0)):
        name = f"logprobs, K={row['slots']}, forward and both gradients"
        if row["path"] == name and row["data"] == "policy":
            yield int(row["slots"]), float(row["over_gemm"])


def level(rows, path, column):
    """The value of one row's column."""
    (found,) = [
        row for row in rows
        if row["path"] == path and row.get("data", "policy") == "policy"
    ]  # fmt: skip
    return float(found[column])


def of_main(name):
    """Rows of the figure's shape, and of the default chunk where they name one."""
    rows = (row for row in results.read(name) if MAIN.items() <= row.items())
    return [row for row in rows if row.get("chunk", CHUNK) == CHUNK]


def draw_times(ax):
    k, y = zip(*times(of_main("sampled_h200.csv")), strict=True)
    ax.plot(k, y, "o-", color=BLUE, linewidth=2.4, markersize=4)
    ax.annotate(
        "jaxmem, K samples", (k[-1], y[-1]), color=BLUE, fontsize=8,
        xytext=(0, 8), textcoords="offset points", ha="right",
    )  # fmt: skip
    for name, path, column, label, color in LEVELS:
        at = level(of_main(name), path, column)
        ax.axhline(at, color=color, linewidth=1.2, linestyle="--")
        ax.annotate(
            label, (k[0], at), color=color, fontsize=8,
            xytext=(0, -11 if label.startswith("jaxmem") else 3),
            textcoords="offset points",
        )  # fmt: skip
    ax.set_ylim(bottom=0)
    style(ax, k, "forward + both gradients, bare GEMM = 1")


def style(ax, slots, title):
    ax.set_title(title, color=GREY, fontsize=9, loc="left")
    ax.set_xscale("log", base=2)
    ax.set_xticks(slots, [str(k) for k in slots])
    ax.minorticks_off()
    ax.set_xlabel("K, samples of a token's derivative", color=GREY, fontsize=8)
    ax.tick_params(colors=GREY, labelsize=8)
    ax.grid(color=GREY, alpha=0.25, linewidth=0.6)
    for side, spine in ax.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(GREY)


def figure():
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "jaxmem"  # the same file from the same rows
    import matplotlib.pyplot as plt

    fig, ax = plt.subplots(figsize=(7.2, 3.4), layout="constrained")
    draw_times(ax)
    return fig


def main(arguments=None):
    parser = argparse.ArgumentParser(description=inspect.cleandoc(__doc__ or ""))
    parser.add_argument("--out", default="sampled.svg", help="in benchmarks/results")
    asked = parser.parse_args(arguments)
    path = results.in_folder(asked.out)
    figure().savefig(path, transparent=True, metadata={"Date": None})
    print("wrote", path)


if __name__ == "__main__":
    main()
