"""``fp8tune sweep --on ray``: a task per problem size on the GPUs of a cluster, or of this machine.

A task sweeps in a database of its own and returns the file; the driver alone writes, by merging it. Merging twice adds
nothing, so a task that Ray repeats does no harm.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import math
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from fp8tune.errors import Fp8tuneError, MachineError, UsageError
from fp8tune.measure.backends import backend_for
from fp8tune.measure.gpus import TIMER, simulated_gpus
from fp8tune.measure.worker import usable_cores
from fp8tune.records import Kind
from fp8tune.stopping import stopping_cleanly
from fp8tune.store.results import Store
from fp8tune.sweeping import picks, planning, search, session
from fp8tune.sweeping.events import ChildDied, Event, Finished, SizeDone, Started
from fp8tune.sweeping.planning import Plan

MOST_RESTARTS = 5
# Ray's own niceness of 15 would let tasks wait for every other process of the host.
ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
STORE_BYTES = 80 << 20  # of Ray's object store, which accepts no less than 75 MiB: a size returns about one
LOOK_S = 1.0  # between looks at tasks
RUN = "from fp8tune.sweeping import on_ray; on_ray.main()"


def run(store: Store, plan: Plan, *, begun: float) -> Iterator[Event]:
    """Run a sweep with a task for each size that is not decided; the driver's GPU names the model.

    Raises:
        UsageError: Ray is missing, or nothing is timed here.
        MachineError: There is no cluster, or no GPU in it.
    """
    if not plan.backend.times:
        raise UsageError("--on ray times on GPUs: run this where there is one, or with --timer simulated:SEED")
    plan, options, started = session.with_published(store, plan), plan.options, time.monotonic()
    deadline = begun + (math.inf if options.budget_s is None else options.budget_s)
    decided = set() if options.again else session.decided(store, plan)
    todo = [size for size in plan.problems if size.problem not in decided]
    todo.sort(key=lambda size: -size.expected_s(quick=options.quick))
    yield Started(plan.backend.device, plan.backend.kind, len(plan.problems), sum(size.count for size in plan.problems))
    yield from (SizeDone(problem) for problem in decided)
    end = Finished(0.0)
    with _cluster(plan) as (ray, gpus):
        share_s = gpus * (deadline - time.monotonic()) / max(len(todo), 1)
        is_search = search.is_needed(plan, todo, share_s * len(todo))
        retries = {"max_retries": MOST_RESTARTS, "retry_exceptions": [ChildProcessError]}
        remote, place = ray.remote(num_gpus=1, num_cpus=0, **retries)(run_task), (_environment(plan), str(Path.cwd()))
        own = {item.name: getattr(plan, item.name) for item in fields(Plan)} | {"backend": plan.backend.device.name}
        limits = time.time() + deadline - time.monotonic(), share_s if is_search else math.inf
        tasks = {
            remote.remote(pickle.dumps((own | {"problems": (size,), "gpus": ()}, *limits)), *place): size
            for size in todo
        }
        try:
            while tasks:
                done, _ = ray.wait([*tasks], num_returns=1, timeout=LOOK_S)
                for task in done:
                    size = tasks.pop(task)
                    try:
                        part, finished = ray.get(task)
                    except ray.exceptions.RayError as error:
                        reason = str(getattr(error, "cause", None) or type(error).__name__)
                        yield ChildDied("of the cluster", reason, 1, is_replaced=False)
                        end = end.joined(Finished(0.0, size.count, is_whole=False))
                        continue
                    with tempfile.NamedTemporaryFile(suffix=".db") as file:
                        Path(file.name).write_bytes(part)
                        with Store.open(file.name, writable=False) as source:
                            store.merge(source)
                    end = end.joined(finished)
                    yield SizeDone(size.problem)
        finally:
            for task in tasks:
                ray.cancel(task, force=True)
    picks.keep_current(store)
    yield replace(end, seconds=time.monotonic() - started)


@contextlib.contextmanager
def _cluster(plan: Plan) -> Iterator[tuple[Any, int]]:
    """Join the cluster at ``RAY_ADDRESS``, or start one of this machine. Yields Ray and the number of GPUs."""
    try:
        ray: Any = importlib.import_module("ray")
    except ImportError:
        raise UsageError(
            "--on ray needs Ray: pip install 'fp8tune[ray]'; without it, all GPUs of this machine"
        ) from None
    address = os.environ.get("RAY_ADDRESS") or "local"
    options: dict[str, Any] = {"address": address, "log_to_driver": False, "logging_level": "ERROR"}
    if address == "local":
        options |= {"include_dashboard": False, "object_store_memory": STORE_BYTES, "num_cpus": usable_cores()}
        options |= {"num_gpus": usable_cores()} if plan.backend.kind is Kind.SIMULATED else {}
    os.environ |= {name: os.environ.get(name, value) for name, value in ENVIRONMENT.items()}
    handler = signal.getsignal(signal.SIGTERM)
    try:
        try:
            ray.init(**options)
            signal.signal(signal.SIGTERM, handler)  # Ray's own ends the process without cleaning up
            count = sum(int(node["Resources"].get("GPU", 0)) for node in ray.nodes() if node["Alive"])
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            reason = " ".join(str(error).split())[:200]
            raise MachineError(
                f"no Ray cluster at {address} ({reason}): see ray status, or unset RAY_ADDRESS"
            ) from None
        if not count:
            raise MachineError("no GPU is in the Ray cluster: ray status says what is; without a GPU use --timer")
        yield ray, count
    finally:
        ray.shutdown()


def _environment(plan: Plan) -> dict[str, str]:
    """Return the variables that a task has from the driver."""
    named = {name: value for name, value in os.environ.items() if name.startswith("TRITON_")}
    return named | ({TIMER: plan.backend.timer} if plan.backend.kind is Kind.SIMULATED else {})


def run_task(work: bytes, environment: Mapping[str, str], folder: str) -> tuple[bytes, Finished]:
    """Sweep a size on the GPU that Ray assigned to this process, and on its share of the cores; return the database.

    Raises:
        MachineError: The size cannot be swept here.
        ChildProcessError: The process was killed.
    """
    ray: Any = importlib.import_module("ray")
    node_id, gpu = ray.get_runtime_context().get_node_id(), int(ray.get_gpu_ids()[0])
    gpus = next(int(node["Resources"]["GPU"]) for node in ray.nodes() if node["NodeID"] == node_id)
    cores, place = sorted(os.sched_getaffinity(0)), gpu % gpus
    share = cores[len(cores) * place // gpus : len(cores) * (place + 1) // gpus] or [cores[place % len(cores)]]
    if timer := environment.get(TIMER):
        environment = {**environment, TIMER: simulated_gpus(timer, gpu + 1)[gpu].name}

    def prepare() -> None:
        os.sched_setaffinity(0, share)
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: when this process is killed or cancelled

    with tempfile.TemporaryDirectory(prefix="fp8tune-") as results:
        process = subprocess.run(
            [sys.executable, "-c", RUN, results],
            env={**os.environ, **environment},
            cwd=folder if Path(folder).is_dir() else None,
            preexec_fn=prepare,
            input=work,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            check=False,
        )
        if process.returncode == Fp8tuneError.exit_code:
            raise MachineError(process.stderr.decode(errors="replace").strip().splitlines()[-1])
        if process.returncode:
            raise ChildProcessError(f"the process of a size ended with code {process.returncode}")
        return Path(results, "part.db").read_bytes(), pickle.loads(Path(results, "finished").read_bytes())


def main() -> None:
    """Sweep the size that comes by standard input, into a database in a folder."""
    folder = Path(sys.argv[1])
    try:
        own, end_s, limit_s = pickle.load(sys.stdin.buffer)
        backend, _ = backend_for(None, None)
        if backend.device.name != own["backend"]:
            raise MachineError(f"the sweep is for {own['backend']}, and the GPU there is {backend.device.name}")
        budget_s = min(limit_s, max(0.0, end_s - time.time()))
        options = replace(own["options"], budget_s=None if math.isinf(budget_s) else budget_s)
        plan = Plan(**own | {"backend": backend, "options": options})
        planning.make_ready(backend)
        with stopping_cleanly(), Store.open(str(folder / "part.db"), create=True) as store:
            *_, finished = session.sweep(store, plan)
        (folder / "finished").write_bytes(pickle.dumps(finished))
    except Fp8tuneError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
