from __future__ import annotations

from dataclasses import replace

import pytest
from database_rows import AXES, H100, H200, KERNEL, config, evidence, installed, key_of, problem
from hypothesis import given
from hypothesis import strategies as st

from fp8tune.adapter import NO_TABLES
from fp8tune.export.selecting import select
from fp8tune.records import Device, Facts, Kind, NamedInts, Status
from fp8tune_kernels.catalog import load
from fp8tune_kernels.runtime import lookup
from fp8tune_kernels.tables import Table

GFX942 = Device("gfx942")
MI300X = Device("gfx942", "AMD Instinct MI300X")


def table(rows, arch="sm_90", tables=NO_TABLES):
    """(device, key) -> config of the selected rows."""
    return {(row.device, row.key): row.config for row in select(rows, arch, tables).rows}


def measured(K: int, times_us: dict[int, float], device: Device = H100, **others: object):
    return [
        evidence(time_us, of=problem(K=K), config=config(block), device=device, **others)
        for block, time_us in times_us.items()
    ]


def key(K: int) -> NamedInts:
    return key_of(problem(K=K))


def test_each_key_has_its_pick_and_any_other_shape_the_robust_config():
    rows = [*measured(1024, {32: 100.0, 64: 104.0, 128: 103.0}), *measured(2048, {32: 110.0, 64: 100.0, 128: 102.0})]
    assert table(rows) == {
        ("", key(1024)): config(32),
        ("", key(2048)): config(64),
        ("", None): config(64),
    }


SPEC = replace(load("colwise"), default=KERNEL.default, key=KERNEL.key)
times = st.fixed_dictionaries(dict.fromkeys((32, 64, 128), st.floats(50.0, 200.0)))
by_shape = st.dictionaries(st.sampled_from((1024, 1536, 2048, 4096, 8192)), st.tuples(times, times), min_size=2)


def looked_up(rows, K: int, device: Device, nearest: tuple[str, ...]) -> NamedInts:
    """What a lookup gives by the table of these rows."""
    table = [
        (row.kernel, row.device, row.key and tuple(sorted(row.key.items())), tuple(row.config.items()))
        for row in select(rows, "sm_90").rows
    ]
    return NamedInts(lookup.pick(SPEC, key(K), Table(tuple(table), nearest), device.name))


def judged(regret) -> list[tuple[int, str]]:
    return sorted((left.problem.shape["K"], left.config.canonical) for left in regret.problems)


def without(rows, K: int):
    return [row for row in rows if row.problem.shape["K"] != K]


@given(by_shape)
def test_held_out_is_what_a_lookup_gives_by_the_table_without_the_shape(times_us):
    rows = [row for K, (h100, _) in times_us.items() for row in measured(K, h100)]
    (held_out,) = [row.held_out for row in select(rows, "sm_90").rows if row.key is None]
    for regret, nearest in ((held_out.robust, ()), (held_out.nearest, ("colwise",))):
        assert judged(regret) == sorted((K, looked_up(without(rows, K), K, H100, nearest).canonical) for K in times_us)


@given(by_shape)
def test_every_device_is_held_out_by_the_rows_that_it_would_take(times_us):
    rows = [row for K, (h100, h200) in times_us.items() for row in measured(K, h100) + measured(K, h200, H200)]
    any_shape = {row.device: row for row in select(rows, "sm_90").rows if row.key is None}
    takes = {"": [H100], H200.name: [H200]} if H200.name in any_shape else {"": [H100, H200]}
    for name, devices in takes.items():
        expected = [(K, looked_up(without(rows, K), K, of, ("colwise",)).canonical) for of in devices for K in times_us]
        assert judged(any_shape[name].held_out.nearest) == sorted(expected)


def test_kernels_are_named_whose_nearest_row_loses_less():
    camps = {1024: (100.0, 200.0), 2048: (100.0, 200.0), 16384: (200.0, 100.0), 32768: (200.0, 100.0)}
    rows = [row for K, times_us in camps.items() for row in measured(K, dict(zip((32, 64), times_us, strict=True)))]
    assert select(rows, "sm_90").nearest == ("colwise",)
    assert select(measured(1024, {32: 100.0}) + measured(2048, {32: 100.0}), "sm_90").nearest == ()
    assert select(measured(1024, {32: 100.0}), "sm_90").nearest == ()


def test_configs_are_in_declared_order():
    turned = NamedInts(num_stages=1, BLOCK_SIZE=32, num_warps=4)
    (row, *_) = select([evidence(100.0, config=turned)], "sm_90").rows
    assert list(row.config) == [name for name, _ in AXES]


def test_problems_under_one_key_share_the_config_of_least_mean_slowdown():
    def at(M: int, *times_us: float):
        blocks = zip((32, 64, 128), times_us, strict=True)
        return [evidence(time_us, of=problem(M=M), config=config(block)) for block, time_us in blocks]

    rows = [*at(16640, 100.0, 120.0, 105.0), *at(32000, 120.0, 100.0, 105.0)]
    selection = select(rows, "sm_90")
    (shared,) = (row for row in selection.rows if row.key is not None)
    assert shared.config == config(128)
    assert shared.worst_slowdown == 1.05
    assert [time_us for _, time_us in shared.problems] == [105.0, 105.0]


def test_unfinished_problems_are_left_out_with_a_notice():
    rows = [*measured(1024, {32: 100.0}), *measured(2048, {64: 100.0}, complete=False)]
    selection = select(rows, "sm_90")
    assert {row.key for row in selection.rows} == {key(1024), None}
    (notice,) = selection.notices
    assert notice == (
        "colwise: M=16640 K=2048 G=64 not exported, not swept to the end: run fp8tune sweep --kernel colwise again"
    )


def test_rows_of_an_older_interface_are_left_out_with_a_notice():
    newer = replace(KERNEL, source_hash="bbbb", axes=(*AXES, ("BLOCK_SIZE_ITER", (32,))))
    rows = [
        *measured(1024, {32: 100.0}, newest=1.0),
        evidence(
            90.0,
            of=problem(K=2048),
            config=NamedInts({**config(), "BLOCK_SIZE_ITER": 32}),
            version=newer,
            newest=2.0,
        ),
    ]
    selection = select(rows, "sm_90")
    assert {row.key for row in selection.rows} == {key(2048), None}
    assert "older kernel" in selection.notices[0]


def test_another_device_gets_a_row_only_where_the_shared_config_loses():
    h100 = [*measured(1024, {32: 100.0, 64: 110.0}), *measured(2048, {32: 100.0, 64: 110.0})]
    h100 += measured(4096, {32: 100.0, 64: 110.0})
    near = measured(1024, {32: 101.9, 64: 100.0}, H200)
    far = measured(2048, {32: 102.1, 64: 100.0}, H200)
    found = table([*near, *far, *h100])
    assert found[("", key(1024))] == found[("", key(2048))] == config(32)
    assert (H200.name, key(1024)) not in found
    assert found[(H200.name, key(2048))] == config(64)
    assert found[("", None)] == config(32)
    assert (H200.name, None) not in found


@pytest.mark.parametrize(("loss", "stays"), [(1.004, False), (1.006, True), (1.019, True)])
def test_a_row_that_a_device_has_stays_until_the_shared_one_comes_near(loss, stays):
    rows = [*measured(1024, {32: 100.0, 64: 110.0}), *measured(1024, {32: 100.0 * loss, 64: 100.0}, H200)]
    names, own, shared = tuple(sorted(key(1024).items())), tuple(config(64).items()), tuple(config(32).items())
    arch_s = ("colwise", "", names, shared)
    both = installed(arch_s, ("colwise", H200.name, names, own))
    assert (H200.name, key(1024)) not in table(rows)
    assert (H200.name, key(1024)) not in table(rows, tables=installed(arch_s))
    assert ((H200.name, key(1024)) in table(rows, tables=both)) is stays


def test_the_arch_row_of_a_key_that_the_first_device_lacks_comes_from_the_next():
    rows = [*measured(1024, {32: 100.0}), *measured(2048, {32: 100.0}), *measured(4096, {64: 100.0}, H200)]
    found = table(rows)
    assert found[("", key(4096))] == config(64)
    assert found[(H200.name, None)] == config(64)  # the robust config never ran there


def test_of_devices_with_as_many_problems_the_first_name_decides():
    rows = [*measured(1024, {64: 100.0}, H200), *measured(1024, {32: 100.0})]
    assert table(rows)[("", key(1024))] == config(32)


@pytest.mark.parametrize("kind", [Kind.INTERPRETER, Kind.STATIC, Kind.SIMULATED])
def test_what_was_not_measured_is_never_exported_to_a_gpu(kind):
    assert table(measured(1024, {32: 100.0}, kind=kind)) == {}


def test_rows_of_another_arch_are_not_exported():
    assert table(measured(1024, {32: 100.0}, replace(H100, arch="interpreter"))) == {}
    assert table(measured(1024, {32: 100.0}), arch="sm_100") == {}


def test_the_simulated_arch_has_its_own_table():
    simulated = measured(1024, {32: 100.0}, replace(H100, arch="simulated"), kind=Kind.SIMULATED)
    assert table(simulated, "simulated")[("", key(1024))] == config(32)


def published(time_us: float = 100.0, config: NamedInts | None = NamedInts(BLOCK_SIZE=32, num_warps=8), **others):
    of = replace(problem(), routing="unstated", scale_mode="unstated")
    return evidence(
        time_us, of=of, config=config, device=MI300X, kind=Kind.PUBLISHED, version=None, source="a/b#1", **others
    )


def static(config: NamedInts, **others):
    facts = {"facts": Facts(40, 0, 4096, 1.0)} | others
    return evidence(config=config, device=GFX942, kind=Kind.STATIC, of=problem(K=512), **facts)


COMPLETED = NamedInts(BLOCK_SIZE=32, num_warps=8, num_stages=1)  # the first declared number of stages


def test_a_published_config_is_exported_once_our_kernel_compiles_with_it():
    selection = select([published(), static(COMPLETED)], "gfx942")
    assert [(row.key, row.config, row.other_implementation) for row in selection.rows] == [
        (key_of(problem()), COMPLETED, True),
        (None, COMPLETED, True),
    ]
    assert selection.comments["colwise"] == ("published by a/b#1, other implementation: compiled without spills",)


@pytest.mark.parametrize(
    "row",
    [
        static(config()),
        static(COMPLETED, facts=Facts(255, 8, 4096, 1.0)),
        static(COMPLETED, facts=Facts()),
        static(COMPLETED, status=Status.COMPILE_ERROR),
        replace(static(COMPLETED), device=replace(GFX942, arch="gfx950")),
        replace(static(COMPLETED), kind=Kind.INTERPRETER),
    ],
)
def test_a_published_config_that_does_not_fit_is_not_exported(row):
    selection = select([published(), row], "gfx942")
    assert selection.rows == ()
    assert "not exported" in selection.notices[0]
    assert "none exported" in selection.comments["colwise"][0]


def test_one_spilling_problem_is_enough_to_refuse():
    spilling = replace(static(COMPLETED, facts=Facts(255, 8, 0, 1.0)), problem=problem(K=4096))
    assert select([published(), static(COMPLETED), spilling], "gfx942").rows == ()


def test_only_the_newest_version_proves_a_published_config():
    newer = replace(KERNEL, source_hash="bbbb")
    spilling = static(COMPLETED, facts=Facts(255, 8, 0, 1.0), version=newer, newest=2.0)
    assert select([published(), static(COMPLETED, newest=1.0), spilling], "gfx942").rows == ()


def test_published_rows_say_why_they_stay_evidence():
    nameless = select([published(config=None)], "gfx942")
    assert nameless.notices == ("colwise: published rows are not exported: no config is named, evidence only",)
    unknown = select([replace(published(), lookup_key=None)], "gfx942")
    assert "not declared here" in unknown.notices[0]


def test_measured_rows_leave_published_ones_only_what_they_lack():
    rows = [
        published(1.0),
        replace(published(2.0), problem=problem(K=2048), lookup_key=key(2048)),
        static(COMPLETED),
        *measured(5120, {64: 100.0}, replace(H100, arch="gfx942", name="AMD Instinct MI300X")),
    ]
    rows = [replace(row, newest=1.0) for row in rows]
    assert {(row.key, row.other_implementation) for row in select(rows, "gfx942").rows} == {
        (key(5120), False),
        (key(2048), True),
        (None, False),
    }
