from __future__ import annotations

from dataclasses import replace

import pytest
from database_rows import (
    AXES,
    H100,
    H200,
    KERNEL,
    compiled_studies,
    config,
    evidence,
    installed,
    key_of,
    problem,
    studies_of,
)
from hypothesis import given
from hypothesis import strategies as st

from fp8tune.records import Device, Facts, Kind, NamedInts, Status
from fp8tune.stats.shared import hold_out
from fp8tune.stats.study import Study
from fp8tune.tables.current import NO_TABLES, CurrentTables
from fp8tune.tables.select import Selection, nearest_of, select
from fp8tune_kernels.catalog import load
from fp8tune_kernels.runtime import lookup
from fp8tune_kernels.tables import Table

GFX942 = Device("gfx942")
MI300X = Device("gfx942", "AMD Instinct MI300X")


def selection(rows: list[Study], arch: str = "sm_90", tables: CurrentTables = NO_TABLES) -> Selection:
    return select(studies_of(rows, tables), compiled_studies(rows), arch, tables)


def table(rows: list[Study], arch: str = "sm_90", tables: CurrentTables = NO_TABLES) -> dict:
    """(device, key) -> config of the selected rows."""
    return {
        (entry.device, None if entry.key is None else NamedInts(entry.key)): NamedInts(entry.config)
        for entry in selection(rows, arch, tables).table.entries
    }


def measured(
    K: int, times_us: dict[int, float], device: Device = H100, M: int = 16640, **others: object
) -> list[Study]:
    return [
        evidence(time_us, size=problem(K=K, M=M), config=config(block), device=device, **others)
        for block, time_us in times_us.items()
    ]


def key(K: int) -> NamedInts:
    return key_of(problem(K=K))


def test_each_key_has_its_pick_and_other_keys_the_fallback():
    rows = [*measured(1024, {32: 100.0, 64: 104.0, 128: 103.0}), *measured(2048, {32: 110.0, 64: 100.0, 128: 102.0})]
    assert table(rows) == {("", key(1024)): config(32), ("", key(2048)): config(64), ("", None): config(64)}


SPEC = replace(load("colwise"), default=KERNEL.default, key=KERNEL.key)
times = st.fixed_dictionaries(dict.fromkeys((32, 64, 128), st.floats(50.0, 200.0)))
by_shape = st.dictionaries(st.sampled_from((1024, 1536, 2048, 4096, 8192)), times, min_size=2)


@given(by_shape)
def test_held_out_slowdowns_are_those_of_a_lookup_in_the_table_without_the_shape(times_us):
    rows = [row for K, of_key in times_us.items() for row in measured(K, of_key)]
    keyed = [entry.row for entry in selection(rows).table.entries if entry.key is not None]
    for item in hold_out(studies_of(rows), [], nearest_of(keyed)):
        K = item.study.problem.shape["K"]
        rest = selection([row for row in rows if row.problem.shape["K"] != K]).table
        for nearest, slowdown in (((), item.fallback), (("colwise",), item.nearest)):
            exported = Table(tuple(entry.row for entry in rest.entries), nearest)
            launched = NamedInts(lookup.pick(SPEC, key(K), exported, H100.name))
            assert slowdown == item.study.slowdowns[launched]


def test_kernels_are_named_whose_nearest_row_loses_less():
    camps = {1024: (100.0, 200.0), 2048: (100.0, 200.0), 16384: (200.0, 100.0), 32768: (200.0, 100.0)}
    rows = [row for K, times_us in camps.items() for row in measured(K, dict(zip((32, 64), times_us, strict=True)))]
    assert selection(rows).table.nearest == {"colwise"}
    assert selection(measured(1024, {32: 100.0}) + measured(2048, {32: 100.0})).table.nearest == frozenset()


def test_configs_are_in_declared_order():
    turned = NamedInts(num_stages=1, BLOCK_SIZE=32, num_warps=4)
    (entry, *_) = selection([evidence(100.0, config=turned)]).table.entries
    assert [name for name, _ in entry.config] == [name for name, _ in AXES]


def test_problems_of_one_key_share_the_config_of_least_mean_slowdown():
    rows = measured(5120, {32: 100.0, 64: 120.0, 128: 105.0})
    rows += measured(5120, {32: 120.0, 64: 100.0, 128: 105.0}, M=32000)
    assert table(rows)["", key(5120)] == config(128)


def test_unfinished_problems_and_older_interfaces_are_left_out_with_a_notice():
    newer = replace(KERNEL, source_hash="bbbb", axes=(*AXES, ("BLOCK_SIZE_ITER", (32,))))
    newest = NamedInts({**config(), "BLOCK_SIZE_ITER": 32})
    rows = [
        *measured(1024, {32: 100.0}, newest=1.0),
        *measured(4096, {64: 100.0}, newest=1.0, complete=False),
        evidence(90.0, size=problem(K=2048), config=newest, version=newer, newest=2.0),
    ]
    chosen = selection(rows)
    assert {entry.key for entry in chosen.table.entries} == {tuple(sorted(key(2048).items())), None}
    unfinished, older = chosen.notices
    assert ("K=4096" in unfinished, "K=1024" in older) == (True, True)


def test_another_device_gets_a_row_only_where_the_shared_config_loses():
    rows = [row for K in (1024, 2048, 4096) for row in measured(K, {32: 100.0, 64: 110.0})]
    rows += measured(1024, {32: 101.9, 64: 100.0}, H200)
    rows += measured(2048, {32: 102.1, 64: 100.0}, H200)
    shared = {("", size): config(32) for size in (*map(key, (1024, 2048, 4096)), None)}
    assert table(rows) == {**shared, (H200.name, key(2048)): config(64)}


@pytest.mark.parametrize(("loss", "stays"), [(1.004, False), (1.006, True), (1.019, True)])
def test_a_row_that_a_device_has_stays_until_the_shared_one_comes_near(loss, stays):
    rows = [*measured(1024, {32: 100.0, 64: 110.0}), *measured(1024, {32: 100.0 * loss, 64: 100.0}, H200)]
    names, own, shared = tuple(sorted(key(1024).items())), tuple(config(64).items()), tuple(config(32).items())
    arch_row, own_row = ("colwise", "", names, shared), ("colwise", H200.name, names, own)
    for in_use, has_row in ((NO_TABLES, False), (installed(arch_row), False), (installed(arch_row, own_row), stays)):
        assert ((H200.name, key(1024)) in table(rows, tables=in_use)) is has_row


def test_the_row_of_a_key_that_the_first_device_lacks_comes_from_the_next():
    rows = [*measured(1024, {32: 100.0}), *measured(2048, {32: 100.0}), *measured(4096, {64: 100.0}, H200)]
    assert table(rows)["", key(4096)] == config(64)
    assert table(rows)[H200.name, None] == config(64)  # the fallback config never ran there
    (entry,) = [entry for entry in selection(rows).table.entries if dict(entry.key or ()).get("K") == 4096]
    assert entry.origins == (H200.name,)


def test_only_measured_rows_of_the_arch_reach_its_table():
    for kind in (Kind.INTERPRETER, Kind.STATIC, Kind.SIMULATED):
        assert table(measured(1024, {32: 100.0}, kind=kind)) == {}
    assert table(measured(1024, {32: 100.0}), arch="sm_100") == {}
    simulated = measured(1024, {32: 100.0}, replace(H100, arch="simulated"), kind=Kind.SIMULATED)
    assert table(simulated, "simulated")["", key(1024)] == config(32)


# Published rows

COMPLETED = NamedInts(BLOCK_SIZE=32, num_warps=8, num_stages=1)  # the first declared number of stages


def published(time_us: float = 100.0, config: NamedInts | None = NamedInts(BLOCK_SIZE=32, num_warps=8), K: int = 5120):
    size = replace(problem(K=K), routing="unstated", scale_mode="unstated")
    return evidence(
        time_us, size=size, config=config, device=MI300X, kind=Kind.PUBLISHED, version=None, source="a/b#1", newest=1.0
    )


def static(config: NamedInts = COMPLETED, **others: object) -> Study:
    facts = {"facts": Facts(40, 0, 4096, 1.0), "newest": 1.0, "size": problem(K=512)} | others
    return evidence(config=config, device=GFX942, kind=Kind.STATIC, **facts)


def test_a_published_config_is_exported_if_our_kernel_compiles_with_it():
    entries = selection([published(), static()], "gfx942").table.entries
    assert [(entry.key is None, NamedInts(entry.config)) for entry in entries] == [
        (False, COMPLETED),
        (True, COMPLETED),
    ]
    assert {entry.origins for entry in entries} == {(MI300X.name, "a/b#1")}


SPILLING = Facts(255, 8, 4096, 1.0)


@pytest.mark.parametrize(
    "rows",
    [
        [static(config())],
        [static(facts=SPILLING)],
        [static(facts=Facts())],
        [static(status=Status.COMPILE_ERROR)],
        [replace(static(), device=replace(GFX942, arch="gfx950"))],
        [replace(static(), kind=Kind.INTERPRETER)],
        [static(), static(facts=SPILLING, version=replace(KERNEL, source_hash="bbbb"), newest=2.0)],
        [static(), static(facts=SPILLING, size=problem(K=4096))],
    ],
)
def test_a_published_config_that_does_not_fit_is_not_exported(rows):
    chosen = selection([published(), *rows], "gfx942")
    assert chosen.table.entries == ()
    assert "not exported" in chosen.notices[0]


def test_published_rows_without_configs_or_keys_stay_evidence():
    for row, reason in ((published(config=None), "no config"), (replace(published(), lookup_key=None), "not declared")):
        (notice,) = selection([row], "gfx942").notices
        assert reason in notice


def test_measured_rows_leave_published_ones_only_keys_that_they_lack():
    rows = [published(1.0), published(2.0, K=2048), static(), *measured(5120, {64: 100.0}, MI300X, newest=1.0)]
    assert table([replace(row, lookup_key=key_of(row.problem)) for row in rows], "gfx942") == {
        ("", key(5120)): config(64),
        ("", key(2048)): COMPLETED,
        ("", None): config(64),
    }
