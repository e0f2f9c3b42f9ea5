"""Count of the tuned files in the wheels of vLLM and SGLang with their problems, by ``fp8tune doctor``.

    pip download --no-deps vllm==0.33.0 sglang==0.5.23
    unzip -qd wheels/vllm vllm-*.whl && unzip -qd wheels/sglang sglang-*.whl
    python -m benchmarks.tuned_files wheels/vllm wheels/sglang > docs/results/data/tuned-files.csv

Without a wheel it prints the tables of docs/results/tuned-files.md.
"""

from __future__ import annotations

import argparse
import csv
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.tables import table
from fp8tune.check.configs import check_folder
from fp8tune.output.doctor import make_report
from fp8tune.output.documents import plain

CSV = Path(__file__).parents[1] / "docs/results/data/tuned-files.csv"
NEWEST, DEVICES = "3.8.0", 5  # Triton of both wheels; devices on the page

COLUMNS = ("consumer", "kernel", "path", "device", "dtype", "triton", "sizes", "problems")


def rows_of(root: Path, triton: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of the CSV for one wheel."""
    files, findings = check_folder(root, triton)
    for file in plain(make_report(findings, (), files))["files"]:
        kinds = dict.fromkeys(item["problem"] for item in file["problems"])
        path = re.sub(r".*configs/", "", file["path"])
        yield {**file, "path": path, "sizes": len(file["sizes"]), "problems": "; ".join(kinds)}


def tables() -> str:
    """Return the tables of the page, from the committed rows."""
    with CSV.open() as file:
        rows = [*csv.DictReader(file)]
    kinds = ("no match", "no launch", "hidden", "gap", "copy", "near copy")
    by_kernel: dict[str, Counter[str]] = defaultdict(Counter)
    by_triton: dict[str, Counter[str]] = defaultdict(Counter)
    by_device: dict[str, Counter[str]] = defaultdict(Counter)
    for row in rows:
        program, triton = row["consumer"], row["triton"]
        by_kernel[f"{program} {row['kernel']}"].update(["files", *row["problems"].split("; ")])
        if row["kernel"] != "other layout":
            by_triton[triton or "not recorded"][program] += 1
            age = "not recorded" if not triton else triton if triton == NEWEST else "older"
            by_device[row["device"]].update(["files", age])
    devices = sorted(by_device.items(), key=lambda item: -item[1]["files"])[:DEVICES]
    kernels = [(name, counts) for name, counts in by_kernel.items() if any(counts[kind] for kind in kinds)]
    parts = [
        _table("kernel", ("files", *kinds), kernels),
        _table("Triton", ("vLLM", "SGLang"), sorted(by_triton.items())),
        _table(f"device ({DEVICES} of {len(by_device)})", ("files", NEWEST, "older", "not recorded"), devices),
    ]
    return "\n\n".join(parts)


def _table(title: str, heads: Sequence[str], rows: Iterable[tuple[str, Mapping[str, int]]]) -> str:
    return table(
        (title, *heads), ((name, *(str(counts[head] or "") for head in heads)) for name, counts in rows), "---:"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the CSV to stdout; without wheels print the tables of the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("wheels", nargs="*", type=Path, help="folders named vllm and sglang, with an unpacked wheel")
    parser.add_argument("--triton", default=NEWEST, help="Triton version that the wheels run with")
    options = parser.parse_args(arguments)
    if not options.wheels:
        print(tables())
        return
    writer = csv.DictWriter(sys.stdout, COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for root in options.wheels:
        writer.writerows(rows_of(root, options.triton))


if __name__ == "__main__":
    main()
