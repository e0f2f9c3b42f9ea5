"""What the contestants of the race run over: one problem of ``colwise``, its configs and its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fp8tune.measure import device
from fp8tune.plan import problems as plan
from fp8tune.records import NamedInts, Problem
from fp8tune.revisions.loading import load_spec
from fp8tune_kernels.arches import ARCHES
from fp8tune_kernels.spec import KernelSpec

KERNEL = "colwise"
ROW = NamedInts(M=16640, K=5120, E=64)
"""A row of a shape set. It has no N, and so holds one problem: 16640 x 5120 in 64 jagged groups."""
GRID = ("BLOCK_SIZE_ITER=32,64,128,256,512", "LEAD=0", "maxnreg=0")
"""The kernel's grid, but for this: every tuner launches one function with the same tensors, and so nothing that has
zeroes written first (panels), and no option that is left out rather than 0. A short tile makes up for the number."""
ARCH_WITHOUT_GPU = "sm_90"


@dataclass(frozen=True)
class Course:
    """The problem and the configs, the same for every contestant."""

    spec: KernelSpec
    problem: Problem
    configs: tuple[NamedInts, ...]
    torch_device: str
    """``cuda``; or ``meta`` where there is no GPU: tuners can be built there, nothing can be searched."""
    timer: str | None = None
    """The clock of fp8tune's sweep; None is the GPU's. Tests give a simulated one."""

    @classmethod
    def here(cls, limit: int | None = None) -> Course:
        """The course on this machine's GPU: the first ``limit`` configs that the kernel does not call hopeless."""
        import torch

        spec = load_spec(KERNEL)
        problem = plan.problems(spec, [ROW])[0]
        found = device.probe()
        limits = ARCHES[ARCH_WITHOUT_GPU].limits() if found is None else device.limits(found)
        trials = plan.trials(spec, problem, plan.parse_grid(GRID, spec.axes), limits)
        configs = tuple(trial.config for trial in trials if trial.pruned is None)
        return cls(spec, problem, configs[:limit], "cuda" if torch.cuda.is_available() else "meta")

    @cached_property
    def tunables(self) -> dict[str, tuple[int, ...]]:
        """The axes that have a choice of values."""
        axes = plan.parse_grid(GRID, self.spec.axes)
        return {axis: values for axis, values in axes.items() if len(values) > 1}

    @cached_property
    def inputs(self) -> tuple[Any, ...]:
        """The inputs of ``launch``: x, offs, the FP8 dtype, the scale mode."""
        return self.spec.inputs(self.problem, self.torch_device)

    @cached_property
    def outputs(self) -> tuple[Any, ...]:
        """The outputs that every launch overwrites: q, scales."""
        return self.spec.outputs(*self.inputs)

    def launch(self, config: Mapping[str, int]) -> None:
        """Enqueue the kernel with this config, as a sweep does."""
        self.spec.launch(config, self.inputs, self.outputs)

    @cached_property
    def arguments(self) -> tuple[Any, ...]:
        """What ``launch`` gives ``colwise_kernel`` besides the config. A test holds the two together."""
        from fp8tune_kernels.quantize.arithmetic import FP8_MAX

        x, offs, fp8_dtype, power_of_two = self.inputs
        unused = x  # without panels nothing counts in it
        return x, offs, *self.outputs, unused, *x.shape, offs.shape[0], FP8_MAX[fp8_dtype], power_of_two

    def grid(self, config: Mapping[str, Any]) -> tuple[int]:
        """The programs that ``launch`` starts: one a block of columns of each group, and of the rows after the last."""
        from fp8tune_kernels.quantize import panels

        x, offs, *_ = self.inputs
        rows, columns = x.shape
        return (panels.programs(config, rows, columns, offs.shape[0], x.device),)

    def settings(self, config: Mapping[str, int]) -> dict[str, int]:
        """What ``launch`` makes of a config: the kernel's constants and the launch options."""
        from fp8tune_kernels.quantize import panels

        return panels.options(config)

    def as_config(self, settings: Mapping[str, Any]) -> NamedInts:
        """The config in a tuner's launch settings, in the order of the axes; what has no choice is the default's."""
        chosen = {axis: int(settings[axis]) for axis in self.tunables}
        return NamedInts([(axis, chosen.get(axis, self.spec.default[axis])) for axis in self.spec.axes])
