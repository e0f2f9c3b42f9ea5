"""What ``calibrate`` and ``doctor`` print of this machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console

from fp8tune.check.finding import Finding
from fp8tune.redaction import redacted
from fp8tune.render import contracts
from fp8tune.render.report import Column, Report, left, right
from fp8tune.render.terminal import print_json, share
from fp8tune.text import visible

if TYPE_CHECKING:
    from fp8tune.sweeping.calibrate import Calibration

MEASURED = {
    "timer_tick_us": "smallest step between two samples of the timer",
    "empty_kernel_us": "a kernel that does nothing",
    "copy_ceiling_gb_per_s": "device-to-device copy of 512 MiB, read plus written",
    "process_sd": "spread of a config from process to process",
    "block_sd": "spread of a config from block to block in one process",
    "reference_launch_us": "colwise's default at M=16640 K=2048",
    "calibration_processes": "fresh processes that measured both spreads",
}
"""Names of calibrated values, with their meaning."""

STYLES = {"ok": "green", "warning": "yellow", "error": "red"}


def print_calibration(calibration: Calibration, output_format: str) -> None:
    """What was measured, and the numbers that finals on this device go by from now on."""
    if output_format == "json":
        print_json(contracts.calibration(calibration))
        return
    measured = {name: _value(name, value) for name, value in calibration.values.items()}
    columns: list[Column[str]] = [
        left("name", str),
        right("value", measured.__getitem__),
        left("what", MEASURED.__getitem__),
    ]
    title = f"measured on {calibration.device.name or calibration.device.arch}"
    Report(title, columns, [name for name in MEASURED if name in measured]).print()
    print()
    plan = calibration.protocol
    steps = {
        "processes": ", then ".join(map(str, (plan.processes, *plan.more_processes))),
        "rounds in each": str(plan.rounds),
        "finalists within": share(plan.screen_band, 2),
        "as good as the best within": share(plan.tie_band, 2),
        "replaced when slower by": share(plan.keep_band, 2),
    }
    Report("protocol of its finals", [left("number", str), right("value", steps.__getitem__)], list(steps)).print()


def _value(name: str, value: float) -> str:
    if name.endswith("_sd"):
        return share(value, 2)
    if name == "calibration_processes":
        return f"{value:.0f}"
    return f"{value:,.0f} GB/s" if name.endswith("gb_per_s") else f"{value:.3f} us"


def print_findings(findings: Sequence[Finding], output_format: str) -> None:
    """Findings with what to do about each."""
    if output_format == "json":
        print_json([contracts.finding(finding) for finding in findings])
        return
    console = Console(highlight=False)
    for finding in findings:
        console.print(f"{finding.level:<8}", style=STYLES[str(finding.level)], end="")
        console.print(visible(redacted(finding.what)), markup=False, soft_wrap=True)
        if finding.fix:
            console.print(f"        -> {visible(redacted(finding.fix))}", markup=False, soft_wrap=True)
