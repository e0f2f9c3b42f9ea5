from __future__ import annotations

import itertools
import json
import math

import pytest
from command_line import Ended, fp8tune
from database_rows import config, evidence, merged, problem, study_of
from hypothesis import given
from hypothesis import strategies as st
from places import PLANTED

from fp8tune.check import lint
from fp8tune.check.lint import KeyedProblem, KeyVerdict, Report, VariationResult, compared, decided
from fp8tune.errors import MachineError, UsageError
from fp8tune.measure.arms import KernelArm, Place
from fp8tune.measure.backends.simulated import SimulatedBackend
from fp8tune.plan import grids, shapes
from fp8tune.plan import problems as plan
from fp8tune.plan.variations import Variation, variations
from fp8tune.records import Device, KernelVersion, Kind, NamedInts, Problem, Status
from fp8tune.replay.loading import load_spec
from fp8tune.stats.means import median
from fp8tune.stats.pairs import Block
from fp8tune.stats.study import Study
from fp8tune.sweeping.options import Options
from fp8tune_kernels.catalog import KERNELS

UNDERSTATED = PLANTED / "understated.py"


def linted(reference: str, problems: int, configs: int) -> list[VariationResult]:
    """A kernel's first problems of llama4 and its first configs, linted on the simulated clock."""
    spec, clock = load_spec(reference), SimulatedBackend("simulated:0")
    found = plan.problems(spec, shapes.load("llama4").rows)[:problems]
    subjects = [KeyedProblem(of, spec.lookup_key(of), tuple(variations(spec, of))) for of in found]
    tried = list(grids.configs(spec, found[0], spec.axes, None))[:configs]
    version = KernelVersion(spec.name, "aaaa", spec.default, tuple(spec.axes.items()), spec.key)

    def time_us(of: Problem, chosen: NamedInts, process: int, number: int) -> float:
        arm = KernelArm.of(reference, spec, of, chosen)
        return clock.block(arm, Place(process=process, round=number)).time_us or 0.0

    def screened(of: Problem, chosen: NamedInts) -> Study:
        value = median(time_us(of, chosen, 0, number) for number in range(3))
        return study_of(of, chosen, Device("simulated"), Kind.SIMULATED, Status.OK, (value,), version)

    def settled(unclear: VariationResult, alpha: float) -> VariationResult:
        of = unclear.variation.problem
        places = itertools.product(range(1, lint.PROCESSES + 1), range(lint.ROUNDS), (unclear.pick, unclear.best))
        blocks = [Block(str(p), n, chosen, time_us(of, chosen, p, n)) for p, n, chosen in places]
        return decided(unclear, blocks, alpha)

    every = dict.fromkeys([*found, *(variation.problem for subject in subjects for variation in subject.variations)])
    results = compared(subjects, merged(screened(of, chosen) for of in every for chosen in tried))
    unclear = [result for result in results if result.verdict is KeyVerdict.UNCLEAR]
    return [settled(one, lint.ALPHA / len(unclear)) if one in unclear else one for one in results]


@pytest.mark.parametrize("kernel", KERNELS)
def test_no_argument_outside_a_kernels_key_moves_its_winner(kernel):
    results = linted(kernel, 1, 12)
    assert results
    assert {result.variation for result in results if result.verdict is KeyVerdict.MOVES} == set()


def test_a_winner_that_depends_on_what_the_key_leaves_out_is_caught():
    results = linted(f"{UNDERSTATED}:UNDERSTATED", 3, 16)
    moved = [result.variation.argument for result in results if result.verdict is KeyVerdict.MOVES]
    assert set(moved) == {"G"}
    assert len(moved) >= 3  # the best config of one landscape may be the best of the next


JAGGED, ZIPF = problem(), problem(routing="zipf")
SUBJECT = KeyedProblem(JAGGED, NamedInts(K=5120, G=64), (Variation("routing", ZIPF),))


def judged(jagged: dict[int, float], zipf: dict[int, float], **others: object):
    """Block -> microseconds, on the problem and on its variation."""
    rows = [
        evidence(time_us, of=of, config=config(block), **(others if of == ZIPF else {}))
        for of, times in ((JAGGED, jagged), (ZIPF, zipf))
        for block, time_us in times.items()
    ]
    return compared([SUBJECT], merged(rows))


def test_what_the_pick_loses_there_counts():
    (holds,) = judged({32: 100.0, 64: 110.0}, {32: 202.0, 64: 200.0})
    assert (holds.pick, holds.best, holds.slowdown, holds.allowed) == (config(32), config(64), 1.01, 1.01)
    assert holds.verdict is KeyVerdict.HOLDS
    (unclear,) = judged({32: 100.0, 64: 110.0}, {32: 203.0, 64: 200.0})
    assert unclear.verdict is KeyVerdict.UNCLEAR


def test_what_the_tie_rule_grants_at_home_is_granted_abroad():
    (holds,) = judged({32: 100.9, 64: 100.0}, {32: 101.9, 64: 100.0})
    assert holds.allowed == pytest.approx(1.009 * 1.01)
    assert holds.verdict is KeyVerdict.HOLDS


def test_a_pick_that_does_not_run_there_moves():
    (gone,) = judged({32: 100.0, 64: 110.0}, {64: 100.0})
    assert gone.slowdown is None
    assert gone.verdict is KeyVerdict.MOVES


def test_what_was_not_swept_to_its_end_is_not_judged():
    assert judged({32: 100.0}, {32: 100.0}, complete=False) == []
    assert Report((), 1).exit_code == 3


def blocks(pick_us: list[float], best_us: list[float]) -> list[Block]:
    """One process for each pair of times, and three rounds in each, which drift."""
    return [
        Block(str(process), number, config(block), time_us * drift)
        for process, pair in enumerate(zip(pick_us, best_us, strict=True))
        for number, drift in enumerate((0.98, 1.0, 1.02))
        for block, time_us in zip((32, 64), pair, strict=True)
    ]


@pytest.mark.parametrize(
    ("pick_us", "verdict"),
    [
        ([100.1, 100.0, 100.2, 100.1, 99.9, 100.0], KeyVerdict.HOLDS),
        ([103.1, 103.0, 102.9, 103.2, 103.0, 103.1], KeyVerdict.MOVES),
        ([101.0, 106.0, 100.0, 99.0, 104.0, 101.0], KeyVerdict.UNCLEAR),
        ([103.0], KeyVerdict.UNCLEAR),
    ],
)
def test_fresh_processes_settle_a_suspicion(pick_us, verdict):
    (unclear,) = judged({32: 100.0, 64: 110.0}, {32: 104.0, 64: 100.0})
    settled = decided(unclear, blocks(pick_us, [100.0] * len(pick_us)), 0.025)
    mean = math.exp(sum(math.log(time_us / 100.0) for time_us in pick_us) / len(pick_us))
    assert settled.slowdown == pytest.approx(mean)
    assert (settled.verdict, settled.processes) == (verdict, len(pick_us))


def test_no_fresh_process_leaves_a_suspicion():
    (unclear,) = judged({32: 100.0, 64: 110.0}, {32: 104.0, 64: 100.0})
    assert decided(unclear, [], 0.025) == unclear
    assert Report((unclear,), 0).exit_code == 3


@given(st.lists(st.integers(90, 130), min_size=2, max_size=8, unique=True), st.floats(1e-4, 0.5))
def test_what_is_proven_stays_so_at_a_weaker_level(pick_us, alpha):
    (unclear,) = judged({32: 100.0, 64: 110.0}, {32: 104.0, 64: 100.0})
    found = blocks(pick_us, [100.0] * len(pick_us))
    if decided(unclear, found, alpha).is_proven:
        assert decided(unclear, found, 0.5).is_proven
        assert decided(unclear, found, alpha).slowdown > unclear.allowed


def run_lint(*arguments: str) -> Ended:
    return fp8tune("lint", *arguments, "--shapes", "tiny", "--timer", "simulated:1")


def test_the_command_finds_the_planted_dependence_and_says_where(tmp_path):
    database = tmp_path / "lint.db"
    done = run_lint(f"{UNDERSTATED}:UNDERSTATED", "--format", "json", "--db", str(database))
    assert done.returncode == 1, done.stderr
    rows = json.loads(done.stdout)
    moved = [row for row in rows if row["verdict"] == "moves"]
    assert {row["argument"] for row in moved} >= {"G"}
    assert all(row["slowdown"] > row["allowed"] and row["processes"] for row in moved)
    assert {row["argument"] for row in rows} == {"M", "G", "routing", "seed"}
    assert all(row["key"].keys() == {"M_bucket", "K", "G"} for row in rows)
    assert database.exists()


def test_the_command_passes_an_honest_key():
    done = run_lint(f"{UNDERSTATED}:HONEST")
    assert "routing" in done.stdout
    assert "moves" not in done.stdout
    assert done.returncode in (0, 3), done.stderr  # near ties may stay unclear


def test_a_budget_that_is_spent_is_inconclusive():
    done = run_lint(f"{UNDERSTATED}:HONEST", "--time-budget", "0")
    assert done.returncode == 3, done.stderr
    assert "left out by the time budget" in done.stderr


def test_a_key_of_nothing_is_a_finding_before_anything_is_timed(tmp_path):
    spec = tmp_path / "nameless.py"
    spec.write_text(
        "import sys; from dataclasses import replace\n"
        f"sys.path.insert(0, {str(PLANTED)!r})\n"
        "from understated import HONEST\nSPEC = replace(HONEST, key=('num_elements',))\n"
    )
    done = run_lint(f"{spec}:SPEC")
    assert (done.returncode, done.stdout) == (1, "")
    assert "num_elements is in the key" in done.stderr


def test_what_cannot_be_had_is_one_line(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(MachineError, match="needs a GPU"):
        lint.planned(Options(("colwise",), ("tiny",)))
    with pytest.raises(UsageError, match="did you mean colwise"):
        lint.planned(Options(("colwse",), ("tiny",), timer="simulated:1"))
