"""Kernels of this process, and its part of the recording: written again and again, and at the end."""

from __future__ import annotations

import atexit
import contextlib
import fnmatch
import functools
import os
import sys
import threading
import time
import uuid
from collections import defaultdict
from pathlib import Path
from typing import Any

from fp8tune.replay.recording import Recording, text_of
from fp8tune.replay.watch import times
from fp8tune.replay.watch.kernel import WatchedKernel
from fp8tune_kernels.tuners import chain, function_name

FOLDER, PATTERNS, VALUES = "FP8TUNE_RECORD", "FP8TUNE_RECORD_JIT", "FP8TUNE_RECORD_VALUES"
"""Environment variables: the folder of parts; the bare kernels that count, one pattern a line; "0": no integers."""
KERNELS = "FP8TUNE_RECORD_KERNELS"
"""Environment variable: the folder of fp8tune_kernels, for programs that have none or an older."""

FIRST_WRITE_S, LEAST_PAUSE_S = 1.0, 5.0
SHARE = 0.01  # the part of the time that writing may take


class Process:
    """Kernels of this process. A forked child begins anew."""

    def __init__(self, folder: Path, patterns: tuple[str, ...] = ()) -> None:
        self.folder, self.patterns = folder, patterns
        self.watched: defaultdict[type, dict[int, WatchedKernel]] = defaultdict(dict)
        """Class of an autotuner or jitted function -> id of one -> its launches."""
        self._others: set[int] = set()  # bare kernels that no pattern names
        self._begin()

    def _begin(self) -> None:
        for watched in self.watched.values():
            watched.clear()
        self._path = self.folder / f"{os.getpid()}-{uuid.uuid4().hex[:8]}.json"
        self._lock = threading.Lock()
        self._writer: threading.Thread | None = None

    def start(self) -> None:
        """Write at the end of this process, however Python ends it."""
        atexit.register(self.finish)
        os.register_at_fork(after_in_child=self._begin)
        leave = os._exit

        def finish_and_leave(status: int) -> Any:
            self.finish(wait_s=0)
            leave(status)

        os._exit = finish_and_leave

    def find(self, kernel: Any) -> WatchedKernel | None:
        """Return the launches of an autotuner, or of a bare kernel that a pattern names; None for other bare ones."""
        watched, is_autotuned = self.watched[type(kernel)], hasattr(kernel, "configs")
        if id(kernel) in self._others:
            return None
        if id(kernel) not in watched:
            if not is_autotuned and not any(fnmatch.fnmatch(function_name(kernel), p) for p in self.patterns):
                self._others.add(id(kernel))
                return None
            watched[id(kernel)] = WatchedKernel(kernel, is_autotuned, os.environ.get(VALUES) != "0")
            if self._writer is None:
                self._writer = threading.Thread(target=self._write_again_and_again, daemon=True, name="fp8tune-record")
                self._writer.start()
        return watched[id(kernel)]

    def finish(self, wait_s: float = 2.0) -> None:
        """Write what there is, with the launches that were still being timed."""
        with contextlib.suppress(Exception):
            deadline = time.monotonic() + wait_s
            for entry in (entry for watched in self._every() for entry in list(watched.entries.values())):
                entry.samples.read(max(0.0, deadline - time.monotonic()))
        try:
            self.write()
        except Exception as error:
            print(f"fp8tune: process {os.getpid()} is not recorded: {error!r}", file=sys.stderr)

    def write(self) -> None:
        """Replace this process's part by one of now."""
        if not self._lock.acquire(timeout=5):
            return
        try:
            beside = self._path.with_suffix(".tmp")
            beside.write_text(text_of(self.recording(), is_compact=True), encoding="utf-8")
            beside.replace(self._path)
        finally:
            self._lock.release()

    def _every(self) -> list[WatchedKernel]:
        return [item for watched in list(self.watched.values()) for item in list(watched.values())]

    def recording(self) -> Recording:
        """Return all that this process has recorded."""
        every = self._every()
        inner = {id(item) for watched in every if watched.is_autotuned for item in list(chain(watched.kernel))[1:]}
        codes: dict[str, Any] = {}
        # what an autotuner launches is the autotuner's; a bare kernel may have launches of its own
        kernels = [item.document(codes) for item in every if not item.is_autotuned or id(item.kernel) not in inner]
        torch, triton = (str(getattr(sys.modules.get(name), "__version__", "")) for name in ("torch", "triton"))
        return Recording("", *_device(), torch, triton, kernels=tuple(kernels), codes=codes)

    def _write_again_and_again(self) -> None:
        pause_s = FIRST_WRITE_S
        while True:
            time.sleep(pause_s)
            started = time.perf_counter()
            with contextlib.suppress(Exception):  # the last one says what is wrong
                self.write()
            pause_s = max(LEAST_PAUSE_S, (time.perf_counter() - started) / SHARE)


def _device() -> tuple[str, str]:
    """Return name and arch of this process's GPU; empty without one."""
    if not times.is_on_gpu():
        return "", ""
    torch = sys.modules["torch"]
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    if torch.version.hip:
        return properties.name, properties.gcnArchName.partition(":")[0]
    return properties.name, f"sm_{properties.major}{properties.minor}"


@functools.cache
def current() -> Process:
    """Return this process's; started when Triton is imported."""
    patterns = [line for line in os.environ.get(PATTERNS, "").splitlines() if line]
    full = tuple(pattern if ":" in pattern else f"*:{pattern}" for pattern in patterns)  # of any module
    process = Process(Path(os.environ[FOLDER]), full)
    process.start()
    return process
