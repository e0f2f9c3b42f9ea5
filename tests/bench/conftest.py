"""Contenders on small problems on the CPU, and a torchao to stand in."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
from bench_fakes import TorchAo

from fp8tune.bench.counterparts import COUNTERPARTS
from fp8tune.bench.kernel_contenders import (
    KernelContender,
)
from fp8tune.plan import problems as plan
from fp8tune.plan import shapes
from fp8tune.replay.loading import load_spec


@pytest.fixture
def torchao(monkeypatch: pytest.MonkeyPatch) -> TorchAo:
    """Puts a function in the place of a kernel's counterpart."""

    def put(kernel: str, function: Callable[..., Any]) -> None:
        theirs = COUNTERPARTS[kernel]
        parts = theirs.module.split(".")
        for depth in range(1, len(parts) + 1):
            name = ".".join(parts[:depth])
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        setattr(sys.modules[theirs.module], theirs.name, function)

    return put


@pytest.fixture
def contender(monkeypatch: pytest.MonkeyPatch) -> Callable[..., KernelContender]:
    """A contender on a small problem on the CPU: ours on the interpreter, ``torch.compile`` without compiling."""
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")

    def built(name: str, kernel: str, device: str = "cpu") -> KernelContender:
        spec = load_spec(kernel)
        one = plan.problems(spec, shapes.load("tiny").rows)[-1]
        made = KernelContender(name, one, kernel, spec.bytes_moved(one.shape), spec.default)
        made.build(device)
        return made

    return built
