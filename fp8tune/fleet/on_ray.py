"""``fp8tune sweep --on ray``: an actor a GPU, on this machine or on the cluster at ``RAY_ADDRESS``.

The work is in the database (:mod:`fp8tune.store.units`), so Ray is asked for nothing but processes on GPUs. A node that
joins gets actors, an actor that is lost is replaced, and its unit waits again at once: no lease has to end first.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fp8tune.errors import MachineError, UsageError
from fp8tune.fleet.ray_actor import RayWorker, Task, WorkerState, folder
from fp8tune.fleet.ray_ahead import CompileNodes
from fp8tune.measure.worker import usable_cores
from fp8tune.store import database
from fp8tune.store.results import Store

if TYPE_CHECKING:
    from fp8tune.fleet.ahead import CompileTask

ADDRESS = "RAY_ADDRESS"
OF_A_CLUSTER_BEGUN_HERE = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
"""Ray's own niceness is 15: its workers wait for every other process of the host, and a sweep without Ray does not.
In the test suite, beside three busy processes, 500 simulated units took over 400 s with it and 44 s with 0 (Ray 2.60.0,
two cores)."""

STORE_BYTES = 80 << 20
"""Ray's object store, of a cluster that is begun here: nothing large goes through it. 75 MiB is the least it takes."""

MOST_LOSSES = 5
"""Actors that a GPU loses in a row, with no unit done, before it is given up."""

ENDS_WITHIN_S = 10.0
"""Workers without a unit that were told to stop and have not after so long are killed."""

ANSWERS_WITHIN_S = 2.0
"""Workers that do not say within so long whether they have a unit are killed; others say so at once."""


@dataclass
class Slot:
    """One GPU of the cluster, and the actor that is on it."""

    node: str
    host: str
    place: int
    """The GPU's number on its node."""
    places: int
    cpus: float
    """CPUs of its actor, as Ray counts them."""
    number: int
    """Among all GPUs that were ever used."""
    actor: Any = None
    working: Any = None
    """What Ray gives for the actor's work."""
    asked: Any = None
    """The same for its state."""
    name: str = ""
    begun: int = 0
    """Actors so far."""
    losses: int = 0
    """In a row, with no unit done."""
    state: WorkerState = field(default_factory=WorkerState)
    ended: str | None = None
    """Why nothing runs here any more; None while something does."""


@dataclass
class RayFleet:
    """The actors of one sweep. A context manager: at its end nothing of it runs, and no Ray that it began."""

    db: str
    store: Store
    """Open, on the same database."""
    timer: str | None = None
    deadline: float = math.inf
    """On the clock."""
    command: str = ""
    clock: Callable[[], float] = time.monotonic
    say: Callable[[str], None] = lambda _: None
    """Takes a line about a GPU that was lost or given up."""
    kernels: tuple[str, ...] = ()
    """Those of the sweep."""
    slots: list[Slot] = field(default_factory=list)
    ahead: CompileNodes | None = None
    """Nodes without a GPU that compile, once :meth:`compile_ahead` was called."""
    has_begun_ray: bool = False

    def __enter__(self) -> RayFleet:
        """Raises UsageError where Ray is missing or the database cannot be reached from all nodes, MachineError where
        there is no cluster or no GPU in it."""
        self._ray = imported()
        self._nodes_were: set[str] = set()
        try:
            self._connect()
            self._check_database()
            self._join()
            if not self.slots:
                raise MachineError("no GPU is in the Ray cluster: ray status says what is; without a GPU use --timer")
        except BaseException:
            self._disconnect()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            if self.ahead is not None:
                self.ahead.end()
            self._end_workers()
        finally:
            self._disconnect()

    def is_over(self) -> bool:
        """Look after the actors; True once no GPU works any more. To be asked every second or so."""
        self._join()
        for slot in self.slots:
            if slot.ended is None:
                self._look_after(slot)
        if self.ahead is not None:
            of_hosts = {slot.node: slot.actor for slot in self.working}
            self.ahead.look_after(self._ray.nodes(), of_hosts.values())
        return all(slot.ended is not None for slot in self.slots)

    def compile_ahead(self, task: CompileTask) -> None:
        """Have nodes without a GPU compile, those that join later too."""
        self.ahead = CompileNodes(self._ray, task, self.say)

    @property
    def working(self) -> list[Slot]:
        """GPUs that have a worker."""
        return [slot for slot in self.slots if slot.ended is None]

    @property
    def states(self) -> dict[str, WorkerState]:
        """Who is at it, by name, and what each does: GPUs first."""
        ahead = self.ahead.states if self.ahead is not None else {}
        return {slot.name: slot.state for slot in self.working} | ahead

    # Ray itself

    def _connect(self) -> None:
        address = os.environ.get(ADDRESS, "")
        if address.startswith("ray://"):
            raise UsageError(f"{ADDRESS}={address} is a client's: give HOST:PORT of the cluster's head node")
        for name, value in OF_A_CLUSTER_BEGUN_HERE.items():
            os.environ.setdefault(name, value)
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
        if not address:
            made_up = {"num_gpus": usable_cores()} if self.timer else {}
            options |= {"address": "local", "include_dashboard": False, "object_store_memory": STORE_BYTES, **made_up}
            options |= {"num_cpus": usable_cores()}
        self.has_begun_ray = not address
        with contextlib.suppress(AttributeError):
            # Ray prints what became of a lost actor to stdout, twenty lines of its raylet's log with it
            self._ray._private.worker._worker_logs_enabled = False
        with _signals_kept():
            try:
                self._ray.init(**(options if not address else {**options, "address": address}))
            except (ConnectionError, RuntimeError, ValueError, OSError) as error:
                raise MachineError(_why_not(error, address)) from None

    def _disconnect(self) -> None:
        with _signals_kept():
            self._ray.shutdown()

    def _check_database(self) -> None:
        if database.path_of(self.db) is None:
            return
        here = self._ray.util.get_node_ip_address()
        others = sorted({node["NodeManagerAddress"] for node in self._gpu_nodes()} - {here})
        if others:
            raise UsageError(
                f"{database.label(self.db)} is a file of this host, and GPUs are on {len(others)} other"
                f"{'s' if len(others) > 1 else ''} ({others[0]}): give a server with --db or FP8TUNE_DB, as "
                "postgresql://USER@HOST/NAME"
            )

    def _gpu_nodes(self) -> list[Mapping[str, Any]]:
        return [node for node in self._ray.nodes() if node["Alive"] and node["Resources"].get("GPU", 0) >= 1]

    # Actors

    def _join(self) -> None:
        """Actors for the GPUs of nodes that were not there before."""
        for node in self._gpu_nodes():
            if node["NodeID"] in self._nodes_were:
                continue
            self._nodes_were.add(node["NodeID"])
            gpus, cpus = int(node["Resources"]["GPU"]), float(node["Resources"].get("CPU", 0))
            for place in range(gpus):
                each = cpus // gpus if cpus >= gpus else math.floor(100 * cpus / gpus) / 100
                host = node["NodeManagerHostname"]
                slot = Slot(node["NodeID"], host, place, gpus, each, len(self.slots))
                self.slots.append(slot)
                self._begin(slot)

    def _begin(self, slot: Slot) -> None:
        """An actor on the slot's node, which begins to work."""
        slot.begun += 1
        again = f".{slot.begun}" if slot.begun > 1 else ""
        slot.name = f"{slot.host}:ray-{slot.number}{again}"
        task = Task(
            self.db,
            slot.name,
            slot.place,
            slot.places,
            timer=None if self.timer is None else numbered(self.timer, slot.number),
            time_budget_s=self.deadline - self.clock(),
            command=self.command,
            kernels=self.kernels,
            folder=folder(),
            environment={name: value for name, value in os.environ.items() if name.startswith("PG")},
        )
        on_node = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(slot.node, soft=False)
        options = {"num_gpus": 1, "num_cpus": slot.cpus, "max_concurrency": 2, "scheduling_strategy": on_node}
        slot.actor = self._ray.remote(RayWorker).options(**options).remote(task)
        slot.working, slot.asked, slot.state = slot.actor.work.remote(), slot.actor.state.remote(), WorkerState()

    def _look_after(self, slot: Slot) -> None:
        asked, _ = self._ray.wait([slot.asked], timeout=0)
        if asked:
            with contextlib.suppress(self._ray.exceptions.RayError):
                slot.state = self._ray.get(slot.asked)
                slot.losses = 0 if slot.state.done else slot.losses
            slot.asked = slot.actor.state.remote()
        done, _ = self._ray.wait([slot.working], timeout=0)
        if done:
            self._ended(slot)

    def _ended(self, slot: Slot) -> None:
        """An actor has ended: by itself, for a reason; or it was lost, and another takes its place."""
        try:
            reason = self._ray.get(slot.working)
        except self._ray.exceptions.RayTaskError as error:  # it could not begin
            reason = str(error.cause) if isinstance(error.cause, MachineError) else type(error.cause).__name__
        except self._ray.exceptions.RayError:
            self._lost(slot)
            return
        slot.ended = reason or "told to stop"
        if reason:
            self.say(f"{slot.name} has ended: {reason}")

    def _lost(self, slot: Slot) -> None:
        returned = self.store.return_units_of(slot.name, "its Ray actor was lost")
        back = f", {returned} unit waits again" if returned else ""
        slot.losses += 1
        if slot.node not in {node["NodeID"] for node in self._gpu_nodes()}:
            slot.ended = "its node left"
            self.say(f"{slot.name} is gone with its node{back}")
        elif slot.losses > MOST_LOSSES:
            slot.ended = f"lost {slot.losses} times in a row"
            self.say(f"{slot.name} is given up: its actor was {slot.ended}{back}")
        else:
            self.say(f"{slot.name} was lost and is replaced{back}")
            self._begin(slot)

    def _end_workers(self) -> None:
        """Have all end; kill those that do not. Units that they had wait again."""
        working = self.working
        errors = self._ray.exceptions.RayError
        with contextlib.suppress(errors):
            told = {slot.actor.stop.remote(): slot for slot in working}
            said = self._ray.wait([*told], num_returns=len(told), timeout=ANSWERS_WITHIN_S)[0] if told else []
            # asked for now: what is known is a second old, and who took a unit since then would be waited for
            idle = [told[each].working for each in said if not self._answer(each)]
            if idle:
                self._ray.wait(idle, num_returns=len(idle), timeout=ENDS_WITHIN_S)
        for slot in working:
            with contextlib.suppress(errors):
                self._ray.kill(slot.actor)
        for slot in working:
            self.store.return_units_of(slot.name, "the sweep was told to end", counts=False)

    def _answer(self, asked: Any) -> bool:
        """Whether a worker has a unit; False of one that is lost."""
        with contextlib.suppress(self._ray.exceptions.RayError):
            return bool(self._ray.get(asked))
        return False


def imported() -> Any:
    """Ray. Raises UsageError where it is missing."""
    try:
        ray = importlib.import_module("ray")
        importlib.import_module("ray.util.scheduling_strategies")
    except ImportError:
        raise UsageError("--on ray needs Ray: pip install 'fp8tune[ray]', or use --on queue") from None
    return ray


def numbered(timer: str, number: int) -> str:
    """The made-up GPU of a number; a real clock is the same on each.

    >>> numbered("simulated:1,slower=0.1", 3), numbered("do_bench", 3)
    ('simulated:1,gpu=3,slower=0.1', 'do_bench')
    """
    if not timer.startswith("simulated:") or ",gpu=" in timer:
        return timer
    first, comma, rest = timer.partition(",")
    return f"{first},gpu={number}{comma}{rest}"


def _why_not(error: BaseException, address: str) -> str:
    """One line, of what Ray raises where no cluster is reached or begun; ``address`` is empty for one of its own."""
    cause: BaseException | None = error
    while cause is not None:
        if "AuthToken" in str(cause):
            return (
                f"the Ray cluster at {address} wants its token: set RAY_AUTH_MODE=token, and copy ~/.ray/auth_token "
                "from its head node or set RAY_AUTH_TOKEN"
            )
        cause = cause.__cause__
    where = f"no Ray cluster at {address}" if address else "Ray does not start here"
    line = " ".join(str(error).split())[:200]
    return f"{where} ({line}): see ray status, or unset {ADDRESS}"


@contextlib.contextmanager
def _signals_kept() -> Iterator[None]:
    """Ray sets a SIGTERM handler of its own, which would end us without an orderly end."""
    try:
        before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        yield
    finally:
        with contextlib.suppress(ValueError):  # not in the main thread: Ray sets none either
            for number, handler in before.items():
                signal.signal(number, handler)
