"""`fp8tune bench` of kernels, end to end on a simulated GPU: what is timed, and what is not."""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from bench_fakes import FAULTS, PROBLEM, FakeGpu, TorchAo, simulated
from forked import Forked, ended

from fp8tune import cli
from fp8tune.bench import kernels as bench
from fp8tune.bench.cells import Cells, Timing
from fp8tune.bench.kernel_contenders import (
    OURS,
    TORCH_ADD,
    TORCH_COMPILE,
    TORCHAO,
    HostCall,
    KernelContender,
    public_wrapper,
)
from fp8tune.bench.kernels import Kernel, Row
from fp8tune.bench.options import BenchOptions
from fp8tune.errors import UsageError
from fp8tune.measure.backends.choice import backend_for
from fp8tune.records import NamedInts, Outcome, Status
from fp8tune.replay.loading import load_spec


def test_a_simulated_run_times_every_cell_and_repeats_itself() -> None:
    first = simulated("colwise", FAULTS)
    kernels = [event for event in first if isinstance(event, Kernel)]
    rows = [event for event in first if isinstance(event, Row)]
    assert [kernel.name for kernel in kernels] == ["colwise", load_spec(FAULTS).name]
    assert [each for kernel in kernels for each in kernel.rows] == rows
    for each in rows:
        assert list(each.timings) == [OURS, TORCH_COMPILE, TORCHAO]
        assert all(timing.time_us and not timing.reason for timing in (each.copy, *each.timings.values()))
        assert each.timings["fp8tune"].config == load_spec("colwise" if each in kernels[0].rows else FAULTS).default
    assert list(kernels[0].hosts) == ["fp8tune", "torchao", "torch.add"]
    assert simulated("colwise", FAULTS) == first


def test_host_times_are_within_the_time_budget() -> None:
    count = len(simulated("colwise")) - 1
    for seconds, hosts in ((0, []), (1, ["fp8tune", "torchao", "torch.add"])):
        clock = iter(range(1000)).__next__  # a second a question
        kernel, *rows = simulated("colwise", time_budget_s=float(count + seconds), clock=clock)
        assert isinstance(kernel, Kernel)
        assert (len(rows), list(kernel.hosts)) == (count, hosts)


@pytest.mark.parametrize(
    ("number", "code", "op"), [(signal.SIGINT, 130, ("--op", "grouped-mm")), (signal.SIGTERM, 143, ())]
)
def test_who_stops_it_gets_what_was_timed(number: int, code: int, op: tuple[str, ...], tmp_path: Path) -> None:
    many = "".join(f"[[rows]]\nM = {1024 * n}\nK = 512\nN = 512\nE = 4\n" for n in range(1, 500))
    (tmp_path / "many.toml").write_text(many)
    command = ["fp8tune", "bench", "--timer", "simulated:1", "--format", "json", *op]
    said = tmp_path / "said.json"

    def run() -> None:
        os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT), 1)
        sys.argv = [*command, "--shapes", str(tmp_path / "many.toml")]
        cli.main()

    running = Forked(run)
    while line := running.line():
        if line.startswith("[2/"):
            break
    os.kill(running.pid, number)
    found, progress = running.wait()
    assert found == code, progress
    rows = json.loads(said.read_text())
    assert len([row for row in rows if row["row"] in ("problem", "grouped-mm")]) >= 2
    assert "problems left out" in progress
    assert ("host times left out: colwise" in progress) == (not op)


def test_a_kernel_that_torch_compile_refuses_is_compiled_once() -> None:
    refuses = Outcome(Status.COMPILE_ERROR, reason="Unsupported: no")

    def outcomes(step: str, name: str, round: int) -> Outcome:
        return refuses if (step, name) == ("launch", TORCH_COMPILE) else Outcome(Status.OK, 5.0)

    backend = FakeGpu(outcomes)
    refused: dict[str, Timing] = {}
    rows = [
        bench._row(Cells(backend), [Refusing(name, PROBLEM, "x", 8, NamedInts()) for name in names], refused, Timing())
        for names in 3 * [(OURS, TORCH_COMPILE, TORCHAO)]
    ]
    assert [row.timings[TORCH_COMPILE].reason for row in rows] == ["Unsupported: no"] * 3
    assert [row.timings[TORCHAO].time_us for row in rows] == [5.0] * 3
    assert backend.asked.count(("launch", TORCH_COMPILE, 0)) == 1


@dataclass(frozen=True)
class Refusing(KernelContender):
    def check(self) -> Timing:
        return Timing()


def test_host_calls_launch_once_on_a_small_input(torchao: TorchAo) -> None:
    torchao("rowwise-2d", load_spec("rowwise-2d").reference)
    calls = {name: HostCall(name, "rowwise-2d", "rowwise-2d").launcher("cpu") for name in bench.HOSTS}
    (ours, _), (theirs, _) = calls[OURS](), calls[TORCHAO]()
    assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
    assert calls[TORCH_ADD]().shape == (64, 64)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--against", "torcha", "--timer", "simulated:1"], "did you mean torchao"),
        (["--kernel", "colwse", "--timer", "simulated:1"], "did you mean colwise"),
        (["--shapes", "lama4", "--timer", "simulated:1"], "did you mean llama4"),
        pytest.param(
            [], "needs a GPU", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
        ),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], says: str) -> None:
    done = ended("bench", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.gpu
def test_on_a_gpu_every_kernel_has_a_time_and_a_ceiling() -> None:
    backend, _ = backend_for(None, None)
    events = list(bench.run(backend, bench.planned(BenchOptions(shapes=("tiny",)), backend)))
    for each in events:
        if isinstance(each, Row):
            assert each.ours.time_us, each.ours.reason
            assert each.copy.time_us, each.copy.reason
            assert not each.is_wrong, each.timings["fp8tune"].reason
            assert all(timing.time_us or timing.reason for timing in each.timings.values())
            assert each.timings["torch.compile"].time_us, each.timings["torch.compile"].reason
        elif isinstance(each, Kernel):
            assert each.hosts["fp8tune"].time_us, each.hosts["fp8tune"].reason
            assert each.hosts["torch.add"].time_us


def test_a_spent_time_budget_starts_no_problem() -> None:
    assert simulated("colwise", time_budget_s=0.0) == []


def test_a_kernel_of_elsewhere_has_no_wrapper_to_time() -> None:
    with pytest.raises(UsageError, match="lives elsewhere"):
        public_wrapper(load_spec(FAULTS))
