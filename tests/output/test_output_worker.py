"""``worker --status``: workers, lost ones first, failed units, and the speedup so far."""

from __future__ import annotations

import pytest

from fp8tune.output import worker
from fp8tune.store.schema import UnitState
from fp8tune.store.units import Queue, QueuedSweep, Unit, UnitStatus

SWEEP = QueuedSweep("3f2b8d0c", "NVIDIA H200", "{}", "fp8tune sweep --on queue")


def unit(position: int, kernel: str = "colwise") -> Unit:
    return Unit(f"u{position}", SWEEP.key, position, kernel, "hash", ("p",), (f"K={position}",), expected_s=60.0)


RUNNING = [
    UnitStatus(unit(n), UnitState.RUNNING, 1, f"node{n:02}:0", 14.0, None, -5.0 if n == 7 else 30.0) for n in range(9)
]
ENDED = [
    UnitStatus(unit(20), UnitState.DONE, 1, "node07:0", 51.0, 40.0),
    UnitStatus(unit(21, "matmul"), UnitState.FAILED, 5, "node02:0", reason="out of memory"),
]


@pytest.mark.parametrize(
    ("queue", "speedups", "first"),
    [
        (Queue((SWEEP,), (*RUNNING, *ENDED)), {SWEEP.key: 1.123}, "sweep:3f2b8d0c  1.12x so far  1 of 11 units done"),
        (Queue((SWEEP,), (*RUNNING, *ENDED)), {}, "sweep:3f2b8d0c  1 of 11 units done, 1 failed, about"),
        (Queue(), {}, "no work is queued in rows.db: fp8tune sweep --on queue"),
    ],
)
def test_the_status_of_a_queue(
    queue: Queue,
    speedups: dict[str, float],
    first: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    document = worker.make_status(queue, "rows.db", speedups)
    for screen in worker.status(document):
        screen.print()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(first)
    assert (document.speedups, [row.sweep for row in document.units]) == (speedups, [SWEEP.key] * len(queue.units))
    if queue.units:
        assert lines[2].split() == ["node07:0", "NVIDIA", "H200", "colwise", "K=7", "14", "s", "1", "lost"]
        assert len(lines) == 2 + worker.WORKERS + 2
        assert lines[-2] == "(1 more worker)"
        assert lines[-1].startswith("failed: matmul K=21 on node02:0: out of memory")
