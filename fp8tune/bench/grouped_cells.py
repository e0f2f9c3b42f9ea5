"""One cell of ``fp8tune bench --op grouped-mm``, in the worker that owns the tensors: what each cell runs.

A step is a forward pass, or forward and backward with both gradients. A part is one kernel or GEMM of our step on
operands that are there already, so that the parts add up to the step but for launches and reciprocals of scales.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from fp8tune.bench.cells import Timing, block_us, guarded
from fp8tune.errors import MachineError
from fp8tune.measure.timing import Trial, make_timer
from fp8tune.records import Problem
from fp8tune_kernels.groups import group_ends

if TYPE_CHECKING:
    import torch

BF16, FP8, TORCHAO = "bf16", "fp8", "torchao"
FORWARD, BOTH, GRAPH = "fwd", "fwd+bwd", "fwd+bwd in a CUDA graph"

STEPS = (*((contender, step) for contender in (BF16, FP8, TORCHAO) for step in (FORWARD, BOTH)), (FP8, GRAPH))
"""(whose grouped GEMM, what of it)."""

GEMMS = ("GEMM out", "GEMM grad_A", "GEMM grad_B")
PARTS = (
    "rowwise-2d A",
    "colwise-3d B_t",
    GEMMS[0],
    "rowwise-2d grad",
    "transpose-3d B_t",
    GEMMS[1],
    "colwise-dual grad, A",
    GEMMS[2],
)
PADDING = ("pad A", "unpad out", "pad grad", "unpad grad_A")
"""Parts of a step whose groups are not all positive multiples of 16 rows."""

Call = Callable[[], Any]


@dataclass(frozen=True)
class Operands:
    """Tensors of a problem: those of :func:`fp8tune_kernels.fp8_grouped_mm`, and the output's gradient."""

    A: torch.Tensor
    B_t: torch.Tensor
    offs: torch.Tensor
    grad: torch.Tensor
    pad: bool


def needs_padding(problem: Problem) -> bool:
    """Whether a group is empty or of no multiple of 16 rows: no FP8 GEMM contracts over it as it is."""
    ends = group_ends(problem.routing, problem.shape["M"], problem.shape["G"], problem.seed)
    sizes = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    return any(size <= 0 or size % 16 for size in sizes)


def parts_of(problem: Problem) -> tuple[str, ...]:
    """The parts of our step on a problem."""
    return (*PARTS, *PADDING) if needs_padding(problem) else PARTS


# What the worker is asked


def time_step(contender: str, step: str, problem: Problem, timer_name: str) -> Timing:
    """One of :data:`STEPS`. Raises Poisoned with a Timing where the process must not be used again."""
    timer = make_timer(timer_name)
    trial = Trial(f"{contender} {step} {problem}", 0, _step_bytes(contender, step, problem))
    return guarded(lambda: block_us(timer, trial, lambda: step_call(contender, step, operands(problem, "cuda"))))


def time_part(part: str, problem: Problem, timer_name: str) -> Timing:
    """One of :func:`parts_of`."""
    timer = make_timer(timer_name)
    trial = Trial(f"{part} {problem}", 0, part_bytes(part, problem))
    return guarded(lambda: block_us(timer, trial, lambda: part_call(part, operands(problem, "cuda"))))


def peak_memory(contender: str, problem: Problem, timer_name: str) -> int | None:
    """Bytes that forward and backward allocate at their peak, beyond operands; None where nothing runs or it fails."""
    import torch

    if not make_timer(timer_name).runs_kernels:
        return None
    try:
        call = step_call(contender, BOTH, operands(problem, "cuda"))
        call()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        return torch.cuda.max_memory_allocated() - before
    except Exception:  # the step's own cell has the reason
        return None


# Bytes: what a part moves at least, for a clock that draws its times


def part_bytes(part: str, problem: Problem) -> int:
    """The least bytes of a part: bfloat16 is 2, FP8 is 1; a GEMM reads both operands and writes its result."""
    M, N, K, G = (problem.shape[dim] for dim in "MNKG")
    moved: Mapping[str, int] = {
        "rowwise-2d A": 3 * M * K,
        "colwise-3d B_t": 3 * G * K * N,
        "GEMM out": M * K + G * K * N + 2 * M * N,
        "rowwise-2d grad": 3 * M * N,
        "transpose-3d B_t": 3 * G * K * N,
        "GEMM grad_A": M * N + G * K * N + 2 * M * K,
        "colwise-dual grad, A": 3 * M * (N + K),
        "GEMM grad_B": M * (N + K) + 2 * G * K * N,
        "pad A": 4 * M * K,
        "unpad out": 4 * M * N,
        "pad grad": 4 * M * N,
        "unpad grad_A": 4 * M * K,
    }
    return moved[part]


def _step_bytes(contender: str, step: str, problem: Problem) -> int:
    parts = parts_of(problem)
    if contender == BF16:
        parts = GEMMS
    if step == FORWARD:
        parts = tuple(part for part in parts if part in (*PARTS[:3], *PADDING[:2]))
    return sum(part_bytes(part, problem) for part in parts) * (2 if contender == BF16 else 1)


# Operands and what runs on them


@lru_cache(maxsize=1)  # a large problem fills much of a GPU
def operands(problem: Problem, device: str) -> Operands:
    """Seeded random operands of a problem on ``device``."""
    import torch

    M, N, K, G = (problem.shape[dim] for dim in "MNKG")
    generator = torch.Generator(device).manual_seed(problem.seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, device=device, generator=generator)

    ends = group_ends(problem.routing, M, G, problem.seed)
    return Operands(
        A=normal(M, K).requires_grad_(),
        B_t=normal(G, N, K).transpose(1, 2).requires_grad_(),
        offs=torch.tensor(ends, dtype=torch.int32, device=device),
        grad=normal(M, N),
        pad=needs_padding(problem),
    )


def step_call(contender: str, step: str, given: Operands) -> Call:
    """What runs one of :data:`STEPS`. Raises MachineError where a contender cannot take the operands."""
    import torch

    multiply = _grouped_mm(contender, given)
    if step == FORWARD:
        A, B_t = given.A.detach(), given.B_t.detach()
        return lambda: multiply(A, B_t, given.offs)

    def forward_and_backward() -> tuple[torch.Tensor, ...]:
        out = multiply(given.A, given.B_t, given.offs)
        return torch.autograd.grad(out, (given.A, given.B_t), given.grad)

    return _captured(forward_and_backward) if step == GRAPH else forward_and_backward


def _grouped_mm(contender: str, given: Operands) -> Callable[..., torch.Tensor]:
    import torch

    from fp8tune_kernels import fp8_grouped_mm

    if contender == BF16:
        return lambda A, B_t, offs: torch._grouped_mm(A, B_t, offs=offs)
    if contender == FP8:
        return lambda A, B_t, offs: fp8_grouped_mm(A, B_t, offs, pad_token_groups=given.pad)
    if given.pad:
        raise MachineError("torchao takes only groups of a positive multiple of 16 rows")
    function = _of_torchao()
    return lambda A, B_t, offs: function(A, B_t, offs, pad_token_groups_for_grouped_mm=False)


def _of_torchao() -> Callable[..., torch.Tensor]:
    try:
        module = importlib.import_module("torchao.prototype.moe_training.fp8_grouped_mm")
        function: Callable[..., torch.Tensor] = module._to_fp8_rowwise_then_scaled_grouped_mm
    except (ImportError, AttributeError) as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "torchao":
            raise MachineError("torchao is not installed: pip install 'fp8tune[bench]'") from None
        raise MachineError(f"torchao's FP8 grouped GEMM cannot be imported: {error}") from error
    return function


def _captured(call: Call) -> Call:
    """The replay of a CUDA graph of the call: what is left of it without host work."""
    import torch

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):  # binaries are loaded at their first launch, which no capture may contain
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def part_call(part: str, given: Operands) -> Call:
    """What runs one of :func:`parts_of`, on operands padded as the step pads them."""
    from fp8tune_kernels import token_groups

    M = len(given.A)
    A, B_t, grad, offs = given.A.detach(), given.B_t.detach(), given.grad, given.offs
    if given.pad:
        A, offs = token_groups.pad(A, given.offs)
        grad, _ = token_groups.pad(grad, given.offs)
    makers: Mapping[str, Callable[[], Call]] = {
        "pad A": lambda: lambda: token_groups.pad(given.A.detach(), given.offs),
        "pad grad": lambda: lambda: token_groups.pad(given.grad, given.offs),
        "unpad out": lambda: lambda: token_groups.unpad(grad, given.offs, M),  # as large as grad
        "unpad grad_A": lambda: lambda: token_groups.unpad(A, given.offs, M),
        **_quantizations(A, B_t, grad, offs),
        **_gemms(A, B_t, grad, offs),
    }
    return makers[part]()


def _quantizations(
    A: torch.Tensor, B_t: torch.Tensor, grad: torch.Tensor, offs: torch.Tensor
) -> Mapping[str, Callable[[], Call]]:
    from fp8tune_kernels import grouped_mm, quantize_colwise_3d, quantize_colwise_dual, quantize_rowwise_2d

    return {
        "rowwise-2d A": lambda: lambda: quantize_rowwise_2d(A),
        "colwise-3d B_t": lambda: lambda: quantize_colwise_3d(B_t),
        "rowwise-2d grad": lambda: lambda: quantize_rowwise_2d(grad),
        "transpose-3d B_t": lambda: lambda: grouped_mm.quantize_transposed(B_t),
        "colwise-dual grad, A": lambda: lambda: quantize_colwise_dual(grad, A, offs),
    }


def _gemms(
    A: torch.Tensor, B_t: torch.Tensor, grad: torch.Tensor, offs: torch.Tensor
) -> Mapping[str, Callable[[], Call]]:
    """The three GEMMs on reciprocals that are there already."""
    from fp8tune_kernels import grouped_mm, quantize_colwise_3d, quantize_colwise_dual, quantize_rowwise_2d
    from fp8tune_kernels.scaled_gemm import multiply

    def prepared(a: Any, b: Any, scale_a: Any, scale_b: Any) -> Call:
        inverse_a, inverse_b = scale_a.reciprocal(), scale_b.reciprocal()
        return lambda: multiply(a, b, inverse_a, inverse_b, offs)

    def rows_times_experts(rows: torch.Tensor, experts: tuple[torch.Tensor, torch.Tensor]) -> Call:
        codes, scales = quantize_rowwise_2d(rows)
        return prepared(codes, experts[0], scales.squeeze(1), experts[1].squeeze(1))

    def over_groups() -> Call:
        q_grad, scales_grad, q_A, scales_A = quantize_colwise_dual(grad, A, offs)
        return prepared(q_grad.t(), q_A, scales_grad, scales_A)

    return {
        "GEMM out": lambda: rows_times_experts(A, quantize_colwise_3d(B_t)),
        "GEMM grad_A": lambda: rows_times_experts(grad, grouped_mm.quantize_transposed(B_t)),
        "GEMM grad_B": over_groups,
    }
