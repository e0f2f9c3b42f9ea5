"""The tables of ``fp8tune calibrate``."""

from __future__ import annotations

from dataclasses import asdict

from fp8tune.calibrate.record import Calibration
from fp8tune.choose.calibration import MEASURED
from fp8tune.render.terminal import print_json, table


def print_calibration(calibration: Calibration, output_format: str) -> None:
    """What was measured, and the protocol that finals on this device go by from now on."""
    if output_format == "json":
        device = {"arch": calibration.device.arch, "device": calibration.device.name}
        print_json({**device, "measured": calibration.values, "protocol": asdict(calibration.protocol)})
        return
    device_name = calibration.device.name or calibration.device.arch
    rows = [
        (name, _value(name, calibration.values[name]), MEASURED[name])
        for name in MEASURED
        if name in calibration.values
    ]
    table(f"measured on {device_name}", [("name", "left"), ("value", "right"), ("what", "left")], rows)
    print()
    protocol = calibration.protocol
    steps = [
        ("processes", ", then ".join(map(str, (protocol.processes, *protocol.more_processes)))),
        ("rounds in each", str(protocol.rounds)),
        ("finalists within", _percent(protocol.screen_band)),
        ("as good as the best within", _percent(protocol.tie_band)),
        ("replaced when slower by", _percent(protocol.keep_band)),
    ]
    table("protocol of its finals", [("number", "left"), ("value", "right")], steps)


def _value(name: str, value: float) -> str:
    if name.endswith("_sd"):
        return _percent(value)
    return f"{value:,.0f} GB/s" if name.endswith("gb_per_s") else f"{value:.3f} us"


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"
