"""Printing of a recording: a short line a kernel, and the sweep that gains most."""

from __future__ import annotations

import json
from pathlib import Path

from command_line import fp8tune

from fp8tune.replay.recording import Config, Grid, Kernel, Launch, Recording, text_of
from fp8tune.output.record import make_summary

LAUNCH = Launch((), Grid((), (((), (1,)),)))
TWO = (Config({"BLOCK": 64}), Config({"BLOCK": 128}))


def _kernel(name: str, gpu_us: float, configs: tuple[Config, ...] = TWO, tuning_s: float = 0.0) -> Kernel:
    launch = Launch((), LAUNCH.grid, gpu_us=gpu_us)
    return Kernel(
        f"some.package.of.a.long.name.of.kernels:{name}", launches=(launch,), configs=configs, tuning_s=tuning_s
    )


FIXED = _kernel("fixed", 60.0, configs=TWO[:1])
SLOW, TUNED = _kernel("slow", 30.0, tuning_s=1.0), _kernel("tuned", 10.0, tuning_s=9.0)


def test_the_kernel_with_most_tuning_and_gpu_time_is_swept_first() -> None:
    refused = Kernel("m:refused", refusal="a lambda", configs=TWO, launches=(LAUNCH,), tuning_s=90.0)
    for kernels, first in (((FIXED, SLOW, TUNED, refused), TUNED), ((FIXED,), FIXED)):
        best = most_to_gain(rows(Recording(kernels=kernels)))
        assert best is not None
        assert best.kernel == first.name
    assert most_to_gain(rows(Recording(kernels=(refused,)))) is None


def test_show_prints_a_recording(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(text_of(Recording(kernels=(FIXED, SLOW, TUNED))))
    ended = fp8tune("show", path)
    assert TUNED.name in ended.stdout
    assert f"next: fp8tune sweep --kernel {TUNED.name} --recording {path}" in ended.stdout
    assert f"all: fp8tune sweep --recording {path}" in ended.stdout
    output = json.loads(fp8tune("show", path, "--format", "json").stdout)
    assert [row["kernel"] for row in output["kernels"]] == [FIXED.name, SLOW.name, TUNED.name]
    assert fp8tune("show", path, "--failed").returncode == 2
