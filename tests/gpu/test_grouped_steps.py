"""On a GPU: the grouped GEMM waits for nothing, is captured and replayed, compiled, and right on every group layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from fp8tune.measure.edges import fill_integers
from fp8tune_kernels import fp8_grouped_mm, mxfp8_grouped_mm
from fp8tune_kernels.gemm import token_groups
from fp8tune_kernels.groups import group_ends
from fp8tune_kernels.spec import ROUTINGS

pytestmark = pytest.mark.gpu

M, K, N, E = 2000, 256, 384, 6


def operands(routing: str, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """A, weights (E, N, K), offs and grad."""
    generator = torch.Generator("cuda").manual_seed(seed)
    shapes = ((M, K), (E, N, K), (M, N))
    A, weights, grad = (
        torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator) for shape in shapes
    )
    offs = torch.tensor(group_ends(routing, M, E, seed), dtype=torch.int32, device="cuda")
    return A.requires_grad_(), weights.requires_grad_(), offs, grad


def step(call: Callable[..., torch.Tensor], *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
    A, weights, offs, grad = given
    out = call(A, weights.transpose(1, 2), offs)
    return out, *torch.autograd.grad(out, (A, weights), grad)


def fp8(A: torch.Tensor, B_t: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    return fp8_grouped_mm(A, B_t, offs)


def auto(A: torch.Tensor, B_t: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    return fp8_grouped_mm(A, B_t, offs, precision="auto")


def fp8_kept(A: torch.Tensor, B_t: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    return fp8_grouped_mm(A, B_t, offs, keep_fp8=("A", "B_t"))


def mxfp8(A: torch.Tensor, B_t: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    return mxfp8_grouped_mm(A, B_t, offs, pad_token_groups=True)


def exact(A: torch.Tensor, B_t: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """In float32, group by group; zeros past the last one."""
    ends = offs.tolist()
    parts = [A[s:e].float() @ b.float() for s, e, b in zip([0, *ends], ends, B_t, strict=False)]
    return torch.cat([*parts, A.new_zeros(len(A) - ends[-1], B_t.shape[2], dtype=torch.float32)])


def sqnr_db(result: torch.Tensor, right: torch.Tensor) -> float:
    noise = result.double() - right.double()
    return float(10 * torch.log10(right.double().square().sum() / noise.square().sum()))


@pytest.fixture
def no_waiting() -> Iterator[None]:
    """Whatever waits for the device raises. Switched on by the test, once everything is compiled."""
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("call", [fp8, auto, mxfp8])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_every_layout_is_near_float32(routing: str, call: Callable[..., torch.Tensor]) -> None:
    given = operands(routing)
    right = step(exact, *given[:3], given[3].float())
    for result, wanted in zip(step(call, *given), right, strict=True):
        assert result.isfinite().all()
        assert sqnr_db(result, wanted) > 25


def test_the_cpu_reference_is_what_the_gpu_computes() -> None:
    given = operands("ragged")
    on_cpu = [tensor.detach().cpu() for tensor in given]
    on_cpu[:2] = [tensor.requires_grad_() for tensor in on_cpu[:2]]
    for result, right in zip(step(fp8, *given), step(fp8, *on_cpu), strict=True):
        assert sqnr_db(result.cpu(), right) > 40  # Hopper's short accumulators, and bfloat16


@pytest.mark.parametrize("routing", ROUTINGS)
def test_what_is_kept_in_fp8_changes_no_bit(routing: str) -> None:
    given = operands(routing)
    for result, right in zip(step(fp8_kept, *given), step(fp8, *given), strict=True):
        assert torch.equal(result, right)


@pytest.mark.parametrize("call", [fp8, fp8_kept, auto, mxfp8])
def test_nothing_waits_for_the_device(no_waiting: None, call: Callable[..., torch.Tensor]) -> None:
    given = operands("empty")
    step(call, *given)
    torch.cuda.set_sync_debug_mode("error")
    step(call, *given)


@pytest.mark.parametrize("call", [fp8, fp8_kept, auto, mxfp8])
def test_a_captured_step_replays_on_other_routings(call: Callable[..., torch.Tensor]) -> None:
    given = operands("balanced")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step(call, *given)
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step(call, *given)
    for seed, routing in enumerate(ROUTINGS, 1):
        other = operands(routing, seed)
        for tensor, value in zip(given, other, strict=True):
            tensor.data.copy_(value.data)
        graph.replay()
        for result, right in zip(results, step(call, *other), strict=True):
            assert torch.equal(result, right)


def test_torch_compile_of_a_step_gives_the_same() -> None:
    given = operands("ragged")
    compiled = torch.compile(fp8, fullgraph=True)
    for result, right in zip(step(compiled, *given), step(fp8, *given), strict=True):
        assert torch.equal(result, right)


@pytest.fixture
def dirty_memory() -> None:
    """What the allocator gives out next held NaN: torch's GEMMs leave rows of no group as they were."""
    del_me = [torch.full((E * N * K,), float("nan"), device="cuda", dtype=torch.bfloat16) for _ in range(8)]
    torch.cuda.synchronize()
    del del_me


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("precision", ["fp8", "bf16"])
def test_exact_values_give_exact_bytes(precision: str, routing: str, dirty_memory: None) -> None:
    A, weights, offs, grad = (tensor.detach() for tensor in operands(routing))
    for tensor in (A, weights, grad):
        fill_integers(tensor, 2)
    used = int(offs[-1]) if routing == "empty" else M - 3
    offs.clamp_(max=used)
    A[used:], grad[used:] = float("nan"), float("nan")
    none = offs, None, precision == "fp8", None, None, None, None
    found = (
        torch.ops.fp8tune.grouped_mm_forward(A, weights.mT, *none),
        torch.ops.fp8tune.grouped_mm_input_gradient(grad, weights.mT, *none),
        torch.ops.fp8tune.grouped_mm_weight_gradient(grad, A, *none),
    )
    wanted = torch.zeros(M, N, device="cuda"), torch.zeros(M, K, device="cuda"), torch.zeros(E, N, K, device="cuda")
    start = 0
    for group, end in enumerate(offs.tolist()):
        a, g, w = A[start:end].double(), grad[start:end].double(), weights[group].double()
        wanted[0][start:end], wanted[1][start:end], wanted[2][group] = a @ w.t(), g @ w, g.t() @ a
        start = end
    for result, right in zip(found, wanted, strict=True):
        assert torch.equal(result, right.bfloat16())


def test_padding_of_many_elements() -> None:
    """More than 2^31: offsets within a matrix need 64 bits."""
    x = torch.arange(270_000, device="cuda").remainder(251).to(torch.bfloat16)[:, None].expand(-1, 8192).contiguous()
    offs = torch.tensor([7, 100_001, 270_000], dtype=torch.int32, device="cuda")
    padded, padded_offs = token_groups.pad(x, offs)
    assert padded_offs.tolist() == [16, 16 + 100_000, 16 + 100_000 + 170_000]
    assert torch.equal(padded[16 + 100_000 : 16 + 100_000 + 169_999], x[100_001:])
    assert torch.equal(token_groups.unpad(padded, offs, len(x)), x)
