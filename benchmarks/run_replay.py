"""Policies that learn within a sampler's support, and from a part of the tokens.

    python -m benchmarks.run_replay
    python -m benchmarks.run_replay --fractions 1.0 0.5

The first trains under three truncations and writes to grpo_replay_cpu.csv how many
tokens have a ratio of the trainer's probability to the sampler's inside [0.9, 1.1],
with the trainer's probability over the vocabulary and within the support. The second
trains with every value of `grpo.token_fraction` and writes rewards by rollout to
grpo_fractions_cpu.csv. Overrides follow on `--`.
"""

import argparse

from benchmarks import results, run_grpo

REPLAYED = "grpo_arithmetic_multitoken.gin"
SAMPLERS = (
    {"top_p": 0.8, "support": 14},
    {"top_k": 4},
    {"min_p": 0.3, "support": 14},
)
RATIOS = (
    "unreplayed_inside_1_1",
    "ratios_inside_1_1",
    "ratios_outside_1_25",
    "mismatch_p99",
    "support_mean",
    "reward",
)
LEARNED = "grpo_arithmetic.gin"
CURVES = ("reward", "entropy", "grad_norm")


def replayed(sampler, overrides=(), every=20):
    """A row for the first rollout, some between, and the last."""
    named = [f"sampling.{name}={value}" for name, value in sampler.items()]
    history, _, _ = run_grpo.train(REPLAYED, ["run.steps=40", *named, *overrides])
    said = " ".join(f"{name}={value}" for name, value in sampler.items())
    return rows_of(history, {"config": REPLAYED, "sampler": said}, RATIOS, every)


def learned(fraction, overrides=(), every=10):
    """Likewise of a run that learns from a part of its tokens."""
    named = f"grpo.token_fraction={fraction}"
    history, _, (_, cpu) = run_grpo.train(LEARNED, [named, *overrides])
    about = {"config": LEARNED, "token_fraction": fraction}
    return rows_of(history, about | {"run_cpu_seconds": round(cpu)}, CURVES, every)


def rows_of(history, about, fields, every):
    steps = [
        step
        for step in history
        if step.step in (1, len(history)) or step.step % every == 0
    ]
    return [
        {
            **about,
            "step": step.step,
            **{name: run_grpo.rounded(getattr(step, name)) for name in fields},
        }
        for step in steps
    ]


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", help="default: see above")
    parser.add_argument("--fractions", type=float, nargs="+", metavar="F")
    parser.add_argument("overrides", nargs="*")
    asked = parser.parse_args(arguments)
    if asked.fractions:
        made = [learned(x, asked.overrides) for x in asked.fractions]
        name = "grpo_fractions_cpu.csv"
    else:
        made = [replayed(sampler, asked.overrides) for sampler in SAMPLERS]
        name = "grpo_replay_cpu.csv"
    rows = [row for rows in made for row in rows]
    print("wrote", results.write(asked.out or name, rows))


if __name__ == "__main__":
    main()
