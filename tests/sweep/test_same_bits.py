"""Configs with equal output bits at every size: on the interpreter, and in sweeps on the simulated clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from places import PLANTED

from fp8tune.errors import UsageError
from fp8tune.exporting import select_rows
from fp8tune.measure.output_bits import output_bits
from fp8tune.measure.simulated import SimulatedBackend
from fp8tune.options import SweepOptions
from fp8tune.plan.grids import configs
from fp8tune.records import NamedInts, Problem
from fp8tune.replay.loading import load_spec
from fp8tune.stats.same_bits import Bits, allowed, families
from fp8tune.stats.study import Study, Verdict
from fp8tune.store.results import Store
from fp8tune.studies import constrained
from fp8tune.sweeping import planning, session

SUMMING = PLANTED / "summing.py"
SIZES = (1, 3, 8, 17)
LARGEST = max(SIZES)

Times = dict[int, dict[NamedInts, float]]


def problem(kernel: str, size: int) -> Problem:
    return Problem(kernel, NamedInts(M=size), in_dtype="float32")


def hashed(kernel: str) -> dict[int, Bits]:
    reference, spec = f"{SUMMING}:{kernel}", load_spec(f"{SUMMING}:{kernel}")
    problems = {size: problem(spec.name, size) for size in SIZES}
    every, bits = list(configs(spec, problems[1], spec.axes, None)), dict[int, Bits]()
    for size, own in problems.items():
        parts = problems if size == LARGEST else {size: own}
        bits[size] = output_bits(reference, own, problems[LARGEST], parts, every, "cpu")
    return bits


def outputs(kernel: str, size: int, config: NamedInts) -> torch.Tensor:
    """Outputs on the first rows of the largest batch, launched without any of what is tested."""
    spec = load_spec(f"{SUMMING}:{kernel}")
    batch, *rest = spec.inputs(problem(spec.name, LARGEST), "cpu")
    inputs = (batch[:size].clone(), *rest)
    written = spec.outputs(*inputs)
    spec.launch(config, inputs, written)
    return written[0]


def planted(bits: Mapping[int, Bits], axis: str) -> Times:
    """Times by which the axis' last value is best at small sizes, and its first at large ones."""
    values = sorted({config[axis] for config in bits[LARGEST]})

    def time(size: int, config: NamedInts) -> float:
        best = values[-1] if size < 8 else values[0]
        return 1.0 + (config[axis] != best) + 0.001 * sum(config.values()) / 100

    return {size: {config: time(size, config) for config in bits[size]} for size in bits}


@pytest.mark.parametrize(("kernel", "axis"), [("SPLIT", "SPLIT_K"), ("SOFTMAX", "BLOCK")])
def test_bits_are_those_at_the_largest_size_with_the_constraint_and_differ_without(kernel: str, axis: str) -> None:
    bits = hashed(kernel)
    times = planted(bits, axis)
    fastest = {size: min(times[size], key=times[size].__getitem__) for size in SIZES}
    members = allowed(times, bits)
    chosen = {size: min(members[size], key=times[size].__getitem__) for size in SIZES}
    for picks, is_constrained in ((fastest, False), (chosen, True)):
        largest = outputs(kernel, LARGEST, picks[LARGEST])
        same = [torch.equal(outputs(kernel, size, picks[size]), largest[:size]) for size in SIZES]
        assert all(same) == is_constrained
    assert all(times[size][chosen[size]] >= times[size][fastest[size]] for size in SIZES)


def test_configs_that_differ_in_nothing_that_sums_share_a_class() -> None:
    """BLOCK_M is free: the constraint is on bits, not on configs."""
    bits = hashed("SPLIT")
    members = allowed(planted(bits, "SPLIT_K"), bits)
    # four blocks of 64 are added in one order, by one program or by four
    assert {(config["BLOCK_K"], config["SPLIT_K"]) for config in members[LARGEST]} == {(64, 1), (64, 4)}
    assert {config["BLOCK_M"] for config in members[LARGEST]} == {16, 32}


def test_a_config_whose_launches_differ_from_each_other_is_in_no_class() -> None:
    bits = hashed("RACING")
    assert {config["RACE"] for config in bits[LARGEST]} == {0}


def test_a_problem_that_is_no_part_of_the_largest_is_refused() -> None:
    large, small = problem("softmax", 40), problem("softmax", 16)
    with pytest.raises(ValueError, match="no part"):
        output_bits(f"{SUMMING}:SOFTMAX", large, small, {40: large}, [], "cpu")


def test_the_class_of_least_mean_time_wins_and_a_gap_at_one_size_rules_one_out() -> None:
    a, b, c = (NamedInts(C=number) for number in range(3))
    bits = {1: {a: {1: "x"}, b: {1: "y"}}, 8: {a: {1: "x", 8: "p"}, b: {1: "y", 8: "q"}, c: {1: "z", 8: "r"}}}
    times = {1: {a: 2.0, b: 1.0, c: 1.0}, 8: {a: 1.0, b: 1.5, c: 0.1}}
    assert allowed(times, bits) == {1: {b}, 8: {b}}
    assert allowed(times | {8: {a: 1.0, b: 3.0}}, bits) == {1: {a}, 8: {a}}
    assert allowed(times, {1: {}, 8: bits[8]}) == {}
    # the largest size has the most elements: who differs there is out, though equal on a few
    few = {1: {a: {1: "x"}, b: {1: "x"}}, 8: bits[8]}
    assert allowed(times, few)[1] == {a}


def test_recorded_launches_are_told_apart_by_sizes() -> None:
    launches = [
        Problem("k", NamedInts(M=size, N=columns), input_layout=f"recorded-{id}")
        for id, (size, columns) in enumerate([(1, 8), (4, 8), (4, 8), (1, 9)])
    ]
    sizes = [sorted(family) for family in families(launches, "M", lambda item: item, lambda _: "")]
    assert sizes == [[1, 4], [4], [1]]


# Sweeps


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SweepOptions:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    path = tmp_path / "few.toml"
    path.write_text("[[rows]]\nM = [16, 256, 4096]\nK = 4096\nN = 8\nE = 2\n")
    return SweepOptions(
        kernel=(f"{PLANTED / 'faults.py'}:SPEC",), shapes=(str(path),), timer="simulated:1", same_bits="M"
    )


def swept(store: Store, options: SweepOptions) -> list[Study]:
    plan = planning.expanded(planning.planned(options))
    list(session.run(store, plan))
    return session.studies(store, plan)


def orders(studies: list[Study]) -> set[str]:
    """Simulated orders of sums of picks; a problem of its own size has the hash of its order."""
    gpu = SimulatedBackend("simulated:1")
    picks = [study.choice.pick for study in studies]
    hashes = gpu.output_bits("", studies[0].problem, studies[0].problem, {0: studies[0].problem}, picks)
    return {hashes[pick][0] for pick in picks}


def test_a_sweep_confirms_picks_of_one_order_and_export_takes_them(options: SweepOptions) -> None:
    with Store.open("sqlite://", create=True) as store:
        studies = swept(store, options)
        chosen, notices = constrained(store, studies, "M")
        assert not notices
        assert len(orders(studies)) > 1
        assert len(orders([choice.study for choice in chosen])) == 1
        assert {choice.study.choice.verdict for choice in chosen} <= {Verdict.PROVEN, Verdict.OPEN}
        slowdowns = [choice.slowdown for choice in chosen]
        assert all(slowdown and slowdown > 0.98 for slowdown in slowdowns)
        assert max(slowdown or 0 for slowdown in slowdowns) > 1.0
        selection = select_rows(store, "simulated", same_bits="M")
        exported = {NamedInts(entry.config) for entry in selection.table.entries if entry.key is not None}
        assert exported == {choice.study.choice.pick for choice in chosen}
        assert any("cost" in notice for notice in selection.notices)


def test_without_hashes_the_fix_is_named(options: SweepOptions) -> None:
    """Read a database that is older than the table."""
    with Store.open("sqlite://", create=True) as store:
        swept(store, replace(options, same_bits=None, quick=True))
        with store.transaction(write=True) as connection:
            connection.exec_driver_sql("DROP TABLE output_bits")
        with pytest.raises(UsageError, match="sweep --same-bits M"):
            select_rows(store, "simulated", same_bits="M")
        swept(store, replace(options, quick=True))
        assert select_rows(store, "simulated", same_bits="M").table.entries


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"same_bits": "rows"}, "no size has that name"), ({"gpus": 2}, "leave out --on and --gpus")],
)
def test_what_cannot_be_constrained_is_refused(options: SweepOptions, changes: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        planning.expanded(planning.planned(replace(options, **changes)))  # type: ignore[arg-type]
