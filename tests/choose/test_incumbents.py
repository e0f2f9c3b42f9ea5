from __future__ import annotations

from database_rows import installed

from fp8tune.choose.incumbents import COMMITTED
from fp8tune.records import Device, NamedInts


def test_a_device_s_own_row_is_its_incumbent_before_the_arch_s() -> None:
    rows = (
        ("colwise", "", (("G", 1), ("K", 5120)), (("num_warps", 4),)),
        ("colwise", "NVIDIA H200", (("G", 1), ("K", 5120)), (("num_warps", 8),)),
        ("colwise", "", None, (("num_warps", 2),)),
    )
    table, key = installed(*rows), NamedInts(K=5120, G=1)
    h100, h200 = Device("sm_90", "NVIDIA H100"), Device("sm_90", "NVIDIA H200")
    assert table.config("colwise", h100, key) == NamedInts(num_warps=4)
    assert table.own_config("colwise", h100, key) is None
    assert table.config("colwise", h200, key) == table.own_config("colwise", h200, key) == NamedInts(num_warps=8)
    assert table.config("colwise", h200, NamedInts(K=1, G=1)) is None
    assert table.config("colwise", Device("sm_90"), None) == NamedInts(num_warps=2)
    assert table.own_config("colwise", Device("sm_90"), None) is None
    assert table.config("rowwise", h100, key) is None


def test_a_rule_for_unseen_keys_is_held_only_by_a_table_that_has_a_row_for_them() -> None:
    rows = (("colwise", "", None, (("num_warps", 2),)), ("rowwise", "", None, (("num_warps", 2),)))
    table = installed(*rows, nearest=("rowwise",))
    assert table.takes_nearest("colwise", "sm_90") is False
    assert table.takes_nearest("rowwise", "sm_90") is True
    assert table.takes_nearest("mxfp8-dim0", "sm_90") is None


def test_the_committed_tables_are_read_without_torch_and_absent_ones_are_empty() -> None:
    h100 = Device("sm_90", "NVIDIA H100 80GB HBM3")
    assert COMMITTED.config("colwise", h100, NamedInts(M_bucket=16384, K=5120, G=16)) is not None
    assert COMMITTED.config("colwise", Device("simulated"), NamedInts(K=1)) is None
    assert COMMITTED.config("colwise", Device("../sm_90"), NamedInts(K=1)) is None
