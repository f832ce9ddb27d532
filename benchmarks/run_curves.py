"""Learning curves of the shipped arithmetic jobs, as they are and with their savings.

    python -m benchmarks.run_curves

Each config runs with three seeds: as shipped, and with prompts that are read once a
group and slots that are refilled. Savings change what is computed and when, not what is
learned: curves differ by rounding, which the optimizer enlarges.
"""

import argparse
import itertools

from benchmarks import results, run_grpo

VARIANTS = {
    "as shipped": (),
    "savings": ("grpo.share_prompts=True", "grpo.row_lengths=(32,)",
                "sampling.slots=128"),
}  # fmt: skip
COLORS = dict(zip(VARIANTS, ("tab:blue", "tab:orange"), strict=True))


def measure(name, seeds, overrides):
    """Rows of one config, and the whole curves [variant, seed]."""
    rows, curves = [], {}
    for variant, seed in itertools.product(VARIANTS, range(seeds)):
        given = (f"run.seed={seed}", *VARIANTS[variant], *overrides)
        of_run, history = run_grpo.curve(name, given)
        curves[variant, seed] = [step.reward for step in history]
        for row in of_run:
            columns = ("step", "reward", "accuracy", "entropy", "run_cpu_seconds")
            facts = {"config": name, "variant": variant, "seed": seed}
            rows.append(facts | {key: row[key] for key in columns})
        print(rows[-1], flush=True)
    return rows, curves


def draw(path, curves):
    """Reward by rollout, one panel per config and one line per run."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.5), layout="constrained")
    panels = figure.subplots(1, len(curves), sharey=True, squeeze=False)[0]
    for panel, (name, runs) in zip(panels, curves.items(), strict=True):
        for (variant, seed), rewards in runs.items():
            label = None if seed else variant
            panel.plot(
                range(1, len(rewards) + 1), rewards, color=COLORS[variant],
                alpha=0.7, linewidth=1, label=label,
            )  # fmt: skip
        panel.set(title=name.removesuffix(".gin"), xlabel="rollout", ylim=(0, 1))
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("reward")
    panels[0].legend()
    figure.savefig(path, dpi=150)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="grpo_curves_cpu.csv")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_args(arguments)
    rows, curves = [], {}
    for name in run_grpo.ARITHMETIC:
        of_config, curves[name] = measure(name, given.seeds, given.overrides)
        rows += of_config
    path = results.write(given.out, rows)
    draw(path.with_suffix(".png"), curves)
    print("wrote", path)


if __name__ == "__main__":
    main()
