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
from pathlib import Path
from typing import Any

from fp8tune.replay.recording import Recording, text_of
from fp8tune.replay.watch import times
from fp8tune.replay.watch.kernel import WatchedKernel
from fp8tune_kernels.pinning import pin_report
from fp8tune_kernels.tuners import function_name

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
        self.watched: dict[int, WatchedKernel] = {}
        """id of an autotuner or jitted function -> its launches."""
        self._ignored: dict[int, Any] = {}
        """id of a kernel that is not recorded -> the kernel, so that no other gets its id."""
        self._begin()

    def _begin(self) -> None:
        self.watched.clear()
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
        """Return the launches of an autotuner, or of a bare kernel that a pattern names; None for other kernels.

        Never raises: a kernel that cannot be watched is launched all the same.
        """
        if id(kernel) in self.watched or id(kernel) in self._ignored:
            return self.watched.get(id(kernel))
        try:
            is_autotuned = hasattr(kernel, "configs")
            if is_autotuned or self._is_named(function_name(kernel)):
                watched = WatchedKernel(kernel, is_autotuned, os.environ.get(VALUES) != "0")
                if self._writer is None:
                    self._writer = threading.Thread(target=self._write_repeatedly, daemon=True, name="fp8tune-record")
                    self._writer.start()
                return self.watched.setdefault(id(kernel), watched)
        except Exception as error:
            print(f"fp8tune: a kernel is not recorded: {error!r}", file=sys.stderr)
        self._ignored[id(kernel)] = kernel
        return None

    def _is_named(self, name: str) -> bool:
        """Return True if a pattern may name a bare kernel. A script's own name is compared when it has ended."""
        module, _, attribute = name.partition(":")
        if module == "__main__":
            return any(fnmatch.fnmatch(attribute, pattern.rpartition(":")[2]) for pattern in self.patterns)
        return any(fnmatch.fnmatch(name, pattern) for pattern in self.patterns)

    def finish(self, wait_s: float = 2.0) -> None:
        """Write what there is, with the launches that were still being timed."""
        with contextlib.suppress(Exception):
            deadline = time.monotonic() + wait_s
            for entry in (entry for item in list(self.watched.values()) for entry in list(item.entries.values())):
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

    def _write_repeatedly(self) -> None:
        pause_s = FIRST_WRITE_S
        while True:
            time.sleep(pause_s)
            started = time.perf_counter()
            with contextlib.suppress(Exception):  # the last one says what is wrong
                self.write()
            pause_s = max(LEAST_PAUSE_S, (time.perf_counter() - started) / SHARE)

    def recording(self) -> Recording:
        """Return all that this process has recorded."""
        codes: dict[str, Any] = {}
        kernels = tuple(item.document(codes) for item in list(self.watched.values()))
        torch, triton = (str(getattr(sys.modules.get(name), "__version__", "")) for name in ("torch", "triton"))
        unpinned = {str(row["kernel"]): str(row["reason"]) for row in pin_report()["unpinned"]}
        return Recording("", *_device(), torch, triton, kernels=kernels, codes=codes, unpinned=unpinned)


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
