"""A device error breaks the GPU context of its process: wherever it shows, the process is given up with its reason."""

from __future__ import annotations

from pathlib import Path

import pytest
from places import PLANTED

from fp8tune.measure import trial
from fp8tune.measure.arms import KernelArm
from fp8tune.measure.worker import Poisoned
from fp8tune.records import NamedInts, Outcome, Problem, Status

RAISE = "raise RuntimeError('CUDA error: an illegal memory access was encountered')"
REASON = "RuntimeError: CUDA error: an illegal memory access was encountered"
CONFIG = NamedInts(FAULT=7, num_warps=4)


@pytest.fixture
def reference(tmp_path: Path) -> str:
    """Inputs break the context where K is 13; FAULT 7 does on one group layout."""
    text = (PLANTED / "faults.py").read_text()
    text = text.replace("    generator =", f"    if problem.shape['K'] == 13:\n        {RAISE}\n    generator =")
    copy = 'out[0].copy_(2 * x + (routing == "one-giant"))'
    text = text.replace(copy, f"if routing == 'one-giant':\n                {RAISE}\n            {copy}")
    (tmp_path / "poisonous.py").write_text(text)
    return f"{tmp_path}/poisonous.py:SPEC"


def problem(K: int) -> Problem:
    return Problem("planted-faults", NamedInts(M=64, K=K), routing="balanced")


def test_tensors_that_cannot_be_built_end_the_process_before_another_row_is_blamed(reference: str) -> None:
    with pytest.raises(Poisoned):
        trial.prepare(reference, problem(13), "cpu")
    with pytest.raises(Poisoned) as raised:
        trial.build(KernelArm(reference, problem(13), CONFIG), "cpu")
    assert raised.value.value == Outcome(Status.CRASHED, reason=REASON)


def test_a_launch_on_an_edge_keeps_its_reason(reference: str) -> None:
    with pytest.raises(Poisoned) as raised:
        trial.checked_block(KernelArm(reference, problem(8), CONFIG), "cpu", 0, times=False)
    outcome = raised.value.value
    assert isinstance(outcome, Outcome)
    assert outcome.status is Status.CRASHED
    assert outcome.reason.startswith(f"{REASON}, on the edge 'one-giant routing'")
