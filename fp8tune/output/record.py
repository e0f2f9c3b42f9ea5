"""Document and screen of a recording: the end of ``record``, and ``show run.json``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from fp8tune.output.documents import Document, value
from fp8tune.output.tables import Column, Screen, number
from fp8tune.output.text import command, counted, percent
from fp8tune.replay.recording import Kernel, Recording


class RecordedKernel(Document):
    """One kernel of a recording."""

    kernel: str = value("Name of the kernel.", source="name")
    launches: int = value("All launches.")
    distinct: int = value("Launches that differ in more than values.")
    keys: int = value("Distinct keys of the autotuner: each is tuned at run time on its own.")
    configs: int = value("Configs that it declares.")
    gpu_share: float | None = value("Share of the GPU time of all recorded kernels; null if it was not timed.", "share")
    tuning_s: float = value("Time of run-time tuning, over all processes.", "s")
    tuned_keys: dict[str, float] = value(
        "Time of run-time tuning by key; 0 where nothing can be timed.", "s", "tuned_s"
    )
    table: str = value("Table that the kernel was pinned to; empty if it was not pinned.")
    pinned_keys: dict[str, str] = value("Keys with the table's key that gave their config.", source="table_keys")
    refusal: str = value("Reason why it cannot be swept; empty if it can be.")
    skipped: int = value("Launches that were only counted.")

    @property
    def is_sweepable(self) -> bool:
        """True if a sweep can time it."""
        return bool(self.distinct) and not self.refusal


class RecordingSummary(Document, printed_by="show RECORDING"):
    """Kernels that a program launched."""

    document: Literal["recording"] = value("Distinguishes documents.", default="recording")
    recording: str = value("File of the recording.")
    device: str = value("Name of the GPU; empty if Triton's interpreter ran.")
    arch: str = value("Architecture of the GPU.")
    processes: int = value("Processes that launched kernels.")
    kernels: list[RecordedKernel] = value("Kernels, those with most GPU time first.")
    unpinned: dict[str, str] = value("Kernels without configs from a table, with the reason, if tables were pinned.")
    next: str | None = value("Command that sweeps the kernel with most to gain; null if none can be swept.")


def make_summary(recording: Recording, path: str) -> RecordingSummary:
    """Return a recording as a document."""
    total_us, rows = sum(_gpu_us(kernel) or 0.0 for kernel in recording.kernels), []
    for kernel in recording.kernels:
        gpu_us, skipped = _gpu_us(kernel), sum(kernel.skipped.values())
        row = RecordedKernel.from_records(
            kernel,
            launches=sum(launch.count for launch in kernel.launches) + skipped,
            distinct=len(kernel.launches),
            keys=len({repr(launch.key) for launch in kernel.launches}),
            configs=len(kernel.configs),
            gpu_share=gpu_us / total_us if gpu_us and total_us else None,
            skipped=skipped,
        )
        rows.append(row)
    rows.sort(key=lambda row: (-(row.gpu_share or 0.0), not row.configs, -row.launches, row.kernel))
    # Next is the kernel with the largest share of tuning seconds plus share of GPU time; with one config, only if no
    # other can be swept.
    sweepable = [row for row in rows if row.is_sweepable]
    tunable = [row for row in sweepable if row.configs > 1]
    total_s = sum(row.tuning_s for row in tunable) or 1.0
    best = max(tunable or sweepable, key=lambda row: row.tuning_s / total_s + (row.gpu_share or 0.0), default=None)
    step = command("sweep", "--kernel", best.kernel, "--recording", path) if best else None
    return RecordingSummary.from_records(recording, recording=path, kernels=rows, next=step)


def _gpu_us(kernel: Kernel) -> float | None:
    """Return the time of all launches that were timed; None where there are none."""
    times = [launch.count * launch.gpu_us for launch in kernel.launches if launch.gpu_us is not None]
    return sum(times) if times else None


def recording(document: RecordingSummary, *, is_strict: bool = False) -> Screen:
    """Return the screen of a recording; ``is_strict``: with what tuned at run time."""
    columns = [
        Column("kernel", lambda row: row.kernel, loses="start"),
        number("GPU time", lambda row: "-" if row.gpu_share is None else f"{percent(row.gpu_share, 1)} %"),
        number("tuning s", lambda row: f"{row.tuning_s:.1f}" if row.tuning_s else "-"),
        number("launches", lambda row: f"{row.launches:,}"),
        number("distinct", lambda row: f"{row.distinct:,}", loses="all"),
        number("keys", lambda row: f"{row.keys:,}", loses="all"),
        number("configs", lambda row: f"{row.configs:,}"),
    ]
    counts = f"{counted(len(document.kernels), 'kernel')} in {counted(document.processes, 'process')}"
    where = document.device or "Triton's interpreter"
    return Screen(
        [f"{document.recording}: {counts} on {where}"], columns, [*_lines(document, is_strict)], document.kernels
    )


def _lines(document: RecordingSummary, is_strict: bool) -> Iterator[str]:
    """Yield what the table does not say: refused, pinned and tuned kernels, and the next command."""
    kernels = document.kernels
    for row in kernels:
        if row.refusal:
            yield f"{row.kernel} cannot be swept: {row.refusal}"
    if pinned := [row for row in kernels if row.table]:
        near = sum(key != known for row in pinned for key, known in row.pinned_keys.items())
        keys = f"{counted(sum(len(row.pinned_keys) for row in pinned), 'key')}, {near} by a near key"
        yield f"{len(pinned)} of {counted(len(kernels), 'kernel')} pinned: {keys} of the table"
    if tuned := [row for row in kernels if row.tuned_keys and (is_strict or pinned)]:
        total_s = sum(seconds for row in tuned for seconds in row.tuned_keys.values())
        yield f"{counted(len(tuned), 'kernel')} tuned at run time ({total_s:.1f} s):"
        for row in tuned:
            key, *others = row.tuned_keys
            yield f"  {row.kernel} {key}{f' and {len(others)} more' if others else ''}"
    for name, reason in document.unpinned.items() if is_strict else ():
        yield f"{name} is not pinned: {reason}"
    for row in kernels:
        if row.skipped:
            yield f"{row.kernel}: {row.skipped:,} launches were only counted"
    if document.next:
        yield f"next: {document.next}"
    if sum(row.is_sweepable for row in kernels) > 1:
        yield f"all: {command('sweep', '--recording', document.recording)}"
