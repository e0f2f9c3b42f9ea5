"""Two runs of one program: as it is, and with its kernels pinned to the picks."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from fp8tune.replay import program
from fp8tune.replay.watch import window
from fp8tune.replay.watch.window import Measured


@dataclass(frozen=True)
class Run:
    """A run that has ended."""

    ended: program.Ended
    measured: Sequence[Measured]
    """One record for each process that launched a kernel."""

    @property
    def launching(self) -> list[Measured]:
        """Processes that launched kernels."""
        return [process for process in self.measured if process.launches]

    @property
    def gpu_us(self) -> float | None:
        """GPU time in the windows of all processes; None if nothing was profiled."""
        times = [process.gpu_us for process in self.launching]
        return sum(time for time in times if time is not None) if any(times) else None

    @property
    def kernel_us(self) -> Mapping[str, float]:
        """GPU time in the windows of all processes by function name."""
        return sum((Counter(dict(process.kernel_us)) for process in self.launching), Counter())

    @property
    def tuning_s(self) -> Mapping[str, float]:
        """Time of run-time tuning by function name, of the process where it took longest."""
        result: Counter[str] = Counter()
        for process in self.launching:
            result |= Counter(dict(process.tuning_s))
        return result

    def share_of(self, kernels: Iterable[str]) -> float | None:
        """Return the share of the GPU time that kernels take; None if nothing was profiled."""
        total, times = self.gpu_us, self.kernel_us
        return sum(times.get(name, 0.0) for name in set(map(function_of, kernels))) / total if total else None


def run(
    command: Sequence[str],
    patterns: Sequence[str],
    stdout: int | None,
    *,
    first: Run | None = None,
    tables: Path | None = None,
) -> Run:
    """Run the program and measure it: the same part as in the ``first`` run, with its kernels pinned to ``tables``.

    Raises:
        UsageError: The command cannot be started.
    """
    with tempfile.TemporaryDirectory(prefix="fp8tune-tune-") as folder:
        variables = {window.FOLDER: folder}
        if first is not None:
            plan = {process.rank: (process.opened, process.closed) for process in first.launching}
            variables |= {window.PLAN: json.dumps(plan), window.TABLES: str(tables)}
        ended = program.run(command, patterns, stdout, asks_usage=first is None, variables=variables)
        return Run(ended, Measured.read(Path(folder)))


@dataclass(frozen=True)
class Change:
    """Effect of the picks, from the first run to the second."""

    kernels: Mapping[str, float] | None = None
    """Function name of a pinned kernel -> the change of its GPU time, as a share of all GPU time in the first run's
    window. None if it was not measured."""
    others: float | None = None
    """Change of all other GPU time, as such a share: what two equal runs may differ by."""
    tuning_s: Mapping[str, float] = field(default_factory=dict)
    """Function name -> the change of the time of its run-time tuning, in the process where it took longest."""
    pinned: frozenset[str] = frozenset()
    """Kernels that took their configs from a table in the second run."""
    reason: str = ""
    """Reason why no GPU time was measured."""

    @property
    def gpu(self) -> float | None:
        """Change of the program's GPU time by the picks, as a share: -0.04 is 4 % less."""
        return None if self.kernels is None else sum(self.kernels.values())

    @property
    def startup_s(self) -> float:
        """Change of the time that run-time tuning takes at every start."""
        return sum(self.tuning_s.values())


def change(first: Run, second: Run) -> Change:
    """Compare the windows of two runs, which must hold the same launches."""
    result = Change(
        tuning_s={name: second.tuning_s.get(name, 0.0) - time_s for name, time_s in first.tuning_s.items()},
        pinned=frozenset(name for process in second.launching for name in process.pinned),
    )
    before = {process.rank: process for process in first.launching}
    after = {process.rank: process for process in second.launching}
    if any(process.opened is None for process in before.values()):
        return replace(
            result, reason=f"it made at most {window.QUIET_LAUNCHES} launches after the last run-time tuning"
        )
    if len(before) < len(first.launching) or len(after) < len(second.launching):
        return replace(result, reason="several processes launch kernels, and no RANK tells them apart")
    spans = [
        {rank: (item.opened, item.closed, item.launches if item.closed is None else None) for rank, item in run.items()}
        for run in (before, after)
    ]
    if spans[0] != spans[1]:
        return replace(result, reason="the second run made other launches than the first")
    if not first.gpu_us or second.gpu_us is None:
        return replace(result, reason="no GPU was used")
    kernels = {
        name: (second.kernel_us.get(name, 0.0) - first.kernel_us.get(name, 0.0)) / first.gpu_us
        for name in map(function_of, result.pinned)
    }
    return replace(result, kernels=kernels, others=second.gpu_us / first.gpu_us - 1 - sum(kernels.values()))


def function_of(kernel: str) -> str:
    """Return the name of a kernel's function, as a profile has it."""
    return kernel.rpartition(":")[2].rpartition(".")[2]
