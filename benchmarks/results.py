"""Rows of measurements as CSV, each with where and when it was measured.

    python -m benchmarks.results head_h200.csv PART.csv ...
    python -m benchmarks.results offload_h200.csv PART.csv --key variant --key device

adds the rows of the parts to a result, in the place of those that measure the same.
"""

import argparse
import csv
import datetime
import importlib.metadata
import pathlib
import platform
from collections.abc import Mapping, Sequence

FOLDER = pathlib.Path(__file__).parent / "results"
KEYS = ("n", "d", "v", "dtype", "path", "device")  # rows alike here measure the same


def provenance() -> dict[str, str]:
    """Device, versions of jax and date: what makes a number a measurement."""
    import jax  # not where torch measures

    device = jax.devices()[0]
    return {
        "device": device.device_kind if device.platform != "cpu" else cpu_name(),
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
        "date": today(),
    }


def today() -> str:
    return datetime.date.today().isoformat()


def cpu_name(path: str | pathlib.Path = "/proc/cpuinfo") -> str:
    """Number of cores, model name, and the instructions that multiply bfloat16.

    XLA uses them where the processor has them. Their sums round otherwise than those of
    float32: AMX adds 16 products at a time, so that errors are smaller.
    """
    lines = pathlib.Path(path).read_text().splitlines()
    pairs = [tuple(map(str.strip, line.split(":", 1))) for line in lines if ":" in line]
    names = [value for key, value in pairs if key == "model name"]
    flags = {flag for key, value in pairs if key == "flags" for flag in value.split()}
    used = [name for name in ("amx_bf16", "avx512_bf16") if name in flags][:1]
    name = f"{len(names)} cores {names[0]}" if names else platform.processor()
    return " with ".join([name, *used])


def write(path: str | pathlib.Path, rows: Sequence[Mapping]) -> pathlib.Path:
    """`save`, with the provenance of this process after each row's own columns."""
    return save(path, [{**row, **provenance()} for row in rows])


def save(
    path: str | pathlib.Path, rows: Sequence[Mapping], comment: str = ""
) -> pathlib.Path:
    """Writes rows that say themselves where they are from; a bare name is in results/.

    Columns are those of any row, in the order in which they first appear. The comment
    is a first line.
    """
    path = in_folder(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = list(dict.fromkeys(column for row in rows for column in row))
    with path.open("w", newline="") as file:
        file.write(comment)
        writer = csv.DictWriter(file, fieldnames=columns, restval="")
        writer.writeheader()
        writer.writerows(rows)
    return path


def merge(
    path: str | pathlib.Path, rows: Sequence[Mapping], keys: Sequence[str] = KEYS
) -> pathlib.Path:
    """Adds rows to a CSV; one that measures the same (by its keys) is replaced.

    A first line that names the script of older rows stays as long as one of them does.

    Raises:
        ValueError: two rows measure the same, given ones or ones that a given one would
            replace: one of them would be lost.
    """
    path = in_folder(path)
    new = {_key(row, keys): row for row in rows}
    old = read(path) if path.exists() else []
    replaced = [_key(row, keys) for row in old if _key(row, keys) in new]
    if len(new) < len(rows) or len(set(replaced)) < len(replaced):
        raise ValueError(f"rows are alike in {list(keys)}: name what tells them apart")
    comment = _comment(path) if len(replaced) < len(old) else ""
    kept = [new.pop(_key(row, keys), row) for row in old]
    return save(path, [*kept, *new.values()], comment)


def _comment(path):
    """The first line of a CSV that begins with "#", or nothing."""
    with path.open(encoding="utf-8", newline="") as file:
        first = file.readline()
    return first if first.startswith("#") else ""


def _key(row, keys):
    return tuple(str(row.get(key, "")) for key in keys)


def read(path: str | pathlib.Path) -> list[dict[str, str]]:
    """Rows of a result; a bare name is in results/.

    A first line that begins with "#" says which script wrote a record, and which commit
    has the script.
    """
    lines = in_folder(path).read_text("utf-8").splitlines(keepends=True)
    return list(csv.DictReader(lines[1:] if lines[0].startswith("#") else lines))


def show(row: Mapping) -> None:
    """One line of what `timing.columns` and the others made."""
    said = {
        "": f"N={row['n']} D={row['d']} V={row['v']} {row['path']:30s}",
        "fwd": _said_time(row, "forward"),
        "fwd+bwd": _said_time(row, "forward_backward"),
        "MiB temp": row.get("forward_backward_temp_mib"),
        "peak": row.get("forward_backward_peak_mib"),
        "compile s": row.get("compile_s"),
        "errors": row.get("logprob_error"),
        "std 20": row.get("logprob_error_std20"),
        "note": row.get("note"),
    }
    print(" | ".join(f"{k} {v}".strip() for k, v in said.items() if v), flush=True)


def _said_time(row, name):
    ms, ratio, spread = (row[f"{name}_{x}"] for x in ("ms", "over_gemm", "spread"))
    return f"{ms} ms = {ratio} GEMM (spread {spread})" if ratio else ms


def in_folder(path: str | pathlib.Path) -> pathlib.Path:
    """A bare name is in results/."""
    path = pathlib.Path(path)
    return FOLDER / path if path.parent == pathlib.Path() else path


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Adds rows of parts to a result.")
    parser.add_argument("result")
    parser.add_argument("parts", nargs="+")
    parser.add_argument(
        "--key",
        action="append",
        help=f"columns that tell rows apart; {', '.join(KEYS)}",
    )
    asked = parser.parse_args(arguments)
    for part in asked.parts:
        print("wrote", merge(asked.result, read(part), asked.key or KEYS))


if __name__ == "__main__":
    main()
