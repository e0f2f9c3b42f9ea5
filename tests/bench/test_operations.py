"""Operations of ``bench --op``: contenders agree, faults are found, and packages register their own."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from toy_operation import operation

from fp8tune import registry
from fp8tune.bench import operations
from fp8tune.errors import UsageError
from fp8tune.plan import problems, shapes
from fp8tune.replay.loading import load_spec
from fp8tune_kernels.groups import group_ends
from fp8tune_kernels.operations.operation import Operation, Size, Unavailable
from fp8tune_kernels.operations.rivals import rivals
from fp8tune_kernels.spec import NamedInts

SIZES = {
    "grouped-mm": NamedInts(M=192, N=64, K=48, G=3),
    "mxfp8-grouped-mm": NamedInts(M=192, N=64, K=64, G=3),
    "moe-mlp": NamedInts(M=192, N=48, K=64, G=3),
    "moe-layer": NamedInts(tokens=96, hidden=64, expert=48, experts=5, top_k=3),
}


def load(name: str) -> Operation:
    return operations.load(name, is_kernel=False)


@pytest.mark.usefixtures("quantizers_in_plain_torch")
@pytest.mark.parametrize("name", SIZES)
def test_all_contenders_that_are_installed_are_right(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    chosen, size = load(name), Size(name, SIZES[name], "jagged")
    tensors = chosen.inputs(size, device)
    expected = chosen.reference(tensors)
    for contender, make in chosen.contenders.items():
        try:
            call = make(tensors)
        except Unavailable as missing:
            assert contender in chosen.rivals, missing
            continue
        outputs = call.read(call.step())
        fault, ratios = chosen.compare(outputs, call.reference() if call.reference else expected)
        assert fault == "", contender
        assert [*ratios] == [*chosen.results]
        assert (min(ratios.values()) > 40) == ("fp8tune" not in contender or "bf16" in contender)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_one_wrong_group_is_found_in_each_result(place: int) -> None:
    chosen = load("grouped-mm")
    tensors = chosen.inputs(Size("grouped-mm", NamedInts(M=512, N=64, K=48, G=4), "balanced"), "cpu")
    expected = chosen.reference(tensors)
    outputs = [result.clone() for result in expected]
    outputs[place][-1 if place == 2 else slice(384, 512)] = 0
    fault, ratios = chosen.compare(tuple(outputs), expected)
    assert fault.startswith(chosen.results[place])
    assert ratios[chosen.results[place]] == pytest.approx(0)
    assert chosen.compare(expected, expected)[0] == ""


def test_nan_is_wrong_and_groups_without_rows_are_not_compared() -> None:
    chosen = load("grouped-mm")
    size = Size("grouped-mm", NamedInts(M=128, N=32, K=32, G=3), "listed", groups=(64, 0, 64))
    tensors = chosen.inputs(size, "cpu")
    out, grad, weights = chosen.reference(tensors)
    unwritten = weights.clone()
    unwritten[1] = float("nan")
    assert chosen.compare((out, grad, unwritten), (out, grad, weights))[0] == ""
    assert "out is wrong" in chosen.compare((out * float("nan"), grad, weights), (out, grad, weights))[0]


def test_a_layer_has_tokens_and_a_rows_name() -> None:
    chosen = shapes.parse("models,N=2048,E=128")
    sizes = [
        item
        for row in chosen.rows
        if chosen.names.get(row) == "Qwen3-30B-A3B down"
        for item in load("moe-layer").sizes(row, chosen.names[row])
    ]
    assert [shape["tokens"] for shape, _ in sizes] == [4096, 16384]
    assert {label for _, label in sizes} == {"Qwen3-30B-A3B"}


def test_the_reference_of_a_layer_takes_given_experts() -> None:
    chosen = load("moe-layer")
    layer = chosen.inputs(Size("moe-layer", SIZES["moe-layer"]), "cpu")
    ids = layer.logits.topk(3, dim=-1)[1]
    reference = functools.partial(chosen.reference, layer)  # type: ignore[call-arg]
    assert torch.equal(reference()[0], reference(ids)[0])  # type: ignore[call-arg]
    assert not torch.equal(reference()[0], reference(ids.roll(1, 0))[0])  # type: ignore[call-arg]


def test_groups_are_a_routing_or_listed() -> None:
    chosen = load("grouped-mm")
    listed = chosen.inputs(Size("x", NamedInts(M=48, N=16, K=16, G=3), "listed", groups=(16, 32, 0)), "cpu")
    assert listed.offs.tolist() == [16, 48, 48]
    routed = chosen.inputs(Size("x", NamedInts(M=480, N=16, K=16, G=3), "zipf", seed=1), "cpu")
    assert routed.offs.tolist() == group_ends("zipf", 480, 3, 1)


def test_a_package_registers_an_operation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "theirs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        f"[{registry.OPERATIONS}]\ndoubling = theirs_op:DOUBLING\nodd = theirs_op:ODD\nlost = theirs_op:LOST\n"
    )
    (tmp_path / "theirs_op.py").write_text("from toy_operation import operation\nDOUBLING, ODD = operation(), 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    registry.registered.cache_clear()
    assert {*SIZES, "doubling"} <= registry.registered(registry.OPERATIONS).keys()
    assert load("doubling").title == operation().title
    for name, message in (("odd", "is no Operation"), ("lost", "cannot be imported"), ("doubl", "doubling")):
        with pytest.raises(UsageError, match=message):
            load(name)
    registry.registered.cache_clear()


# Kernels


def test_torchs_formula_of_a_kernel_has_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Formulas for torch.compile go by no loop; references do, so that they are easy to believe."""
    from fp8tune_kernels.operations import rivals as formulas

    monkeypatch.setattr(formulas, "compiled", lambda function: function)
    for kernel in formulas._FORMULAS:
        spec = load_spec(kernel)
        problem = spec.scaled_down(problems.problems(spec, [{"M": 192, "K": 64, "N": 96, "E": 3}])[0])
        values = spec.inputs(problem, "cpu")
        chosen = operations.of_kernel(spec)
        outputs = rivals(spec)["torch.compile"](values).step()
        assert chosen.compare(tuple(outputs), spec.reference(*values)) == ("", {}), kernel


def test_a_rival_with_other_bytes_shape_or_dtype_is_wrong() -> None:
    chosen = operations.load("colwise", is_kernel=True)
    right = (torch.ones(4, 8).to(torch.float8_e4m3fn), torch.ones(8))
    changed = right[0].clone().view(torch.uint8)
    changed[1, 2] += 1
    assert chosen.compare(right, right)[0] == ""
    assert chosen.compare((changed.view(torch.float8_e4m3fn), right[1]), right)[0].startswith("output 0: 1 of 32")
    assert "shape" in chosen.compare((right[0].t(), right[1]), right)[0]
    assert "float64" in chosen.compare((right[0], right[1].double()), right)[0]
    assert "1 outputs" in chosen.compare(right[:1], right)[0]


def test_what_has_no_formula_or_is_not_installed_says_so() -> None:
    spec = load_spec("grouped-rows")
    with pytest.raises(Unavailable, match="no formula of grouped-rows"):
        rivals(spec)["torch.compile"](())
    with pytest.raises(Unavailable, match="no counterpart of expert-sort"):
        rivals(load_spec("expert-sort"))["torchao"](())
