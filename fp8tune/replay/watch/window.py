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
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fp8tune.replay.watch import times
from fp8tune_kernels import pinning
from fp8tune_kernels.tuners import python_function

FOLDER, PLAN, TABLES = "FP8TUNE_WINDOW", "FP8TUNE_WINDOW_PLAN", "FP8TUNE_WINDOW_TABLES"
"""Environment variables: the folder that gets a file from each process; JSON of rank -> launch numbers; a folder of
tables of ``fp8tune export --for python``."""

QUIET_S, QUIET_LAUNCHES = 0.2, 20
"""Time and launches without run-time tuning after which the first run's window opens."""
LENGTH_S = 2.0
"""Length of the first run's window."""
SUFFIX = ".window"


@dataclass(frozen=True)
class Measured:
    """Measurements of one process."""

    rank: str
    """``RANK`` of its environment; empty without one."""
    opened: int | None
    """Number of the first launch in the window; None if no window opened."""
    closed: int | None
    """Number of the first launch after it; None if Python ended first."""
    launches: int
    """Launches of the whole run."""
    tuning_s: Mapping[str, float] = field(default_factory=dict)
    """Function name -> time of its run-time tuning. Without what the next start finds on the disk: compiled code, and
    the result for kernels with ``cache_results``."""
    gpu_us: float | None = None
    """Time in which the GPU was busy in the window; None where nothing profiles."""
    kernel_us: Mapping[str, float] = field(default_factory=dict)
    """Function name -> its GPU time in the window."""
    pinned: tuple[str, ...] = ()
    """Kernels that took their configs from a table."""

    @classmethod
    def read(cls, folder: Path) -> list[Measured]:
        """Return what the processes of a run wrote."""
        texts = (path.read_text(encoding="utf-8") for path in sorted(folder.glob(f"*{SUFFIX}")))
        return [cls(**json.loads(text)) for text in texts]


class Window:
    """The window of this process."""

    def __init__(self, folder: Path, plan: Mapping[str, Any] | None, tables: str) -> None:
        self._path = folder / f"{os.getpid()}-{uuid.uuid4().hex[:8]}{SUFFIX}"
        self._rank = os.environ.get("RANK", "")
        self._plan: tuple[int, int | None] | None = None if plan is None else plan.get(self._rank, (sys.maxsize, None))
        self._tables = pinning.tables_of(tables) if tables else []
        logging.getLogger("fp8tune").setLevel(logging.ERROR)  # that kernels are pinned is no news
        self._tuning_s: defaultdict[str, float] = defaultdict(float)
        self._compiled_s = 0.0
        self._known: set[int] = set()
        self._pinned: list[str] = []
        self._inside = threading.local()
        self._launches = self._tuned_at = 0
        self._tuned_at_s = time.perf_counter()
        self._profile: Any = None
        self._opened: int | None = None
        self._opened_s = 0.0
        self._is_closed = False
        atexit.register(self._finish)

    def counted(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``run`` of a class of kernels, counted. A launch within a launch does not count."""

        @functools.wraps(original)
        def run(kernel: Any, *args: Any, **kwargs: Any) -> Any:
            if getattr(self._inside, "depth", False) or kwargs.get("warmup"):
                return original(kernel, *args, **kwargs)
            if self._tables and id(kernel) not in self._known and self._pin(kernel):
                return kernel.run(*args, **kwargs)  # the pin has put another in its place
            before_s, compiled_s = getattr(kernel, "bench_time", None), self._compiled_s
            with self._guarded():
                self._count()
            self._inside.depth = True
            try:
                return original(kernel, *args, **kwargs)
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

    def _pin(self, kernel: Any) -> bool:
        """Pin a kernel that a table names. Return True if its ``run`` is another now."""
        self._known.add(id(kernel))
        for table in self._tables:
            if pinning.is_of(kernel, table):
                pinning.pin_to(kernel, table, "tune")
                self._pinned.append(table.kernel)
                if "run" in vars(kernel):
                    kernel.run = functools.partial(self.counted(_unbound(kernel.run)), kernel)
                    return True
        return False

    def _count(self) -> None:
        self._launches += 1
        if self._is_closed:
            return
        if self._plan is not None:
            opens, closes = self._plan
            if self._launches == opens:
                self._open()
            elif self._launches == closes:
                self._close()
            return
        now_s = time.perf_counter()
        if self._opened is None:
            if self._launches - self._tuned_at > QUIET_LAUNCHES and now_s - self._tuned_at_s > QUIET_S:
                self._open()
        elif now_s - self._opened_s > LENGTH_S:
            self._close()

    def _tuned(self, kernel: Any, seconds: float) -> None:
        """Note the time of run-time tuning, and begin anew: it is no work that both runs have."""
        if not getattr(kernel, "cache_results", False):
            self._tuning_s[python_function(kernel).__name__] += seconds
        self._tuned_at, self._tuned_at_s = self._launches, time.perf_counter()
        if self._plan is None and self._opened is not None and not self._is_closed:
            self._opened = None
            self._stop()

    def _open(self) -> None:
        if times.is_capturing():
            return
        self._synchronize()
        if times.is_on_gpu():
            profiler = sys.modules["torch"].profiler
            self._profile = profiler.profile(activities=[profiler.ProfilerActivity.CUDA])
            with warnings.catch_warnings(action="ignore"):  # that it has one cycle
                self._profile.start()
            self._synchronize()
        self._opened, self._opened_s = self._launches, time.perf_counter()

    def _close(self, *, is_end: bool = False) -> None:
        self._is_closed = True
        self._synchronize()
        events = self._stop()
        spans = [(event.start_ns(), event.start_ns() + event.duration_ns()) for event in events]
        kernel_us: Counter[str] = Counter()
        for event in events:
            kernel_us[event.name()] += event.duration_ns() / 1e3
        self._write(
            Measured(
                rank=self._rank,
                opened=self._opened,
                closed=None if is_end else self._launches,
                launches=self._launches,
                tuning_s=dict(self._tuning_s),
                gpu_us=busy_ns(spans) / 1e3 if spans else None,
                kernel_us=dict(kernel_us),  # asdict copies no Counter
                pinned=tuple(self._pinned),
            )
        )

    def _stop(self) -> list[Any]:
        """End the profile and return what ran on the GPU."""
        profile, self._profile = self._profile, None
        if profile is None:
            return []
        with warnings.catch_warnings(action="ignore"):
            profile.stop()
        is_gpu = sys.modules["torch"].autograd.DeviceType.CUDA
        return [event for event in profile.profiler.kineto_results.events() if event.device_type() == is_gpu]

    def _finish(self) -> None:
        with self._guarded():
            if self._opened is not None and not self._is_closed:
                self._close(is_end=True)
            elif not self._is_closed:
                self._write(
                    Measured(
                        self._rank,
                        None,
                        None,
                        self._launches,
                        tuning_s=dict(self._tuning_s),
                        pinned=tuple(self._pinned),
                    )
                )

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """Go on with the program, unmeasured, if the block fails."""
        try:
            yield
        except Exception as error:
            self._is_closed = True
            print(f"fp8tune: process {os.getpid()} is not measured: {error!r}", file=sys.stderr)

    def _write(self, measured: Measured) -> None:
        self._path.write_text(json.dumps(asdict(measured)), encoding="utf-8")

    @staticmethod
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


def _unbound(run: Callable[..., Any]) -> Callable[..., Any]:
    return lambda _, *args, **kwargs: run(*args, **kwargs)


@functools.cache
def current() -> Window | None:
    """Return this process's window; None if ``fp8tune tune`` did not start the program."""
    folder = os.environ.get(FOLDER)
    if not folder:
        return None
    plan = os.environ.get(PLAN)
    return Window(Path(folder), json.loads(plan) if plan else None, os.environ.get(TABLES, ""))


def counted(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``run`` of a class of kernels, counted if there is a window."""
    window = current()
    if window is None:
        return run
    if knobs := getattr(sys.modules.get("triton.knobs"), "compilation", None):  # Triton 3.4 and later
        window.listen(knobs)
    return window.counted(run)
