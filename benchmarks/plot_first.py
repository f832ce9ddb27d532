"""Bars of memory and time of the head, which name themselves.

    python -m benchmarks.plot_first --out first_h200.svg

Both gradients of one head at 131,072 tokens, from the committed CSVs. Colours are such
that it reads on a light page and on a dark one.
"""

import argparse
import inspect

from benchmarks import plot_head, results

CSVS = ("sampled_h200.csv", "peers_h200.csv")
TOKENS, D, V = 131072, 4096, 128256
BARS = {  # path: (label, colour)
    "torch.compile": ("torch.compile", plot_head.GREY),
    "logprobs, exact, forward and both gradients": ("jaxmem, exact", "#2f81f7"),
    plot_head.SAMPLED: ("jaxmem, sampled", "#e3405f"),
}
PANELS = (
    ("Memory of the head, GiB", plot_head.gib, "{:.1f}"),
    ("Time, seconds", lambda row: float(row["forward_backward_ms"]) / 1000, "{:.2f}"),
)


def rows_of(csvs=CSVS):
    """Path to its row at that size."""
    size = {"n": str(TOKENS), "d": str(D), "v": str(V)}
    rows = [plot_head.as_timed(row) for name in csvs for row in results.read(name)]
    return {
        row["path"]: row
        for row in rows
        if row["path"] in BARS and size.items() <= row.items()
    }


def figure(rows):
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "jaxmem"  # the same file from the same rows
    import matplotlib.pyplot as plt

    fig, axes = plt.subplots(2, 1, figsize=(4.6, 3.4), layout="constrained")
    for ax, (title, value, shown) in zip(axes, PANELS, strict=True):
        labels, colors = zip(*BARS.values(), strict=True)
        values = [value(rows[path]) for path in BARS]
        bars = ax.barh(labels, values, color=colors, height=0.72)
        ax.bar_label(
            bars, [shown.format(x) for x in values], padding=4, fontsize=11,
            color=plot_head.GREY,
        )  # fmt: skip
        ax.set_title(title, color=plot_head.GREY, fontsize=12, loc="left")
        ax.set_xlim(right=1.15 * max(values))
        ax.set_xticks([])
        ax.tick_params(colors=plot_head.GREY, labelsize=11, length=0)
        ax.invert_yaxis()
        ax.spines[:].set_visible(False)
    return fig


def main(arguments=None):
    parser = argparse.ArgumentParser(description=inspect.cleandoc(__doc__ or ""))
    parser.add_argument("--out", default="first_h200.svg", help="in benchmarks/results")
    path = results.in_folder(parser.parse_args(arguments).out)
    figure(rows_of()).savefig(path, transparent=True, metadata={"Date": None})
    print("wrote", path)


if __name__ == "__main__":
    main()
