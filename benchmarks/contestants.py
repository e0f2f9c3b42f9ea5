"""The tuners that race, each as its own documentation says to use it.

A contestant is a function of the course that imports and builds what it needs and returns the search. Only the search
is on the clock: from its first call to the pick. All of them launch ``colwise_kernel`` just as a sweep does.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.course import GRID, KERNEL, ROW, Course
from fp8tune.measure.worker import usable_cores
from fp8tune.records import NamedInts
from fp8tune.stats import median


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

    return _by_launching(course, triton.autotune(_triton_configs(course), key=["M", "K", "G"])(colwise_kernel))


def fp8tune_quick(course: Course) -> Search:
    """``fp8tune sweep --quick`` into a new database: every config's bytes are checked before it is timed."""
    from fp8tune.store.results import Store
    from fp8tune.sweep import session

    folder = Path(tempfile.mkdtemp())
    sizes = "\n".join(f"{dim} = {size}" for dim, size in ROW.items())
    (folder / "race.toml").write_text(f"[[rows]]\n{sizes}\n")
    shapes = (str(folder / "race.toml"),)
    wish = session.Wish((KERNEL,), shapes, grid=GRID, timer=course.timer, quick=True, command="race")

    def search() -> Found:
        job = session.take(wish)
        prepared = _narrowed(session.prepare(job), course)
        timed = set()
        with Store.open(str(folder / "race.db"), create=True) as store:
            for event in session.run(store, job, prepared):
                row = session.row_of(event)
                if row is not None and row.outcome.time_us is not None:
                    timed.add(row.config)
            pick = session.winners(store, job.laboratory, [course.problem])[0].config
        return Found(course.as_config(pick or {}), len(timed))

    return search


def thread_pool(course: Course) -> Search:
    """What one writes in ten lines: all configs compiled by a pool of threads, then a short ``do_bench`` of each."""
    course.arguments  # noqa: B018 - the tensors are built before the clock starts

    def search() -> Found:
        compile_in_threads(course, usable_cores())
        times_ms = {config: _short_bench_ms(course, config) for config in course.configs}
        fastest = {config: time_ms for config, time_ms in times_ms.items() if time_ms is not None}
        return Found(min(fastest, key=fastest.__getitem__), len(fastest))

    return search


def helion_finite(course: Course) -> Search:
    """Helion's FiniteSearch over the very list, with its check of the outputs."""
    import helion

    configs = [helion.Config(**{axis: config[axis] for axis in course.tunables}) for config in course.configs]
    return _helion(course, "FiniteSearch", configs=configs)


def helion_lfbo(course: Course) -> Search:
    """Helion's LFBOTreeSearch, its default, over the axes; what is not in the list is filtered out."""
    wanted = set(course.configs)
    return _helion(
        course,
        "LFBOTreeSearch",
        autotune_config_filter=lambda config: config if course.as_config(config) in wanted else None,
    )


def libtuner(course: Course) -> Search:
    """FlagGems' LibTuner with its default policy: ``triton.autotune`` that keeps its timings in a database."""
    os.environ["GEMS_VENDOR"] = "nvidia"  # else it runs the query commands of every vendor that it knows
    os.environ["FLAGGEMS_CACHE_DIR"] = tempfile.mkdtemp()  # else it answers from its database
    from flag_gems.utils.libentry import libtuner as decorate

    from fp8tune_kernels.quantize.colwise import colwise_kernel

    return _by_launching(course, decorate(_triton_configs(course), key=["M", "K", "G"])(colwise_kernel))


CONTESTANTS: dict[str, Callable[[Course], Search]] = {
    "triton.autotune": triton_autotune,
    "fp8tune": fp8tune_quick,
    "thread-pool": thread_pool,
    "helion-finite": helion_finite,
    "helion-lfbo": helion_lfbo,
    "libtuner": libtuner,
}
"""In the order they run: those the verdict is about first."""


def compile_in_threads(course: Course, threads: int) -> None:
    """``warmup`` calls in Triton's asynchronous mode. A config that fails to compile is left to its launch."""
    import triton

    from fp8tune_kernels.quantize.colwise import colwise_kernel

    with ThreadPoolExecutor(threads) as executor, triton.AsyncCompileMode(executor, ignore_errors=True):
        for config in course.configs:
            colwise_kernel.warmup(*course.arguments, grid=course.grid(config), **course.settings(config))


def _short_bench_ms(course: Course, config: NamedInts) -> float | None:
    from triton.runtime.errors import OutOfResources
    from triton.testing import do_bench

    try:
        return median(do_bench(lambda: course.launch(config), warmup=2, rep=10, return_mode="all"))
    except OutOfResources:
        return None


def _triton_configs(course: Course) -> list[Any]:
    """The course's configs as ``triton.Config``: warps and stages are arguments of their own there."""
    import triton

    options = ("num_warps", "num_stages")
    return [
        triton.Config(
            {axis: value for axis, value in course.settings(config).items() if axis not in options},
            **{option: config[option] for option in options},
        )
        for config in course.configs
    ]


def _by_launching(course: Course, tuner: Any) -> Search:
    """The search of a kernel that tunes itself the first time it is launched."""
    launch, arguments = tuner[course.grid], course.arguments

    def search() -> Found:
        launch(*arguments)
        timed = [times for times in tuner.configs_timings.values() if times[0] < float("inf")]
        return Found(course.as_config(tuner.best_config.all_kwargs()), len(timed))

    return search


def _helion(course: Course, algorithm: str, **options: Any) -> Search:
    """A search through Helion's API for kernels that are not its own; all its settings are as it ships."""
    from helion.autotuner import PowerOfTwoFragment, autotune

    compiled = set()

    def compile_fn(config: Any) -> Callable[..., tuple[Any, ...]]:
        compiled.add(course.as_config(config))

        def run(*_: Any) -> tuple[Any, ...]:
            course.launch(course.as_config(config))
            return course.outputs

        return run

    default = course.spec.default
    tunables = {axis: PowerOfTwoFragment(min(v), max(v), default[axis]) for axis, v in course.tunables.items()}
    inputs, tensors = course.inputs, course.inputs[:2]

    def reference(*_: Any) -> tuple[Any, ...]:
        return course.spec.reference(*inputs)

    def search() -> Found:
        best = autotune(tunables, compile_fn, tensors, baseline_fn=reference, algorithm=algorithm, **options)
        return Found(course.as_config(best), len(compiled))

    return search


def _narrowed(prepared: Any, course: Course) -> Any:
    """The sweep over no other configs than the course's."""
    wanted = set(course.configs)
    batches = [
        replace(batch, trials=tuple(trial for trial in batch.trials if trial.config in wanted))
        for batch in prepared.request.batches
    ]
    return replace(prepared, request=replace(prepared.request, batches=tuple(batches)))
