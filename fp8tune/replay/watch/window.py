"""Measure the same part of two runs of a program: its GPU time between two launches, and the time of run-time tuning.

In the first run the window opens when no kernel has been tuned for a while, and closes after :data:`LENGTH_S` or when
Python ends. The second run gets the launch numbers of the first, so that both windows hold the same work, and the
tables that its kernels are pinned to. Numbers count the launches of watched kernels in a process.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import logging
import os
import sys
import threading
import time
import uuid
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fp8tune.replay.watch import times
from fp8tune_kernels.pinning import pin_to
from fp8tune_kernels.pinning.tables import tables_of
from fp8tune_kernels.pinning.targets import is_of
from fp8tune_kernels.tuners import python_function

FOLDER, PLAN, TABLES = "FP8TUNE_WINDOW", "FP8TUNE_WINDOW_PLAN", "FP8TUNE_WINDOW_TABLES"
"""Environment variables: the folder that gets a file from each process; JSON of rank -> launch numbers; a folder of
tables of ``fp8tune export --for python``."""

QUIET_S, QUIET_LAUNCHES = 0.2, 20
"""Time and launches without run-time tuning after which the first run's window opens."""
LENGTH_S = 2.0  # length of the first run's window
SUFFIX = ".window"


@dataclass
class Measured:
    """Measurements of one process, which fills them in while it runs."""

    rank: str  # `RANK` of its environment; empty without one
    opened: int | None = None  # number of the first launch in the window; None if no window opened
    closed: int | None = None  # number of the first launch after it; None if Python ended first
    launches: int = 0  # until the window closed
    tuning_s: dict[str, float] = field(default_factory=dict)
    """Function name -> time of its run-time tuning. Without what the next start finds on the disk: compiled code, and
    the result for kernels with ``cache_results``."""
    gpu_us: float | None = None  # time in which the GPU was busy in the window; None where nothing profiles
    kernel_us: dict[str, float] = field(default_factory=dict)  # function name -> its GPU time in the window
    pinned: list[str] = field(default_factory=list)  # kernels that took their configs from a table

    @classmethod
    def read(cls, folder: Path) -> list[Measured]:
        """Return what the processes of a run wrote."""
        texts = (path.read_text(encoding="utf-8") for path in sorted(folder.glob(f"*{SUFFIX}")))
        return [cls(**json.loads(text)) for text in texts]


class Window:
    """The window of this process."""

    def __init__(self, folder: Path, plan: Mapping[str, Any] | None, tables: str) -> None:
        self.measured = Measured(os.environ.get("RANK", ""))
        self._path = folder / f"{os.getpid()}-{uuid.uuid4().hex[:8]}{SUFFIX}"
        self._plan = None if plan is None else plan.get(self.measured.rank, (sys.maxsize, None))
        self._tables = tables_of(tables) if tables else []
        logging.getLogger("fp8tune").setLevel(logging.ERROR)  # that kernels are pinned is no news
        self._compiled_s = 0.0
        self._known: set[int] = set()
        self._inside = threading.local()
        self._tuned_at, self._tuned_at_s, self._opened_s = 0, time.perf_counter(), 0.0
        self._profile: Any = None
        self._is_closed = False
        atexit.register(self.finish)

    def counted(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a kernel class's ``run``, counted. A launch within a launch does not count."""

        @functools.wraps(original)
        def run(kernel: Any, *args: Any, **kwargs: Any) -> Any:
            if getattr(self._inside, "depth", False) or kwargs.get("warmup"):
                return original(kernel, *args, **kwargs)
            is_pinned = self._tables and id(kernel) not in self._known and self._pin(kernel)
            launch = type(kernel).run if is_pinned else original  # a pin gives the kernel another class
            before_s, compiled_s = getattr(kernel, "bench_time", None), self._compiled_s
            with self._guarded():
                self._count()
            self._inside.depth = True
            try:
                return launch(kernel, *args, **kwargs)
            finally:
                self._inside.depth = False
                tuned_s = getattr(kernel, "bench_time", None)
                if tuned_s is not None and tuned_s != before_s:
                    with self._guarded():
                        self._tuned(kernel, tuned_s - (self._compiled_s - compiled_s))

        return run

    def listen(self, compilation: Any) -> None:
        """Add up the time of compiling that Triton's cache saves the next start."""
        before = getattr(compilation, "listener", None)

        def listener(*, times: Any, cache_hit: bool, **others: Any) -> None:
            self._compiled_s += 0.0 if cache_hit else times.total / 1e6
            if before is not None:
                before(times=times, cache_hit=cache_hit, **others)

        compilation.listener = listener

    def finish(self) -> None:
        """Write what was measured, if the window is still open or never opened."""
        if not self._is_closed:
            with self._guarded():
                self._close(None)

    def _pin(self, kernel: Any) -> bool:
        """Pin a kernel that a table names. Return True if there is one."""
        self._known.add(id(kernel))
        for table in self._tables:
            if is_of(kernel, table):
                pin_to(kernel, table, "tune")
                self.measured.pinned.append(table.kernel)
                return True
        return False

    def _count(self) -> None:
        measured = self.measured
        if self._is_closed:
            return
        measured.launches += 1
        if self._plan is not None:
            opens, closes = (measured.launches == number for number in self._plan)
        else:
            now_s, is_open = time.perf_counter(), measured.opened is not None
            is_quiet = measured.launches - self._tuned_at > QUIET_LAUNCHES and now_s - self._tuned_at_s > QUIET_S
            opens, closes = not is_open and is_quiet, is_open and now_s - self._opened_s > LENGTH_S
        if opens:
            self._open()
        elif closes:
            self._close(measured.launches)

    def _tuned(self, kernel: Any, seconds: float) -> None:
        """Note the time of run-time tuning, and begin anew: it is no work that both runs have."""
        measured, name = self.measured, python_function(kernel).__name__
        if not getattr(kernel, "cache_results", False):
            measured.tuning_s[name] = measured.tuning_s.get(name, 0.0) + seconds
        self._tuned_at, self._tuned_at_s = measured.launches, time.perf_counter()
        if self._plan is None and not self._is_closed:
            measured.opened = None
            self._profiled()

    def _open(self) -> None:
        if times.is_capturing():
            return
        _synchronize()
        if times.is_on_gpu():
            profiler = sys.modules["torch"].profiler
            self._profile = profiler.profile(activities=[profiler.ProfilerActivity.CUDA])
            with warnings.catch_warnings(action="ignore"):  # that it has one cycle
                self._profile.start()
            _synchronize()
        self.measured.opened, self._opened_s = self.measured.launches, time.perf_counter()

    def _close(self, launch: int | None) -> None:
        """End the window before a launch, or with Python, and write what was measured."""
        self._is_closed = True
        _synchronize()
        events, kernel_us = self._profiled(), Counter[str]()
        for event in events:
            kernel_us[event.name()] += event.duration_ns() / 1e3
        spans = [(event.start_ns(), event.start_ns() + event.duration_ns()) for event in events]
        self.measured.closed, self.measured.kernel_us = launch, dict(kernel_us)  # asdict copies no Counter
        self.measured.gpu_us = busy_ns(spans) / 1e3 if spans else None
        self._path.write_text(json.dumps(asdict(self.measured)), encoding="utf-8")

    def _profiled(self) -> list[Any]:
        """End the profile and return what ran on the GPU."""
        profile, self._profile = self._profile, None
        if profile is None:
            return []
        with warnings.catch_warnings(action="ignore"):
            profile.stop()
        is_gpu = sys.modules["torch"].autograd.DeviceType.CUDA
        return [event for event in profile.profiler.kineto_results.events() if event.device_type() == is_gpu]

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """Go on with the program, unmeasured, if the block fails."""
        try:
            yield
        except Exception as error:
            self._is_closed = True
            print(f"fp8tune: process {os.getpid()} is not measured: {error!r}", file=sys.stderr)


def _synchronize() -> None:
    if times.is_on_gpu():
        sys.modules["torch"].cuda.synchronize()


def busy_ns(spans: Iterable[tuple[int, int]]) -> int:
    """Return the time that any of the spans (start, end) covers."""
    total, until = 0, 0
    for start, end in sorted(spans):
        total += max(0, end - max(start, until))
        until = max(until, end)
    return total


@functools.cache
def current() -> Window | None:
    """Return this process's window; None if ``fp8tune tune`` did not start the program."""
    folder = os.environ.get(FOLDER)
    if not folder:
        return None
    plan = os.environ.get(PLAN)
    return Window(Path(folder), json.loads(plan) if plan else None, os.environ.get(TABLES, ""))


def counted(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return a kernel class's ``run``, counted if there is a window."""
    window = current()
    if window is None:
        return run
    if knobs := getattr(sys.modules.get("triton.knobs"), "compilation", None):  # Triton 3.4 and later
        window.listen(knobs)
    return window.counted(run)
