"""The figure of a deep stack's policies: time of a step against GiB of the device.

python -m benchmarks.plot_offload offload_h200.csv --out offload_h200.svg
"""

import argparse
import inspect
import re

from benchmarks import plot_head, results

COLORS = {"offload": "#2f81f7", "full": "#d29922", "save": "#3fb950"}


def has_point(variant) -> bool:
    """True if a variant has the usual sizes, weights and compiler options."""
    words = [word.partition("=") for word in variant.split()[1:]]
    return all(key in ("last", "save") and ":" not in value for key, _, value in words)


def points(rows):
    """(variant, colour, GiB, time over the first variant's) of each measured row."""
    for row in rows:
        variant = row["variant"]
        if has_point(variant) and row.get("peak_gib") and row.get("over_first"):
            color = COLORS.get(re.split("[_ ]", variant)[0], plot_head.GREY)
            yield variant, color, float(row["peak_gib"]), float(row["over_first"])


def figure(rows):
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "jaxmem"  # the same file from the same rows
    import matplotlib.pyplot as plt

    fig, ax = plt.subplots(figsize=(7.2, 3.8), layout="constrained")
    drawn = sorted(points(rows), key=lambda point: point[2])
    middle = (drawn[0][2] + drawn[-1][2]) / 2
    for label, color, gib, ratio in drawn:
        ax.plot(gib, ratio, "o", color=color, markersize=6)
        left = gib > middle or label.startswith("offload")  # where there is room
        ax.annotate(
            label, (gib, ratio), color=color, fontsize=8, va="center",
            xytext=(-7 if left else 7, 0), textcoords="offset points",
            ha="right" if left else "left",
        )  # fmt: skip
    ax.set_title(
        "time of a step, full = 1", color=plot_head.GREY, fontsize=9, loc="left"
    )
    ax.set_xlabel("GiB at the peak", color=plot_head.GREY, fontsize=8)
    ax.margins(x=0.32, y=0.12)
    ax.tick_params(colors=plot_head.GREY, labelsize=8)
    ax.grid(color=plot_head.GREY, alpha=0.25, linewidth=0.6)
    for side, spine in ax.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(plot_head.GREY)
    return fig


def main(arguments=None):
    parser = argparse.ArgumentParser(description=inspect.cleandoc(__doc__ or ""))
    parser.add_argument("csv")
    parser.add_argument("--out", default="offload.svg", help="in benchmarks/results")
    args = parser.parse_args(arguments)
    path = results.in_folder(args.out)
    metadata = {"Date": None} if path.suffix == ".svg" else None
    figure(results.read(args.csv)).savefig(
        path, dpi=160, transparent=True, metadata=metadata
    )
    print("wrote", path)


if __name__ == "__main__":
    main()
