"""Tokens of a step that verifies drafts from text, by public records of completions.

    python -m benchmarks.run_drafting replay rl_math --clones FOLDER --tokenizer FILE
    python -m benchmarks.run_drafting replay FILE.jsonl
    python -m benchmarks.run_drafting gains

`replay` decodes recorded completions again, with drafts of k tokens from each pool of
`drafting`. A set is one of `drafting_sets.SETS`, read from clones of public
repositories in folders OWNER/NAME, or a JSONL file whose lines have "prompt" and
"completions", as lists of tokens, maybe "earlier" completions, and with a tokenizer as
texts. Columns, of each pool:

    own, beside, ..    tokens of all rows by the steps that they take; each adds the
                       accepted tokens of a draft and one of its own
    own_longest, ..    the longest completion of each group by the most steps of one of
                       its rows: rows that start together wait for the last one
    own_drafted, ..    tokens of drafts in a step
    own_accepted, ..   the accepted share of these

`gains` divides these tokens by the time of a step of so many tokens, in those of a step
of one: so much faster would a rollout be, without the search for drafts.
"""

import argparse
import inspect
import pathlib

from benchmarks import drafting, drafting_sets, results

KS = 1, 2, 3, 4, 7, 8
REPLAYED = "set", "k", "tokenizer", "most_tokens", "least_mean_tokens"


def replay(args: argparse.Namespace) -> None:
    """Write a row for each set and k."""
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
            results.merge(args.out, [row], REPLAYED)


def gains(args: argparse.Namespace) -> None:
    """Write how much faster a rollout would be, by set, pool and width of a step."""
    over = {
        int(row["width"]): float(row["over_one"])
        for row in results.read(args.widths)
        if (row["slots_of"], row["prompt"]) == ("row", "512") and row["width"] != "1"
    }
    rows: dict[tuple, dict] = {}
    for row in results.read(args.replay):
        width = 1 + int(row["k"])
        if width not in over:
            continue
        for pool in drafting.POOLS:
            same = {name: row[name] for name in ("set", *REPLAYED[2:])}
            same |= {"completion_tokens": row["completion_tokens"], "pool": pool}
            gains = rows.setdefault(tuple(same.values()), same)
            gains[f"width_{width}"] = round(float(row[pool]) / over[width], 3)
    dated = [row | {"date": results.today()} for row in rows.values()]
    print("wrote", results.save(args.out, dated))


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
    part = parts.add_parser("gains")
    part.set_defaults(run=gains)
    part.add_argument("--replay", default="drafting_replay.csv")
    part.add_argument("--widths", default="drafting_widths_h200.csv")
    part.add_argument("--out", default="drafting_gains_h200.csv")
    args = parser.parse_args(arguments)
    args.run(args)


if __name__ == "__main__":
    main()
