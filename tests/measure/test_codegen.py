"""What changes machine code is set explicitly, and named with the row."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
from database_rows import H100

from fp8tune.measure import codegen
from fp8tune.measure.worker import Worker
from fp8tune.records import Device


@pytest.mark.parametrize(
    ("environment", "settings"),
    [
        ({}, "fp_fusion=1"),
        ({"TRITON_DEFAULT_FP_FUSION": "0"}, "fp_fusion=0"),
        ({"TRITON_DEFAULT_FP_FUSION": "True"}, "fp_fusion=1"),
        ({"DISABLE_LLVM_OPT": "1", "PATH": "/bin", "TRITON_CACHE_DIR": "/x"}, "fp_fusion=1 DISABLE_LLVM_OPT=1"),
        ({"TRITON_PRINT_AUTOTUNING": "1", "MLIR_ENABLE_DUMP": "1", "LLVM_IR_ENABLE_DUMP": "1"}, "fp_fusion=1"),
        ({"TRITON_INVENTED_TOMORROW": "2"}, "fp_fusion=1 TRITON_INVENTED_TOMORROW=2"),
        ({"TRITON_DUMP_MIR": "1", "AMDGCN_ENABLE_DUMP": "1", "TRITON_REDIS_HOST": "h"}, "fp_fusion=1"),
        ({"DISABLE_TELEMETRY": "1", "ENABLE_USER_SITE": "1", "LLVM_CONFIG": "x"}, "fp_fusion=1"),  # other programs'
        ({"PTXAS_OPTIONS": ""}, "fp_fusion=1"),
    ],
)
def test_settings_are_one_text(environment: dict[str, str], settings: str) -> None:
    assert codegen.settings(environment) == settings


def test_paths_are_told_apart_but_not_stored() -> None:
    first, second = (codegen.settings({"TRITON_PTXAS_PATH": path}) for path in ("/home/me/ptxas", "/opt/ptxas"))
    assert first != second
    assert "/" not in first + second


def test_every_setting_is_part_of_what_may_be_compared() -> None:
    fields = set(Device.__dataclass_fields__)
    assert {"timing", "codegen"} <= fields
    changed = [replace(H100, timing="events"), replace(H100, codegen="fp_fusion=0")]
    assert len({H100.fingerprint, *(device.fingerprint for device in changed)}) == 3


def _fp_fusion() -> tuple[bool, str | None]:
    from triton import knobs

    return knobs.language.default_fp_fusion, os.environ.get(codegen.FP_FUSION)


@pytest.mark.parametrize("asked", [True, False])
def test_workers_set_fp_fusion_whatever_tritons_default_is(asked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And leave the environment alone, which is a part of Triton's cache keys."""
    from triton import knobs

    if not hasattr(knobs.language, "default_fp_fusion"):
        pytest.skip("this Triton always fuses")
    monkeypatch.setattr(codegen, "fp_fusion", lambda: asked)
    worker = Worker()
    try:
        assert worker.call(60, _fp_fusion) == (asked, os.environ.get(codegen.FP_FUSION))
    finally:
        worker.close()
