"""What is compiled before anything is timed."""

from __future__ import annotations

import os
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench_fakes import without_a_gpu

from fp8tune.bench import kernels as bench
from fp8tune.bench import warming
from fp8tune.bench.options import BenchOptions
from fp8tune.measure.arms import Arm, Work
from fp8tune.measure.backends.simulated import SimulatedBackend


def test_warming_up_runs_an_autotuner_once_for_sizes_of_one_kind() -> None:
    backend = SimulatedBackend("simulated:1")
    wanted = bench.planned(BenchOptions(kernels=("colwise",)), backend)
    warmed = wanted.compiled_first(backend.device)
    names = [contender.name for contender in warmed]
    assert names == sorted(names, key=lambda name: name != "torchao")
    groups = {contender.problem.shape["G"] for contender in warmed if contender.name == "torchao"}
    assert groups == {1, 16, 8}  # a size of 1, multiples of 16, others: three binaries each
    assert names.count("fp8tune") > names.count("torchao")
    assert list(warming.in_parallel(backend, warmed, 8)) == []  # no kernel runs: nothing is said


@dataclass(frozen=True)
class Warmed(Arm):
    """An autotuner times a config, on a fake GPU, and the launch of the one it picks fails."""

    path: Path

    @property
    def work(self) -> Work:
        return Work("warmed", 0)

    def launcher(self, torch_device: str) -> Callable[[], object]:
        from triton.runtime import driver

        if self.path.name == "dies":
            os._exit(3)
        times = driver.active.get_benchmarker()(lambda: self.path.write_text(str(os.getpid())), quantiles=(0.5, 0.2))
        assert len(times) == 3
        raise ValueError("planted")

    def build(self, torch_device: str) -> None:
        from triton.runtime import driver

        driver.set_active(types.SimpleNamespace())  # type: ignore[arg-type]


def test_contenders_are_warmed_up_in_processes_that_are_thrown_away(tmp_path: Path) -> None:
    arms = [Warmed(path=tmp_path / name) for name in ("dies", "one", "two", "three")]
    seen = list(warming.in_parallel(without_a_gpu(), arms, workers=2))
    assert [(compiled.done, compiled.total) for compiled in seen] == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "three", "two"]
    assert str(os.getpid()) not in {path.read_text() for path in tmp_path.iterdir()}
