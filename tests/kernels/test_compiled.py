"""Triton's own back ends take every kernel, for GPUs that are not here, and make wide loads and stores of it."""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fp8tune_kernels import catalog

TRANSPOSING = (
    "colwise",
    "colwise twice",
    "colwise-dual",
    "colwise-dual panels",
    "rowwise twice",
    "transpose-3d-atomic",
    "transpose-3d-reduction",
)
"""Not ``rowwise transposed``: the default is a contiguous matrix's, and its tile is 16 columns wide."""

NARROW = {
    ("gfx942", "gather-sum", r"store_dwordx4"),
    ("gfx942", "swiglu-gradient", r"store_dwordx4"),
    ("gfx942", "swiglu-rowwise", r"load_dwordx4"),
    ("gfx942", "swiglu-rowwise", r"store_dwordx4"),
}
"""What the default's threads hold too little for: 4 values or 8 codes of a row, which AMD's 64 threads a warp make."""

SCRIPT = Path(__file__).with_name("compile_kernels.py")

WIDE = {
    "sm_90": (r"ld\.global\S*\.v4\.b32", r"st\.global\S*\.v4\.b32", r"cvt\.rn\.satfinite\.e4m3x2\.f(32|16x2)"),
    "gfx942": (r"load_dwordx4", r"store_dwordx4", r"v_cvt_pk_fp8_f32"),
}
"""Accesses of 16 bytes, with or without a word to the caches, and the conversion in hardware."""

ON_HOPPER = (
    r"cp\.async\.bulk\.tensor\S*global",
    r"cp\.async\.bulk\.tensor\S*shared",
    r"wgmma\.mma_async",
    r"setmaxnreg",
)
"""Loads and stores by the copy engine, the tensor cores, and registers that warpgroups give each other."""

OF_GEMMS = {"sm_90": (r"cp\.async\.cg", r"wgmma\.mma_async"), "gfx942": (r"load_dwordx4", r"v_mfma_f32")}
"""Loads of 16 bytes, and the instructions of the tensor or matrix cores; sums are stored as those leave them."""


Forms = dict[str, dict[str, Any]]
each_arch = pytest.mark.parametrize("arch", WIDE)


@pytest.fixture(scope="module")
def compiled(once_a_run: Callable[[str, Callable[[], str]], str]) -> dict[str, Forms]:
    """Arch -> forms of kernels."""
    return json.loads(once_a_run("compiled kernels", by_script))  # type: ignore[no-any-return]


def by_script() -> str:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_DISABLE_LINE_INFO"] = "1"  # a sixth of the time goes into the lines that instructions are of
    with tempfile.TemporaryDirectory() as cache:
        environment["TRITON_CACHE_DIR"] = cache
        ran = subprocess.run([sys.executable, SCRIPT, *WIDE], env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr  # also where a public function gives other bytes than the reference
    return ran.stdout


@pytest.mark.slow
@each_arch
def test_loads_and_stores_are_wide(arch: str, compiled: dict[str, Forms]) -> None:
    for label, form in compiled[arch].items():
        kernel = label.partition(" ")[0]
        if kernel == "expert-sort":  # it places numbers one by one
            continue
        wide = WIDE[arch][:2] if kernel in ("transposed-codes-3d", "gather-sum") else WIDE[arch]  # which cast nothing
        wide = OF_GEMMS[arch] if kernel in (*catalog.GEMMS, "gathered-rows") else wide
        for instruction in ON_HOPPER if kernel in catalog.ON_HOPPER else wide:
            if (arch, label, instruction) not in NARROW:
                assert re.search(instruction, form["assembly"]), (label, instruction)


@each_arch
def test_sizes_of_1_compile_and_other_numbers_of_rows_compile_nothing(arch: str, compiled: dict[str, Forms]) -> None:
    """Triton makes a size of 1 a constant, which has no ``.to()``; the interpreter accepts it."""
    assert arch != "sm_90" or compiled[arch].keys() >= {*catalog.KERNELS}
    assert {label: form["edges"] for label, form in compiled[arch].items() if form.get("edges")} == {}
    assert {label for label, form in compiled[arch].items() if form["binaries"] != 1} == set()


@each_arch
def test_no_tile_is_transposed_byte_by_byte_through_shared_memory(arch: str, compiled: dict[str, Forms]) -> None:
    """Chunks of 16 rows that groups share are, once a panel: 8 a thread at most, where a tile takes 36 to 72."""
    for label in compiled[arch].keys() & {*TRANSPOSING}:
        assembly = compiled[arch][label]["assembly"]
        assert len(re.findall(r"st\.shared\.b8|ds_write_b8", assembly)) <= 8, label
        assert ("ldmatrix.sync.aligned.m8n8.x4.trans" in assembly) == (arch == "sm_90"), label
