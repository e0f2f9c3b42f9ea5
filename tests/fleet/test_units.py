"""Units of a sweep: their sizes, what they keep of a sweep, and which code they may import."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from dataclasses import replace
from pathlib import Path
from statistics import geometric_mean

import pytest
from command_line import fp8tune
from fleet.crew import DEVICE, plan_of, queue, worked
from places import PLANTED

from fp8tune.errors import UsageError
from fp8tune.fleet import units
from fp8tune.options import SweepOptions
from fp8tune.replay import recording
from fp8tune.replay.recording import Kernel
from fp8tune.store.results import Store
from fp8tune.store.schema import UnitState
from fp8tune.sweeping import picks, planning


@pytest.fixture
def db(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("FP8TUNE_TIMER", DEVICE)
    return str(tmp_path / "results.db")


# Documents


def test_units_are_built_anew_from_their_document_and_name_no_database() -> None:
    options = SweepOptions(
        kernel=("rowwise-2d",), shapes=("tiny",), timer=DEVICE, db="postgresql://me:secret@host/x", quick=True
    )
    plan = planning.expanded(planning.planned(options))
    sweep = units.queued(plan)
    assert "secret" not in sweep.document + sweep.command
    again = units.plan_of(sweep, timer=f"{DEVICE},gpu=1")
    assert [size.configs for size in again.problems] == [size.configs for size in plan.problems]
    queued = [unit.problems for unit in units.units_of(plan, sweep.key)]
    assert queued == [(units.problem_key(size),) for size in again.problems]
    with pytest.raises(UsageError, match="the units are for simulated:1, and this GPU is simulated:2"):
        units.plan_of(sweep, timer="simulated:2")


def rewritten(db: str, **changed: object) -> None:
    """Change the document of the queued sweep, as whoever may write to the database can; options by their names."""
    with contextlib.closing(sqlite3.connect(db)) as connection, connection:
        document = json.loads(connection.execute("select document from queued_sweeps").fetchone()[0])
        whole = {name: changed.pop(name) for name in ("version", "options", "settings", "rows") if name in changed}
        document["options"].update(changed)
        connection.execute("update queued_sweeps set document = ?", (json.dumps({**document, **whole}),))


def waiting_attempts(db: str) -> list[int]:
    with Store.open(db, writable=False) as store:
        return [status.attempts for status in store.queue().units if status.state is UnitState.WAITING]


def test_a_document_of_another_form_is_one_line_and_its_units_stay(db: str) -> None:
    queue(db, plan_of(1))
    with Store.open(db, writable=False) as store:
        (sweep,) = store.queue().sweeps
    whole = json.loads(sweep.document)
    kernels = [{"kernel": value} for value in (3, [3], ["rowwise-2d?check=nonsense"], None)]
    options = [*kernels, {"grid": {"num_warps": 4}}, {"quick": "yes"}, {"timer": "simulated:1"}]
    wrong: dict[str, list[object]] = {
        "options": [None, *({**whole["options"], **changed} for changed in options)],
        "settings": [{"seed": "zero"}, {"dtype": ["bfloat16"]}, 7],
        "rows": [3, [3], [{"M": "many"}], [{"M": -1, "K": 128}]],
        "version": [{}],
    }
    for name, value in ((name, value) for name, values in wrong.items() for value in values):
        with pytest.raises(UsageError):
            units.plan_of(replace(sweep, document=json.dumps({**whole, name: value})), timer=DEVICE)
    rewritten(db, rows=[{"M": "many"}])
    done = fp8tune("worker", "--db", db)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("fp8tune: ")
    assert waiting_attempts(db) == [0]
    assert fp8tune("worker", "--status", "--db", db).returncode == 0


def test_the_speedup_so_far_is_that_of_the_decided_sizes(db: str) -> None:
    plan = plan_of(3)
    sweep = queue(db, plan)
    with Store.open(db) as store:
        assert units.speedups(store) == {}
    for _ in worked(db):
        pass
    with Store.open(db) as store:
        ratios = [pick.speedup_ratio for pick in picks.read(store)]
        assert units.speedups(store) == {sweep.key: pytest.approx(geometric_mean(ratios))}


# Imports


def test_code_that_only_the_database_names_is_not_imported(db: str, tmp_path: Path) -> None:
    """Write access to the database must not decide what a worker runs. Its units are left to other workers."""
    (tmp_path / "payload.py").write_text("open('canary', 'w').write('ran')\nSPEC = print\n")
    recorded = Kernel(f"{tmp_path / 'payload.py'}:SPEC", file=str(tmp_path / "payload.py"))
    (tmp_path / "run.json").write_text(recording.text_of(recording.Recording(kernels=(recorded,))))
    queue(db, plan_of(1))
    for kernel in (f"{tmp_path}/payload.py:SPEC", f"payload:SPEC@{tmp_path}/run.json"):
        rewritten(db, kernel=[kernel])
        done = fp8tune("worker", "--db", db, cwd=tmp_path)
        assert not (tmp_path / "canary").exists()
        assert done.returncode == 2
        assert " --kernel " in done.stderr.splitlines()[-1]
        assert waiting_attempts(db) == [0]


def test_a_worker_imports_what_its_command_line_names(db: str) -> None:
    path = PLANTED / "untouched.py"
    options = ("--quick", "--shapes", "llama4", "--db", db)
    sweep = fp8tune("sweep", "--on", "queue", "--kernel", f"{path}:SPEC", *options)
    assert f"fp8tune worker --kernel {path}:SPEC" in sweep.stderr
    assert fp8tune("worker", "--db", db).returncode == 2
    assert set(waiting_attempts(db)) == {0}
    done = fp8tune("worker", "--db", db, "--kernel", "untouched.py:*", cwd=PLANTED)
    assert done.returncode == 0, done.stderr
    assert waiting_attempts(db) == []


ALLOWED = [
    ("ops:softmax", "ops:softmax"),
    ("ops:softmax", "ops:*"),
    ("ops:softmax@/run.json", "ops:*@/run.json"),
    ("ops:softmax@/run.json?check=exact", "ops:softmax@/run.json"),
    ("ops:softmax?reference=mine:right", "ops:softmax?reference=mine:right"),
    ("rowwise-2d?check=exact", "ops:*"),
]
REFUSED = [
    ("ops:softmax", "ops:add"),
    ("ops:softmax@/run.json", "ops:*"),
    ("ops:softmax?reference=os:system", "ops:*"),
    ("/ops.py:softmax?reference=/mine.py:right", "/*.py:*"),
    ("ops:softmax?inputs=os:system", "ops:*"),
    ("rowwise-2d?reference=os:system", "ops:*"),
    ("rowwise-2d?reference=payload.py:SPEC", "mine.py:*"),
    ("fp8tune_kernels.quantize.colwise:SPEC@/run.json", "ops:*"),
]


def test_a_pattern_allows_names_of_kernels_and_nothing_else() -> None:
    assert [pair for pair in ALLOWED if units.worker_options([pair[0]], [pair[1]])] == []
    assert [pair for pair in REFUSED if not units.worker_options([pair[0]], [pair[1]])] == []
    assert units.worker_options(["ops:softmax"])
