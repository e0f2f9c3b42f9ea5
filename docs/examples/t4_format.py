"""An export format: all that was tried, as results of T4, the format in which autotuning research shares its data.

The package that holds this file declares it in its pyproject.toml:

    [project.entry-points."fp8tune.formats"]
    t4 = "t4_format:FORMAT"

Then ``fp8tune export --for t4 --arch sm_90 --kernel my_ops:matmul -o results`` writes a file for each problem.
"""

import json
from collections.abc import Sequence
from pathlib import PurePosixPath

from fp8tune.records import NamedInts, Status
from fp8tune.tables.files import File
from fp8tune.tables.formats import Format, Options
from fp8tune.tables.picks import KernelPicks, Pick

INVALIDITY = {Status.WRONG: "correctness", Status.COMPILE_ERROR: "compile", Status.TIMEOUT: "timeout"}


def write(kernels: Sequence[KernelPicks], options: Options) -> list[File]:
    """Return a file of results for each problem; see https://github.com/odgaard/TuningSchema."""
    (kernel,) = kernels
    return [
        File(PurePosixPath(kernel.bare_name, f"{number}.t4-results.json"), json.dumps(results(kernel, pick), indent=1))
        for number, pick in enumerate(kernel.picks)
    ]


def results(kernel: KernelPicks, pick: Pick) -> dict[str, object]:
    """Return the document of one problem, with times in milliseconds."""
    timed = [
        {
            "configuration": arguments(kernel, config),
            "objectives": ["time"],
            "times": {"runtimes": [time_us / 1000]},
            "invalidity": "correct",
            "correctness": 1,
            "measurements": [{"name": "time", "value": time_us / 1000, "unit": "ms"}],
        }
        for config, time_us in pick.study.times_us.items()
    ]
    failed = [
        {
            "configuration": arguments(kernel, config),
            "objectives": ["time"],
            "times": {"runtimes": []},
            "invalidity": INVALIDITY.get(status, "runtime"),
            "correctness": 0,
            "measurements": [],
        }
        for config, status in pick.study.failures.items()
    ]
    return {"schema_version": "1.0.0", "metadata": {"timeunit": "milliseconds"}, "results": [*timed, *failed]}


def arguments(kernel: KernelPicks, name: NamedInts) -> dict[str, object]:
    """Return a config as the kernel's launch takes it."""
    config = kernel.triton_config(name)
    return {**config.kwargs, **config.options}


FORMAT = Format(write, "any reader of T4 takes {folder}")
