"""The figure of a deep stack's policies: milliseconds a step against GiB of the device.

python -m benchmarks.plot_offload offload_h200.csv --out offload_h200.svg
"""

import argparse
import inspect

from benchmarks import plot_head, results

# How a variant is said, and where beside its point; those of another size are left out.
LABELS = {
    "none": ("none", (6, 0)),
    "full": ("full", (7, 4)),
    "dots": ("dots", (7, 2)),
    "save_attention": ("save_attention", (7, 2)),
    "offload_block": ("offload_block", (7, 4)),
    "offload_attention": ("offload_attention", (7, 2)),
    "full last=4:none": ("full, 4 kept", (7, 2)),
    "full last=6:none": ("full, 6 kept", (7, -8)),
    "offload_block save=attn_lse": ("offload_block, attention saved", (7, 2)),
    "offload_block last=4:none": ("offload_block, 4 kept", (-4, -12)),
    "offload_block last=7:none": ("offload_block, 7 kept", (7, -9)),
}
COLORS = {"offload": "#2f81f7", "full": "#d29922"}


def points(rows):
    """(label, offset, colour, GiB, ms) of what ran, once by device."""
    for row in rows:
        if row["variant"] in LABELS and row.get("peak_gib") and row["ms"][0].isdigit():
            label, offset = LABELS[row["variant"]]
            first = row["variant"].split("_")[0].split(" ")[0]
            color = COLORS.get(first, plot_head.GREY)
            yield label, offset, color, float(row["peak_gib"]), float(row["ms"])


def figure(rows):
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "jaxmem"  # the same file from the same rows
    import matplotlib.pyplot as plt

    fig, ax = plt.subplots(figsize=(7.2, 3.8), layout="constrained")
    for label, offset, color, gib, ms in points(rows):
        ax.plot(gib, ms, "o", color=color, markersize=6)
        ax.annotate(
            label, (gib, ms), color=color, fontsize=8, xytext=offset,
            textcoords="offset points",
        )  # fmt: skip
    ax.set_title("ms a step, by GiB of the device", color=plot_head.GREY, fontsize=9,
                 loc="left")  # fmt: skip
    ax.set_xlabel("GiB at the peak", color=plot_head.GREY, fontsize=8)
    ax.margins(x=0.15, y=0.12)
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
