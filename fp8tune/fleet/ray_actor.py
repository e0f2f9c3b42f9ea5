"""What runs in a Ray actor: one worker on one GPU. No torch is imported here, so that the GPU is set before."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from fp8tune.errors import Fp8tuneError, MachineError, one_line

if TYPE_CHECKING:
    from fp8tune.measure.cached_programs import Program

AMD = "HIP_VISIBLE_DEVICES"
AMD_RUNTIME = "ROCR_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Task:
    """What an actor is to do. It reaches the actor as an argument: no command line and no log has the URL."""

    db: str = field(repr=False)
    name: str
    """Who the worker is in ``fp8tune queue``."""
    place: int
    """The GPU's number among those that are used on its node."""
    places: int
    """How many are."""
    timer: str | None = None
    time_budget_s: float = float("inf")
    command: str = ""
    kernels: tuple[str, ...] = ()
    """Those of the sweep, which its command line named, so that they may be imported."""
    folder: str = ""
    """The working directory of whoever began this."""
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Variables by which PostgreSQL's driver finds its server."""


@dataclass(frozen=True)
class WorkerState:
    """What a worker is doing."""

    doing: str = "starting"
    unit: str = ""
    trials: int = 0
    """Of the unit."""
    done: int = 0
    """Units."""
    uuid_hash: str = ""
    """Which GPU it has: :attr:`fp8tune.records.Device.uuid_hash`."""


class RayWorker:
    """The actor. Two threads: one works, one answers."""

    def __init__(self, task: Task) -> None:
        """Raises MachineError where the GPU that Ray assigned can no longer be set."""
        check_device("torch" in sys.modules, os.environ)
        self._task, self._state, self._stopped = task, WorkerState(), threading.Event()

    def state(self) -> WorkerState:
        """What it is doing now."""
        return self._state

    def where(self) -> tuple[int, str, tuple[int, ...]]:
        """Its process, the GPU that it sees, and the cores of its working thread: for tests."""
        return os.getpid(), os.environ.get("CUDA_VISIBLE_DEVICES", ""), self._cores

    def stop(self) -> bool:
        """Have it end once it has no unit. Returns whether it has one."""
        self._stopped.set()
        return bool(self._state.unit)

    def keep(self, programs: Sequence[Program]) -> int:
        """Put what another node has compiled into this host's Triton cache. Returns how many it did not have."""
        from fp8tune.measure.cached_programs import keep

        return keep(programs)

    def work(self) -> str:
        """Work until it is told to stop. Returns why it ended before; empty where it was told to."""
        task = self._task
        os.environ.update(task.environment)
        enter(task.folder)
        self._cores = share(sorted(os.sched_getaffinity(0)), task.place, task.places)
        os.sched_setaffinity(0, self._cores)  # of this thread and all that it starts: compilers, workers
        try:
            return self._work(task)
        except _Stop:
            return ""
        except Fp8tuneError as error:
            return str(error)
        except Exception as error:
            return one_line(error)

    _cores: tuple[int, ...] = ()

    def _work(self, task: Task) -> str:
        from fp8tune.fleet import events, worker
        from fp8tune.fleet.imports import Imports
        from fp8tune.sweep.events import FinalsStarted, RoundStarted, TrialDone

        imports = Imports.named(task.kernels)
        options = worker.WorkerOptions(
            task.db, task.timer, True, task.time_budget_s, name=task.name, command=task.command, imports=imports
        )
        unit, trials, done, doing, gpu = "", 0, 0, "starting", ""
        with contextlib.closing(worker.work(options, sleep=self._sleep)) as working:
            for event in working:
                match event:
                    case events.WorkerStarted(_, device):
                        gpu = device.uuid_hash
                    case events.Preparing():
                        doing = "preparing"
                    case events.UnitTaken(of, _):
                        unit, trials, doing = f"{of.kernel} {of.shapes[0] if of.shapes else ''}", 0, "planning"
                    case RoundStarted():
                        doing = "screen"
                    case FinalsStarted():
                        doing = "finals"
                    case TrialDone(from_database=False):
                        trials += 1
                    case events.UnitDone():
                        done, unit, doing = done + 1, "", "between units"
                    case events.UnitFailed() | events.UnitReturned():
                        unit, doing = "", "between units"
                    case events.Waiting():
                        unit, doing = "", "waiting"
                    case events.WorkerEnded(reason=reason):
                        return reason
                self._state = WorkerState(doing, unit, trials, done, gpu)
                if not unit and self._stopped.is_set():
                    break
        return ""

    def _sleep(self, seconds: float) -> None:
        if self._stopped.wait(seconds):
            raise _Stop


class _Stop(Exception):  # noqa: N818 - no error: whoever began this said so
    pass


def check_device(is_torch_there: bool, environment: Mapping[str, str]) -> None:
    """Raise MachineError unless the device that Ray assigned is the one that torch will see."""
    if is_torch_there:
        raise MachineError("torch was imported before the actor's GPU was set: it would use another one")
    if AMD in environment and AMD_RUNTIME in environment:
        raise MachineError(
            f"{AMD_RUNTIME} is set beside Ray's {AMD}, which then counts in the other's list: start Ray without it"
        )


def enter(folder: str) -> None:
    """Have this process be as one that was begun in ``folder``, and not by Ray."""
    with contextlib.suppress(OSError):  # another host may not have the folder
        os.chdir(folder)
    forget_main()


def forget_main() -> None:
    """Have fresh processes import nothing of Ray: Python runs the file of ``__main__`` in each, here a Ray worker's.

    It took 0.7 s a process instead of 0.02, and the finals begin dozens.
    """
    main = sys.modules["__main__"]
    with contextlib.suppress(AttributeError):
        del main.__file__
    main.__spec__ = None


def share(cores: Sequence[int], place: int, places: int) -> tuple[int, ...]:
    """The cores of one of so many workers on a host: neighbours, none of which another one has; at least one.

    >>> share([0, 1, 2, 3, 4, 5, 6, 7], 1, 2), share([0, 1], 5, 8)
    ((4, 5, 6, 7), (1,))
    """
    if len(cores) < places:
        return (cores[place % len(cores)],)
    first, last = (len(cores) * n // places for n in (place, place + 1))
    return tuple(cores[first:last])


def folder() -> str:
    """The working directory; empty where it is gone."""
    with contextlib.suppress(OSError):
        return str(Path.cwd())
    return ""
