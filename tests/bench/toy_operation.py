"""An operation with right, wrong and missing contenders, and a back end that runs it on a CPU and draws its times."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from fp8tune.bench.contenders import check
from fp8tune.measure.simulated import SimulatedBackend
from fp8tune_kernels.operations.operation import Call, Operation, Size, Unavailable
from fp8tune_kernels.spec import NamedInts


def sizes(row: Mapping[str, int], label: str) -> Iterator[tuple[NamedInts, str]]:
    yield NamedInts(M=row["M"], K=row["K"]), label


def inputs(size: Size, device: str) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(size.seed)
    return torch.randn(size.shape["M"], size.shape["K"], generator=generator, device=device).requires_grad_()


def doubled(factor: float = 2.0) -> Callable[[torch.Tensor], Call]:
    return lambda x: Call(lambda: x * factor, (x,), torch.ones_like(x))


def half_zero(x: torch.Tensor) -> Call:
    return Call(lambda: torch.cat([x[: len(x) // 2] * 2, x[len(x) // 2 :] * 0]), (x,), torch.ones_like(x))


def missing(x: torch.Tensor) -> Call:
    raise Unavailable("rival is not installed")


def broken(x: torch.Tensor) -> Call:
    def forward() -> torch.Tensor:
        raise RuntimeError("no such kernel")

    return Call(forward)


def operation(ours: Callable[[torch.Tensor], Call] = doubled()) -> Operation:
    return Operation(
        name="doubling",
        title="doubling, forward and backward",
        sizes=sizes,
        inputs=inputs,
        reference=lambda x: (x.detach() * 2, torch.full_like(x, 2.0)),
        results=("out", "grad"),
        ours={"fp8tune": ours, "fp8tune, again": doubled()},
        baseline={"torch": doubled()},
        rivals={"half": half_zero, "absent": missing, "broken": broken},
        flops=lambda shape: shape["M"] * shape["K"],
        bytes_moved=lambda shape: 8 * shape["M"] * shape["K"],
        routed=False,
        shapes="starting-line",
    )


class OnCpu(SimulatedBackend):
    """Checks on the CPU, with simulated times."""

    def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        assert function is check
        return check(*args, torch_device="cpu", **kwargs)
