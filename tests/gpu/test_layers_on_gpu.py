"""On a GPU: ``fp8_grouped_mm`` and ``moe_layer`` wait for nothing, replay in graphs, compile, and are near torch's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from benchmarks.contenders import measured
from benchmarks.layers import OPERATIONS, fault
from fp8tune.measure.edges import fill_integers
from fp8tune.plan.shapes import Settings
from fp8tune_kernels import choose_experts, fp8_grouped_mm, moe_layer, mxfp8_grouped_mm
from fp8tune_kernels.groups import group_ends
from fp8tune_kernels.spec import ROUTINGS

pytestmark = pytest.mark.gpu

T, K, N, E, TOP_K, M = 1024, 512, 384, 16, 4, 2000

Step = Callable[..., tuple[torch.Tensor, ...]]


def normal(*shape: int, seed: int, std: float = 1.0) -> torch.Tensor:
    draw = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, device="cuda", generator=draw).mul_(std).bfloat16()


def product(call: Callable[..., torch.Tensor], A: Any, w: Any, offs: Any, grad: Any) -> tuple[torch.Tensor, ...]:
    """The output and gradients of a grouped GEMM."""
    out = call(A, w.transpose(1, 2), offs)
    return out, *torch.autograd.grad(out, (A, w), grad)


def cosines(mine: Any, others: Any) -> list[float]:
    pairs = zip(mine, others, strict=True)
    return [torch.cosine_similarity(a.flatten().float(), b.flatten().float(), 0).item() for a, b in pairs]


def operands_of_product(routing: str = "ragged", seed: int = 0) -> tuple[torch.Tensor, ...]:
    offs = torch.tensor(group_ends(routing, M, E, seed), dtype=torch.int32, device="cuda")
    A, w = normal(M, K, seed=seed).requires_grad_(), normal(E, N, K, seed=seed + 1).requires_grad_()
    return A, w, offs, normal(M, N, seed=seed + 2)


def layer(
    call: Callable[..., torch.Tensor], x: Any, w13: Any, w2: Any, logits: Any, grad: Any
) -> tuple[torch.Tensor, ...]:
    """Return the output and gradients of a layer with its router."""
    out = call(x, w13, w2, *choose_experts(logits, TOP_K))
    return out, *torch.autograd.grad(out, (x, w13, w2, logits), grad)


def operands_of_layer(routing: str = "", seed: int = 0, tokens: int = T) -> tuple[torch.Tensor, ...]:
    x, logits = normal(tokens, K, seed=seed), normal(tokens, E, seed=seed + 1)
    w13, w2 = normal(E, 2 * N, K, seed=seed + 2, std=K**-0.5), normal(E, K, N, seed=seed + 3, std=N**-0.5)
    return *(entry.requires_grad_() for entry in (x, w13, w2, logits)), normal(tokens, K, seed=seed + 4)


STEPS: dict[str, tuple[Step, Callable[..., torch.Tensor], Callable[..., tuple[torch.Tensor, ...]]]] = {
    "fp8": (product, fp8_grouped_mm, operands_of_product),
    "auto": (product, partial(fp8_grouped_mm, precision="auto"), operands_of_product),
    "mxfp8": (product, partial(mxfp8_grouped_mm, pad_token_groups=True), operands_of_product),
    "layer, fp8": (layer, moe_layer, operands_of_layer),
    "layer, bf16": (layer, partial(moe_layer, precision="bf16"), operands_of_layer),
}
each_step = pytest.mark.parametrize("name", STEPS)


def assert_same(results: tuple[torch.Tensor, ...], right: tuple[torch.Tensor, ...]) -> None:
    for single, second in zip(results, right, strict=True):
        assert torch.equal(single, second)


@pytest.fixture
def no_waiting() -> Iterator[None]:
    """Raise where something waits for the device. Switched on by the test, once everything is compiled."""
    yield
    torch.cuda.set_sync_debug_mode("default")


@each_step
def test_nothing_waits_for_the_device_and_bytes_repeat(no_waiting: None, name: str) -> None:
    step, call, operands = STEPS[name]
    values = operands("empty")
    first = step(call, *values)
    torch.cuda.set_sync_debug_mode("error")
    again = [step(call, *values) for _ in range(3)]  # the last two replay
    torch.cuda.set_sync_debug_mode("default")
    for results in again:
        assert_same(results, first)


@each_step
def test_a_captured_step_replays_on_other_routings(name: str) -> None:
    step, call, operands = STEPS[name]
    values = operands("balanced")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(call, *values)
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        results = step(call, *values)
    for seed, routing in enumerate(ROUTINGS, 1):
        second = operands(routing, seed)
        for tensor, value in zip(values, second, strict=True):
            tensor.data.copy_(value.data)
        graph.replay()
        assert_same(results, step(call, *second))


def launches(function: Callable[[], object]) -> list[str]:
    """Names of the kernels that a call launches, copies and fills included."""
    function()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        function()
        torch.cuda.synchronize()
    return sorted(event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA)


@each_step
def test_a_compiled_step_gives_the_same_bytes_by_the_same_kernels_and_no_more(name: str) -> None:
    torch._dynamo.reset()
    step, call, operands = STEPS[name]
    values = operands()
    compiled = torch.compile(call, fullgraph=True, dynamic=False)
    assert_same(step(compiled, *values), step(call, *values))
    eager, traced = (launches(lambda f=f: step(f, *values)) for f in (call, compiled))
    # Torch's element-wise kernels and copies have names in C++ or with spaces, those that a compiler made begin alike.
    own = [[n for n in names if n.isidentifier() and not n.startswith("triton_")] for names in (eager, traced)]
    assert own[0] == own[1]
    assert len(traced) <= len(eager), (eager, traced)


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("precision", ["fp8", "bf16"])
def test_exact_values_give_exact_bytes_whatever_memory_held(precision: str, routing: str) -> None:
    """Torch's GEMMs leave rows of no group as they were."""
    A, w, offs, grad = (x.detach() for x in operands_of_product(routing))
    for tensor in (A, w, grad):
        fill_integers(tensor, 2)
    used = int(offs[-1]) if routing == "empty" else M - 3
    offs.clamp_(max=used)
    A[used:], grad[used:] = float("nan"), float("nan")
    held = [torch.full((E * N * K,), float("nan"), device="cuda", dtype=torch.bfloat16) for _ in range(8)]
    torch.cuda.synchronize()
    del held
    results = product(partial(fp8_grouped_mm, precision=precision), A.requires_grad_(), w.requires_grad_(), offs, grad)
    right = torch.zeros(M, N, device="cuda"), torch.zeros(M, K, device="cuda"), torch.zeros(E, N, K, device="cuda")
    start = 0
    for group, end in enumerate(offs.tolist()):
        a, g, of_group = A[start:end].double(), grad[start:end].double(), w[group].double()
        right[0][start:end], right[1][start:end], right[2][group] = a @ of_group.t(), g @ of_group, g.t() @ a
        start = end
    assert_same(results, tuple(entry.bfloat16() for entry in right))


def test_the_cpu_reference_is_what_the_gpu_computes() -> None:
    values = operands_of_product()
    on_cpu = [x.detach().cpu().requires_grad_(x.requires_grad) for x in values]
    for result, right in zip(product(fp8_grouped_mm, *values), product(fp8_grouped_mm, *on_cpu), strict=True):
        noise = (result.cpu().double() - right.double()).square().sum()
        assert 10 * torch.log10(right.double().square().sum() / noise) > 40  # Hopper's accumulators, and bfloat16


def test_all_contenders_of_the_benchmark_are_right_and_timed() -> None:
    operation, row = OPERATIONS["moe-layer"], {"M": 4096, "N": 2048, "K": 1024, "E": 64, "top_k": 8}
    operands = operation.inputs(row, Settings(), "cuda")
    makers = {name: partial(make, operands) for name, make in operation.contenders.items() if name != "sonicmoe"}
    for name, cell in measured(makers, partial(operation.reference, operands), fault).items():
        assert not cell.problem, name
        assert cell.time_us is not None, name
        assert cell.peak_mib, name


@pytest.mark.parametrize("tokens", [1, 127, 4097])
def test_any_number_of_tokens(tokens: int) -> None:
    values = operands_of_layer(tokens=tokens)
    fp8, bf16 = (layer(partial(moe_layer, precision=name), *values) for name in ("fp8", "bf16"))
    assert min(cosines(fp8, bf16)) > 0.98


def test_fp8_and_bf16_agree_with_biases_and_experts_of_other_devices() -> None:
    x, w13, w2, _, grad = operands_of_layer()
    draw = torch.Generator("cuda").manual_seed(1)
    ids = torch.randint(-1, E + 3, (T, TOP_K), device="cuda", generator=draw)
    weights = torch.rand(T, TOP_K, device="cuda", generator=draw).requires_grad_()
    b13, b2 = (torch.randn(E, size, device="cuda", generator=draw).requires_grad_() for size in (2 * N, K))
    results = []
    for precision in ("fp8", "bf16"):
        out = moe_layer(x, w13, w2, ids, weights, b13=b13, b2=b2, activation="gpt-oss", precision=precision)
        results.append([out.detach(), *torch.autograd.grad(out, [x, w13, w2, b13, b2, weights], grad)])
    assert min(cosines(*results)) > 0.99
    assert not results[0][-1][(ids < 0) | (ids >= E)].any()
