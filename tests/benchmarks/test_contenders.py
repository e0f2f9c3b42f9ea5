"""Comparisons with other libraries: what is right, what is wrong, and the table."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from benchmarks import casts, contenders, layers
from benchmarks.contenders import OURS, Call, Cell, Unavailable, measured, report
from fp8tune.plan.shapes import Settings
from fp8tune_kernels import catalog

ROW = {"M": 64, "N": 64, "K": 32, "E": 4, "top_k": 2}


@pytest.mark.parametrize("name", layers.OPERATIONS)
def test_contenders_of_an_operation_agree_with_its_reference(name: str) -> None:
    operation = layers.OPERATIONS[name]
    inputs = operation.inputs(ROW, Settings(), "cpu")
    makers = {own: partial(make, inputs) for own, make in operation.contenders.items() if own != "torch.compile"}
    cells = measured(makers, partial(operation.reference, inputs), layers.fault)
    problems = {own: cell.problem for own, cell in cells.items() if cell.problem}
    assert {*problems} <= {"torchao", "sonicmoe"}  # not installed
    assert all("No module named" in problem for problem in problems.values())


@pytest.mark.parametrize("scale", [0.0, 1.2, float("nan")])
def test_one_wrong_expert_is_found(scale: float) -> None:
    right = (torch.randn(8, 8), torch.randn(4, 16, 16))
    assert layers.fault(right, right) == ""
    wrong = right[1].clone()
    wrong[3] *= scale
    assert layers.fault((right[0], wrong), right) == "wrong result 1"


def test_casts_are_compared_byte_for_byte() -> None:
    spec = catalog.load("rowwise-2d")
    q, scales = torch.zeros(2, 4, dtype=torch.float8_e4m3fn), torch.ones(2, 1)
    assert casts.fault(spec, (q, scales), (q, scales)) == ""
    changed = q.view(torch.uint8).clone().index_fill_(1, torch.tensor([3]), 1).view(q.dtype)
    assert casts.fault(spec, (changed, scales), (q, scales)) == "wrong output 0"
    assert casts.fault(spec, (q.float(), scales), (q, scales)) == "wrong output 0"


def test_only_right_contenders_have_ratios_and_a_wrong_one_of_ours_is_an_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    cells = {OURS: Cell("", 10.0, 2.0), "twice": Cell("", 20.0), "wrong": Cell("wrong result 0"), "half": Cell("", 5.0)}
    assert report("title", [("small", cells), ("large", {**cells, "half": Cell("lost")})]) == 0
    output = capsys.readouterr().out
    assert "| small | 2.00x | wrong result 0 | 0.50x | 10.0 | 2 |" in output
    assert "| mean | 2.00x on 2 |  | 0.50x on 1 |  |  |" in output
    assert report("title", [("small", {OURS: Cell("wrong result 0")})]) == 1


def test_contenders_are_timed_in_turn_once_they_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    order = list[str]()

    def make(name: str, value: float) -> Call:
        def forward() -> tuple[float]:
            order.append(name)
            return (value,)

        return Call(forward)

    def unavailable() -> Call:
        raise Unavailable("is not installed")

    def fault(outputs: tuple[float, ...], expected: tuple[float, ...]) -> str:
        return "" if outputs == expected else "wrong"

    def timed(step: object) -> object:
        assert callable(step)
        step()
        return type("Outcome", (), {"time_us": float(len(order))})

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    for name in ("memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda: 0)
    monkeypatch.setattr(contenders, "block", timed)
    makers = {OURS: partial(make, OURS, 1.0), "b": partial(make, "b", 1.0), "bad": partial(make, "bad", 2.0)}
    cells = measured({**makers, "lost": unavailable}, lambda: (1.0,), fault)
    assert order == [OURS, "b", "bad", OURS, "b", OURS, "b", "b", OURS, OURS, "b"]
    assert (cells["bad"].problem, cells["lost"].problem) == ("wrong", "is not installed")
    assert (cells[OURS].time_us, cells["b"].time_us) == (9.0, 8.0)
