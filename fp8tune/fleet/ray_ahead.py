"""Nodes of a Ray cluster that have cores and no GPU: they compile ahead, and send what they have to the GPUs' hosts.

Programs go through Ray's object store into the Triton cache of each host with a GPU. A node that is lost costs time
alone: what it had not sent is compiled where it is missed.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from fp8tune import scratch
from fp8tune.errors import Fp8tuneError, one_line
from fp8tune.fleet.ray_actor import WorkerState, enter, folder

if TYPE_CHECKING:
    from fp8tune.fleet.ahead import CompileTask
    from fp8tune.measure.cached_programs import Program

CACHE = "TRITON_CACHE_DIR"

SENT_EVERY_S = 0.5
"""How often a node sends what it has compiled since the last time."""

ENDS_WITHIN_S = 5.0
"""Nodes that were told to stop and have not after so long are left to Ray."""


def programs(task: CompileTask, working_directory: str) -> Iterator[list[Program]]:
    """What runs on a node: programs as they are compiled. Raises Fp8tuneError where none of them would be found."""
    enter(working_directory)
    with scratch.folder("ahead") as cache:  # not the host's own: what it had before would not be sent
        os.environ[CACHE] = str(cache)
        from fp8tune.fleet import ahead
        from fp8tune.measure.cached_programs import new

        known: set[str] = set()
        for _ in ahead.compiled(ahead.arms_of(task), task.arch, SENT_EVERY_S):
            if found := list(new(known)):
                yield found


@dataclass
class Node:
    """One that compiles."""

    id: str
    host: str
    sending: Any
    """Ray's generator of what it compiles; None once it has ended."""
    sent: int = 0
    """Programs."""


@dataclass
class CompileNodes:
    """All that compile ahead of one sweep."""

    ray: Any
    task: CompileTask
    say: Callable[[str], None]
    nodes: list[Node] = field(default_factory=list)

    @property
    def states(self) -> dict[str, WorkerState]:
        """Those that compile, by name, and what they have."""
        at_it = [node for node in self.nodes if node.sending is not None]
        return {
            f"{node.host}:{node.id[:4]}": WorkerState("compiling ahead", f"{node.sent:,} programs") for node in at_it
        }

    def look_after(self, all_nodes: Sequence[Mapping[str, Any]], workers: Collection[Any]) -> None:
        """Begin on nodes that are new, and hand what has come to ``workers``: an actor for each host with a GPU."""
        known = {node.id for node in self.nodes}
        joined = [of for of in all_nodes if of["Alive"] and of["NodeID"] not in known and _is_fit(of["Resources"])]
        places = len(self.nodes) + len(joined)
        self.nodes += [self._begun(of, place, places) for place, of in enumerate(joined, len(self.nodes))]
        for node in self.nodes:
            self._hand_out(node, workers)

    def end(self) -> None:
        """Stop them."""
        left = [node.sending for node in self.nodes if node.sending is not None]
        with contextlib.suppress(self.ray.exceptions.RayError):
            for sending in left:
                self.ray.cancel(sending)
            ended = [sending.completed() for sending in left]
            if ended:
                self.ray.wait(ended, num_returns=len(ended), timeout=ENDS_WITHIN_S)

    def _begun(self, node: Mapping[str, Any], place: int, places: int) -> Node:
        on_node = self.ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        options = {"num_cpus": node["Resources"]["CPU"], "num_returns": "streaming", "scheduling_strategy": on_node}
        # one call a process, which has a server of compilers with the folder of its cache
        fresh = self.ray.remote(max_calls=1, max_retries=0)(programs)
        sending = fresh.options(**options).remote(replace(self.task, place=place, places=places), folder())
        return Node(node["NodeID"], node["NodeManagerHostname"], sending)

    def _hand_out(self, node: Node, workers: Collection[Any]) -> None:
        """Give to all what one has sent by now."""
        while node.sending is not None and self.ray.wait([node.sending], timeout=0)[0]:
            try:
                sent = next(node.sending)
                node.sent += len(self.ray.get(sent))
            except StopIteration:
                self._ended(node, "")
            except self.ray.exceptions.RayError as error:
                cause = getattr(error, "cause", None)
                self._ended(node, str(cause) if isinstance(cause, Fp8tuneError) else one_line(cause or error))
            else:
                for worker in workers:
                    worker.keep.remote(sent)

    def _ended(self, node: Node, why: str) -> None:
        node.sending = None
        what = f"{node.host} has compiled {node.sent:,} programs ahead for {self.task.arch}"
        self.say(f"{what}, and stopped: {why}" if why else what)


def _is_fit(resources: Mapping[str, float]) -> bool:
    return not resources.get("GPU") and resources.get("CPU", 0.0) >= 1
