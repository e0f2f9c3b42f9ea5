"""A simulated GPU on which a test decides what some blocks come to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from fp8tune.measure.arms import Arm, KernelArm, Place
from fp8tune.measure.simulated import SimulatedBackend
from fp8tune.measure.trees import Tree
from fp8tune.records import Outcome

Answer = Callable[[KernelArm, Place], Outcome | None]


@dataclass
class FakeGpu(SimulatedBackend):
    """Its screens are the simulated GPU's. In finals, ``answer`` comes first: None leaves a block to the clock."""

    timer: str
    answer: Answer = lambda arm, place: None
    unbuilt: Outcome | None = None  # what building a problem's tensors comes to, if not ok
    turns: int = 0  # how often a process began with a problem in finals
    calls: list[tuple[KernelArm, Place]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(self.timer)

    def worker(self, tree: Tree | None = None) -> FakeWorker:  # type: ignore[override]
        return FakeWorker(self)


@dataclass
class FakeWorker:
    """One process in finals."""

    gpu: FakeGpu

    def build(self, arm: Arm) -> Outcome:
        self.gpu.turns += 1
        return self.gpu.unbuilt or self.gpu.build(arm)

    def launch(self, arm: Arm) -> Outcome:
        return self.gpu.launch(arm)

    def block(self, arm: KernelArm, place: Place) -> Outcome:
        self.gpu.calls.append((arm, place))
        return self.gpu.answer(arm, place) or self.gpu.block(arm, place)

    def close(self) -> None:
        pass
