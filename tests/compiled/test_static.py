"""Static facts: resources from the compiler's text, and what is stored of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from database_rows import begin, config, row, stored_results

from fp8tune.compiled import facts
from fp8tune.records import Code, Device, Facts, Kind
from fp8tune.store.results import Store

GFX950 = Device("gfx950", triton="3.7.1")
GOOD = Code(resident_warps=32, fp8_conversions=16)


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


# The database


def stored(path: Path) -> Store:
    return Store.open(str(path), create=True)


def test_what_the_machine_code_does_is_kept_and_merged(tmp_path):
    compiled_row = row(None, device=GFX950, kind=Kind.STATIC, facts=Facts(64, 0, 4096, 0.5, GOOD))
    with stored(tmp_path / "a.db") as store:
        store.add(begin(store, GFX950), compiled_row)
        store.add(begin(store, GFX950), row(None, config=config(64), device=GFX950, kind=Kind.STATIC))
        codes = {item.config: item.facts.code for item in stored_results(store)}
        assert codes == {config(): GOOD, config(64): None}
        assert [item.outcome.facts.code for item in store.rows()] == [GOOD, None]
        with stored(tmp_path / "b.db") as second:
            second.merge(store)
            assert {item.config: item.facts.code for item in stored_results(second)} == codes
