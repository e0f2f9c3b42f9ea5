"""``mxfp8_grouped_mm``, emulated: the recipe spelled out in plain torch, every group layout, compilers, refusals."""

import pytest
import torch
from test_grouped_mm import Layer, Results, by_group, exactly, layer, run, sqnr_db

from fp8tune_kernels import catalog, mxfp8_grouped_mm
from fp8tune_kernels.gemm.grouped_mxfp8 import mxfp8_path
from fp8tune_kernels.spec import ROUTINGS

pytestmark = [
    pytest.mark.usefixtures("quantizers_in_plain_torch"),
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() >= (10, 0),
        reason="native here: not yet run",
    ),
]


def layer_of_32(routing: str, device: str, seed: int = 0) -> Layer:
    """N=64: MXFP8 takes no 48."""
    given = layer(routing, device, seed=seed)
    weights = torch.cat([given.weights, given.weights[:, :16] * 2], 1)
    return Layer(given.A, weights, given.offs, torch.cat([given.grad, given.grad[:, :16] * 2], 1))


def by_the_recipe(given: Layer, scale_mode: str) -> Results:
    """Each group's rows padded to whole blocks, as zeros that change no maximum."""

    def quantized(x: torch.Tensor, dim: int) -> torch.Tensor:
        lines = x if dim == 1 else x.t()
        q, scales = catalog.load("mxfp8-dim0").reference(lines.contiguous(), torch.float8_e4m3fn, scale_mode)
        values = q.float() * scales.float().repeat_interleave(32, 1)[:, : lines.shape[1]]
        return values if dim == 1 else values.t()

    return by_group(given, quantized)


@pytest.mark.parametrize("scale_mode", ["rceil", "floor"])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_output_and_gradients_are_those_of_the_recipe(routing: str, scale_mode: str, device: str) -> None:
    given = layer_of_32(routing, device)
    results = run(mxfp8_grouped_mm, given, pad_token_groups=True, scale_mode=scale_mode)
    for result, recipe, right in zip(results, by_the_recipe(given, scale_mode), exactly(given), strict=True):
        assert sqnr_db(result, recipe) > 45
        assert sqnr_db(result, right) > sqnr_db(recipe.bfloat16(), right) - 0.1 > 20


def test_the_path_is_named(device: str) -> None:
    assert mxfp8_path(torch.device(device)) == "emulated"


def test_torch_compile_traces_it_whole(device: str) -> None:
    given = layer_of_32("ragged", device)

    def call(A: torch.Tensor, B_t: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        return mxfp8_grouped_mm(A, B_t, offs, pad_token_groups=True)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for result, right in zip(run(compiled, given), run(call, given), strict=True):
        assert torch.equal(result, right)


def test_wrong_arguments_are_refused(device: str) -> None:
    given = layer("balanced", device)
    with pytest.raises(ValueError, match=r"^B_t has K=64 and N=48, wanted multiples of 32$"):
        mxfp8_grouped_mm(given.A, given.B_t, given.offs)
    given = layer_of_32("balanced", device)
    with pytest.raises(ValueError, match=r"^scale_mode is 'ceil', wanted floor or rceil$"):
        mxfp8_grouped_mm(given.A, given.B_t, given.offs, scale_mode="ceil")
