import sys
from types import ModuleType

import pytest
import torch

from fp8tune_kernels import catalog
from fp8tune_kernels.runtime import lookup
from fp8tune_kernels.tables import Key, Row, Table

SPEC = catalog.load("colwise")
KEY = {"M_bucket": 16384, "K": 5120, "G": 64}
ITEMS = tuple(sorted(KEY.items()))
OTHER = tuple(sorted({**KEY, "K": 7168}.items()))
FAR = tuple(sorted({**KEY, "K": 1024}.items()))


def row(warps: int, device: str, key: Key | None, kernel: str = "colwise") -> Row:
    return (kernel, device, key, (("num_warps", warps),))


ROWS = (row(2, "H200", ITEMS), row(4, "", ITEMS), row(8, "H200", None), row(16, "", None), row(32, "", OTHER))


@pytest.mark.parametrize(
    ("rows", "device", "warps"),
    [
        pytest.param(ROWS, "H200", 2, id="this device, this key"),
        pytest.param(ROWS, "H100", 4, id="this arch, this key"),
        pytest.param(ROWS[1:], "H200", 4, id="the key before the device"),
        pytest.param(ROWS[2:], "H200", 8, id="this device, any shape"),
        pytest.param(ROWS[2:], "H100", 16, id="this arch, any shape"),
        pytest.param(ROWS[4:], "H100", SPEC.default["num_warps"], id="another shape only"),
        pytest.param((), "H100", SPEC.default["num_warps"], id="no row"),
        pytest.param((row(2, "", ITEMS, "rowwise"),), "", SPEC.default["num_warps"], id="another kernel"),
    ],
)
def test_the_most_specific_row_wins(rows: tuple[Row, ...], device: str, warps: int) -> None:
    for order in (rows, rows[::-1]):
        assert lookup.pick(SPEC, KEY, Table(order), device) == {**SPEC.default, "num_warps": warps}
        assert lookup.pick(SPEC, KEY, Table(order, ("rowwise",)), device) == {**SPEC.default, "num_warps": warps}


@pytest.mark.parametrize(
    ("rows", "device", "warps"),
    [
        pytest.param(ROWS, "H200", 2, id="this device, this key"),
        pytest.param(ROWS[1:], "H200", 4, id="the key before the device"),
        pytest.param(ROWS[2:], "H200", 32, id="another key before any shape"),
        pytest.param((*ROWS[2:], row(64, "H200", OTHER)), "H200", 64, id="as near, of this device"),
        pytest.param((*ROWS[2:], row(64, "H200", OTHER)), "H100", 32, id="as near, of another device"),
        pytest.param((*ROWS[2:], row(64, "H200", FAR)), "H200", 32, id="of this device, but further"),
        pytest.param(ROWS[2:4], "H200", 8, id="no key, this device"),
        pytest.param((), "H200", SPEC.default["num_warps"], id="no row"),
        pytest.param((row(2, "", OTHER, "rowwise"),), "", SPEC.default["num_warps"], id="another kernel"),
    ],
)
def test_a_kernel_that_the_table_names_takes_the_nearest_key(rows: tuple[Row, ...], device: str, warps: int) -> None:
    for order in (rows, rows[::-1]):
        assert lookup.pick(SPEC, KEY, Table(order, ("colwise",)), device) == {**SPEC.default, "num_warps": warps}


@pytest.mark.parametrize("arch", ["sm_998", "interpreter", "../x", "a.b", ""])
def test_an_arch_without_a_table_has_no_rows(arch: str) -> None:
    assert lookup.table(arch) == Table()


def test_a_broken_table_is_no_missing_table(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("fp8tune_kernels.tables.sm_997")  # it has no ROWS
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with pytest.raises(AttributeError):
        lookup.table("sm_997")


def test_without_a_gpu_the_default_is_launched() -> None:
    cpu = torch.device("cpu")
    assert lookup.running_arch(cpu) == "interpreter"
    first = lookup.config_for(SPEC, tuple(KEY.values()), cpu)
    assert first == SPEC.default
    assert lookup.config_for(SPEC, tuple(KEY.values()), cpu) is first
