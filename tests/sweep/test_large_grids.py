"""Searches: sweeps of grids that do not fit the time budget, on the simulated clock."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from fp8tune.errors import UsageError
from fp8tune.measure.arms import KernelArm
from fp8tune.options import SweepOptions
from fp8tune.plan import grids
from fp8tune.plan.shapes import Selection
from fp8tune.records import NamedInts, Status
from fp8tune.store.results import Store
from fp8tune.sweeping import planning, search, session
from fp8tune.sweeping.events import Finished, TrialDone
from fp8tune.sweeping.planning import Plan

DEVICE = "simulated:1"
LEADS = f"LEAD={','.join(map(str, range(1, 1401)))}"
LARGE = (LEADS, "maxnreg=0,64,96,128,168", "num_warps=1,2,4,8,16", "BLOCK_SIZE<=32")
SMALL = ("BLOCK_SIZE*BLOCK_SIZE_ITER<=4096", "num_stages=1")


def plan_of(*grid: str, sizes: int = 1, budget_s: float | None = 60.0, quick: bool = True) -> Plan:
    options = SweepOptions(kernel=("colwise",), timer=DEVICE, quick=quick, grid=grid, shapes=(), budget_s=budget_s)
    rows = tuple(NamedInts(M=16640, K=1024 * (1 + number), E=8, N=1024) for number in range(sizes))
    return planning.expanded(replace(planning.planned(options), selections=(Selection(rows),)))


def swept(store: Store, plan: Plan, step_s: float) -> tuple[list[TrialDone], Finished]:
    """Sweep by a clock that takes so many seconds between looks at it."""
    ticks = itertools.count()
    *events, last = session.run(store, plan, lambda: step_s * next(ticks))
    assert isinstance(last, Finished)
    return [event for event in events if isinstance(event, TrialDone)], last


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(str(tmp_path / "large.db"), create=True) as opened:
        yield opened


def test_conditions_and_products() -> None:
    axes = {"A": (1, 2, 4), "B": (8, 16)}
    cases = {"A*B<=32": 5, "A == 2": 2, "B>8*A": 1, "A!=B": 6, "16<B": 0, "A*A*B>=128": 2}
    for text, count in cases.items():
        (condition,) = grids.parse_conditions(["B=8", text], axes)
        configs = [NamedInts(A=a, B=b) for a, b in itertools.product(*axes.values())]
        assert sum(map(condition.holds, configs)) == count, text
    for text in ("C<=2", "1<2", "A<=B*"):
        with pytest.raises(UsageError):
            grids.parse_conditions([text], axes)
    assert grids.parse_grid(["B=8", "A*B<=32"], axes) == {"A": (1, 2, 4), "B": (8,)}
    for default in (NamedInts(A=1, B=8), NamedInts(A=2, B=16), NamedInts(A=8, B=8)):
        product = grids.Product(axes, default, lambda config: "odd" if config["A"] == 1 else "")
        numbered = {product.at(number) for number in range(len(product))}
        assert next(iter(product)) == default
        assert {*product} == numbered
        assert len(product) == len(numbered)
        assert product[NamedInts(A=1, B=16)] == "odd"
        assert not product.keys() & {NamedInts(A=3, B=8), NamedInts(A=1)}


def test_a_search_goes_on_where_it_was_stopped(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A grid of two million configs is never gone through, and no config is tried twice."""
    monkeypatch.setattr(grids.Product, "__iter__", lambda self: pytest.fail("a product was gone through"))
    monkeypatch.setattr(search, "MOST_CONTENDERS", 1)
    monkeypatch.setattr(search, "QUICK_SHARE", 0.5)
    plan = plan_of(*LARGE)
    (size,) = plan.problems
    assert size.count == 2_100_000
    running = session.run(store, plan, lambda: 0.0)
    first = [event.row.config for event in itertools.islice(running, 15) if isinstance(event, TrialDone)]
    running.close()  # type: ignore[attr-defined]
    events, last = swept(store, plan, 1.5)
    new = [event.row.config for event in events if not event.from_database and not event.row.round]
    assert len({*first, *new}) == len(first) + len(new) == last.seen > len(first)
    assert size.version.default in first
    assert {row.outcome.status for row in store.rows()} == {Status.OK}  # pruned configs have no rows
    assert 0 < last.grid < size.count
    assert last.is_whole
    more, then = swept(store, plan, 1.5)
    assert then.seen > last.seen
    assert sum(not event.from_database and not event.row.round for event in more) == then.seen - last.seen


def test_only_grids_that_do_not_fit_are_searched(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(*SMALL)
    _, last = swept(store, plan, 0.0)
    assert (last.seen, last.grid) == (0, 0)
    monkeypatch.setattr(search, "SIMULATED_S", 10.0)
    _, last = swept(store, replace(plan, key="another"), 0.0)  # the budget lasts for all of it
    assert last.seen == last.grid == search.unpruned(plan.problems[0].configs)
    with pytest.raises(UsageError, match="--budget"):
        plan_of(*LARGE, budget_s=None)


def test_a_confirmation_follows_and_its_finalists_stay(store: Store) -> None:
    plan = plan_of(*LARGE, quick=False)
    running = session.run(store, plan, iter(itertools.chain(range(40), itertools.repeat(40))).__next__)
    assert any(isinstance(event, TrialDone) and event.row.stage == "final" for event in running)
    running.close()  # type: ignore[attr-defined]
    finalists = {row.config for row in store.rows() if row.stage == "final"}
    _, last = swept(store, plan, 0.0)
    assert last.is_whole
    assert {row.config for row in store.rows() if row.stage == "final"} >= finalists
    assert last.seen == len({row.config for row in store.rows()})


def test_what_compiles_long_holds_nothing_up(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A search of two minutes had compiled 8 configs at a time on 15 cores, and waited for the slowest of them."""
    plan, queued, done = plan_of(*LARGE), dict[NamedInts, int](), list[NamedInts]()

    def compile(arms: Sequence[KernelArm]) -> None:
        for arm in arms:
            queued.setdefault(arm.config, len(done))

    def is_compiled(arm: KernelArm) -> bool:
        return len(done) >= queued[arm.config] + (12 if arm.config["num_warps"] == 16 else 0)

    for name, value in (("compilers", 15), ("compile", compile), ("is_compiled", is_compiled)):
        monkeypatch.setattr(plan.backend, name, value)
    monkeypatch.setattr(store, "add_soon", lambda *row: None)
    waiting, waited = list[int](), list[int]()
    for event in search.SearchPass(store, plan, 1, plan.problems[0], 0).visit(200.0, itertools.count().__next__):
        if isinstance(event, TrialDone) and event.row.config:
            if event.row.config["num_warps"] == 16:
                waited.append(len(done) - queued[event.row.config])
            done.append(event.row.config)
            waiting.append(len(queued) - len(done))
    assert len({*done}) == len(done) > 50
    assert all(count <= max(search.BATCH, number) for number, count in enumerate(waiting, 1))
    assert max(waiting) > 2 * search.BATCH
    assert sum(count >= 12 for count in waited) > 0.9 * len(waited) > 0
