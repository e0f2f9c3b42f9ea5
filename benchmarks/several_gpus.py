"""Measure a host with several GPUs: sweeps on all, the expert-parallel layer, and whether its GPUs are equally fast.

    python -m benchmarks.several_gpus --out results --seconds 600
    FP8TUNE_TIMER=simulated:1 python -m benchmarks.several_gpus --gpus 2 --layers tiny --tokens 64   # without a GPU

Prints three tables, and writes ``several-gpus.json``, databases, and the files of ``benchmarks.expert_parallel``. One
GPU has the share of the cores that it has beside the others. Each sweep compiles anew. On simulated GPUs, which take
no time, the speedup is that of their own clocks: the blocks on one GPU over the most blocks on one of several.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fp8tune.check.gpus import agreements
from fp8tune.errors import DatabaseError
from fp8tune.exporting import select_rows
from fp8tune.measure.backends import backend_for
from fp8tune.measure.device import probe
from fp8tune.output.tables import Column, Screen, number
from fp8tune.store.results import Store
from fp8tune.sweeping import picks
from fp8tune.tables.current import SHIPPED

Row = dict[str, Any]
END_S = 15.0  # for a process that was told to end
ENDED = {0, -signal.SIGKILL}  # exit codes: well, or killed here


@dataclass
class Host:
    """The GPUs of this machine, what is measured, and the time for it."""

    options: argparse.Namespace
    folder: Path  # logs and compiled kernels
    deadline: float = math.inf  # of the current part, on the monotonic clock
    left_out: list[str] = field(default_factory=list)

    @property
    def left_s(self) -> float:
        """Seconds that are left of the current part."""
        return self.deadline - time.monotonic()

    def db(self, name: str) -> str:
        """Return the database of a run."""
        return str(self.options.out / f"{name}.db")

    def sweep(self, name: str, shapes: Sequence[str]) -> list[str]:
        """Return the command that sweeps into the database of a run."""
        named = {"kernel": self.options.kernel, "grid": self.options.grid, "shapes": shapes}
        texts = [f"--{option}={text}" for option, values in named.items() for text in values]
        return ["fp8tune", "sweep", *texts, f"--db={self.db(name)}"]

    def environment(self, gpu: int | None, cache: str, noise: str = "") -> dict[str, str]:
        """Return the environment of a process on one GPU or all; ``noise`` makes simulated GPUs differ."""
        values = {**os.environ, "TRITON_CACHE_DIR": str(self.folder / f"triton-{cache}")}
        values.pop("TRITON_INTERPRET", None)
        if gpu is None:
            return values
        if timer := values.get("FP8TUNE_TIMER"):
            return values | {"FP8TUNE_TIMER": f"{timer}{noise},gpu={gpu}"}
        visible = values.get("CUDA_VISIBLE_DEVICES", "")
        return values | {"CUDA_VISIBLE_DEVICES": visible.split(",")[gpu] if visible else str(gpu)}

    def start(self, log: str, command: Sequence[str], environment: Mapping[str, str], gpu: int | None = None) -> Any:
        """Start a Python module on a GPU's share of the cores, or on all."""
        cores, gpus = sorted(os.sched_getaffinity(0)), self.options.gpus
        share = cores if gpu is None else cores[len(cores) * gpu // gpus : len(cores) * (gpu + 1) // gpus] or cores
        pinned = ["taskset", "-c", ",".join(map(str, share)), sys.executable, "-m", *command]
        with (self.folder / f"{log}.log").open("ab") as output:
            return subprocess.Popen(pinned, env=environment, stdout=output, stderr=output, start_new_session=True)

    def wait(self, log: str, processes: Sequence[Any], watch: Callable[[], None] = lambda: None) -> bool:
        """Wait for processes, at most until the part's time is over. Returns True if none failed or was stopped."""
        try:
            while any(process.poll() is None for process in processes) and self.left_s > 0:
                watch()
                time.sleep(0.05)
            is_late = any(process.poll() is None for process in processes)
        finally:
            for process in processes:
                process.terminate()
            for process in processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(END_S)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        codes = [process.wait() for process in processes]
        if is_late:
            self.skip(f"{log}: stopped, its time was over")
        elif not set(codes) <= ENDED:
            print("\n".join((self.folder / f"{log}.log").read_text().splitlines()[-8:]), file=sys.stderr)
            self.skip(f"{log}: failed with {codes}")
        return not is_late and set(codes) <= ENDED

    def skip(self, text: str) -> None:
        """Print and note what is left out."""
        self.left_out.append(text)
        print(f"LEFT OUT: {text}", flush=True)


# One sweep, on one GPU and on several


def sweeps(host: Host) -> list[Row]:
    """Sweep on one GPU, on all, on all with a child that is killed, and with Ray."""
    rows = list[Row]()
    for name in ("one", "all", "killed", *(["ray"] if host.options.ray else [])):
        last_s = rows[-1]["seconds"] if rows else 0.0
        needed_s = last_s / host.options.gpus if name == "all" else 1.5 * last_s
        if host.left_s < needed_s:
            host.skip(f"sweep, {name}: about {needed_s:.0f} s are needed, and {max(0, host.left_s):.0f} s are left")
            continue
        row = timed_sweep(host, name, 1 if name == "one" else host.options.gpus, host.options.kill_at * last_s)
        rows.append(row | beside_one(host, name))
        is_simulated = bool(os.environ.get("FP8TUNE_TIMER"))
        measure = "busiest" if is_simulated else "seconds"
        is_whole = rows[0]["is_whole"] and row["is_whole"]
        rows[-1]["speedup"] = rows[0][measure] / row[measure] if is_whole else None
    return rows


def timed_sweep(host: Host, name: str, count: int, kill_s: float) -> Row:
    """Run a sweep. In ``killed`` a child that sweeps is killed after ``kill_s``."""
    killed, is_ray, db = list[int](), name == "ray", host.db(name)

    def watch() -> None:
        if name == "killed" and not killed and time.monotonic() - begun > kill_s and stored(db):
            for child in itertools.islice(gpu_children(process.pid), 1):
                os.kill(child, signal.SIGKILL)
                killed.append(child)

    command = [*host.sweep(name, host.options.shapes), *(["--on=ray"] if is_ray else [f"--gpus={count}"])]
    begun = time.monotonic()
    process = host.start(name, command, host.environment(None, name), 0 if name == "one" else None)
    is_whole = host.wait(name, [process], watch)
    seconds = time.monotonic() - begun
    if name == "killed" and not killed:
        host.skip("killed: it ended before a child was killed")
    with Store.open(db, writable=False) as store:
        blocks = Counter(row.device.uuid_hash for row in store.rows())
    counts = {"rows": sum(blocks.values()), "busiest": max(blocks.values(), default=0), "killed": len(killed)}
    return {"run": name, "gpus": count, "seconds": seconds, "is_whole": is_whole, **counts}


def stored(db: str) -> bool:
    """Return True once a database has rows."""
    with contextlib.suppress(DatabaseError), Store.open(db, writable=False) as store:
        return bool(store.pools())
    return False


def gpu_children(process: int) -> Iterator[int]:
    """Yield the processes of a sweep that sweep on a GPU each: they come from its fork server."""
    for server in children_of(process):
        yield from children_of(server)


def children_of(process: int) -> list[int]:
    """Return the child processes of a process."""
    with contextlib.suppress(OSError):
        return [*map(int, Path(f"/proc/{process}/task/{process}/children").read_text().split())]
    return []


def beside_one(host: Host, name: str) -> Row:
    """Compare the exported table and the picks of a run with those of one GPU."""
    tables, chosen, times = list[str](), list[dict[Any, Any]](), dict[Any, float]()
    for run in (name, "one"):
        with Store.open(host.db(run), writable=False) as store:
            chosen.append({pick.problem: pick for pick in picks.read(store)})
            arches = {pick.device.arch for pick in chosen[-1].values()}
            tables += [select_rows(store, arch, tables=SHIPPED).table.render() for arch in arches]
            times = {(item.problem, item.config): item.time_us for item in picks.finalists(store)}
    pairs = {size: (pick.config, chosen[0][size].config) for size, pick in chosen[1].items() if size in chosen[0]}
    losses = [times.get((size, b), math.inf) / times[size, a] - 1 for size, (a, b) in pairs.items() if a != b]
    same = {"is_same_table": len(tables) == 2 and tables[0] == tables[1], "same_picks": len(pairs) - len(losses)}
    return {**same, "picks": len(chosen[1]), "worst_loss": max(losses, default=0.0)}


# The layer, and the GPUs beside each other


def experts(host: Host) -> list[Row]:
    """Run the expert-parallel layer on all GPUs, and on half of them from four on."""
    gpus, rows = host.options.gpus, list[Row]()
    counts = [gpus, gpus // 2] if gpus >= 4 else [gpus]
    for ranks in counts:
        seconds = host.left_s * (0.8 if ranks == counts[-1] else 0.6)  # the benchmark begins no layer after that
        command = [
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={ranks}",
            "-m",
            "benchmarks.expert_parallel",
        ]
        command += ["--layers", *host.options.layers, "--tokens", *map(str, host.options.tokens)]
        command += [f"--seconds={seconds:.0f}", f"--out={host.options.out}"]
        log, environment = f"experts-{ranks}", host.environment(None, "experts") | {"OMP_NUM_THREADS": "1"}
        if host.left_s > END_S:
            host.wait(log, [host.start(log, command, environment)])
        path = host.options.out / f"expert-parallel-{ranks}.json"
        rows += json.loads(path.read_text()) if path.exists() else []
        timed = {(row["ranks"], row["layer"], row["tokens"]) for row in rows}
        for layer, tokens in itertools.product(host.options.layers, host.options.tokens):
            if (ranks, layer, tokens) not in timed:
                host.skip(f"{layer} with {tokens} tokens on each of {ranks} GPUs")
    return rows


def equal_gpus(host: Host) -> list[Row]:
    """Sweep the same sizes on every GPU at once; return how fast each is, and what doctor says."""
    environments = [host.environment(gpu, "one", f".{gpu + 1}") for gpu in range(host.options.gpus)]
    command, db = host.sweep("gpus", host.options.each), host.db("gpus")
    if not host.wait("gpus", [host.start("gpus", command, values, gpu) for gpu, values in enumerate(environments)]):
        return []
    names = dict[str, int | str]()
    for gpu, values in enumerate(environments):
        timer = values.get("FP8TUNE_TIMER")
        known = backend_for(None, timer)[0].device if timer else probe(values)
        names |= {known.uuid_hash: gpu} if known else {}
    doctor = [sys.executable, "-m", "fp8tune", "doctor", f"--db={db}", "--format=json"]
    printed = json.loads(subprocess.run(doctor, stdout=subprocess.PIPE, text=True, check=False).stdout)
    lines = [f"{item['level']}: {item['text']}" for item in printed["findings"] if "GPUs named" in item["text"]]
    with Store.open(db, writable=False) as store:
        results = agreements(store)
    slowdowns = ({names.get(uuid, uuid[:4]): share for uuid, share in result.slowdowns.items()} for result in results)
    return [
        {**asdict(result), "slowdowns": own, "doctor": lines} for result, own in zip(results, slowdowns, strict=True)
    ]


# Tables


def screens(sweeps: Sequence[Row], layers: Sequence[Row], hosts: Sequence[Row]) -> Iterator[Screen]:
    """Yield a table for each part."""
    columns = [
        Column("sweep", lambda row: row["run"]),
        number("GPUs", lambda row: str(row["gpus"])),
        number("s", lambda row: f"{row['seconds']:.1f}"),
        number("speedup", lambda row: f"{row['speedup']:.2f}x" if row["speedup"] else "-"),
        number("rows", lambda row: f"{row['rows']:,}"),
        number("on one GPU", lambda row: f"{row['busiest']:,}"),
        Column("table", lambda row: "same" if row["is_same_table"] else "other"),
        number("same picks", lambda row: f"{row['same_picks']} of {row['picks']}"),
        number("loss", lambda row: f"{row['worst_loss']:.1%}" if row["worst_loss"] else ""),
    ]
    yield Screen(["One sweep with confirmation, beside one GPU"], columns, [], sweeps)
    times = {(row["layer"], row["tokens"], row["contender"], row["ranks"]): row["median_ms"] for row in layers}
    counts = sorted({row["ranks"] for row in layers})
    rows = [row for row in layers if row["ranks"] == counts[-1]]

    def time_ms(row: Row, ranks: int, contender: str = "") -> float:
        return float(times.get((row["layer"], row["tokens"], contender or row["contender"], ranks), math.nan))

    columns = [
        Column("layer", lambda row: row["layer"]),
        number("tokens", lambda row: f"{row['tokens']:,}"),
        Column("contender", lambda row: row["contender"], loses="end"),
        *(number(f"{count} GPUs, ms", [f"{time_ms(row, count):.1f}" for row in rows]) for count in counts),
        number("speedup", lambda row: f"{time_ms(row, counts[-1], 'torch bf16') / row['median_ms']:.2f}x"),
        number("efficiency", lambda row: f"{time_ms(row, counts[0]) / row['median_ms']:.2f}" if counts[1:] else ""),
    ]
    yield Screen(["Expert-parallel layer, forward and backward, tokens of a rank"], columns, [], rows)
    for row in hosts:
        columns = [
            number("GPU", [str(gpu) for gpu in row["slowdowns"]]),
            number("slower than the fastest", [f"{slowdown:.2%}" for slowdown in row["slowdowns"].values()]),
        ]
        loss = max([0.0, *row["losses"]])
        below = [
            f"the same configs are at most {max(row['spreads']):.1%} apart, and picks of the slowest lose {loss:.1%}",
            *(f"doctor: {line}" for line in row["doctor"]),
        ]
        yield Screen([f"GPUs named {row['device']['name']}"], columns, below, [*row["slowdowns"]])


PARTS: dict[str, tuple[float, Callable[[Host], list[Row]]]] = {
    "sweeps": (0.6, sweeps),
    "experts": (0.25, experts),
    "gpus": (0.15, equal_gpus),
}
"""Shares of the time; what a part does not need is for the next ones."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write. Exit code 1: something was left out."""
    parser = argparse.ArgumentParser(prog="benchmarks.several_gpus", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("several-gpus"), help="folder of results, without any")
    parser.add_argument("--seconds", type=float, default=600, help="time limit")
    parser.add_argument("--gpus", type=int, help="default: all")
    parser.add_argument("--parts", nargs="+", choices=tuple(PARTS), default=tuple(PARTS))
    parser.add_argument("--kernel", nargs="+", default=["colwise"])
    parser.add_argument(
        "--grid", nargs="+", default=["BLOCK_SIZE=64,128", "num_warps=4,8", "num_stages=1", "maxnreg=0"]
    )
    parser.add_argument("--shapes", nargs="+", default=["models"], help="what all GPUs sweep together")
    parser.add_argument("--each", nargs="+", default=["models,M=32768"], help="what every GPU sweeps")
    parser.add_argument("--ray", action="store_true", help="sweep with Ray, too")
    parser.add_argument("--kill-at", type=float, default=0.5, help="share of the time without a kill")
    parser.add_argument("--layers", nargs="+", default=["Qwen3-30B-A3B", "DeepSeek-V3"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[4096, 16384], help="of a rank")
    options = parser.parse_args(arguments)
    options.gpus = options.gpus or importlib.import_module("torch").cuda.device_count()
    if options.gpus < 2:
        parser.error("two GPUs are needed: --gpus 2 and FP8TUNE_TIMER=simulated:1 simulate them")
    options.out.mkdir(parents=True, exist_ok=True)
    end, results = time.monotonic() + options.seconds, {part: list[Row]() for part in PARTS}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        host = Host(options, Path(folder))
        ahead = [part for part in PARTS if part in options.parts]
        for part in [*ahead]:
            share = PARTS[part][0] / sum(PARTS[name][0] for name in ahead)
            host.deadline = time.monotonic() + share * (end - time.monotonic())
            results[part] = PARTS[part][1](host)
            ahead.remove(part)
            document = {**results, "left_out": host.left_out, "options": vars(options)}
            (options.out / "several-gpus.json").write_text(json.dumps(document, indent=1, default=str))
    for screen in screens(*results.values()):
        if screen.rows:
            print()
            screen.print()
    for text in host.left_out:
        print(f"LEFT OUT: {text}")
    return int(bool(host.left_out))


if __name__ == "__main__":
    sys.exit(main())
