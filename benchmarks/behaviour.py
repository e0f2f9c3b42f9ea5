"""Recorded behaviour: picks, tables, planted faults and JSON of the commands, to compare while the code is rewritten.

    python -m benchmarks.behaviour             # compare with behaviour.json; exit code 1 where anything differs
    python -m benchmarks.behaviour --record    # store what this checkout does
    python -m benchmarks.behaviour tables      # one section

Needs no GPU and takes about three minutes. A value in the record is short text, or a hash of a longer document. Tables
are hashed row by row of each kernel, documents field by field, so that a difference names its place.
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
from fp8tune_kernels import catalog
from fp8tune_kernels.runtime import user_tables

RECORD = Path(__file__).with_suffix(".json")

DELETED_KERNELS = frozenset(
    f"grouped-mm-{name}" for name in ("forward", "input-gradient", "weight-gradient")
)  # methods of passes, which are no kernels: another change removes them

ARCHES = ("sm_90", "gfx942")
EMPTIED = "import fp8tune_kernels.tables.{arch} as table; table.ROWS = table.NEAREST = (); "
"""Python before a command, which then sees an empty table."""

SEEDS = range(1, 21)
FORMATS = {
    "python": "",
    "hf": "--size M=elements --size N=1 --size E=1",
    "triton-cache": "",
    "diff": "",
}
"""Format -> its options for the recorded kernel."""

SIZES = "[[rows]]\nM = 4096\nK = 2048\nN = 2048\nE = 8\nG = 8\n"
GRID = "--grid num_warps=4 --grid BLOCK_SIZE=64,128 --grid BLOCK_SIZE_ITER=64,128 --grid num_stages=1,2"

PROGRAM = "import torch, swiglu; swiglu.swiglu(torch.ones(4096), torch.ones(4096))\n"

COMMANDS = {
    "explain": "explain colwise M=16640,K=5120,G=16 --device H100 --format json --db results.db",
    "show, markdown": "show --kernel rowwise --device H200 --format markdown --db results.db",
    "export": "export --arch sm_90 --kernel colwise --output colwise.py --format json --db results.db",
    "sweep": f"sweep --kernel colwise --shapes 1.toml --timer simulated:1 {GRID} --db a.db --format json",
    "quick sweep": f"sweep --kernel rowwise --quick --shapes 1.toml --timer simulated:1 {GRID} --db a.db --format json",
    "queue": f"sweep --kernel rowwise --shapes 1.toml --timer simulated:2 {GRID} --db a.db --on queue --format json",
    "queue, before": "queue --db a.db --format json",
    "worker": "worker --db a.db --timer simulated:2 --format json",
    "queue, after": "queue --db a.db --format json",
    "show, small": "show --db a.db --format json",
    "calibrate": "calibrate --timer simulated:3 --db a.db --format json",
    "import": "import sweeps/published/kernels.csv --db b.db --format json",
    "import, database": "import a.db --db b.db --format json",
    "forget": "forget --unreadable --db b.db --format json",
    "bench": "bench --kernel colwise --timer simulated:1 --format json",
    "compare": "compare HEAD..HEAD --repo ROOT --kernel colwise --shapes tiny --timer simulated:1 --format json",
    "lint": f"lint colwise --shapes 1.toml --timer simulated:1 {GRID} --format json",
    "record": "record -o run.json --format json -- python small.py",
    "unknown kernel": "sweep --kernel colwse",
    "unknown arch": "export --arch sm_9 --db results.db",
}
"""Name -> command; all run in one folder, in this order."""

_VOLATILE = (
    (re.compile(r"\b(?=\d*[a-f])[0-9a-f]{7,64}\b"), "HASH"),
    (re.compile(r"\b[\w.-]+:\d{3,}\b(?=[\" ]|$)"), "WORKER"),
    (re.compile(r"(/[\w.+-]+){2,}"), "PATH"),
    (re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d)?\S*"), "DATE"),
)
_DURATIONS = ("_s", "seconds", "bytes_before", "bytes_after", "archive_bytes", "commit", "torch", "triton", "worker")


Values = dict[str, str]


def digest(value: object) -> str:
    """Return a short hash of a document. Dictionaries may be in any order."""
    text = json.dumps(_stable(value), sort_keys=True)
    for pattern, substitute in _VOLATILE:
        text = pattern.sub(substitute, text)
    return _hashed([text])


def _hashed(texts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:12]


def by_field(document: object) -> Values:
    """Return a hash of each field: over all objects of a list, in any order of the objects."""
    if isinstance(document, Mapping):
        return {f"{name}": digest(value) for name, value in document.items() if not name.endswith(_DURATIONS)}
    if not isinstance(document, list):
        return {"": digest(document)}
    fields: dict[str, list[str]] = defaultdict(list)
    for item in document:
        if not isinstance(item, Mapping):
            fields[""].append(digest(item))
        elif item.get("kernel") not in DELETED_KERNELS:
            identity = digest([item.get(name) for name in ("kernel", "device", "shape", "routing", "input_layout")])
            for name, value in by_field(item).items():
                fields[name].append(f"{identity} {value}")
    return {"count": str(len(document)), **{name: _hashed(sorted(values)) for name, values in fields.items()}}


def _stable(value: object) -> object:
    """Round floats to six digits and leave out durations."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, Mapping):
        return {str(name): _stable(item) for name, item in value.items() if not str(name).endswith(_DURATIONS)}
    if isinstance(value, list | tuple):
        return [_stable(item) for item in value]
    return value


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


def committed_picks() -> Values:
    """Hash the rows of ``show`` on the committed database, by field and by kernel and device."""
    _, text, _ = run("show --format json --db results.db")
    rows = [row for row in json.loads(text) if row["kernel"] not in DELETED_KERNELS]
    groups: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        facts = [row[name] for name in ("shape", "routing", "input_layout", "in_dtype", "scale_mode", "config")]
        groups[f"picks of {row['kernel']} on {row['device']} ({row['kind']})"].append(digest([*facts, row["time_us"]]))
    fields = {f"field {name}": value for name, value in by_field(rows).items()}
    return {**fields, **{name: f"{len(group)} {_hashed(sorted(group))}" for name, group in groups.items()}}


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
        values[f"{arch}, {origin}: NEAREST"] = " ".join(sorted({*table.nearest} - DELETED_KERNELS))
        groups: dict[str, list[str]] = defaultdict(list)
        for kernel, device, key, config in table.rows:
            if kernel not in DELETED_KERNELS:
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
    _, text, _ = run("show --db simulated.db --format json")
    for row in json.loads(text):
        sizes = ",".join(f"{name}={value}" for name, value in row["shape"].items())
        config = " ".join(map(str, row["config"].values()))
        outcome = f"{config}: {row['time_us']:.3f} us {row['verdict']}"
        values[f"{row['device']} {row['kernel']} {sizes} {row['input_layout'][-6:]}"] = outcome
    return values


def formats() -> Values:
    """Hash the files of each format, from one of the simulated sweeps; call after :func:`simulated_sweeps`."""
    if not Path("simulated.db").exists():
        run("sweep --kernel swiglu:kernel --recording swiglu.json --timer simulated:16 --db simulated.db")
    values: Values = {}
    for name, options in FORMATS.items():
        output = Path(f"files-{name}")
        target = output / "configs.diff" if name == "diff" else output
        output.mkdir()
        arguments = f"--arch simulated --kernel swiglu:kernel --device simulated:16 --db simulated.db {options}"
        code, _, messages = run(f"export --for {name} {arguments} --output {target}")
        values[f"{name}: exit code"] = f"{code} {messages}" if code else "0"
        for path in sorted(file for file in output.rglob("*") if file.is_file()):
            values[f"{name}: {path.relative_to(output)}"] = digest(path.read_text())
    return values


def planted_faults() -> Values:
    """List what the checks say of planted faults: of a kernel in plain torch, and of copies of our kernels."""
    folder = printed.ROOT / "tests"
    command = f"sweep --kernel {folder}/planted/faults.py:SPEC --shapes 1.toml --trial-timeout 20 --format json"
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


def commands() -> Values:
    """Hash what commands print, field by field, on small inputs."""
    values: Values = {}
    for name, command in COMMANDS.items():
        code, text, messages = run(command)
        values[f"{name}: exit code"] = str(code)
        try:
            fields = by_field(document(text)) if text.strip() else {"message": _plain(messages.strip())}
        except ValueError:
            fields = {"text": digest(text)}
        values |= {f"{name}: {field}": value for field, value in fields.items()}
    return values


SECTIONS: dict[str, Callable[[], Values]] = {
    "picks": committed_picks,
    "tables": tables,
    "sweeps": simulated_sweeps,
    "formats": formats,
    "faults": planted_faults,
    "commands": commands,
}


@contextlib.contextmanager
def _folder() -> Iterator[None]:
    """An empty folder with the inputs of the commands."""
    with printed.folder(), mock.patch.dict(os.environ, {"FP8TUNE_BASE": ""}):
        Path("1.toml").write_text(SIZES)
        Path("small.py").write_text(PROGRAM)
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
