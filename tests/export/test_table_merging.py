"""What an export makes of a table that is there: no row is lost."""

from __future__ import annotations

import fcntl
import json
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from database_rows import H100, H200, config, evidence, finished_sweep, problem
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8tune.cli import main
from fp8tune.errors import UsageError
from fp8tune.export import table as exporting
from fp8tune.export.merging import Existing, Merged, existing, merge
from fp8tune.export.table import Table, render, write
from fp8tune.records import Device
from fp8tune.store.results import Store
from fp8tune_kernels import tables
from fp8tune_kernels.runtime import user_tables

SHIPPED = Path(tables.__file__).parent


def measured(*Ks: int, kernel: str = "colwise", device: Device = H100, block: int = 32) -> Table:
    """A table of one config, measured on these K."""
    rows = [
        replace(item, problem=replace(item.problem, kernel=kernel), version=replace(item.version, kernel=kernel))
        for K in Ks
        for item in [evidence(100.0, of=problem(K=K), config=config(block), device=device)]
    ]
    return render(rows, "sm_90")


def merged(path: Path, table: Table, prune: bool = False) -> Merged:
    """As ``fp8tune export`` does it."""
    found = merge(existing(path), table, prune)
    write(found.table, path)
    return found


def rows_of(path: Path) -> dict[tuple[str, str, int | None], int]:
    """(kernel, device, K) -> block, from the module; the JSON has the same rows in the same order."""
    rows = user_tables.parsed(path.read_text()).rows
    beside = json.loads(path.with_suffix(".json").read_text())["rows"]
    assert [(row[0], row[1], dict(row[2]) if row[2] else None) for row in rows] == [
        (row["kernel"], row["device"], row["key"]) for row in beside
    ]
    return {(row[0], row[1], dict(row[2] or ()).get("K")): dict(row[3])["BLOCK_SIZE"] for row in rows}


def counts(found: Merged) -> tuple[int, int, int, int]:
    return len(found.added), len(found.changed), len(found.kept), len(found.removed)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A table of one kernel, of three keys on an H100."""
    write(measured(1024, 2048, 4096), tmp_path / "sm_90.py")
    return tmp_path / "sm_90.py"


def test_kernels_that_the_database_does_not_know_keep_their_rows(path: Path) -> None:
    before = rows_of(path)
    evidence_before = json.loads(path.with_suffix(".json").read_text())["rows"]
    found = merged(path, measured(1024, kernel="toy"), prune=True)
    assert rows_of(path) == {**before, ("toy", "", 1024): 32, ("toy", "", None): 32}
    assert counts(found) == (2, 0, 4, 0)
    assert json.loads(path.with_suffix(".json").read_text())["rows"][:4] == evidence_before
    assert "# colwise: measured on NVIDIA H100 80GB HBM3\n" in path.read_text()
    again = merge(existing(path), measured(1024, kernel="toy"))
    assert not exporting.stale(again.table, path)


def test_a_row_of_a_known_kernel_goes_only_if_it_is_pruned(path: Path) -> None:
    table = measured(1024, block=64)
    found = merged(path, table)
    assert counts(found) == (0, 2, 2, 0)
    assert [dict(row[2] or ())["K"] for row in found.left] == [2048, 4096]
    assert rows_of(path)["colwise", "", 2048] == 32
    pruned = merged(path, table, prune=True)
    assert counts(pruned) == (0, 0, 2, 2)
    assert rows_of(path) == {("colwise", "", 1024): 64, ("colwise", "", None): 64}


def test_another_devices_rows_stand_beside_those_of_one_that_the_database_does_not_know(path: Path) -> None:
    found = merged(path, measured(1024, 8192, device=H200, block=64), prune=True)
    assert rows_of(path) == {
        **{("colwise", "", K): 32 for K in (1024, 2048, 4096, None)},
        ("colwise", "", 8192): 64,
        ("colwise", H200.name, 1024): 64,
        ("colwise", H200.name, None): 64,
    }
    assert counts(found) == (3, 0, 4, 0)
    merged(path, measured(2048, device=H200))
    assert ("colwise", H200.name, 2048) not in rows_of(path)  # it takes the arch's config: no row of its own


def test_rows_of_a_device_that_the_database_does_not_know_stay(path: Path) -> None:
    merged(path, measured(1024, device=H200, block=64))
    before = rows_of(path)
    found = merged(path, measured(1024, 2048, 4096), prune=True)
    assert (rows_of(path), counts(found)) == (before, (0, 0, 6, 0))


def test_how_unseen_keys_are_looked_up_stays_with_the_row_for_any_other_shape(path: Path) -> None:
    text = path.read_text()
    path.write_text(text.replace("...] = ()\n", '...] = ("colwise",)\n', 1))
    assert existing(path).nearest == ("colwise",)
    assert merge(existing(path), measured(1024, kernel="toy")).table.nearest == ("colwise",)
    assert merge(existing(path), measured(1024, device=H200, block=64)).table.nearest == ("colwise",)
    assert merge(existing(path), measured(1024, 2048)).table.nearest == ()


def test_without_its_json_a_row_stays_and_says_so(path: Path) -> None:
    path.with_suffix(".json").unlink()
    merged(path, measured(1024, kernel="toy"))
    rows = json.loads(path.with_suffix(".json").read_text())["rows"]
    assert [row["evidence"] for row in rows] == ["unknown"] * 4 + ["measured"] * 2


@pytest.mark.parametrize("text", ["", "ROWS = 1", "import os\n", "ROWS: tuple = (1,)\n", "<<<<<<< HEAD\n", "(" * 9999])
def test_a_file_that_is_no_table_is_not_overwritten(tmp_path: Path, text: str) -> None:
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(UsageError, match="is no table") as raised:
        existing(tmp_path / "mine.py")
    assert "\n" not in str(raised.value)


@given(st.lists(st.tuples(st.booleans(), st.sampled_from([1024, 2048, 4096]), st.sampled_from([32, 64])), max_size=4))
@settings(max_examples=30)
def test_whatever_is_exported_in_turn_no_row_is_lost_and_a_second_time_changes_nothing(
    exports: list[tuple[bool, int, int]],
) -> None:
    old = Existing({})
    for on_h200, K, block in exports:
        table = measured(K, device=H200 if on_h200 else H100, block=block)
        found = merge(old, table)
        assert {entry.row[:3] for entry in found.table.entries} >= set(old.entries)
        assert found.removed == ()
        new = Existing(
            {entry.row[:3]: entry for entry in found.table.entries}, found.table.nearest, found.table.comments
        )
        again = merge(new, table)
        assert (again.table.module, again.table.evidence) == (found.table.module, found.table.evidence)
        assert not again.added + again.changed + again.removed
        old = new


# The command


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of tables of a checkout, a copy of the committed ones."""
    (tmp_path / "checkout" / ".git").mkdir(parents=True)
    folder = tmp_path / "checkout" / "tables"
    shutil.copytree(SHIPPED, folder)
    monkeypatch.setattr(tables, "__file__", str(folder / "__init__.py"))
    return folder


@pytest.fixture
def toy(tmp_path: Path) -> str:
    """A database of one toy kernel, and of nothing for other arches."""
    with Store.open(str(tmp_path / "toy.db"), create=True) as store:
        finished_sweep(store, {problem(K=K): {config(32): 100.0, config(64): 120.0} for K in (1024, 2048)})
    return str(tmp_path / "toy.db")


def fp8tune(*arguments: str) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["fp8tune", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
    return int(ended.value.code or 0)


def test_a_database_of_one_kernel_takes_nothing_from_the_table(
    checkout: Path, toy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = user_tables.parsed((checkout / "sm_90.py").read_text())
    assert fp8tune("export", "--arch", "sm_90", "--db", toy) == 0
    printed = capsys.readouterr()
    after = user_tables.parsed((checkout / "sm_90.py").read_text())
    assert {row[:3] for row in after.rows} >= {row[:3] for row in before.rows}
    assert [row for row in after.rows if row[0] != "colwise"] == [row for row in before.rows if row[0] != "colwise"]
    assert set(after.nearest) >= set(before.nearest) - {"colwise"}
    assert f"written: rows {len(after.rows) - len(before.rows)} added, " in printed.out
    assert ", 0 removed" in printed.out
    assert "--prune removes them" in printed.err


def test_a_pruned_row_is_named(checkout: Path, toy: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert fp8tune("export", "--arch", "sm_90", "--db", toy, "--prune") == 0
    printed = capsys.readouterr()
    removed = [line for line in printed.err.splitlines() if "removed: colwise, " in line]
    assert f", {len(removed)} removed" in printed.out
    assert len(removed) > 10
    assert fp8tune("export", "--arch", "sm_90", "--db", toy, "--check") == 0


def test_check_finds_a_row_that_the_database_does_not_give(
    checkout: Path, toy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    fp8tune("export", "--arch", "sm_90", "--db", toy)
    assert fp8tune("export", "--arch", "sm_90", "--db", toy, "--check") == 1
    assert "stale, run fp8tune export --arch sm_90 --prune" in capsys.readouterr().out


@pytest.mark.parametrize("check", [(), ("--check",)])
def test_an_empty_result_is_refused(
    checkout: Path, toy: str, check: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    before = (checkout / "sm_100.py").read_bytes()
    assert fp8tune("export", "--arch", "sm_100", "--db", toy, *check) == 2
    assert "nothing to export for sm_100" in capsys.readouterr().err
    assert (checkout / "sm_100.py").read_bytes() == before


def test_where_it_is_installed_a_users_own_table_is_written(
    tmp_path: Path, toy: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    site = tmp_path / "checkout" / ".venv" / "lib" / "site-packages" / "fp8tune_kernels" / "tables"
    (tmp_path / "checkout" / ".git").mkdir(parents=True)
    shutil.copytree(SHIPPED, site)
    before = {file.name: file.read_bytes() for file in site.glob("*.*")}
    monkeypatch.setattr(tables, "__file__", str(site / "__init__.py"))
    monkeypatch.setenv("FP8TUNE_TABLES", str(tmp_path / "mine" / "tables"))
    assert fp8tune("export", "--arch", "sm_90", "--db", toy) == 0
    assert str(tmp_path / "mine" / "tables" / "sm_90.py") in capsys.readouterr().out
    own = user_tables.parsed((tmp_path / "mine" / "tables" / "sm_90.py").read_text())
    assert {row[0] for row in own.rows} == {"colwise"}
    assert {file.name: file.read_bytes() for file in site.glob("*.*")} == before
    assert fp8tune("export", "--arch", "sm_90", "--db", toy, "--check") == 0
    monkeypatch.setenv("FP8TUNE_TABLES", "")
    assert fp8tune("export", "--arch", "sm_90", "--db", toy) == 2
    assert "FP8TUNE_TABLES is empty" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("place", "found"),
    [
        ("kernels/fp8tune_kernels/tables", True),
        (".venv/lib/python3.12/site-packages/fp8tune_kernels/tables", False),
        ("usr/lib/python3/dist-packages/fp8tune_kernels/tables", False),
    ],
)
def test_a_checkout_is_a_work_tree_and_no_installation(tmp_path: Path, place: str, found: bool) -> None:
    (tmp_path / place).mkdir(parents=True)
    assert not exporting.in_checkout(tmp_path / place)
    (tmp_path / ".git").write_text("gitdir: elsewhere\n")  # as a further work tree has it
    assert exporting.in_checkout(tmp_path / place) is found


# Temporary files


@contextmanager
def full_disk(room: int) -> Iterator[None]:
    """No file grows past so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("room", [0, 1500])  # for nothing; for the module, but not for the JSON
def test_a_full_disk_leaves_the_table_as_it_was_and_nothing_beside_it(path: Path, room: int) -> None:
    before = {file: file.read_bytes() for file in path.parent.iterdir()}
    table = measured(1024, block=64)
    assert len(table.module) < 1500 < len(table.evidence)
    with full_disk(room), pytest.raises(UsageError, match="cannot be written"):
        write(table, path)
    assert {file: file.read_bytes() for file in path.parent.iterdir()} == before


def test_the_next_export_removes_what_a_killed_one_left(path: Path) -> None:
    left, others, in_use = (
        path.parent / name for name in (".sm_90.py.ab_cd01x", ".sm_90.py.swp", ".sm_90.json.abcdefgh")
    )
    for file in (left, others, in_use):
        file.write_text("half a tab")
    with in_use.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # by an export that runs
        write(measured(1024, block=64), path)
    assert not left.exists()
    assert others.exists()
    assert in_use.exists()
    write(measured(1024, block=128), path)
    assert not in_use.exists()


def test_the_committed_tables_are_read_back_as_they_are() -> None:
    for arch in ("sm_90", "sm_100", "gfx942", "gfx950", "gfx90a"):
        path = SHIPPED / f"{arch}.py"
        found = existing(path)
        again = exporting.made_of(arch, found.entries.values(), found.nearest, found.comments or {})
        assert (again.module, again.evidence) == (path.read_text(), path.with_suffix(".json").read_text())
