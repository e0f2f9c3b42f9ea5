"""Autotuners side by side on one GPU: wall time to a pick from a cold compile cache, what the pick is worth, and
whether the next run picks the same. ``benchmarks/README.md`` says how to read it.

    python -m benchmarks.race --dry-run      # what can be used here
    python -m benchmarks.race --json race.json
    python -m benchmarks.race --contestants triton.autotune,fp8tune --reruns 3
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.contestants import CONTESTANTS, Course, true_times_us
from fp8tune import scratch
from fp8tune.errors import Fp8tuneError, MachineError, unknown
from fp8tune.measure.compiling import one_line
from fp8tune.records import NamedInts
from fp8tune.stats.means import median, trimmed_mean

ORACLE = "oracle"
"""The process that times all configs at length."""
BEFORE_THE_ORACLE = 2
"""So many contestants: should time run out, the figures that matter are there."""
COLD = ("contestant", "search s", "less", "process s", "less", "timed", "pick", "regret %")
ALL_RUNS = ("runs", "picks", "mean regret %", "worst %")

say = partial(print, flush=True)

Answer = dict[str, Any]
"""What a process found; ``failure`` holds the reason where it found nothing."""


@dataclass(frozen=True)
class Run:
    """One search by one contestant, in a process of its own."""

    contestant: str
    process_s: float
    """From the start of the process to its end."""
    search_s: float | None = None
    """The search alone, without imports and inputs; None where there is no pick."""
    pick: NamedInts | None = None
    timed: int | None = None
    """Configs that the contestant timed."""
    failure: str = ""
    """Why there is no pick."""


@dataclass(frozen=True)
class Oracle:
    """The true times of the configs, as far as a long timing gives them."""

    times_us: Mapping[NamedInts, float]
    noise: float
    """Median over the configs of how far two halves of the rounds differ: 0.001 is 0.1 %."""

    @classmethod
    def of_rounds(cls, rounds_us: Mapping[NamedInts, Sequence[float]]) -> Oracle:
        """From the values of at least two rounds of each config: a config's time is their 25 % trimmed mean."""
        halves = [(trimmed_mean(values[::2]), trimmed_mean(values[1::2])) for values in rounds_us.values()]
        times_us = {config: trimmed_mean(values) for config, values in rounds_us.items()}
        return cls(times_us, median(abs(one / other - 1) for one, other in halves))

    @property
    def best(self) -> NamedInts:
        """The fastest config."""
        return min(self.times_us, key=self.times_us.__getitem__)

    def regret(self, pick: NamedInts | None) -> float | None:
        """0.01 for a pick 1 % slower than the best; None for a config that was not timed."""
        return self.times_us[pick] / self.times_us[self.best] - 1 if pick and pick in self.times_us else None


# The table


def table(runs: Sequence[Run], oracle: Oracle | None) -> str:
    """A line a contestant: its first run, which compiled, beside the picks of all; or the reason of having none."""
    by_contestant: dict[str, list[Run]] = {}
    for run in runs:
        by_contestant.setdefault(run.contestant, []).append(run)
    others = by_contestant.get("triton.autotune", [None])[0]
    rows = [(*COLD, *ALL_RUNS), *(_cells(own, others, oracle) for own in by_contestant.values() if own[0].pick)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    text += [f"{name}: {own[0].failure}" for name, own in by_contestant.items() if not own[0].pick]
    if oracle:
        text.append(
            f"best of the oracle: {config_text(oracle.best)} at {oracle.times_us[oracle.best]:.2f} us; "
            f"its halves differ by {100 * oracle.noise:.2f} % (median of {len(oracle.times_us)} configs)"
        )
    return "\n".join(text)


def _cells(own: Sequence[Run], others: Run | None, oracle: Oracle | None) -> tuple[str, ...]:
    cold, picks = own[0], [run.pick for run in own if run.pick]
    regrets = [regret for pick in picks if oracle and (regret := oracle.regret(pick)) is not None]
    return (
        cold.contestant,
        _number(cold.search_s),
        _ratio(others.search_s if others else None, cold.search_s),
        _number(cold.process_s),
        _ratio(others.process_s if others and others.pick else None, cold.process_s),
        str(cold.timed),
        config_text(cold.pick),
        _percent(oracle.regret(cold.pick) if oracle else None),
        str(len(picks)),
        str(len(set(picks))),
        _percent(sum(regrets) / len(regrets) if regrets else None),
        _percent(max(regrets, default=None)),
    )


def config_text(config: NamedInts | None) -> str:
    """``32/128/4/1``: the values in the order of the axes."""
    return "/".join(str(value) for value in config.values()) if config else "-"


def _number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _percent(share: float | None) -> str:
    return _number(None if share is None else 100 * share, 2)


def _ratio(theirs_s: float | None, own_s: float | None) -> str:
    return f"{theirs_s / own_s:.1f}x" if theirs_s and own_s else "-"


def as_json(runs: Sequence[Run], oracle: Oracle | None) -> Mapping[str, object]:
    """Every run, and the oracle's time of every config; configs as objects."""
    times = oracle and [{"config": dict(config), "time_us": us} for config, us in oracle.times_us.items()]
    plain = [{**asdict(run), "pick": None if run.pick is None else dict(run.pick)} for run in runs]
    return {"runs": plain, "oracle": oracle and {"noise": oracle.noise, "best": dict(oracle.best), "times": times}}


# A process


def answer_of(name: str, rounds: int, dry: bool) -> Answer:
    """What the process of a contestant, or of the oracle, does."""
    course = Course.here()
    if name == ORACLE:
        return {"rounds_us": [[dict(config), us] for config, us in true_times_us(course, rounds).items()]}
    what = "cannot be used here"
    try:
        search = CONTESTANTS[name](course)
        if dry:
            return {"failure": "ready"}
        what, begun = "failed", time.perf_counter()
        found = search()
        return {"search_s": time.perf_counter() - begun, "pick": dict(found.pick), "timed": found.timed}
    except Exception as error:  # whatever keeps a tuner from a pick is its line in the table
        return {"failure": f"{what}: {one_line(error)}"}


def in_process(name: str, given: argparse.Namespace, folder: Path, cache: Path) -> tuple[Answer, float]:
    """The answer of a process and the seconds it lived. Triton's cache is in ``cache``, temporary files in ``folder``.

    One that does not end in time is killed with all it started: it must not share the GPU with the next.
    """
    for made in (folder, cache):
        made.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache), "TMPDIR": str(folder)}
    environment.pop("TRITON_INTERPRET", None)
    answer, log = folder / "answer.json", folder / "log"  # the tuners' own output may be anything
    command = [sys.executable, "-m", "benchmarks.race", "--rounds", str(given.rounds), "--answer", name, str(answer)]
    command += ["--dry-run"] * given.dry_run
    begun = time.monotonic()
    with log.open("wb") as said:
        process = subprocess.Popen(
            command, cwd=Path(__file__).parent.parent, env=environment, stdout=said, stderr=said, process_group=0
        )
        try:
            process.wait(given.time_budget)
        except subprocess.TimeoutExpired:
            return {"failure": f"stopped after {given.time_budget:g} s"}, time.monotonic() - begun
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    seconds = time.monotonic() - begun
    if answer.exists():
        return json.loads(answer.read_text()), seconds
    last = (log.read_text(errors="replace").strip().splitlines() or ["it printed nothing"])[-1][:300]
    return {"failure": f"exited with code {process.returncode}: {last}"}, seconds


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line. Raises UsageError for an unknown contestant; exits for what argparse refuses."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.race", description=(__doc__ or "").partition("\n\n")[0])
    add = parser.add_argument
    add("--contestants", default=",".join(CONTESTANTS), help="names with commas between (default: %(default)s)")
    add("--reruns", type=int, default=5, metavar="N", help="searches of each contestant, the cold one included")
    add("--rounds", type=int, default=60, metavar="N", help="rounds of the oracle (default: %(default)s)")
    add("--time-budget", type=float, default=150.0, metavar="S", help="stop a process after S seconds")
    add("--json", type=Path, metavar="PATH", help="write all results there, after every process")
    add("--dry-run", action="store_true", help="only import and build every contestant; needs no GPU")
    add("--answer", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    given.contestants = list(dict.fromkeys(given.contestants.split(",")))
    for name in given.contestants:
        if name not in CONTESTANTS:
            raise unknown("contestant", name, CONTESTANTS)
    if min(given.reruns, given.rounds - 1) < 1:
        parser.error("--reruns starts at 1, --rounds at 2")
    return given


def schedule(given: argparse.Namespace) -> list[str]:
    """The first two, the oracle, the other contestants, then the reruns in turns."""
    names: list[str] = given.contestants
    if given.dry_run:
        return names
    return [*names[:BEFORE_THE_ORACLE], ORACLE, *names[BEFORE_THE_ORACLE:], *names * (given.reruns - 1)]


Process = Callable[[str, argparse.Namespace, Path, Path], tuple[Answer, float]]
"""As :func:`in_process`."""


def hold(given: argparse.Namespace, folder: Path, perform: Process = in_process) -> None:
    """Run all processes in order, saying and saving what comes out of each. Caches are in ``folder``."""
    runs: list[Run] = []
    oracle: Oracle | None = None
    for number, name in enumerate(schedule(given)):
        if any(run.contestant == name and run.pick is None for run in runs):
            continue  # it cannot run here
        owner = given.contestants[0] if name == ORACLE else name
        answer, process_s = perform(name, given, folder / f"{number}-{name}", folder / f"cache-{owner}")
        if name == ORACLE and "failure" not in answer:
            oracle = Oracle.of_rounds({NamedInts(config): values for config, values in answer["rounds_us"]})
        elif name != ORACLE:
            pick = {"pick": NamedInts(answer["pick"])} if "pick" in answer else {}
            runs.append(Run(name, process_s, **{**answer, **pick}))
        say(f"{name}: process {process_s:.1f} s {answer.get('failure', '')}")
        if given.json:
            given.json.write_text(json.dumps(as_json(runs, oracle), indent=1) + "\n")
    say(table(runs, oracle))


def main() -> None:
    """The command: one line and exit code 2 for what cannot be done."""
    try:
        given = parse()
        if given.answer:
            name, path = given.answer
            Path(path).write_text(json.dumps(answer_of(name, given.rounds, given.dry_run)))
            return
        course = Course.here()
        if course.torch_device != "cuda" and not given.dry_run:
            raise MachineError("there is no GPU here: use --dry-run to see which contestants can be used")
        say(f"{course.problem.kernel} {course.problem.shape} {course.problem.routing}, {len(course.configs)} configs")
        with scratch.folder("race") as folder:
            hold(given, folder)
    except Fp8tuneError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
