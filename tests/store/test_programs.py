"""Machine code of launches: kept by compiler, compared across versions of Triton, carried over from old schemas."""

from __future__ import annotations

import contextlib
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest
from database_rows import (
    H100,
    KERNEL,
    begin,
    config,
    evidence,
    finished_sweep,
    import_file,
    only_study,
    problem,
    row,
)
from hypothesis import given
from hypothesis import strategies as st

from fp8tune.errors import DatabaseError
from fp8tune.records import Compiler, Device, Facts, Kind, NamedInts
from fp8tune.stats.same_code import Programs
from fp8tune.store.layers import Layers
from fp8tune.store.results import FASTEST, Store
from fp8tune.studies import is_stale, pick_of, read_studies

OLD, NEW = (Compiler("sm_90", version, ptxas="12.8.93") for version in ("3.6.0", "3.9.0"))
GFX = Device("gfx950", triton="3.7.1")
UPGRADED = replace(H100, triton="3.9.0")
TIMES = {config(32): 100.0, config(64, 4, 2): 120.0, config(128): 110.0}
PICK, DEFAULT, RUNNER_UP = TIMES


def opened(path: Path) -> Store:
    return Store.open(str(path), create=True)


def code(**hashes: str) -> dict[tuple[object, ...], str]:
    """Hashes of launches by the names of their configs."""
    configs = {"pick": PICK, "default": DEFAULT, "runner_up": RUNNER_UP, "other": config(64)}
    return {(KERNEL, problem(), configs[name]): value for name, value in hashes.items()}


def swept(store: Store) -> None:
    """Store a finished sweep with Triton 3.6.0, whose pick, default and runner-up are known to be compiled so."""
    finished_sweep(store, {problem(): TIMES})
    store.keep_programs(OLD, code(pick="a1", default="b1", runner_up="c1"))


@pytest.mark.parametrize(
    ("new", "is_unchanged"),
    [
        ({"pick": "a1", "runner_up": "c1"}, True),
        ({"pick": "a1", "runner_up": "c1", "other": "d2"}, True),  # which Triton 3.6.0 was not seen to compile
        ({"pick": "a1", "default": "b2", "runner_up": "c1"}, False),  # a rival may be faster now
        ({"pick": "a2", "default": "b1", "runner_up": "c1"}, False),
        ({"pick": "a1", "default": "b1"}, False),  # of the runner-up nothing is known
        ({}, False),
    ],
)
def test_a_pick_holds_for_another_triton_if_it_makes_the_same_code_of_pick_and_rivals(
    tmp_path: Path, new: dict[str, str], is_unchanged: bool
) -> None:
    with opened(tmp_path / "a.db") as store:
        swept(store)
        store.keep_programs(NEW, code(**new))
        programs, (study,) = Programs(store.programs()), read_studies(store)
        for pick in (study, pick_of(study)):
            assert programs.is_unchanged(pick, UPGRADED) == is_unchanged
            assert programs.is_unchanged(pick, H100)
            assert is_stale(pick, UPGRADED, lambda: programs) or is_unchanged
            assert is_stale(pick, replace(UPGRADED, driver="590.1"), lambda: programs)
            for values in ({"codegen": "fp_fusion=0"}, {"arch": "sm_100"}):
                assert not programs.is_unchanged(pick, replace(UPGRADED, **values))
        # Of a compiler whose assembler was replaced nothing is known but what it was seen to compile.
        store.keep_programs(replace(NEW, ptxas="13.0.1"), code(pick=new.get("pick", ""), runner_up="c2"))
        programs = Programs(store.programs())
        assert not programs.is_unchanged(study, UPGRADED)
        assert programs.code_hash(problem(), KERNEL, PICK, UPGRADED) == new.get("pick", "")
        expected = "" if "runner_up" in new else "c2"
        assert programs.code_hash(problem(), KERNEL, RUNNER_UP, UPGRADED) == expected


def test_a_sweep_stores_the_code_of_what_it_compiles_and_the_newest_counts(tmp_path: Path) -> None:
    device = replace(H100, codegen="fp_fusion=1")
    compiler = Compiler("sm_90", "3.6.0", "fp_fusion=1", "12.8.93")
    with opened(tmp_path / "a.db") as store:
        for number, code_hash in enumerate(("a1", "a1", "", "a2")):
            facts = Facts(40, 0, 4096, 0.4, code_hash=code_hash, compiler=compiler)
            store.add(begin(store, device), row(100.0, device=device, facts=facts, round=number))
            expected = {(problem(), KERNEL.source_hash, config()): {compiler: code_hash or "a1"}}
            assert store.programs() == store.programs("colwise", "sm_90") == expected
        assert store.programs("rowwise") == store.programs(arch="gfx942") == {}


def test_code_is_merged_and_read_with_shipped_results(tmp_path: Path) -> None:
    with opened(tmp_path / "shipped.db") as shipped, opened(tmp_path / "own.db") as own:
        swept(shipped)
        own.keep_programs(NEW, code(pick="a1", default="b1", runner_up="c1"))
        assert own.pools() == []  # a proof is no result
        both = Layers(own, shipped)
        (study,) = read_studies(both)
        assert Programs(both.programs()).is_unchanged(study, UPGRADED)
        expected = both.programs()
        for first, second in ((own, shipped), (shipped, own), (own, shipped)):
            first.merge(second)
            assert first.programs() == expected


OLD_TABLES = """
    DROP TABLE programs; DROP TABLE compilers;
    CREATE TABLE codes (result_id INTEGER PRIMARY KEY REFERENCES results (id) ON DELETE CASCADE, code_hash TEXT) STRICT;
    INSERT INTO codes SELECT id, '' FROM results;
    CREATE TABLE queued_sweeps (key TEXT PRIMARY KEY) STRICT;
    CREATE TABLE units (key TEXT PRIMARY KEY, sweep_key TEXT REFERENCES queued_sweeps (key)) STRICT;
    INSERT INTO queued_sweeps VALUES ('sweep'); INSERT INTO units VALUES ('unit', 'sweep');
    UPDATE meta SET value = '22' WHERE name = 'schema_version';
"""


def of_schema_22(path: Path) -> None:
    with opened(path) as store:
        finished_sweep(store, {problem(): TIMES})
        facts = Facts(40, 0, 0, 0.4)
        store.add(begin(store, GFX), row(None, device=GFX, kind=Kind.STATIC, facts=facts))
    with contextlib.closing(sqlite3.connect(path)) as raw:
        raw.executescript(OLD_TABLES)


def version_of(path: Path) -> str:
    with contextlib.closing(sqlite3.connect(path)) as raw:
        return str(raw.execute("SELECT value FROM meta WHERE name = 'schema_version'").fetchone()[0])


@pytest.mark.parametrize("options", [{}, {"writable": False}, {"create": True}])
def test_a_database_of_the_schema_before_is_brought_up_to_date(tmp_path: Path, options: dict[str, bool]) -> None:
    of_schema_22(tmp_path / "a.db")
    with opened(tmp_path / "b.db") as store:
        assert import_file(store, tmp_path / "a.db")
        assert len(store.studies()) == 2
    assert version_of(tmp_path / "a.db") == "22"
    with Store.open(str(tmp_path / "a.db"), **options) as store:
        assert store.integrity() == []
        assert store.programs() == {}
        assert [result.facts for study in store.studies(arch="gfx950") for result in study.results] == [
            Facts(40, 0, 0, 0.4)
        ]
        (study,) = read_studies(store)
        assert study.choice.pick == PICK
    with Store.open(str(tmp_path / "a.db")) as store:  # now it can hold code
        store.keep_programs(OLD, code(pick="a1"))
        assert len(store.programs()) == 1
    assert version_of(tmp_path / "a.db") == "23"


def test_a_database_that_cannot_be_brought_up_to_date_stays_as_it_was(tmp_path: Path) -> None:
    of_schema_22(tmp_path / "a.db")
    with contextlib.closing(sqlite3.connect(tmp_path / "a.db")) as raw:
        raw.executescript("DROP TABLE units; CREATE VIEW units AS SELECT 1")
    with pytest.raises(DatabaseError):
        Store.open(str(tmp_path / "a.db"))
    assert version_of(tmp_path / "a.db") == "22"


def test_a_changed_hash_is_noticed(tmp_path: Path) -> None:
    with opened(tmp_path / "a.db") as store:
        swept(store)
    with contextlib.closing(sqlite3.connect(tmp_path / "a.db")) as raw, raw:
        raw.execute("UPDATE programs SET code_hash = 'a9' WHERE code_hash = 'a1'")
    with Store.open(str(tmp_path / "a.db")) as store, pytest.raises(DatabaseError, match="programs is damaged"):
        store.programs()


def test_prune_removes_the_code_of_results_that_go_and_keeps_proofs(tmp_path: Path) -> None:
    with opened(tmp_path / "a.db") as store:
        sweep = begin(store)
        for number in range(FASTEST + 5):
            facts = Facts(code_hash=f"{number:x}", compiler=OLD)
            store.add(sweep, row(100.0 + number, config=config(number + 1), facts=facts))
        elsewhere = (KERNEL, problem(K=1408), config(999))
        fastest, slowest = ((KERNEL, problem(), config(number)) for number in (1, FASTEST + 5))
        store.keep_programs(NEW, {elsewhere: "a1", fastest: "0", slowest: "f"})
        store.prune(set())
        compilers = {launch: set(hashes) for (_, _, launch), hashes in store.programs("colwise").items()}
        assert compilers.pop(config(999)) == {NEW}
        assert compilers.pop(config(1)) == {OLD, NEW}
        assert compilers == {config(number + 1): {OLD} for number in range(1, FASTEST)}


HASHES = st.dictionaries(st.sampled_from([PICK, DEFAULT, RUNNER_UP, config(64)]), st.sampled_from("ab"))


@given(HASHES, HASHES)
def test_code_is_the_same_both_ways_and_one_changed_hash_is_enough(
    old: dict[NamedInts, str], new: dict[NamedInts, str]
) -> None:
    study = only_study(*(evidence(time_us, config=config) for config, time_us in TIMES.items()))

    def is_unchanged(now: dict[NamedInts, str], before: Device = H100, after: Device = UPGRADED) -> bool:
        known = {launch: {OLD: old[launch]} for launch in old.keys() - now.keys()}
        known |= {launch: {NEW: now[launch]} for launch in now.keys() - old.keys()}
        known |= {launch: {OLD: old[launch], NEW: now[launch]} for launch in now.keys() & old.keys()}
        programs = Programs({(problem(), KERNEL.source_hash, launch): hashes for launch, hashes in known.items()})
        return programs.is_unchanged(replace(study, device=before), after)

    shared = old.keys() & new.keys()
    assert is_unchanged(new) == is_unchanged(new, UPGRADED, H100)
    assert is_unchanged(old) == ({PICK, RUNNER_UP} <= old.keys())
    assert not is_unchanged(new) or {PICK, RUNNER_UP} <= shared
    for launch in shared:
        assert not is_unchanged(new | {launch: "c"})
