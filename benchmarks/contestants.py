"""The tuners that race over one problem of ``colwise``, each as its own documentation says to use it.

A contestant is a function of the course that imports and builds what it needs and returns the search, which alone is
on the clock. All of them launch ``colwise_kernel`` just as a sweep does.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from fp8tune.measure import device
from fp8tune.measure.worker import usable_cores
from fp8tune.plan import grids
from fp8tune.plan import problems as plan
from fp8tune.records import NamedInts, Problem
from fp8tune.replay.loading import load_spec
from fp8tune.stats.means import median
from fp8tune_kernels.arches import ARCHES
from fp8tune_kernels.spec import KernelSpec

KERNEL = "colwise"
ROW = NamedInts(M=16640, K=5120, E=64)
"""A row of a shape set. It has no N, and so holds one problem: 16640 x 5120 in 64 jagged groups."""
GRID = ("BLOCK_SIZE_ITER=32,64,128,256,512", "LEAD=0", "maxnreg=0")
"""Every tuner launches one function with the same tensors: nothing that has zeroes written first (panels), and no
option that is left out rather than 0. A short tile makes up for the number."""
ARCH_WITHOUT_GPU = "sm_90"
SAMPLES = 5
"""Launches of a config that the oracle times in a round, after one that is not timed."""


@dataclass(frozen=True)
class Course:
    """The problem and the configs, the same for every contestant."""

    spec: KernelSpec
    problem: Problem
    axes: Mapping[str, Sequence[int]]
    """The kernel's, as the grid narrows and widens them."""
    configs: tuple[NamedInts, ...]
    torch_device: str
    """``cuda``; or ``meta`` where there is no GPU: tuners can be built there, nothing can be searched."""

    @classmethod
    def here(cls) -> Course:
        """The course on this machine's GPU: the configs of the grid that the kernel does not prune."""
        import torch

        spec = load_spec(KERNEL)
        problem = plan.problems(spec, [ROW])[0]
        found = device.probe()
        limits = ARCHES[ARCH_WITHOUT_GPU].limits() if found is None else device.limits(found)
        axes = grids.parse_grid(GRID, spec.axes)
        kept = [config for config, pruned in grids.configs(spec, problem, axes, limits).items() if not pruned]
        in_grid = tuple(config for config in kept if all(config[axis] in axes[axis] for axis in axes))  # no default
        return cls(spec, problem, axes, in_grid, "cuda" if torch.cuda.is_available() else "meta")

    @property
    def tunables(self) -> dict[str, Sequence[int]]:
        """The axes that have a choice of values."""
        return {axis: values for axis, values in self.axes.items() if len(values) > 1}

    @cached_property
    def inputs(self) -> tuple[Any, ...]:
        """The inputs of ``launch``: x, offs, the FP8 dtype, the scale mode."""
        return self.spec.inputs(self.problem, self.torch_device)

    @cached_property
    def outputs(self) -> tuple[Any, ...]:
        """The outputs that every launch overwrites: q, scales."""
        return self.spec.outputs(*self.inputs)

    def launch(self, config: Mapping[str, int]) -> None:
        """Enqueue the kernel with this config, as a sweep does."""
        self.spec.launch(config, self.inputs, self.outputs)

    @cached_property
    def arguments(self) -> tuple[Any, ...]:
        """What ``launch`` gives ``colwise_kernel`` besides the config. A test holds the two together."""
        from fp8tune_kernels.quantize.arithmetic import FP8_MAX

        x, offs, fp8_dtype, power_of_two = self.inputs
        unused = x  # without panels nothing counts in it
        constants = (FP8_MAX[fp8_dtype], power_of_two, 1)  # groups begin at any row
        return x, offs, *self.outputs, unused, *x.shape, offs.shape[0], *constants

    def grid(self, config: Mapping[str, Any]) -> tuple[int]:
        """The programs that ``launch`` starts: one a block of columns of each group, and of the rows after the last."""
        from fp8tune_kernels.quantize import panels

        x, offs, *_ = self.inputs
        rows, columns = x.shape
        return (panels.programs(config, rows, columns, offs.shape[0], x.device),)

    def settings(self, config: Mapping[str, int]) -> dict[str, int]:
        """What ``launch`` makes of a config: the kernel's constants and the launch options."""
        from fp8tune_kernels.quantize import panels

        return panels.options(config)

    def as_config(self, settings: Mapping[str, Any]) -> NamedInts:
        """The config in a tuner's launch settings, in the order of the axes."""
        return NamedInts([(a, int(settings[a]) if a in self.tunables else self.axes[a][0]) for a in self.spec.axes])


@dataclass(frozen=True)
class Found:
    """What a search came to."""

    pick: NamedInts
    timed: int
    """Configs that it timed, of those it was given."""


Search = Callable[[], Found]


def triton_autotune(course: Course) -> Search:
    """``triton.autotune`` as it is: a config after the other, compiled and timed by ``do_bench`` (25 ms + 100 ms)."""
    import triton

    from fp8tune_kernels.quantize.colwise import colwise_kernel

    options = ("num_warps", "num_stages")  # arguments of their own there
    configs = [
        triton.Config(
            {axis: value for axis, value in course.settings(config).items() if axis not in options},
            **{option: config[option] for option in options},
        )
        for config in course.configs
    ]
    tuner: Any = triton.autotune(configs, key=["M", "K", "G"])(colwise_kernel)
    launch, arguments = tuner[course.grid], course.arguments

    def search() -> Found:
        launch(*arguments)
        timed = [times for times in tuner.configs_timings.values() if times[0] < float("inf")]
        return Found(course.as_config(tuner.best_config.all_kwargs()), len(timed))

    return search


def fp8tune_quick(course: Course, timer: str = "do_bench") -> Search:
    """``fp8tune sweep --quick`` into a new database: every config's bytes are checked before it is timed."""
    from fp8tune.cli.adapter import app
    from fp8tune.stats.rank import competing
    from fp8tune.store.results import Store
    from fp8tune.studies import decided

    folder = Path(tempfile.mkdtemp())
    shapes, db = str(folder / "race.toml"), str(folder / "race.db")
    sizes = "\n".join(f"{dim} = {size}" for dim, size in ROW.items())
    Path(shapes).write_text(f"[[rows]]\n{sizes}\n")
    command = ["sweep", "--quick", "--kernel", KERNEL, "--shapes", shapes, "--timer", timer, "--db", db]
    command += [argument for axis in GRID for argument in ("--grid", axis)]

    def search() -> Found:
        app(command, standalone_mode=False)
        with Store.open(db, writable=False) as store:
            (study,) = store.studies(keep=competing)
        fixed = {axis: values[0] for axis, values in course.axes.items() if len(values) == 1}
        raced = [r for r in study.results if fixed.items() <= dict(r.config or {}).items()]  # less the default
        (study,) = decided([replace(study, results=tuple(raced))])
        return Found(course.as_config(study.pick.config or {}), len(study.times_us))

    return search


def thread_pool(course: Course) -> Search:
    """What one writes in ten lines: all configs compiled by a pool of threads, then a short ``do_bench`` of each."""
    from triton.runtime.errors import OutOfResources
    from triton.testing import do_bench

    course.arguments  # noqa: B018 - the tensors are built before the clock starts

    def search() -> Found:
        compile_in_threads(course)
        times_ms = {}
        for config in course.configs:
            try:
                samples_ms = do_bench(lambda: course.launch(config), warmup=2, rep=10, return_mode="all")  # noqa: B023
                times_ms[config] = median(samples_ms)
            except OutOfResources:
                continue
        return Found(min(times_ms, key=times_ms.__getitem__), len(times_ms))

    return search


CONTESTANTS: dict[str, Callable[[Course], Search]] = {
    "triton.autotune": triton_autotune,
    "fp8tune": fp8tune_quick,
    "thread-pool": thread_pool,
}
"""In the order they run."""


def true_times_us(course: Course, rounds: int) -> dict[NamedInts, list[float]]:
    """Microseconds of each config that can be launched, one value a round, timed in turns in this process.

    A round is a permutation of all configs, so that drift and neighbours hit each alike. A value is the median of
    :data:`SAMPLES` launches, each after a flush of the L2 cache as ``do_bench`` does it.
    """
    import torch
    import triton

    compile_in_threads(course)
    driver = triton.runtime.driver.active
    flush = driver.get_empty_cache_for_benchmark()
    times_us: dict[NamedInts, list[float]] = {config: [] for config in course.configs if _launches(course, config)}
    order, permuted = list(times_us), random.Random(0)
    for _ in range(rounds):
        permuted.shuffle(order)
        events: dict[NamedInts, list[tuple[Any, Any]]] = {config: [] for config in order}
        for config, pairs in events.items():
            course.launch(config)
            for _ in range(SAMPLES):
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                driver.clear_cache(flush)
                start.record()
                course.launch(config)
                end.record()
                pairs.append((start, end))
        torch.cuda.synchronize()  # only here: the GPU never waits for Python
        for config, pairs in events.items():
            times_us[config].append(1e3 * median(start.elapsed_time(end) for start, end in pairs))
    return times_us


def compile_in_threads(course: Course) -> None:
    """``warmup`` calls in Triton's asynchronous mode. A config that fails to compile is left to its launch."""
    import triton

    from fp8tune_kernels.quantize.colwise import colwise_kernel

    with ThreadPoolExecutor(usable_cores()) as executor, triton.AsyncCompileMode(executor, ignore_errors=True):
        for config in course.configs:
            colwise_kernel.warmup(*course.arguments, grid=course.grid(config), **course.settings(config))


def _launches(course: Course, config: NamedInts) -> bool:
    from triton.runtime.errors import OutOfResources

    try:
        course.launch(config)
    except OutOfResources:
        return False
    return True
