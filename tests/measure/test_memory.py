"""Memory that is given back, on a fake GPU."""

from __future__ import annotations

import pytest
import torch

from fp8tune.measure import memory


@pytest.mark.parametrize(("unused_bytes", "waits"), [(memory.MUCH_BYTES, True), (memory.MUCH_BYTES - 1, False)])
def test_who_gives_much_back_waits(unused_bytes: int, waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    held, slept = [unused_bytes + 7], []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: held[-1])
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: held.append(7))
    monkeypatch.setattr(memory.time, "sleep", slept.append)
    memory.give_back()
    assert held[-1] == 7
    assert slept == ([memory.SETTLING_S] if waits else [])


def test_without_a_gpu_there_is_nothing_to_give(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(memory.time, "sleep", lambda seconds: pytest.fail("it slept"))
    memory.give_back()
