"""Static facts from the compiler's text to the table: resources, cost, calibration, and what an export makes of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from database_rows import H100, H200, KERNEL, begin, config, evidence, problem, row

from fp8tune.choose import static_score
from fp8tune.choose.static_score import CALIBRATED_ON, calibrations, cost, ranking
from fp8tune.compiled import facts
from fp8tune.export import table as export
from fp8tune.export.selecting import Basis, evidence_for, select
from fp8tune.records import Code, Device, Facts, Kind
from fp8tune.store.results import Store
from fp8tune_kernels.arches import ARCHES

GFX950 = Device("gfx950", triton="3.7.1")
COMPILER = Device(CALIBRATED_ON, triton="3.7.1")
GOOD = Code(
    resident_warps=32,
    programs=10_000,
    load_bytes=16,
    store_bytes=16,
    load_run_bytes=128,
    store_run_bytes=128,
    passes=1,
    tile_bytes=128,
    instructions_per_kib=6000,
    fp8_conversions=16,
)


def static(block: int, warps: int = 4, *, device: Device = COMPILER, code: Code = GOOD, spill_bytes: int = 0, **others):
    compiled = Facts(64, spill_bytes, 4096, 0.5, code)
    return evidence(config=config(block, warps), device=device, kind=Kind.STATIC, facts=compiled, **others)


def slower(factor: int) -> Code:
    return replace(GOOD, instructions_per_kib=factor * GOOD.instructions_per_kib)


BLOCKS = (32, 64, 128, 256, 512)
DEFAULT = KERNEL.default["BLOCK_SIZE"]


def compiled(device: Device = COMPILER, order: tuple[int, ...] = BLOCKS) -> list:
    """One config for each block size, the first of ``order`` of the least cost."""
    default = static(DEFAULT, device=device, code=slower(9))
    default = replace(default, config=KERNEL.default)
    return [default, *(static(block, device=device, code=slower(1 + n)) for n, block in enumerate(order))]


def measured(times_us: dict[int, float], default_us: float = 150.0, **others) -> list:
    rows = [evidence(time_us, config=config(block), **others) for block, time_us in times_us.items()]
    return [*rows, evidence(default_us, config=KERNEL.default, **others)]


RISING = {block: 100.0 + 10 * n for n, block in enumerate(BLOCKS)}


# The compiler's text


def test_amd_resources_come_from_the_metadata():
    text = """
      - .agpr_count:     12
        .private_segment_fixed_size: 40
        .sgpr_count:     89
        .sgpr_spill_count: 3
        .vgpr_count:     316
        .vgpr_spill_count: 2
    """
    assert facts.amd_resources(text, 8192) == facts.Resources(
        registers=316, spill_bytes=40, shared_bytes=8192, scratch_bytes=40, agprs=12, sgprs=89
    )
    spilled_to_registers = text.replace("fixed_size: 40", "fixed_size: 0")
    assert facts.amd_resources(spilled_to_registers, 0).spill_bytes == 4 * (3 + 2)


# The cost


@pytest.mark.parametrize(
    "worse",
    [
        replace(GOOD, load_run_bytes=32),
        replace(GOOD, store_run_bytes=16),
        replace(GOOD, passes=2),
        replace(GOOD, tile_bytes=16),
        replace(GOOD, resident_warps=4),
        replace(GOOD, programs=20),
        replace(GOOD, shared_per_kib=500),
        slower(2),
    ],
)
def test_the_cost_rises_with_what_takes_time(worse):
    arch = ARCHES[CALIBRATED_ON]
    assert cost(Facts(64, 0, 0, 1.0, worse), 4, arch) > cost(Facts(64, 0, 0, 1.0, GOOD), 4, arch)


def test_spilling_costs_and_unread_code_has_no_cost():
    arch = ARCHES["gfx942"]
    dry = cost(Facts(64, 0, 0, 1.0, GOOD), 4, arch)
    assert cost(Facts(64, static_score.SPILLED_BYTES, 0, 1.0, GOOD), 4, arch) == pytest.approx(2 * dry)
    assert cost(Facts(64, 0, 0, 1.0), 4, arch) is None


def test_a_ranking_takes_the_fullest_problem_of_each_layout():
    turned = replace(problem(), input_layout="transposed")
    rows = [
        static(32, code=slower(1)),
        static(64, code=slower(2)),
        static(32, of=turned, code=slower(4)),
        static(64, of=turned, code=slower(1)),
        static(128, of=problem(K=512), code=slower(1)),  # compiled for another shape alone
    ]
    assert [each.config for each in ranking(rows)] == [config(64), config(32)]
    assert ranking(reversed(rows)) == ranking(rows)


# Calibration


def test_a_ranking_that_is_right_has_no_regret():
    (found,) = calibrations([*compiled(), *measured(RISING)]).values()
    assert (found.device, found.problems, found.configs) == (H100.name, 1, len(BLOCKS) + 1)
    assert (found.top1_slowdown, found.top5_slowdown, found.default_slowdown) == (1.0, 1.0, 1.5)
    assert found.rank_correlation == pytest.approx(1.0)
    assert found.is_trusted


def test_a_ranking_turned_round_is_not_trusted():
    found = calibrations([*compiled(order=BLOCKS[::-1]), *measured(RISING, default_us=120.0)])["colwise"]
    assert found.top1_slowdown == pytest.approx(1.4)
    assert found.top5_slowdown == 1.0
    assert found.rank_correlation < 0
    assert not found.is_trusted


@pytest.mark.parametrize(
    "rows",
    [
        compiled(),
        measured(RISING),
        [*compiled(), *measured(RISING, version=replace(KERNEL, source_hash="bbbb"))],
        [*compiled(GFX950), *measured(RISING)],
        [*compiled(), *measured(RISING, complete=False)],
        [*compiled(), *measured(RISING, kind=Kind.SIMULATED)],
    ],
)
def test_only_both_kinds_of_rows_of_one_version_calibrate(rows):
    assert calibrations(rows) == {}


def test_the_device_with_most_problems_calibrates():
    more = [item for K in (1024, 2048) for item in measured(RISING, of=problem(K=K), device=H200)]
    assert calibrations([*compiled(), *measured(RISING), *more])["colwise"].device == H200.name


# The table


def test_a_trusted_ranking_gives_the_row_for_any_shape():
    selection = select([*compiled(), *measured(RISING), *compiled(GFX950, BLOCKS[::-1])], "gfx950")
    (found,) = selection.rows
    assert (found.key, found.config, found.basis) == (None, config(512), Basis.STATIC)
    assert selection.comments["colwise"] == (
        "static, compiled and not run: on NVIDIA H100 80GB HBM3 the first by static cost loses 0.0 %, "
        "the default 50.0 %",
    )


def test_a_ranking_that_does_worse_than_the_default_gives_the_default():
    rows = [*compiled(order=BLOCKS[::-1]), *measured(RISING, default_us=120.0), *compiled(GFX950)]
    (found,) = select(rows, "gfx950").rows
    assert (found.config, found.basis) == (KERNEL.default, Basis.DEFAULT)
    assert found.calibration is not None
    assert not found.calibration.is_trusted


def test_without_calibration_the_default_is_exported():
    selection = select(compiled(GFX950), "gfx950")
    assert [(row.config, row.basis) for row in selection.rows] == [(KERNEL.default, Basis.DEFAULT)]
    assert "not calibrated" in selection.comments["colwise"][0]


def test_a_default_that_spills_there_gives_way():
    default, *others = compiled(GFX950)
    spilling = replace(default, facts=replace(default.facts, spill_bytes=8))
    (found,) = select([spilling, *others], "gfx950").rows
    assert (found.config, found.basis) == (config(32), Basis.STATIC)


def test_static_facts_never_overturn_a_measurement():
    here = measured(RISING, default_us=120.0)
    assert select([*compiled(order=BLOCKS[::-1]), *here], CALIBRATED_ON).rows == select(here, CALIBRATED_ON).rows
    unfinished = measured(RISING, complete=False)
    assert select([*compiled(), *unfinished], CALIBRATED_ON).rows == ()


def test_the_side_car_says_what_each_row_rests_on():
    table = export.render([*compiled(), *measured(RISING), *compiled(GFX950)], "gfx950")
    assert '"evidence": "static"' in table.evidence
    assert '"top1_slowdown": 1.0' in table.evidence
    assert "# colwise: static, compiled and not run" in table.module
    assert '"evidence": "measured"' in export.render(measured(RISING), CALIBRATED_ON).evidence


# The database


def stored(path: Path) -> Store:
    return Store.open(str(path), create=True)


def test_what_the_machine_code_does_is_kept_and_merged(tmp_path):
    compiled_row = row(None, device=GFX950, kind=Kind.STATIC, facts=Facts(64, 0, 4096, 0.5, GOOD))
    with stored(tmp_path / "a.db") as store:
        store.add(begin(store, GFX950), compiled_row)
        store.add(begin(store, GFX950), row(None, config=config(64), device=GFX950, kind=Kind.STATIC))
        found = {item.config: item.facts.code for item in store.evidence()}
        assert found == {config(): GOOD, config(64): None}
        assert [item.outcome.facts.code for item in store.rows()] == [GOOD, None]
        with stored(tmp_path / "b.db") as other:
            other.merge(store)
            assert {item.config: item.facts.code for item in other.evidence()} == found


def test_an_export_reads_what_the_ranking_is_calibrated_on(tmp_path):
    with stored(tmp_path / "a.db") as store:
        sweep = begin(store, GFX950)
        store.add(sweep, row(None, device=GFX950, kind=Kind.STATIC, facts=Facts(1, 0, 0, 1.0, GOOD)))
        store.add(begin(store), row())
        assert {item.device.arch for item in evidence_for(store, "gfx950")} == {"gfx950", CALIBRATED_ON}
        assert {item.device.arch for item in evidence_for(store, CALIBRATED_ON)} == {CALIBRATED_ON}
