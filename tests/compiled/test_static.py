"""Static facts from the compiler's text to the table: resources, what fits an arch, and what an export makes of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from database_rows import H200, KERNEL, begin, config, evidence, problem, row

from fp8tune.choose import untimed
from fp8tune.choose.untimed import TIMED_ON, choose, compiled, fitting, timed
from fp8tune.compiled import facts
from fp8tune.export import table as export
from fp8tune.export.selecting import Basis, evidence_for, select
from fp8tune.records import Code, Device, Facts, Kind, Status
from fp8tune.render import contracts
from fp8tune.store.results import Store

GFX950 = Device("gfx950", triton="3.7.1")
GOOD = Code(resident_warps=32, fp8_conversions=16)
BLOCKS = (32, 64, 128, 256, 512)


def static(block: int, *, spill_bytes: int = 0, device: Device = GFX950, **others):
    made = Facts(64, spill_bytes, 4096, 0.5, GOOD)
    return evidence(config=config(block), device=device, kind=Kind.STATIC, facts=made, **others)


def default(**others):
    return replace(static(0, **others), config=KERNEL.default)


def measured(times_us: dict[int, float], default_us: float = 150.0, **others) -> list:
    rows = [evidence(time_us, config=config(block), **others) for block, time_us in times_us.items()]
    return [*rows, evidence(default_us, config=KERNEL.default, **others)]


RISING = {block: 100.0 + 10 * n for n, block in enumerate(BLOCKS)}
TIMES = timed(measured(RISING))["colwise"]


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


@pytest.mark.parametrize(
    ("assembly", "count"),
    [
        ("cvt.rn.satfinite.e4m3x2.f32 %rs1, %f1, %f2;\n\tcvt.rn.bf16x2.f32 %r1, %f1, %f2;", 1),
        ("v_cvt_pk_fp8_f32 v0, v1, v2\n\tv_cvt_scalef32_pk_bf8_f32 v0, v1\n\tv_cvt_sr_fp8_f32 v0, v1", 3),
        ("v_cvt_f32_fp8 v0, v1", 0),
    ],
)
def test_conversions_to_fp8_are_counted(assembly, count):
    assert facts.fp8_conversions(assembly) == count


# What fits, in the order of choice


def test_what_loses_least_where_it_was_timed_comes_first():
    assert [fits.config for fits in fitting([static(128), default(), static(32), static(64)], TIMES)] == [
        config(32),
        config(64),
        config(128),
        KERNEL.default,
    ]


def test_what_a_config_spills_here_counts_against_it():
    rows = [static(32, spill_bytes=untimed.SPILLED_BYTES), static(64, spill_bytes=5), static(512)]
    assert [fits.config for fits in fitting(rows, TIMES)] == [config(64), config(512), config(32)]


@pytest.mark.parametrize("status", [Status.COMPILE_ERROR, Status.OUT_OF_RESOURCES, Status.PRUNED])
def test_a_config_must_compile_for_each_layout(status):
    turned = replace(problem(), input_layout="transposed")
    rows = [static(32), replace(static(32, of=turned), status=status), static(64), static(64, of=turned, spill_bytes=4)]
    (fits,) = fitting(rows, TIMES)
    assert (fits.config, fits.facts.spill_bytes) == (config(64), 4)


def test_untimed_configs_come_last_and_are_never_chosen():
    rows = [static(1024), default(), static(512)]
    assert [fits.config for fits in fitting(rows, TIMES)] == [config(512), KERNEL.default, config(1024)]
    assert choose([static(1024)], TIMES) is None


def test_of_a_kernel_that_was_timed_nowhere_the_default_is_chosen_if_it_compiles():
    assert choose([static(32), default()], None).config == KERNEL.default
    assert choose([static(32), replace(default(), status=Status.COMPILE_ERROR)], None) is None


def test_a_loss_is_the_mean_over_all_problems_and_devices():
    more = measured({32: 110.0, 64: 100.0}, of=problem(K=2048), device=H200)
    found = timed([*measured({32: 100.0, 64: 121.0, 128: 100.0}), *more])["colwise"]
    assert found.problems == 2
    assert found.slowdowns == pytest.approx({config(32): 1.1**0.5, config(64): 1.1, KERNEL.default: 1.5})


@pytest.mark.parametrize(
    "others", [{"kind": Kind.SIMULATED}, {"complete": False}, {"device": replace(H200, arch="sm_100")}]
)
def test_only_what_was_swept_to_the_end_there_stands_in(others):
    assert timed(measured(RISING, **others)) == {}


def test_the_version_that_was_compiled_last_is_reported():
    older = replace(KERNEL, source_hash="bbbb")
    rows = [static(32), static(64, spill_bytes=8), replace(static(128), status=Status.COMPILE_ERROR)]
    rows = [replace(entry, newest=2.0) for entry in rows]
    (found,) = compiled([*rows, static(512, version=older, newest=1.0)], {"colwise": TIMES})
    assert (found.kernel, found.arch, found.spilling, found.failed) == ("colwise", "gfx950", 1, 1)
    assert contracts.compiled(found)["mean_slowdown"] == 1.0
    assert found.choice is not None
    assert (found.choice.config, found.choice.slowdown) == (config(32), 1.0)


# The table


def test_what_was_only_compiled_gives_the_row_for_any_shape():
    selection = select([default(), static(64), static(128), *measured(RISING)], "gfx950")
    (found,) = selection.rows
    assert (found.key, found.config, found.basis) == (None, config(64), Basis.STATIC)
    assert selection.comments["colwise"] == (
        "static, compiled and not run: on the 1 problems timed on sm_90 it loses 10.0 % in the mean",
    )


def test_without_times_the_default_is_exported():
    selection = select([static(32), default()], "gfx950")
    assert [(row.config, row.basis) for row in selection.rows] == [(KERNEL.default, Basis.DEFAULT)]
    assert "timed nowhere" in selection.comments["colwise"][0]


def test_static_facts_never_overturn_a_measurement():
    here = measured(RISING)
    compiled_here = [static(512, device=Device(TIMED_ON, triton="3.7.1"))]
    assert select([*compiled_here, *here], TIMED_ON).rows == select(here, TIMED_ON).rows
    assert select([*compiled_here, *measured(RISING, complete=False)], TIMED_ON).rows == ()


def test_the_side_car_says_what_each_row_rests_on():
    table = export.render([static(64), *measured(RISING)], "gfx950")
    assert '"evidence": "static"' in table.evidence
    assert '"mean_slowdown": 1.1' in table.evidence
    assert "# colwise: static, compiled and not run" in table.module
    assert '"evidence": "measured"' in export.render(measured(RISING), TIMED_ON).evidence


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


def test_an_export_reads_the_times_that_stand_in(tmp_path):
    with stored(tmp_path / "a.db") as store:
        sweep = begin(store, GFX950)
        store.add(sweep, row(None, device=GFX950, kind=Kind.STATIC, facts=Facts(1, 0, 0, 1.0, GOOD)))
        store.add(begin(store), row())
        assert {item.device.arch for item in evidence_for(store, "gfx950")} == {"gfx950", TIMED_ON}
        assert {item.device.arch for item in evidence_for(store, TIMED_ON)} == {TIMED_ON}
        assert evidence_for(store, "gfx950", evidence_for(store, TIMED_ON)) == evidence_for(store, "gfx950")
