"""Memory that is given back, on a fake GPU."""

from __future__ import annotations

import pytest
import torch

from fp8tune.measure import memory


@pytest.mark.parametrize("unused_bytes", [0, 16 << 30])
def test_who_gives_back_waits_for_it(unused_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    held_bytes, slept_s = [unused_bytes + 7], []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: held_bytes[-1])
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: held_bytes.append(7))
    monkeypatch.setattr(memory.time, "sleep", slept_s.append)
    memory.give_back()
    assert held_bytes[-1] == 7
    assert slept_s == [unused_bytes / memory.SETTLED_BYTES_PER_S]


def test_without_a_gpu_there_is_nothing_to_give(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(memory.time, "sleep", lambda seconds: pytest.fail("it slept"))
    memory.give_back()
