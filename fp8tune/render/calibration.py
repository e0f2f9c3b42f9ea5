"""The tables of ``fp8tune calibrate``."""

from __future__ import annotations

from collections.abc import Iterator

from fp8tune.calibrate.record import Calibration
from fp8tune.choose.calibration import MEASURED
from fp8tune.render import contracts
from fp8tune.render.report import Column, Report, left, right
from fp8tune.render.terminal import print_json, share


def print_calibration(calibration: Calibration, output_format: str) -> None:
    """What was measured, and the numbers that finals on this device go by from now on."""
    if output_format == "json":
        print_json(contracts.calibration(calibration))
        return
    measured = [name for name in MEASURED if name in calibration.values]
    columns: list[Column[str]] = [
        left("name", str),
        right("value", lambda name: _value(name, calibration.values[name])),
        left("what", lambda name: MEASURED[name]),
    ]
    Report(f"measured on {calibration.device.name or calibration.device.arch}", columns, measured).print()
    print()
    steps: list[Column[tuple[str, str]]] = [left("number", lambda row: row[0]), right("value", lambda row: row[1])]
    Report("protocol of its finals", steps, list(_plan(calibration))).print()


def _plan(calibration: Calibration) -> Iterator[tuple[str, str]]:
    plan = calibration.protocol
    yield "processes", ", then ".join(map(str, (plan.processes, *plan.more_processes)))
    yield "rounds in each", str(plan.rounds)
    yield "finalists within", share(plan.screen_band, 2)
    yield "as good as the best within", share(plan.tie_band, 2)
    yield "replaced when slower by", share(plan.keep_band, 2)


def _value(name: str, value: float) -> str:
    if name.endswith("_sd"):
        return share(value, 2)
    return f"{value:,.0f} GB/s" if name.endswith("gb_per_s") else f"{value:.3f} us"
