"""Other implementations of a head's loss, on the same shapes, checked before timing.

    python -m benchmarks.run_peers --shape 8192,4096,151936 --out peers_h200.csv

Every peer comes from its published package; one that cannot be imported is skipped by
name. torch's peers and jax's run in a process of their own. "forward" asks for no
gradient; "forward_backward" has random cotangents for every token's log-probability,
and entropy where the peer gives it; a peer that gives a sum alone has none.
"""

import argparse
import functools
import importlib
import importlib.metadata
import inspect

from benchmarks import results, workers

FRAMEWORKS = ("torch", "jax")


def load(framework: str, names):
    """(name to call, name to version) of the peers that are installed."""
    try:
        peers = importlib.import_module(f"benchmarks.peers_{framework}").PEERS
    except ImportError as error:
        print(f"skipped: all of {framework}'s peers: {error}")
        return {}, {}
    calls, versions = {}, {}
    for name, peer in peers.items():
        if names and name not in names:
            continue
        try:
            calls[name] = peer.load()
        except Exception as error:  # whatever a package does when it is imported
            print(f"skipped: {name}: {workers.said(error)}", flush=True)
            continue
        version = importlib.metadata.version(peer.distribution)
        versions[name] = f"{peer.distribution} {version}"
    return calls, versions


def work(args):
    """A worker's part: rows to the driver."""
    calls, versions = load(args.worker, args.peer)
    if not calls:
        return
    side = importlib.import_module(f"benchmarks.on_{args.worker}")
    dtypes = importlib.import_module(
        {"torch": "torch", "jax": "jax.numpy"}[args.worker]
    )
    for shape in args.shapes:
        try:
            rows = side.measure(
                shape, getattr(dtypes, args.dtype), calls, args.repetitions
            )
        except Exception as error:  # the other shapes go on
            print(f"N,D,V={shape} failed: {workers.said(error)}", flush=True)
            continue
        for row in rows:
            workers.send({**row, "package": versions[row["path"]]})


def drive(args):
    with workers.compilation_cache() as environment:
        start = functools.partial(workers.start, "benchmarks.run_peers", environment)
        shapes = [f"--shape={','.join(map(str, shape))}" for shape in args.shapes]
        common = [f"--dtype={args.dtype}", f"--repetitions={args.repetitions}"]
        peers = [f"--peer={name}" for name in args.peer]
        for framework in args.framework or FRAMEWORKS:
            for row in start([f"--worker={framework}", *common, *shapes, *peers]):
                results.merge(args.out, [row])
                results.show(row)


def parser():
    made = argparse.ArgumentParser(description=inspect.cleandoc(__doc__ or ""))
    workers.add_shapes(made)
    made.add_argument("--peer", action="append", default=[], help="by name; all")
    made.add_argument("--framework", action="append", choices=FRAMEWORKS)
    made.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    made.add_argument("--repetitions", type=int, default=5)
    made.add_argument("--out", default="peers.csv", help="CSV in benchmarks/results")
    made.add_argument("--worker", choices=FRAMEWORKS, help=argparse.SUPPRESS)
    return made


def main(arguments=None):
    args = parser().parse_args(arguments)
    args.shapes = workers.shapes_of(args)
    work(args) if args.worker else drive(args)


if __name__ == "__main__":
    main()
