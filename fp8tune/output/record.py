"""Document and screen of a recording: the end of ``record``, and ``show run.json``."""

from __future__ import annotations

import shlex
from typing import Literal

from fp8tune.output.documents import Document, value
from fp8tune.output.tables import Column, Screen, number
from fp8tune.output.text import counted, percent
from fp8tune.replay.recording import Kernel, Recording


class RecordedKernel(Document):
    """One kernel of a recording."""

    kernel: str = value("Name of the kernel.")
    launches: int = value("All launches.")
    distinct: int = value("Launches that differ in more than values.")
    keys: int = value("Distinct keys of the autotuner: each is tuned at run time on its own.")
    configs: int = value("Configs that it declares.")
    gpu_share: float | None = value("Share of the GPU time of all recorded kernels; null if it was not timed.", "share")
    tuning_s: float = value("Time of run-time tuning, over all processes.", "s")
    tuned_keys: dict[str, float] = value(
        "Keys that were tuned at run time, each with the time of it; 0 where nothing can be timed.", "s"
    )
    table: str = value("Table that the kernel was pinned to; empty if it was not pinned.")
    pinned_keys: dict[str, str] = value("Keys that took the config of a key of the table: the same, or the nearest.")
    refusal: str = value("Reason why it cannot be swept; empty if it can be.")
    skipped: int = value("Launches that were only counted.")


class RecordingSummary(Document, printed_by="show RECORDING"):
    """Kernels that a program launched."""

    document: Literal["recording"] = value("Distinguishes documents.", default="recording")
    recording: str = value("File of the recording.")
    device: str = value("Name of the GPU; empty if Triton's interpreter ran.")
    arch: str = value("Architecture of the GPU.")
    processes: int = value("Processes that launched kernels.")
    kernels: list[RecordedKernel] = value("Kernels, those with most GPU time first.")
    next: str | None = value("Command that sweeps the kernel with most to gain; null if none can be swept.")


def make_summary(recording: Recording, path: str) -> RecordingSummary:
    """Return a recording as a document."""
    total_us = sum(filter(None, map(_gpu_us, recording.kernels)))
    rows = [
        RecordedKernel(
            kernel=kernel.name,
            launches=sum(launch.count for launch in kernel.launches) + sum(kernel.skipped.values()),
            distinct=len(kernel.launches),
            keys=len({repr(launch.key) for launch in kernel.launches}),
            configs=len(kernel.configs),
            gpu_share=gpu_us / total_us if (gpu_us := _gpu_us(kernel)) and total_us else None,
            tuning_s=kernel.tuning_s,
            tuned_keys=dict(kernel.tuned_s),
            table=kernel.table,
            pinned_keys=dict(kernel.table_keys),
            refusal=kernel.refusal,
            skipped=sum(kernel.skipped.values()),
        )
        for kernel in recording.kernels
    ]
    rows.sort(key=lambda row: (-(row.gpu_share or 0.0), not row.configs, -row.launches, row.kernel))
    return RecordingSummary(
        recording=path,
        device=recording.device,
        arch=recording.arch,
        processes=recording.processes,
        kernels=rows,
        next=_next_command(rows, path),
    )


def _gpu_us(kernel: Kernel) -> float | None:
    """Return the time of all launches that were timed; None where there are none."""
    times = [launch.count * launch.gpu_us for launch in kernel.launches if launch.gpu_us is not None]
    return sum(times) if times else None


def _next_command(rows: list[RecordedKernel], path: str) -> str | None:
    """Return the sweep of the kernel with the largest share of tuning seconds plus share of GPU time.

    A kernel with one config comes only where there is no other.
    """
    sweepable = [row for row in rows if row.distinct and not row.refusal]
    tunable = [row for row in sweepable if row.configs > 1]
    total_s = sum(row.tuning_s for row in tunable) or 1.0
    best = max(tunable or sweepable, key=lambda row: row.tuning_s / total_s + (row.gpu_share or 0.0), default=None)
    return f"fp8tune sweep --kernel {shlex.quote(best.kernel)} --recording {shlex.quote(path)}" if best else None


def recording(document: RecordingSummary, *, is_strict: bool = False) -> Screen:
    """Return the screen of a recording; ``is_strict``: with what tuned at run time."""
    kernels = document.kernels
    where = document.device or "Triton's interpreter"
    counts = f"{counted(len(kernels), 'kernel')} in {counted(document.processes, 'process')}"
    columns = [
        Column("kernel", [row.kernel for row in kernels], cut="start"),
        number("GPU time", [f"{percent(row.gpu_share, 1)} %" if row.gpu_share is not None else "-" for row in kernels]),
        number("tuning s", [f"{row.tuning_s:.1f}" if row.tuning_s else "-" for row in kernels]),
        number("launches", [f"{row.launches:,}" for row in kernels]),
        number("distinct", [f"{row.distinct:,}" for row in kernels], leaves="after cuts"),
        number("keys", [f"{row.keys:,}" for row in kernels], leaves="before cuts"),
        number("configs", [f"{row.configs:,}" for row in kernels]),
    ]
    below = [f"{row.kernel} cannot be swept: {row.refusal}" for row in kernels if row.refusal]
    if pinned := [row for row in kernels if row.table]:
        near = sum(key != known for row in pinned for key, known in row.pinned_keys.items())
        keys = f"{counted(sum(len(row.pinned_keys) for row in pinned), 'key')}, {near} by a near key"
        below.append(f"{len(pinned)} of {counted(len(kernels), 'kernel')} pinned: {keys} of the table")
    if tuned := [row for row in kernels if row.tuned_keys and (is_strict or pinned)]:
        total_s = sum(seconds for row in tuned for seconds in row.tuned_keys.values())
        below.append(f"{counted(len(tuned), 'kernel')} tuned at run time ({total_s:.1f} s):")
        for row in tuned:
            key, *others = row.tuned_keys
            below.append(f"  {row.kernel} {key}{f' and {len(others)} more' if others else ''}")
    below += [f"{row.kernel}: {row.skipped:,} launches were only counted" for row in kernels if row.skipped]
    if document.next:
        below.append(f"next: {document.next}")
    if sum(bool(row.distinct) and not row.refusal for row in kernels) > 1:
        below.append(f"all: fp8tune sweep --recording {shlex.quote(document.recording)}")
    return Screen([f"{document.recording}: {counts} on {where}"], columns, below, kernels)
