"""All that was tried, as T4 results and metadata: the format in which autotuning research shares its data.

Specified by the schemas of https://github.com/odgaard/TuningSchema (branch T4), whose copies in kernel_tuner 1.5.0
(kernel_tuner/schema/T4/1.0.0, Apache-2.0) were read, and used as file_utils.py of kernel_tuner does: a file of results
for each problem, times in milliseconds, ``time`` the objective. Neither schema forbids other fields: the metadata has
the evidence beside them.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

from fp8tune.export.formats.documents import bare_name, evidence, file_name, text_of
from fp8tune.export.given import File, Given, Tuned
from fp8tune.records import Status
from fp8tune.replay.recording import Config

SCHEMA_VERSION = "1.0.0"

INVALIDITY = {
    Status.OK: "correct",
    Status.WRONG: "correctness",
    Status.COMPILE_ERROR: "compile",
    Status.OUT_OF_RESOURCES: "runtime",  # kernel_tuner: a launch that asks for too many resources
    Status.OUT_OF_MEMORY: "runtime",
    Status.CRASHED: "runtime",
    Status.TIMEOUT: "timeout",
    Status.UNTIMED: "runtime",  # T4 has no word for it
    Status.PRUNED: "constraints",
}
"""How a trial ended -> what T4 calls it."""


def write(given: Given) -> list[File]:
    """A folder named after the kernel: a file of results for each problem, and one of metadata."""
    if not given.tuned:
        return []
    folder = PurePosixPath(file_name(bare_name(given.kernel)))
    width = len(str(len(given.tuned) - 1))
    files, problems = [], {}
    for place, one in enumerate(given.tuned):
        sizes = ",".join(f"{name}={size}" for name, size in one.problem.shape.items())
        # the number keeps apart what differs in more than sizes
        name = file_name(f"{place:0{width}d}-{sizes}"[:120]) + ".t4-results.json"
        problems[name] = evidence(one)
        files.append(File(folder / name, text_of(_results(given, one))))
    return [*files, File(folder / "t4-metadata.json", text_of(_metadata(given, problems)))]


def _results(given: Given, one: Tuned) -> dict[str, Any]:
    timed = [_result(_arguments(given.configs[config]), Status.OK, time_us) for config, time_us in one.times_us.items()]
    failed = [
        _result(_arguments(given.configs[config]), Status(status), reason=reason)
        for config, (status, reason) in one.failures.items()
    ]
    return {"schema_version": SCHEMA_VERSION, "metadata": {"timeunit": "milliseconds"}, "results": [*timed, *failed]}


def _result(
    arguments: dict[str, Any], status: Status, time_us: float | None = None, reason: str = ""
) -> dict[str, Any]:
    times_ms = [] if time_us is None else [round(time_us / 1000, 9)]
    measurements = [{"name": "time", "value": time_ms, "unit": "ms"} for time_ms in times_ms]
    measurements += [{"name": "reason", "value": reason, "unit": ""}] if reason else []
    return {
        "configuration": arguments,
        "objectives": ["time"],
        "times": {"runtimes": times_ms},
        "invalidity": INVALIDITY[status],
        "correctness": 1 if status is Status.OK else 0,
        "measurements": measurements,
    }


def _arguments(config: Config) -> dict[str, Any]:
    """The whole config, so that all results have the same parameters."""
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages, "num_ctas": config.num_ctas}
    return {**config.kwargs, **options, **({} if config.maxnreg is None else {"maxnreg": config.maxnreg})}


def _metadata(given: Given, problems: dict[str, Any]) -> dict[str, Any]:
    device = given.device
    described = {"product": device.name, "arch": device.arch, "multiprocessors": device.multiprocessors}
    versions = {"torch": device.torch, "triton": device.triton}
    environment = {
        "device_query": {"name": device.name, "driver": device.driver, "runtime": device.runtime},
        "requirements": [f"{name}=={version}" for name, version in versions.items() if version],
    }
    metadata = {"hardware": {"hardware_description": [described]}, "environment": environment}
    beside = {"kernel": given.kernel, "problems": problems}
    return {"schema_version": SCHEMA_VERSION, "metadata": metadata, "fp8tune": beside}
