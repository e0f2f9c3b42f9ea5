"""Autotuners side by side on one GPU: wall time to a pick from a cold compile cache, what the pick is worth, and
whether the next run picks the same. ``benchmarks/README.md`` says how to read it.

    python -m benchmarks.race
    python -m benchmarks.race --contestants triton.autotune,fp8tune --reruns 3 --json race.json
    python -m benchmarks.race --warm
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from benchmarks.contestants import CONTESTANTS
from benchmarks.standings import Oracle, Run, config_text, standings, table
from benchmarks.step import MACHINE, ORACLE, Answer, Step, run_step
from fp8tune import scratch
from fp8tune.errors import Fp8tuneError, MachineError, unknown
from fp8tune.records import NamedInts

VERDICT = 2
"""The first so many contestants run before the oracle: should time run out, the figures that matter are there."""


@dataclass(frozen=True)
class Options:
    """The command line."""

    contestants: tuple[str, ...]
    reruns: int
    configs: int | None
    rounds: int
    time_budget_s: float
    deadline_s: float | None
    json_path: Path | None
    warm: bool
    dry: bool


@dataclass
class Race:
    """What has come out so far."""

    options: Options
    perform: Callable[[Step], tuple[Answer, float]]
    machine: Answer = field(default_factory=dict)
    runs: list[Run] = field(default_factory=list)
    oracle: Oracle | None = None

    def hold(self) -> None:
        """Take every step in order, saying and saving what comes out of each."""
        begun = time.monotonic()
        for step in schedule(self.options):
            reason = self.skipped(step, time.monotonic() - begun)
            if reason is not None:
                _say(f"{step.name} run {step.number + 1} left out: {reason}")
                continue
            self.take(step)
            self.save()
            if step.name == ORACLE and self.runs:
                _say(self.table())
        if any(run.pick for run in self.runs):
            _say(self.table())

    def skipped(self, step: Step, elapsed_s: float) -> str | None:
        """Why a step is not worth starting, if it is not."""
        own = [run for run in self.runs if run.contestant == step.name]
        if own and own[0].pick is None:
            return "its first run has no pick"
        expected_s = own[-1].process_s if own else 0.0
        if self.options.deadline_s is not None and elapsed_s + expected_s > self.options.deadline_s:
            return f"it would end after the deadline of {self.options.deadline_s:g} s"
        return None

    def take(self, step: Step) -> None:
        """Do one step and keep what it found."""
        answer, process_s = self.perform(step)
        if step.name == ORACLE:
            self._keep_oracle(answer, process_s)
            return
        pick = NamedInts(answer["pick"]) if "pick" in answer else None
        self.runs.append(
            Run(
                step.name,
                step.number,
                process_s,
                search_s=answer.get("search_s"),
                pick=pick,
                timed=answer.get("timed"),
                failure=answer.get("failure", ""),
            )
        )
        found = answer.get("failure") or f"searched {answer['search_s']:.1f} s, picks {config_text(pick)}"
        cache = "warm" if step.number or self.options.warm else "cold"
        _say(f"{step.name} run {step.number + 1} ({cache} cache, process {process_s:.1f} s): {found}")

    def _keep_oracle(self, answer: Answer, process_s: float) -> None:
        if "failure" in answer:
            _say(f"no oracle, and so no regrets: {answer['failure']}")
            return
        self.oracle = Oracle.of_rounds({NamedInts(config): values for config, values in answer["rounds_us"]})
        _say(f"oracle: {self.options.rounds} rounds over all configs in {process_s:.1f} s")

    def table(self) -> str:
        """The standings so far."""
        return table(standings(self.runs, self.oracle), self.oracle)

    def save(self) -> None:
        """Write all of it as JSON, if a path was given."""
        if self.options.json_path is None:
            return
        found = {"machine": self.machine, "warm": self.options.warm, **as_json(self.runs, self.oracle)}
        text = json.dumps(found, indent=1)
        self.options.json_path.write_text(text + "\n")


def as_json(runs: Sequence[Run], oracle: Oracle | None) -> dict[str, object]:
    """Every run, the oracle's time of every config, and the standings; configs as objects, regrets as shares."""
    lines = standings(runs, oracle)
    return {
        "runs": [{**asdict(replace(run, pick=None)), "pick": _plain(run.pick)} for run in runs],
        "oracle": oracle
        and {
            "noise": oracle.noise,
            "best": dict(oracle.best),
            "times": [{"config": dict(config), "time_us": us} for config, us in oracle.times_us.items()],
        },
        "standings": [
            {
                "contestant": line.contestant,
                "search_s": line.cold.search_s,
                "process_s": line.cold.process_s,
                "search_ratio": line.search_ratio,
                "process_ratio": line.process_ratio,
                "pick": _plain(line.cold.pick),
                "picks": [{"config": dict(config), "runs": count} for config, count in line.picks],
                "regrets": list(line.regrets),
                "failure": line.cold.failure,
            }
            for line in lines
        ],
    }


def _plain(config: NamedInts | None) -> dict[str, int] | None:
    return None if config is None else dict(config)


def schedule(options: Options) -> list[Step]:
    """All steps: the verdict's contestants cold, the oracle, the other contestants cold, then the reruns in turns.

    The oracle of a warm race comes first: it compiles what all of them find.
    """

    def runs(names: Sequence[str], number: int) -> list[Step]:
        return [Step(name, number, options.configs, dry=options.dry) for name in names]

    names = options.contestants
    if options.dry:
        return runs(names, 0)
    oracle = Step(ORACLE, 0, options.configs, options.rounds)
    reruns = [step for number in range(1, options.reruns) for step in runs(names, number)]
    verdict = 0 if options.warm else VERDICT
    return [*runs(names[:verdict], 0), oracle, *runs(names[verdict:], 0), *reruns]


def cache_owner(step: Step, options: Options) -> str:
    """Whose compile cache a step uses: its contestant's own; the first one's for the oracle and in a warm race."""
    return options.contestants[0] if options.warm or step.name == ORACLE else step.name


def parse(arguments: Sequence[str] | None = None) -> Options:
    """The command line as options. Raises UsageError for an unknown contestant; exits for what argparse refuses."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.race", description=(__doc__ or "").partition("\n\n")[0])
    add = parser.add_argument
    add("--contestants", default=",".join(CONTESTANTS), help="names with commas between (default: %(default)s)")
    add("--reruns", type=int, default=5, metavar="N", help="searches of each contestant, the cold one included")
    add("--configs", type=int, metavar="N", help="only the first N configs")
    add("--rounds", type=int, default=60, metavar="N", help="rounds of the oracle (default: %(default)s)")
    add("--time-budget", type=float, default=150.0, metavar="S", help="stop a contestant's run after S seconds")
    add("--deadline", type=float, metavar="S", help="start nothing that would end more than S seconds from now")
    add("--json", type=Path, metavar="PATH", help="write all results there, after every step")
    add("--warm", action="store_true", help="one compile cache for all, filled beforehand: a race for picks, not time")
    add("--dry-run", action="store_true", help="only import and build every contestant; needs no GPU")
    given = parser.parse_args(arguments)
    names = tuple(dict.fromkeys(given.contestants.split(",")))
    for name in names:
        if name not in CONTESTANTS:
            raise unknown("contestant", name, CONTESTANTS)
    if min(given.reruns, given.rounds - 1, given.configs or 1) < 1:
        parser.error("--reruns and --configs start at 1, --rounds at 2")
    return Options(
        contestants=names,
        reruns=given.reruns,
        configs=given.configs,
        rounds=given.rounds,
        time_budget_s=given.time_budget,
        deadline_s=given.deadline,
        json_path=given.json,
        warm=given.warm,
        dry=given.dry_run,
    )


def hold(options: Options) -> None:
    """Hold the race in a temporary folder, which has the compile caches too."""
    with scratch.folder("race") as folder:

        def perform(step: Step) -> tuple[Answer, float]:
            own = folder / f"{step.name}-{step.number}"
            return run_step(step, folder / f"cache-{cache_owner(step, options)}", own, options.time_budget_s)

        race = Race(options, perform)
        race.machine, _ = perform(Step(MACHINE, 0, options.configs))
        _announce(race.machine, options)
        race.hold()


def _announce(machine: Answer, options: Options) -> None:
    """Say what runs where. Raises MachineError where nothing can."""
    if "failure" in machine:
        raise MachineError(machine["failure"])
    device = machine["device"]
    if device is None and not options.dry:
        raise MachineError("there is no GPU here: use --dry-run to see which contestants can be used")
    where = "no GPU" if device is None else f"{device['name']}, torch {device['torch']}, triton {device['triton']}"
    _say(f"{machine['problem']}, {machine['configs']} configs; {where}, {machine['cores']} cores")
    _say(f"configs are {'/'.join(machine['axes'])}")


def _say(text: str) -> None:
    print(text, flush=True)


def main() -> None:
    """The command: one line and exit code 2 for what cannot be done."""
    try:
        hold(parse())
    except Fp8tuneError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
