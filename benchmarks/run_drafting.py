"""Drafts from text: tokens of a step by public records, and seconds of a step by width.

    python -m benchmarks.run_drafting widths --trace 5
    python -m benchmarks.run_drafting replay rl_math --clones FOLDER --tokenizer FILE
    python -m benchmarks.run_drafting replay FILE.jsonl

`replay` decodes recorded completions again, with drafts of k tokens from each pool of
`drafting`. A set is one of `drafting_sets.SETS`, read from clones of public
repositories in folders OWNER/NAME, or a JSONL file whose lines have "prompt" and
"completions", as lists of tokens, maybe "earlier" completions, and with a tokenizer as
texts. Columns:

    tokens_per_step    tokens of all rows by the verifications that they take; each adds
                       the accepted tokens of a draft and one of its own
    longest_per_step   the same, of each group's tokens in the row that takes the most
                       steps: rows that start together wait for it
    drafted, accepted  tokens of drafts in a step, and the accepted share of these

`widths` measures a step that verifies drafts, `drafting_widths`, at Qwen3-8B's
dimensions with random weights in bfloat16. Columns:

    step_ms            median of the steps' parts, each of `part` steps
    over_one           by that of today's sampler, with one token a row
    read_gb, tb_per_s  what a step must read: weights, and slots that are filled halfway
    product_tflop      operations of its products with matrices, the head's included
"""

import argparse
import inspect
import pathlib

from benchmarks import drafting_sets, results

KS = 1, 2, 4, 8
REPLAYED = "set", "completion_tokens", "pool", "k", "tokenizer"
WIDTHS = "width", "slots_of", "rows", "prompt", "overrides", "device"
CONFIG = pathlib.Path(__file__).parent.parent / "configs/grpo_qwen3_8b_h200.gin"


def replay(args: argparse.Namespace) -> None:
    """Write a row for each set, pool and k."""
    encode, tokenizer = drafting_sets.encoder(args.tokenizer)
    for name in args.sets:
        groups, columns = drafting_sets.read(name, args.clones, encode)
        columns["tokenizer"] = tokenizer
        groups = drafting_sets.limited(groups, args.limit, args.least, args.groups)
        columns["most_tokens"] = args.limit or ""
        columns["least_mean_tokens"] = args.least or ""
        for row in drafting_sets.measure(groups, KS):
            row = {**columns, **row, "date": results.today()}
            print(row, flush=True)
            keys = *REPLAYED, "most_tokens", "least_mean_tokens"
            results.merge(args.out, [row], keys)


def widths(args: argparse.Namespace) -> None:
    """Write a row for each variant, and those of its trace."""
    from benchmarks import drafting_widths  # jax is slow to import

    args.prompt, args.width = args.prompt or [512], args.width or [1, 2, 4, 5, 8]
    args.trace, out = args.trace or [], results.in_folder(args.out)
    for row, kernels in drafting_widths.run(args):
        row["overrides"] = " ".join(args.overrides)
        print(row, flush=True)
        results.merge(out, [row], WIDTHS)
        for kernel in kernels:
            print("   ", *kernel.values(), flush=True)
        if kernels:
            same = {key: row[key] for key in (*WIDTHS, "step_ms", "jax", "date")}
            path = out.with_name(f"{out.stem}_trace.csv")
            rows = [{**same, **kernel} for kernel in kernels]
            results.merge(path, rows, (*WIDTHS, "class", "kernel"))


def main(arguments=None):
    parser = argparse.ArgumentParser(
        description=inspect.cleandoc(__doc__ or ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parts = parser.add_subparsers(required=True)
    part = parts.add_parser("replay")
    part.set_defaults(run=replay)
    part.add_argument("sets", nargs="+", metavar="SET or FILE.jsonl")
    part.add_argument("--clones", type=pathlib.Path, help="folder of OWNER/NAME")
    part.add_argument("--tokenizer", type=pathlib.Path, help="words without one")
    part.add_argument("--limit", type=int, help="first tokens of a completion")
    part.add_argument("--least", type=int, help="mean tokens of a group that is taken")
    part.add_argument("--groups", type=int, help="that are taken, of the first")
    part.add_argument("--out", default="drafting_replay.csv")
    part = parts.add_parser("widths")
    part.set_defaults(run=widths)
    part.add_argument("overrides", nargs="*", metavar="section.field=value")
    part.add_argument("--config", type=pathlib.Path, default=CONFIG)
    part.add_argument("--rows", type=int, default=64)
    for name, help in (("prompt", "tokens"), ("width", "tokens"), ("trace", "a width")):
        part.add_argument(f"--{name}", type=int, action="append", help=help)
    part.add_argument("--part", type=int, default=16, help="steps between two waits")
    part.add_argument("--parts", type=int, default=6, help="after one that warms up")
    part.add_argument("--seconds", type=float, default=110, help="to start one more")
    part.add_argument("--out", default="drafting_widths_h200.csv")
    args = parser.parse_args(arguments)
    args.run(args)


if __name__ == "__main__":
    main()
