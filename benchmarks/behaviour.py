"""Recorded behaviour: picks of simulated sweeps, tables and planted faults, to compare while the code is rewritten.

    python -m benchmarks.behaviour             # compare with behaviour.json; exit code 1 where anything differs
    python -m benchmarks.behaviour --record    # store what this checkout does
    python -m benchmarks.behaviour tables      # one section

Needs no GPU and takes about two minutes. Tables are hashed by kernel, so that a difference names its place.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton reads it once, when the first kernel is imported

from benchmarks import printed
from fp8tune.store.results import Store
from fp8tune.sweeping import picks
from fp8tune_kernels import catalog
from fp8tune_kernels.runtime import user_tables

RECORD = Path(__file__).with_suffix(".json")

ARCHES = ("sm_90", "gfx942")
EMPTIED = "import fp8tune_kernels.tables.{arch} as table; table.ROWS = table.NEAREST = (); "
"""Python before a command, which then sees an empty table."""

SEEDS = range(1, 21)
SIZES = "[[rows]]\nM = 4096\nK = 2048\nN = 2048\nE = 8\nG = 8\n"
GRID = "--grid num_warps=4 --grid BLOCK_SIZE=64,128 --grid BLOCK_SIZE_ITER=64,128 --grid num_stages=1,2"

Values = dict[str, str]


def _hashed(texts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:12]


def run(command: str) -> tuple[int, str, str]:
    """Run a command of fp8tune in this process. Returns its exit code, its output and its messages."""
    arguments = shlex.split(command.replace("ROOT", str(printed.ROOT)))
    with printed._captured(False) as (output, messages):
        code = printed._fp8tune(arguments)
    return code, output.getvalue(), messages.getvalue()


def document(text: str) -> Any:
    """Parse JSON, or JSON lines."""
    try:
        return json.loads(text)
    except ValueError:
        return [json.loads(line) for line in text.splitlines()]


def tables() -> Values:
    """Hash the rows of exported tables by kernel: with the committed table as the current one, and without a table."""
    values: Values = {}
    for arch, origin in itertools.product(ARCHES, ("committed", "empty")):
        path = Path(f"{origin}_{arch}.py")
        if origin == "committed":
            path.write_text((printed.ROOT / "kernels" / "fp8tune_kernels" / "tables" / f"{arch}.py").read_text())
        emptied = "" if origin == "committed" else EMPTIED.format(arch=arch)
        program = f"{emptied}from fp8tune.cli import main; main()"
        command = [sys.executable, "-c", program, "export", "--arch", arch, "--output", f"{path}", "--db", "results.db"]
        subprocess.run(command, check=True, capture_output=True, cwd=Path.cwd())
        table = user_tables.parsed(path.read_text())
        values[f"{arch}, {origin}: NEAREST"] = " ".join(sorted(table.nearest))
        groups: dict[str, list[str]] = defaultdict(list)
        for kernel, device, key, config in table.rows:
            groups[kernel].append(json.dumps([device, key, sorted(config)]))
        for kernel, group in groups.items():
            values[f"{arch}, {origin}: {kernel}"] = f"{len(group)} {_hashed(sorted(group))}"
    return values


def simulated_sweeps() -> Values:
    """List the picks of simulated sweeps: 15 of two kernels with specifications, 5 of a recorded kernel."""
    values: Values = {}
    for seed in SEEDS:
        kernel = "swiglu:kernel" if seed > 15 else ("colwise", "rowwise")[seed % 2]
        chosen = "--recording swiglu.json" if seed > 15 else f"--shapes 1.toml {GRID}"
        run(f"sweep --kernel {kernel} {chosen} --timer simulated:{seed} --db simulated.db")
    with Store.open("simulated.db", writable=False) as store:
        for pick in picks.read(store):
            sizes, config = ",".join(map(str, pick.problem.shape.items())), pick.config or {}
            name = f"{pick.device.name} {pick.problem.kernel} {sizes} {pick.problem.input_layout[-6:]}"
            values[name] = f"{' '.join(map(str, config.values()))}: {pick.time_us:.3f} us {pick.verdict}"
    return values


def planted_faults() -> Values:
    """List what the checks say of planted faults: of a kernel in plain torch, and of copies of our kernels."""
    folder = printed.ROOT / "tests"
    command = f"sweep --kernel {folder}/planted/faults.py:SPEC --shapes 1.toml --format json"
    _, text, _ = run(f"{command} --db faults.db")
    rows = [row for row in document(text) if "config" in row]
    values = {f"FAULT={row['config']['FAULT']}": f"{row['status']}: {_plain(row['reason'])}" for row in rows}
    sys.path[:0] = [str(folder / "kernels")]
    faults, edges, planting = map(importlib.import_module, ("kernel_faults", "on_edges", "planting"))
    for title in [*faults.FAULTS][::8]:
        spec = catalog.load(title.partition(":")[0].split(", ")[0])
        with tempfile.TemporaryDirectory() as copy, warnings.catch_warnings(action="ignore"):
            faulty = planting.planted(title, Path(copy), *faults.FAULTS[title])
            wrong = next(edges.faults_found(faulty, edges.problem_of(spec), edges.smallest(spec)), "passes")
        values[title] = _plain(wrong)
    return values


def _plain(text: str) -> str:
    return re.sub(r"0x[0-9a-f]+|\d+(\.\d+)?", "0", text)[:120]


SECTIONS: dict[str, Callable[[], Values]] = {
    "tables": tables,
    "sweeps": simulated_sweeps,
    "faults": planted_faults,
}


@contextlib.contextmanager
def _folder() -> Iterator[None]:
    """An empty folder with the inputs of the commands."""
    with printed.folder(), mock.patch.dict(os.environ, {"FP8TUNE_BASE": ""}):
        Path("1.toml").write_text(SIZES)
        printed.run("cp docs/examples/swiglu.py docs/examples/swiglu.json .")
        yield


def differences(before: Mapping[str, Values], after: Mapping[str, Values]) -> Iterable[str]:
    """One line for each value that differs."""
    for section, values in after.items():
        recorded = before.get(section, {})
        for name in sorted({*recorded, *values}):
            old, new = recorded.get(name, "(absent)"), values.get(name, "(absent)")
            if old != new:
                yield f"{section}: {name}\n    recorded {old}\n    now      {new}"


def main(arguments: Any = None) -> int:
    """Compare or record. 1 where a value differs from the record."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.behaviour", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--record", action="store_true", help="store what this checkout does")
    parser.add_argument("sections", nargs="*", help=f"default: all of {', '.join(SECTIONS)}")
    options = parser.parse_args(arguments)
    if unknown := {*options.sections} - {*SECTIONS}:
        parser.error(f"unknown section {min(unknown)!r}: choose from {', '.join(SECTIONS)}")
    before = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    with _folder():
        after = {name: SECTIONS[name]() for name in options.sections or SECTIONS}
    lines = list(differences(before, after))
    if options.record:
        RECORD.write_text(json.dumps({**before, **after}, indent=1, sort_keys=True) + "\n")
    print("\n".join(lines) or "no differences")
    print(f"{len(lines)} of {sum(map(len, after.values()))} values differ", file=sys.stderr)
    return int(bool(lines) and not options.record)


if __name__ == "__main__":
    sys.exit(main())
