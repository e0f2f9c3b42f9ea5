"""``fp8tune sweep --on ray``: ``fp8tune worker`` on each GPU of this machine, or of the cluster at ``RAY_ADDRESS``.

The work is in the database, so Ray only starts processes, and starts those again that were lost.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fp8tune.errors import MachineError, UsageError
from fp8tune.measure.backends import TIMER
from fp8tune.measure.worker import usable_cores
from fp8tune.store import database
from fp8tune.store.results import Store

MOST_RESTARTS = 5
# Ray's own niceness of 15 would let workers wait for every other process of the host.
ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
STORE_BYTES = 80 << 20  # of Ray's object store: nothing large goes through it, and Ray accepts no less than 75 MiB


class RayFleet:
    """Workers on all GPUs that Ray has, those of nodes that join included. A context manager that ends them.

    Raises:
        UsageError: Ray is missing, or the database is a file that other nodes cannot reach.
        MachineError: There is no cluster, or no GPU in it.
    """

    def __init__(self, db: str, options: Sequence[str], timer: str | None = None) -> None:
        """Take the options of each worker; a simulated ``timer``, or the environment's, makes a GPU of each core."""
        timer = timer or os.environ.get(TIMER, "")
        self.db, self.options, self.timer = db, options, timer if timer.startswith("simulated") else None
        self.count, self.name = 0, f"ray-{uuid.uuid4().hex[:4]}"
        self.workers: dict[Any, int] = {}  # Ray's reference to a running worker -> its number
        self.failures: list[str] = []  # why workers ended with an error

    def __enter__(self) -> RayFleet:
        try:
            self._ray = importlib.import_module("ray")
        except ImportError:
            raise UsageError("--on ray needs Ray: pip install 'fp8tune[ray]', or use --on queue") from None
        address = os.environ.get("RAY_ADDRESS") or "local"
        options: dict[str, Any] = {"address": address, "log_to_driver": False, "logging_level": "ERROR"}
        if address == "local":
            options |= {"include_dashboard": False, "object_store_memory": STORE_BYTES, "num_cpus": usable_cores()}
            options |= {"num_gpus": usable_cores()} if self.timer else {}
        os.environ |= {name: os.environ.get(name, value) for name, value in ENVIRONMENT.items()}
        handler = signal.getsignal(signal.SIGTERM)
        try:
            self._ray.init(**options)
            signal.signal(signal.SIGTERM, handler)  # Ray's own ends the process without cleaning up
            others = {node["NodeManagerAddress"] for node in self._gpu_nodes()} - {self._ray.util.get_node_ip_address()}
            if others and database.path_of(self.db) is not None:
                raise UsageError(
                    f"{database.label(self.db)} is a file of this host, and GPUs are on {len(others)} others, such as "
                    f"{min(others)}: give a server with --db or FP8TUNE_DB, as postgresql://USER@HOST/NAME"
                )
            if self.is_over():
                raise MachineError("no GPU is in the Ray cluster: ray status says what is; without a GPU use --timer")
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            reason = " ".join(str(error).split())[:200]
            raise MachineError(
                f"no Ray cluster at {address} ({reason}): see ray status, or unset RAY_ADDRESS"
            ) from None
        except BaseException:
            self._ray.shutdown()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.workers:
            self._ray.cancel(worker, force=True)
        self._ray.shutdown()
        with Store.open(self.db, wait=True) as store:
            for number in self.workers.values():
                store.return_units_of(f"{self.name}-{number}", "the sweep was told to end", counts=False)

    def is_over(self) -> bool:
        """Start workers on new GPUs and see which have ended; True once none is left. To be asked every second."""
        while self.count < sum(int(node["Resources"]["GPU"]) for node in self._gpu_nodes()):
            self._start()
        running = [*self.workers]
        ended = self._ray.wait(running, num_returns=len(running), timeout=0)[0] if running else []
        for worker in ended:
            number = self.workers.pop(worker)
            try:
                self._ray.get(worker)
            except self._ray.exceptions.RayError as error:
                reason = str(getattr(error, "cause", None) or type(error).__name__)
                self.failures.append(f"worker {number} has ended: {reason}")
        return not self.workers

    def _start(self) -> None:
        timer = self.timer
        if timer is not None and ",gpu=" not in timer:
            seed, comma, rest = timer.partition(",")
            timer = f"{seed},gpu={self.count}{comma}{rest}"
        environment = {name: value for name, value in os.environ.items() if name.startswith(("PG", "TRITON_"))}
        environment |= {} if timer is None else {TIMER: timer}
        environment |= {"FP8TUNE_DB": self.db, "FP8TUNE_WORKER": f"{self.name}-{self.count}"}
        retries = {"max_retries": MOST_RESTARTS, "retry_exceptions": [ChildProcessError]}
        run = self._ray.remote(num_gpus=1, num_cpus=0, **retries)(run_worker)
        self.workers[run.remote(self.options, environment, str(Path.cwd()))] = self.count
        self.count += 1

    def _gpu_nodes(self) -> list[Mapping[str, Any]]:
        return [node for node in self._ray.nodes() if node["Alive"] and node["Resources"].get("GPU", 0) >= 1]


def run_worker(options: Sequence[str], environment: Mapping[str, str], folder: str) -> None:
    """Run ``fp8tune worker`` on the GPU that Ray assigned to this process, and on its share of the host's cores.

    Raises:
        MachineError: The worker can do nothing here.
        ChildProcessError: It was killed.
    """
    ray: Any = importlib.import_module("ray")
    node_id = ray.get_runtime_context().get_node_id()
    gpus = next(int(node["Resources"]["GPU"]) for node in ray.nodes() if node["NodeID"] == node_id)
    cores, place = sorted(os.sched_getaffinity(0)), int(ray.get_gpu_ids()[0]) % gpus
    share = cores[len(cores) * place // gpus : len(cores) * (place + 1) // gpus] or [cores[place % len(cores)]]

    def prepare() -> None:
        os.sched_setaffinity(0, share)
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: when this process is killed or cancelled

    process = subprocess.run(
        [sys.executable, "-m", "fp8tune", "worker", *options],
        env={**os.environ, **environment},
        cwd=folder if Path(folder).is_dir() else None,
        preexec_fn=prepare,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if process.returncode == 2:
        raise MachineError(process.stderr.strip().splitlines()[-1].removeprefix("fp8tune: "))
    if process.returncode not in (0, 1):  # 1: a finding, which is in the database
        raise ChildProcessError(f"worker ended with code {process.returncode}")
