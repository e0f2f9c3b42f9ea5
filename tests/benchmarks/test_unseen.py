"""The shape set of shapes nobody swept, and the benchmark that judges lookups on it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from database_rows import H100, H200, KERNEL, config, evidence, problem, studies_of

from benchmarks import unseen
from benchmarks.unseen import look_up
from fp8tune.plan import problems as plan
from fp8tune.plan import shapes
from fp8tune.records import NamedInts
from fp8tune.replay.loading import load_spec
from fp8tune_kernels.catalog import KERNELS
from fp8tune_kernels.tables import Table

SPECS = {"colwise": replace(load_spec("colwise"), default=KERNEL.default, key=KERNEL.key)}
SWEPT = ("llama4", "deepseek-v3", "deepseek-moe-16b", "starting-line", "rows")


@pytest.mark.parametrize("kernel", KERNELS)
def test_no_unseen_shape_has_the_key_of_a_swept_one(kernel):
    spec = load_spec(kernel)
    if kernel == "expert-sort":
        pytest.skip("rows and experts alone are its key, and other models have as many")
    swept = plan.problems(spec, [row for name in SWEPT for row in shapes.load(name).rows])
    results = plan.problems(spec, shapes.load("unseen").rows)
    assert len({subject.shape for subject in results}) >= unseen.FEWEST_SHAPES
    assert {spec.lookup_key(subject) for subject in results} & {spec.lookup_key(subject) for subject in swept} == set()


def measured(K: int, times_us: dict[int, float], device=H100):
    """Block -> microseconds."""
    return [
        evidence(time_us, of=problem(K=K), config=config(block), device=device) for block, time_us in times_us.items()
    ]


def table_row(chosen: NamedInts, device: str = "", key: tuple[tuple[str, int], ...] | None = None):
    return "colwise", device, key, tuple(chosen.items())


def test_a_lookup_is_judged_by_the_shapes_own_best():
    table = Table((table_row(config(32)), table_row(config(64), H200.name)))
    rows = measured(1024, {32: 104.0, 64: 100.0}) + measured(2048, {32: 100.0, 64: 130.0})
    results = look_up(studies_of(rows + measured(1024, {32: 150.0, 64: 101.0, 128: 100.0}, H200)), SPECS, table)
    assert {(item.device, item.problem.shape["K"]): item.slowdown for item in results.unseen} == {
        (H100.name, 1024): 1.04,
        (H100.name, 2048): 1.0,
        (H200.name, 1024): 1.01,
    }
    assert results.geomean() == results.geomean("colwise") == pytest.approx((1.04 * 1.0 * 1.01) ** (1 / 3))
    assert results.geomean("rowwise-2d") is None
    assert (results.shapes, results.exit_code) == (2, 3)  # two shapes are too few


def test_a_key_that_has_a_row_is_seen_and_not_judged():
    key = (("G", 64), ("K", 1024))
    rows = measured(1024, {32: 100.0, 64: 200.0}) + measured(2048, {32: 100.0, 64: 130.0})
    table = (table_row(config(64), key=key), table_row(config(32)))
    for nearest, slowdown in (((), 1.0), (("colwise",), 1.3)):
        results = look_up(studies_of(rows), SPECS, Table(table, nearest))
        assert results.seen == 1
        (judged,) = results.unseen
        assert (judged.problem.shape["K"], judged.slowdown) == (2048, slowdown)


@pytest.mark.parametrize(("time_us", "exit_code"), [(105.0, 0), (105.1, 1), (None, 1)])
def test_the_target_decides(time_us, exit_code):
    """Ten shapes that lose the same, or on one of which the config does not run."""
    rows = [row for K in range(1024, 1024 * 11, 1024) for row in measured(K, {32: time_us or 100.0, 64: 100.0})]
    if time_us is None:
        rows = rows[1:]
    results = look_up(studies_of(rows), SPECS, Table((table_row(config(32)),)))
    assert (results.shapes, results.exit_code) == (10, exit_code)
