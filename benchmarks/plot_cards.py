"""The README's figure: peak memory of a training step of Qwen3-8B with adapters.

    python -m benchmarks.plot_cards --out cards_h200.svg

Bars of cards_h200.csv, with a line at the memory of common cards. Colours are such that
the figure reads on a light page and on a dark one.
"""

import argparse
import inspect

from benchmarks import plot_head, results

OURS = "#2f81f7"
BARS = {  # lengths and variant: label, colour
    ("chat", "torch varlen, 4 rows"): ("PEFT", plot_head.GREY),
    ("chat", "none, 4 rows"): ("jaxmem", OURS),
    ("full", "torch checkpointed, 8 rows"): (
        "PEFT, recomputing, 8 rows", plot_head.GREY,
    ),
    ("full", "full, 4 rows"): ("jaxmem, recomputing", OURS),
    ("full", "nf4, full, 4 rows"): ("jaxmem, recomputing, 4-bit base", OURS),
    ("full", "nf4, full, 1 row of 2048"): ("the same, 1 row of 2,048", OURS),
}  # fmt: skip
CARDS = (24, 48, 80)  # GiB


def rows_of(name="cards_h200.csv"):
    """Lengths and variant to the row of Qwen3-8B with adapters."""
    return {
        (row["lengths"], row["variant"]): row
        for row in results.read(name)
        if (row["model"], row["training"]) == ("qwen3-8b", "lora")
    }


def figure(rows):
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "jaxmem"  # the same file from the same rows
    import matplotlib.pyplot as plt

    fig, ax = plt.subplots(figsize=(6.8, 2.8), layout="constrained")
    labels, colors = zip(*BARS.values(), strict=True)
    values = [float(rows[key]["device_peak_gib"]) for key in BARS]
    bars = ax.barh(labels, values, color=colors, height=0.72)
    ax.bar_label(
        bars, [f"{x:.0f}" for x in values], padding=4, fontsize=11, color=plot_head.GREY
    )
    for card in CARDS:
        ax.axvline(card, color=plot_head.GREY, linewidth=0.8, linestyle=":", zorder=0)
    ax.set_title(
        "Peak GiB while training Qwen3-8B with LoRA, 4 rows of 4,096 tokens",
        color=plot_head.GREY, fontsize=12, loc="right",
    )  # fmt: skip
    ax.set_xlim(right=1.1 * max(values))
    ax.set_xticks(CARDS, [f"{card}" for card in CARDS])
    ax.tick_params(colors=plot_head.GREY, labelsize=11, length=0)
    ax.invert_yaxis()
    ax.spines[:].set_visible(False)
    return fig


def main(arguments=None):
    parser = argparse.ArgumentParser(description=inspect.cleandoc(__doc__ or ""))
    parser.add_argument("--out", default="cards_h200.svg", help="in benchmarks/results")
    path = results.in_folder(parser.parse_args(arguments).out)
    figure(rows_of()).savefig(path, transparent=True, metadata={"Date": None})
    print("wrote", path)


if __name__ == "__main__":
    main()
