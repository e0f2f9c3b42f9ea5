"""``moe_layer`` on a GPU: near torch's layer, without a wait, in graphs and compiled, with more than 2^31 elements."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks import moe_layer as benchmark
from fp8tune_kernels import catalog, choose_experts, moe_layer, sum_rows_of_tokens
from fp8tune_kernels.moe import gathered_rows, gathered_transpose
from fp8tune_kernels.runtime.lookup import config_for
from fp8tune_kernels.spec import NamedInts, Problem

pytestmark = pytest.mark.gpu

T, K, N, E, TOP_K = 1024, 512, 384, 16, 4


def operands(seed: int = 0, **sizes: int) -> list[torch.Tensor]:
    """x, w13, w2, logits and the output's gradient."""
    draw = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape: int, std: float = 1.0) -> torch.Tensor:
        return torch.randn(shape, device="cuda", generator=draw).mul_(std).bfloat16().requires_grad_()

    t = sizes.get("T", T)
    x, w13, w2 = normal(t, K), normal(E, 2 * N, K, std=K**-0.5), normal(E, K, N, std=N**-0.5)
    return [x, w13, w2, normal(t, E), normal(t, K).detach()]


def step(x: Any, w13: Any, w2: Any, logits: Any, grad: Any, **options: Any) -> list[torch.Tensor]:
    out = moe_layer(x, w13, w2, *choose_experts(logits, TOP_K), **options)
    return [out.detach(), *torch.autograd.grad(out, [x, w13, w2, logits], grad)]


def assert_same(mine: list[torch.Tensor], others: list[torch.Tensor]) -> None:
    for one, other in zip(mine, others, strict=True):
        assert torch.equal(one, other)


def test_all_contenders_of_the_benchmark_are_near_torchs_layer() -> None:
    for result in benchmark.compare("OLMoE", 512, "cuda", 20):
        assert result.error == ""
        assert min(result.cosines) > (0.9999 if "bf16" in result.name else 0.99), result


@pytest.mark.parametrize("options", [{}, {"recompute": "gate-up"}, {"activation": "gpt-oss", "layout": "interleaved"}])
def test_bytes_repeat(options: dict[str, Any]) -> None:
    for precision in ("fp8", "bf16"):
        first, *others = (step(*operands(), precision=precision, **options) for _ in range(4))  # the last two replay
        for other in others:
            assert_same(first, other)


def test_fp8_and_bf16_agree_with_biases_and_experts_of_other_devices() -> None:
    x, w13, w2, _, grad = operands()
    draw = torch.Generator("cuda").manual_seed(1)
    ids = torch.randint(-1, E + 3, (T, TOP_K), device="cuda", generator=draw)
    weights = torch.rand(T, TOP_K, device="cuda", generator=draw).requires_grad_()
    b13, b2 = (torch.randn(E, size, device="cuda", generator=draw).requires_grad_() for size in (2 * N, K))
    results = []
    for precision in ("fp8", "bf16"):
        out = moe_layer(x, w13, w2, ids, weights, b13=b13, b2=b2, activation="gpt-oss", precision=precision)
        results.append([out.detach(), *torch.autograd.grad(out, [x, w13, w2, b13, b2, weights], grad)])
    assert min(benchmark.cosines(*results)) > 0.99
    is_elsewhere = (ids < 0) | (ids >= E)
    assert not results[0][-1][is_elsewhere].any()


@pytest.mark.parametrize("precision", ["fp8", "bf16"])
def test_nothing_waits_for_the_device(precision: str) -> None:
    given = operands()
    step(*given, precision=precision)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(*given, precision=precision)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("precision", ["fp8", "bf16"])
def test_a_captured_step_replays_the_right_bytes(precision: str) -> None:
    given, other = operands(), operands(1)
    right = step(*other, precision=precision)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(*given, precision=precision)
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph, stream=stream):
        results = step(*given, precision=precision)
    with torch.no_grad():
        for mine, value in zip(given, other, strict=True):
            mine.copy_(value)
    graph.replay()
    assert_same(results, right)


@pytest.mark.parametrize("precision", ["fp8", "bf16"])
def test_a_compiled_step_gives_the_same_bytes(precision: str) -> None:
    torch._dynamo.reset()

    def layer(x: Any, w13: Any, w2: Any, logits: Any) -> torch.Tensor:
        return moe_layer(x, w13, w2, *choose_experts(logits, TOP_K), precision=precision)

    *leaves, grad = operands()
    out = torch.compile(layer, fullgraph=True)(*leaves)
    assert_same([out.detach(), *torch.autograd.grad(out, leaves, grad)], step(*leaves, grad, precision=precision))


def launches(function: Any) -> list[str]:
    """Names of the kernels that a call launches, copies and fills included."""
    function()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        function()
        torch.cuda.synchronize()
    return sorted(event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA)


@pytest.mark.parametrize("precision", ["fp8", "bf16"])
def test_a_compiled_step_launches_the_same_kernels_and_no_more(precision: str) -> None:
    torch._dynamo.reset()

    def layer(x: Any, w13: Any, w2: Any, logits: Any) -> torch.Tensor:
        return moe_layer(x, w13, w2, *choose_experts(logits, TOP_K), precision=precision)

    *leaves, grad = operands()
    compiled = torch.compile(layer, fullgraph=True, dynamic=False)
    eager, traced = (launches(lambda f=f: torch.autograd.grad(f(*leaves), leaves, grad)) for f in (layer, compiled))
    own = [[name for name in names if not name.startswith(("void at::", "triton_"))] for names in (eager, traced)]
    assert own[0] == own[1]
    assert len(traced) <= len(eager), (eager, traced)


@pytest.mark.parametrize("rows", [1, 127, 4097])
def test_any_number_of_tokens(rows: int) -> None:
    given = operands(T=rows)
    assert min(benchmark.cosines(step(*given), step(*given, precision="bf16"))) > 0.98


@pytest.mark.usefixtures("whole_gpu")
def test_more_elements_than_an_int32_counts() -> None:
    """Rows from the end of tokens, of rows and of the output."""
    tokens, columns = 262_200, 8208
    a = torch.randn(tokens, columns, device="cuda", dtype=torch.bfloat16).to(torch.float8_e4m3fn)
    assert a.numel() > 2**31
    offs = torch.tensor([100, 256], dtype=torch.int32, device="cuda")
    of_rows = torch.arange(tokens - 256, tokens, dtype=torch.int32, device="cuda")
    b = torch.randn(2, 256, columns, device="cuda").to(torch.float8_e4m3fn)
    scale_a, scale_b = torch.ones(tokens, device="cuda"), torch.ones(2, 256, device="cuda")
    (right,) = gathered_rows.reference(a, b, offs, of_rows, scale_a, scale_b)
    inputs = a, b, offs, of_rows, scale_a, scale_b
    tuned = config_for(gathered_rows.SPEC, gathered_rows.key(*inputs), torch.device("cuda"))
    for config in (gathered_rows.SPEC.default, NamedInts(tuned)):
        outputs = gathered_rows.outputs(*inputs)
        gathered_rows.launch(config, inputs, outputs)
        assert min(benchmark.cosines(outputs, [right])) > 0.9999
    (mine,) = outputs = gathered_transpose.outputs(a, offs, of_rows, None)
    gathered_transpose.launch(gathered_transpose.SPEC.default, (a, offs, of_rows, None), outputs)
    (right,) = gathered_transpose.reference(a, offs, of_rows, None)
    assert torch.equal(mine[:384].view(torch.uint8), right[:384].view(torch.uint8))
    del a, inputs, mine, right, outputs
    rows = torch.randn(tokens, columns, device="cuda", dtype=torch.bfloat16)
    row_of = torch.arange(tokens, dtype=torch.int32, device="cuda").flip(0).view(-1, 2)
    out = sum_rows_of_tokens(rows, row_of)
    for at in (0, len(row_of) - 1):
        assert torch.equal(out[at], rows[row_of[at].long()].float().sum(0).bfloat16())


def test_every_kernel_is_right_at_a_size_that_is_timed() -> None:
    """Byte for byte, with the default config and the table's."""
    from fp8tune.measure import checking

    row = {"M": 8192, "K": 1024, "N": 768, "E": 16}
    for kernel in catalog.MOE:
        spec = catalog.load(kernel)
        problem = Problem(
            kernel,
            NamedInts(next(iter(spec.problems(row)))),
            "ragged" if spec.routed else "none",
            in_dtype=spec.in_dtypes[0],
        )
        tensors = checking.build(spec, problem, "cuda")
        key = tuple(dict(spec.lookup_key(problem))[name] for name in spec.key)
        for config in (spec.default, NamedInts(config_for(spec, key, torch.device("cuda")))):
            assert tensors.check(config) is None, (kernel, config)
