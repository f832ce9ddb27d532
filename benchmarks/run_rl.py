"""Reinforcement learning: curves, mismatch of log-probabilities, and the sampler.

    python -m benchmarks.run_rl curves
    python -m benchmarks.run_rl replay
    python -m benchmarks.run_rl fractions 1.0 0.5 0.25 --workers 16
    python -m benchmarks.run_rl entries --workers 12
    python -m benchmarks.run_rl tokens
    python -m benchmarks.run_rl calculator
    python -m benchmarks.run_rl mismatch
    python -m benchmarks.run_rl routes
    python -m benchmarks.run_rl refill --published rollout_projection.csv
    python -m benchmarks.run_rl turns
    python -m benchmarks.run_rl refill --config grpo_qwen3_8b_h200.gin \
        --out refill_h100.csv
    python -m benchmarks.run_rl turns --config grpo_qwen3_8b_h200.gin --turns 4 \
        --out turns_h100.csv
    python -m benchmarks.run_rl passes --out passes_h100.csv

`rl_learning` describes curves, replay, fractions and entries, `rl_tokens` the variance
that fractions of the tokens add, `rl_calculator` a policy that learns to use a tool,
`rl_mismatch` mismatch and routes, `rl_sampler` refill and turns, and `rl_passes`
passes. Overrides of a config follow on `--set`.
"""

import argparse
import inspect

from benchmarks import results


def curves(args):
    from benchmarks import rl_learning

    rows, histories = rl_learning.curves(args.seeds, args.set)
    path = results.write(args.out or "grpo_curves_cpu.csv", rows)
    rl_learning.draw(path.with_suffix(".png"), histories)
    print("wrote", path)


def replay(args):
    from benchmarks import rl_learning

    write(args.out or "grpo_replay_cpu.csv", rl_learning.replay(args.steps, args.set))


def fractions(args):
    from benchmarks import rl_learning

    rows = rl_learning.fractions(
        args.share, args.config, args.seeds, args.workers, args.set
    )
    write(args.out or "grpo_fractions_cpu.csv", rows)


def entries(args):
    from benchmarks import rl_learning

    heads = args.head or list(rl_learning.HEADS)
    rows = rl_learning.entries(heads, args.seeds, args.workers, args.set)
    write(args.out or "grpo_entries_cpu.csv", rows)


def tokens(args):
    from benchmarks import rl_tokens

    rows = rl_tokens.variances(args.count, args.vocab_size)
    write(args.out or "token_draws_cpu.csv", rows)


def calculator(args):
    from benchmarks import rl_calculator

    rows, histories = [], {}
    runs = rl_calculator.calculator(args.seeds, args.text_steps, args.rollouts)
    for row, rewards in runs:
        print(row, flush=True)
        rows.append(row)
        histories[row["tool"], row["seed"]] = rewards
    path = results.write(args.out or "calculator_cpu.csv", rows)
    rl_calculator.draw(path.with_suffix(".png"), histories)
    print("wrote", path)


def mismatch(args):
    from benchmarks import rl_mismatch

    rows = rl_mismatch.heads(args.sequences, args.length)
    write(args.out or "mismatch_cpu.csv", rows)


def routes(args):
    from benchmarks import rl_mismatch

    write(args.out or "routes_cpu.csv", rl_mismatch.routes(args.rows, args.tokens))


def refill(args):
    from benchmarks import rl_sampler

    if args.config:
        rows = rl_sampler.timed_refill(args.config, args.slots[0], args.set)
    else:
        rows = rl_sampler.refilled_slots(args.slots, args.rollouts, args.published)
    write(args.out or "refill_cpu.csv", rows)


def turns(args):
    from benchmarks import rl_sampler

    if args.config:
        rows = rl_sampler.timed_turns(
            args.config, args.turns, args.repetitions, args.rows, args.set
        )
    else:
        rows = rl_sampler.turns(args.turns, args.repetitions)
    write(args.out or "turns_cpu.csv", rows)


def passes(args):
    from benchmarks import rl_passes

    sizes = args.tokens, args.group
    rows = rl_passes.passes(
        args.case or rl_passes.CASES, args.minibatches, args.rollouts, sizes, args.set
    )
    write(args.out or "passes.csv", rows)


def write(path, rows):
    """Print each row as it comes, and write all of them."""
    kept = []
    for row in rows:
        print(row, flush=True)
        kept.append(row)
    print("wrote", results.write(path, kept))


def make_parser():
    parser = argparse.ArgumentParser(
        description=inspect.cleandoc(__doc__ or ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    questions = parser.add_subparsers(required=True)

    def add(run):
        question = questions.add_parser(run.__name__)
        question.set_defaults(run=run)
        question.add_argument("--out", help="in benchmarks/results")
        question.add_argument(
            "--set", action="append", default=[], metavar="KEY=VALUE",
            help="an override of the config; repeat",
        )  # fmt: skip
        return question.add_argument

    argument = add(curves)
    argument("--seeds", type=int, default=3)
    add(replay)("--steps", type=int, default=40, help="rollouts of a run")
    argument = add(fractions)
    argument("share", type=float, nargs="+", help="of the tokens")
    argument("--config", default="grpo_arithmetic_multitoken.gin")
    argument("--seeds", type=int, default=3)
    argument("--workers", type=int, default=1, help="runs at a time, on a core each")
    argument = add(entries)
    argument("--head", action="append", help="one of rl_learning.HEADS; repeat")
    argument("--seeds", type=int, default=3)
    argument("--workers", type=int, default=1, help="runs at a time, on a core each")
    argument = add(tokens)
    argument("--count", type=int, default=20000)
    argument("--vocab-size", type=int, default=4096)
    argument = add(calculator)
    argument("--seeds", type=int, default=3)
    argument("--text-steps", type=int, default=400)
    argument("--rollouts", type=int, default=30)
    argument = add(mismatch)
    argument("--sequences", type=int, default=64)
    argument("--length", type=int, default=256, help="tokens of a sequence")
    argument = add(routes)
    argument("--rows", type=int, default=64)
    argument("--tokens", type=int, default=96, help="of a completion")
    argument = add(refill)
    argument("--slots", type=int, nargs="+", default=[16, 64])
    argument("--rollouts", type=int, default=40)
    argument("--published", metavar="CSV", help="measure its lengths, too")
    argument("--config", help="time a model of its sizes")
    argument = add(turns)
    argument("--turns", type=int, nargs="+", default=[2, 4, 8])
    argument("--repetitions", type=int, default=5)
    argument("--config", help="time a model of its sizes")
    argument("--rows", type=int, default=32, help="of a config")
    argument = add(passes)
    argument("--case", action="append", help="job, unshared or shared; repeat")
    argument("--minibatches", type=int, nargs="+", default=[1, 2])
    argument("--rollouts", type=int, default=4)
    argument("--tokens", type=int, default=512, help="of a long prompt")
    argument("--group", type=int, default=16, help="completions of a long prompt")
    return parser


def main(arguments=None):
    args = make_parser().parse_args(arguments)
    args.run(args)


if __name__ == "__main__":
    main()
