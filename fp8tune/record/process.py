"""What this process has recorded, and its part of the recording: written again and again, and at the end."""

from __future__ import annotations

import atexit
import contextlib
import fnmatch
import os
import sys
import threading
import time
import uuid
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

from fp8tune.autotuned.encoding import chain, function_name
from fp8tune.record import times
from fp8tune.record.launched import Launched
from fp8tune.recording import Recording, text_of

FOLDER, PATTERNS = "FP8TUNE_RECORD", "FP8TUNE_RECORD_JIT"
"""Environment variables: where parts go; which bare kernels are recorded, one pattern a line."""

FIRST_WRITE_S, LEAST_PAUSE_S = 1.0, 5.0
SHARE = 0.01
"""Of the time that writing may take."""


class Process:
    """The kernels of this process. A forked child begins anew."""

    def __init__(self, folder: Path, patterns: tuple[str, ...]) -> None:
        self.folder, self.patterns = folder, patterns
        self.launched: dict[int, Launched] = {}
        """id of an autotuner or jitted function -> what was launched through it."""
        self.others: set[int] = set()
        """Bare kernels that no pattern names."""
        self._begin()

    def _begin(self) -> None:
        self.launched.clear()
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

    def of(self, kernel: Any, is_autotuned: bool = True) -> Launched:
        """What was launched through an autotuner or jitted function."""
        found = self.launched.get(id(kernel))
        if found is None:
            found = self.launched[id(kernel)] = Launched(kernel, is_autotuned)
            if self._writer is None:
                self._writer = threading.Thread(target=self._write_again_and_again, daemon=True, name="fp8tune-record")
                self._writer.start()
        return found

    def wants(self, kernel: Any) -> bool:
        """Whether a pattern names a bare kernel."""
        name = function_name(kernel)
        return any(fnmatch.fnmatch(one, pattern) for one in (name, name.partition(":")[2]) for pattern in self.patterns)

    def finish(self, wait_s: float = 2.0) -> None:
        """Write what there is, with the launches that were still being timed."""
        with contextlib.suppress(Exception):
            deadline = time.monotonic() + wait_s
            for launched in list(self.launched.values()):
                for entry in list(launched.entries.values()):
                    entry.samples.read(max(0.0, deadline - time.monotonic()))
        try:
            self.write()
        except Exception as error:
            print(f"fp8tune record: process {os.getpid()} is not recorded: {error!r}", file=sys.stderr)

    def write(self) -> None:
        """Replace this process's part by one of now."""
        if not self._lock.acquire(timeout=5):
            return
        try:
            text = text_of(self.recording(), is_compact=True)
            beside = self._path.with_suffix(".tmp")
            beside.write_text(text, encoding="utf-8")
            beside.replace(self._path)
        finally:
            self._lock.release()

    def recording(self) -> Recording:
        """All of this process."""
        every = list(self.launched.values())
        inner = {id(one) for launched in every if launched.is_autotuned for one in list(chain(launched.kernel))[1:]}
        # what an autotuner launches is the autotuner's; a bare kernel may have launches of its own
        kernels = [one.document() for one in every if not (one.is_autotuned and id(one.kernel) in inner)]
        device, arch = _device()
        return Recording(
            device=device, arch=arch, torch=_version("torch"), triton=_version("triton"), kernels=tuple(kernels)
        )

    def _write_again_and_again(self) -> None:
        pause_s = FIRST_WRITE_S
        while True:
            time.sleep(pause_s)
            started = time.perf_counter()
            with contextlib.suppress(Exception):  # the last one says what is wrong
                self.write()
            pause_s = max(LEAST_PAUSE_S, (time.perf_counter() - started) / SHARE)


def _device() -> tuple[str, str]:
    """Name and arch of this process's GPU; empty without one."""
    torch = sys.modules.get("torch")
    if torch is None or not times.is_on_gpu():
        return "", ""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    if torch.version.hip:
        return properties.name, properties.gcnArchName.partition(":")[0]
    return properties.name, f"sm_{properties.major}{properties.minor}"


def _version(package: str) -> str:
    module = sys.modules.get(package)
    if version := getattr(module, "__version__", ""):
        return str(version)
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return ""


_current: Process | None = None


def current() -> Process:
    """This process's; started when Triton is imported."""
    global _current
    if _current is None:
        patterns = tuple(filter(None, os.environ.get(PATTERNS, "").splitlines()))
        _current = Process(Path(os.environ[FOLDER]), patterns)
        _current.start()
    return _current


Launch = Callable[..., Any]
