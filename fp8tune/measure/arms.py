"""Arms: things that can be timed, with the work that they do and their place in an experiment."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

from fp8tune.measure import tensor_cache
from fp8tune.plan.problems import seed_text
from fp8tune.records import NamedInts, Problem
from fp8tune_kernels.spec import KernelSpec


@dataclass(frozen=True)
class Work:
    """Description of an arm for a simulated clock. Without config and key, the identity stands for both."""

    identity: str  # the same text has the same true time
    bytes_moved: int
    config: str = ""  # kernel and config alone
    key: str = ""  # kernel and lookup key: with the config, everything that a winner depends on


@dataclass(frozen=True)
class Place:
    """Position of a block in an experiment. A simulated clock needs it."""

    process: int = 0  # number of the worker process, the same whenever the experiment is run again; no process id
    round: int = 0
    position: int = 0  # the block's place in its round: with the round, the time on the process's wall clock
    after: str = ""  # identity of the work timed just before, which leaves something behind; empty for none
    duplicate: bool = False
    clock: int | None = None  # the wall clock of processes that take turns on one device. None: a clock of its own.


@dataclass(frozen=True, kw_only=True)
class Arm(ABC):
    """One thing that is timed. Frozen and picklable: its methods run in a worker."""

    seat: int = 0  # index of the schedule's worker that launches it
    duplicate: bool = False  # the same under a second name: the A/A control
    long_us: ClassVar[float | None] = None  # a launch that takes longer gets a short block

    @property
    @abstractmethod
    def work(self) -> Work:
        """Describe the arm for a simulated clock."""

    @abstractmethod
    def build(self, torch_device: str) -> None:
        """Build the tensors that the arms of its group share. An exception ends the group."""

    @abstractmethod
    def launcher(self, torch_device: str) -> Callable[[], object]:
        """Return a function that enqueues the work once. Its exceptions are this arm's own failure."""


@dataclass(frozen=True)
class KernelArm(Arm):
    """One config of a kernel on one problem."""

    reference: str  # how workers load the spec: a kernel's name, ``module:ATTRIBUTE`` or ``path.py:ATTRIBUTE``
    problem: Problem
    config: NamedInts
    key: NamedInts = field(default_factory=NamedInts)  # lookup key of the problem
    bytes_moved: int = 0
    flops: int | None = None  # floating-point operations, if the kernel declares them
    in_graph: int = 0  # launches in the CUDA graph that is timed; 0 to time single launches
    races_once: bool = False  # launches in a row on one size of the kernel are enough in a process

    @classmethod
    def from_spec(cls, reference: str, spec: KernelSpec, problem: Problem, config: NamedInts) -> KernelArm:
        """Make an arm with the key and the bytes that the spec declares."""
        return cls(reference, problem, config, spec.lookup_key(problem), spec.bytes_of(problem))

    @cached_property  # read at each block
    def work(self) -> Work:
        """Identify the work by kernel, problem and config."""
        kernel, config = self.problem.kernel, self.config.canonical
        identity, key = f"{seed_text(self.problem)} {config}", f"{kernel} {self.key.canonical}"
        return Work(identity, self.bytes_moved, config=f"{kernel} {config}", key=key)

    def build(self, torch_device: str) -> None:
        """Build the problem's tensors, without a reference."""
        tensor_cache.tensors(self.reference, self.problem, torch_device, is_checked=False)

    def launcher(self, torch_device: str) -> Callable[[], object]:
        """Return a launch of the config; its bytes are not checked."""
        tensors = tensor_cache.tensors(self.reference, self.problem, torch_device, is_checked=False)
        return tensors.launcher(self.config, self.in_graph)
