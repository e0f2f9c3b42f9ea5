"""Databases brought together: every row kept, no side preferred, the order of imports without a trace."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import shutil
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest
from database_rows import H100, KERNEL, begin, config, end_finals, import_file, problem, row, subject, table_text

from fp8tune.errors import DatabaseError
from fp8tune.records import Device, Kind
from fp8tune.stats.rank import competing
from fp8tune.store.results import Store
from fp8tune.studies import decided

CONFIGS = (KERNEL.default, config(32), config(128))
ANOTHER_H100 = replace(H100, uuid_hash="0123012301230123")
WIDENED = replace(KERNEL, axes=(*KERNEL.axes, ("num_ctas", (1, 2))))


def sweep_with_finals(
    store: Store,
    times_us: tuple[float, ...],
    seed: int = 0,
    request: str = "request",
    K: int = 5120,
    device: Device = H100,
):
    """A finished sweep of one problem: a screen, and six processes of three rounds; a block is off by up to 0.05 %."""
    noise, size = random.Random(f"{times_us} {seed}"), problem(K=K)
    sweep = begin(store, device, request, again=True)
    store.record_ceiling(sweep, device, 3000.0 + seed)
    rows = []
    for time_us, config_ in zip(times_us, CONFIGS, strict=True):
        rows.append(row(time_us, size=size, config=config_, device=device))
        for process, round in itertools.product(range(6), range(3)):
            block_us = time_us * noise.uniform(0.9995, 1.0005)
            made = row(block_us, size=size, config=config_, stage="final", process=f"final {process:02d}", round=round)
            rows.append(replace(made, device=device))
    store.add_many(sweep, rows)
    store.mark_complete(sweep, subject(size, device), len(CONFIGS))
    end_finals(store, sweep, size, device)
    store.finish_sweep(sweep)


def opened(path: Path | str) -> Store:
    return Store.open(str(path), create=True)


def filled(path: Path, generator: random.Random) -> None:
    """Some sweeps of two problems, with finals or without, of either declaration of the kernel."""
    with opened(path) as store:
        for number in range(generator.randint(1, 3)):
            times = tuple(generator.choice([99.0, 100.0, 100.4, 103.0]) for _ in CONFIGS)
            K = generator.choice([2048, 5120])
            store.record_launches({problem(K=K): json.dumps({"of": f"{path.name} {number}"})})
            if generator.random() < 0.8:
                sweep_with_finals(store, times, generator.randint(0, 10**6), f"{path.name} {number}", K)
            else:
                sweep = begin(store, request=f"{path.name} {number}")
                version = generator.choice([KERNEL, WIDENED])
                store.add(sweep, row(times[0], size=problem(K=K), config=CONFIGS[0], version=version))
                store.mark_complete(sweep, subject(problem(K=K), version=version), 1)


@pytest.mark.parametrize(
    ("database", "seed"),
    [("sqlite", 0), ("postgresql", 12)],
    indirect=["database"],
)
def test_the_order_of_imports_makes_no_difference(database: str, tmp_path: Path, seed: int) -> None:
    generator = random.Random(seed)
    names, outcomes = ["old copy", "a", "b"], []
    filled(tmp_path / "old copy.db", generator)
    shutil.copy(tmp_path / "old copy.db", tmp_path / "a.db")
    for name in ("a", "b"):
        filled(tmp_path / f"{name}.db", generator)
    with opened(database) as store:
        for name in names:
            import_file(store, tmp_path / f"{name}.db")
        outcomes.append(outcome(store))
    for order in [*itertools.permutations(names)][:: 1 if database.endswith(".db") else 6]:
        target = tmp_path / f"{''.join(order)}.db"
        shutil.copy(tmp_path / f"{order[0]}.db", target)
        with opened(target) as store:
            for name in order[1:]:
                import_file(store, tmp_path / f"{name}.db")
            outcomes.append(outcome(store))
    assert all(item == outcomes[0] for item in outcomes)


def outcome(store: Store) -> tuple[object, ...]:
    """The picks, the table and the recorded launches."""
    evidence = store.studies(keep=competing)
    return decided(evidence), table_text(evidence), store.recorded_launches()


ARCHIVED = {
    "meta": "'schema_version' AS name, '1' AS value FROM (SELECT 1)",
    "devices": "id, arch, name, uuid_hash, multiprocessors, driver, runtime, torch, triton FROM new.devices",
    "configs": "id, canonical AS text FROM new.configs",
    "problems": "id, kernel, canonical AS shape, routing, input_layout, in_dtype, fp8_dtype, scale_mode, seed "
    "FROM new.problems",
    "versions": "id, kernel, source_hash, default_id, axes, key FROM new.versions",
    "sweeps": "id, uid, device_id, request, command, started_at, finished_at FROM new.sweeps",
    "processes": "id, sweep_id, name, git_commit, started_at FROM new.processes",
    "studies": "id, problem_id, version_id, device_id, kind, lookup_key, bytes_moved, 7 AS flops, timed_at "
    "FROM new.studies",
    "calibrations": "sweep_id, name, value FROM new.calibrations",
    "study_runs": "study_id, sweep_id, planned, nullif(reference, '') AS reference, check_used, tie_band, keep_band, "
    "floor_us FROM new.study_runs",
    "results": "id, study_id, config_id, source, note, registers, spill_bytes, shared_bytes, compile_s "
    "FROM new.results",
    "trials": "result_id, CASE stage WHEN 0 THEN 'coarse' WHEN 1 THEN 'final' ELSE 'control' END AS stage, process_id, "
    "round, position, status, reason, time_us FROM new.trials",
}


def test_an_archive_of_all_trials_is_read_by_import_alone(tmp_path: Path) -> None:
    with opened(tmp_path / "new.db") as store:
        sweep_with_finals(store, (100.0, 90.0, 110.0))
        (expected,) = decided(store.studies())
    with contextlib.closing(sqlite3.connect(tmp_path / "full.db")) as archive:
        archive.execute("ATTACH ? AS new", (str(tmp_path / "new.db"),))
        for table, query in ARCHIVED.items():
            archive.execute(f"CREATE TABLE {table} AS SELECT {query}")
        archive.commit()
    with pytest.raises(DatabaseError, match="is an archive: read it with fp8tune db import"):
        Store.open(str(tmp_path / "full.db"), writable=False)
    with opened(tmp_path / "again.db") as store:
        report = import_file(store, tmp_path / "full.db")
        assert (report.added, report.already_there) == (3 + 3 * 6 * 3, 0)
        (result,) = decided(store.studies())
        assert (result.pick.config, result.decision.verdict) == (expected.pick.config, expected.decision.verdict)
        assert import_file(store, tmp_path / "full.db").added == 0


def test_every_row_is_merged_once(tmp_path: Path) -> None:
    with opened(tmp_path / "ours.db") as ours, opened(tmp_path / "theirs.db") as theirs:
        sweep_with_finals(theirs, (100.0, 90.0, 110.0), device=ANOTHER_H100)
        theirs.add(begin(theirs, request="unfinished"), row(80.0, config=config(16), device=ANOTHER_H100))
        ours.add(begin(ours), row(None, kind=Kind.STATIC))
        count = 3 + 3 * 6 * 3 + 1
        assert [ours.merge(theirs), ours.merge(theirs)] == [(count, 0), (0, count)]
        same = [replace(study, newest=0) for study in ours.studies(device=ANOTHER_H100)]
        assert same == [replace(study, newest=0) for study in theirs.studies()]
        assert len(list(ours.rows())) == count + 1
        assert ours.integrity() == []
