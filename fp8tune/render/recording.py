"""What ``record`` prints: the kernels that ran, and what to do next."""

from __future__ import annotations

from dataclasses import asdict

from fp8tune.render.report import Column, Report, left, right
from fp8tune.render.terminal import counted, kernel_name, notice, print_json, share
from fp8tune.replay.recording import Recording
from fp8tune.replay.summary import Row, most_to_gain, rows


def print_recording(recording: Recording, path: str, output_format: str) -> None:
    """The kernels of the recording in ``path``; notices say why some cannot be swept."""
    found = rows(recording)
    best = most_to_gain(found)
    command = None if best is None else f"fp8tune sweep --kernel {best.kernel} --recording {path}"
    if output_format == "json":
        print_json(
            {
                "recording": path,
                "device": recording.device,
                "arch": recording.arch,
                "processes": recording.processes,
                "kernels": [asdict(row) for row in found],
                "next": command,
            }
        )
        return
    where = recording.device or "Triton's interpreter"
    title = f"{path}: {counted(len(found), 'kernel')}, {counted(recording.processes, 'process')}, {where}"
    columns: list[Column[Row]] = [
        left("kernel", lambda row: kernel_name(row.kernel)),
        right("launches", lambda row: f"{row.launches:,}"),
        right("distinct", lambda row: f"{row.distinct:,}"),
        right("keys", lambda row: f"{row.keys:,}"),
        right("configs", lambda row: f"{row.configs:,}"),
        right("GPU time", lambda row: share(row.gpu_share, 1)),
        right("tuning s", lambda row: f"{row.tuning_s:.1f}" if row.tuning_s else ""),
    ]
    if any(row.refusal for row in found):
        columns.append(left("", lambda row: "cannot be swept" if row.refusal else ""))
    Report(title, columns, found).print()
    for row in found:
        if row.refusal:
            notice(f"{row.kernel} cannot be swept: {row.refusal}")
        elif row.skipped:
            reasons = next(kernel.skipped for kernel in recording.kernels if kernel.name == row.kernel)
            notice(f"{row.kernel}: {row.skipped:,} launches were only counted: {'; '.join(reasons)}")
    if command:
        print(f"\nnext: {command}")
    if sum(row.is_sweepable for row in found) > 1:
        print(f" all: fp8tune sweep --recording {path}")
