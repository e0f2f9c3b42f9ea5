"""Merging into a table that is there: no row is lost, and two exports never mix."""

from __future__ import annotations

import multiprocessing
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import fp8tune
from database_rows import H100, H200, config, evidence, finished_sweep, problem, studies_of
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8tune.errors import UsageError
from fp8tune.records import Device
from fp8tune.store.results import Store
from fp8tune.tables.launch_table import LaunchTable, parse
from fp8tune.tables.merge import Merged, merge, merge_file
from fp8tune.tables.select import Selection, select
from fp8tune_kernels import tables
from fp8tune_kernels.runtime import user_tables

SHIPPED = Path(tables.__file__).parent


def measured(*Ks: int, kernel: str = "colwise", device: Device = H100, block: int = 32) -> Selection:
    """A table of one config, measured on these K."""
    rows = [
        replace(item, problem=replace(item.problem, kernel=kernel), version=replace(item.version, kernel=kernel))
        for K in Ks
        for item in [evidence(100.0, size=problem(K=K), config=config(block), device=device)]
    ]
    return select(studies_of(rows), [], "sm_90")


def blocks(path: Path) -> dict[tuple[str, str, int | None], int]:
    """(kernel, device, K) -> block size of each row in a module."""
    rows = user_tables.parsed(path.read_text()).rows
    return {(row[0], row[1], dict(row[2] or ()).get("K")): dict(row[3])["BLOCK_SIZE"] for row in rows}


def counts(merged: Merged) -> tuple[int, int, int]:
    return len(merged.added), len(merged.changed), len(merged.unchanged)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A table of one kernel, of three keys on an H100."""
    merge_file(tmp_path / "sm_90.py", measured(1024, 2048, 4096))
    return tmp_path / "sm_90.py"


def test_kernels_that_the_database_does_not_know_keep_their_rows(path: Path) -> None:
    before = blocks(path)
    merged, is_changed = merge_file(path, measured(1024, kernel="toy"))
    assert (is_changed, counts(merged)) == (True, (2, 0, 4))
    assert blocks(path) == {**before, ("toy", "", 1024): 32, ("toy", "", None): 32}
    assert parse(path.read_text(), "sm_90").entries[0].origins == (H100.name,)
    assert not merge_file(path, measured(1024, kernel="toy"))[1]


def test_a_row_that_was_not_selected_again_stays(path: Path) -> None:
    assert counts(merge_file(path, measured(1024, block=64))[0]) == (0, 2, 2)
    assert blocks(path) == {("colwise", "", K): {1024: 64, None: 64}.get(K, 32) for K in (1024, 2048, 4096, None)}


def test_a_row_rests_on_its_device_in_the_module_alone(path: Path) -> None:
    """Another device's results become rows of its own, instead of overwriting rows that it did not measure."""
    merged, _ = merge_file(path, measured(1024, 8192, device=H200, block=64))
    own = {("colwise", "", 8192): 64, ("colwise", H200.name, 1024): 64, ("colwise", H200.name, None): 64}
    assert blocks(path) == {("colwise", "", K): 32 for K in (1024, 2048, 4096, None)} | own
    assert counts(merged) == (3, 0, 4)
    merge_file(path, measured(2048, device=H200))
    assert ("colwise", H200.name, 2048) not in blocks(path)  # it takes the shared config: no row of its own


def test_rows_that_nobody_measured_stay(path: Path) -> None:
    table = parse(path.read_text(), "sm_90")
    path.write_text(replace(table, entries=tuple(entry._replace(origins=()) for entry in table.entries)).render())
    assert counts(merge_file(path, measured(8192))[0]) == (1, 0, 4)


def test_the_rule_for_near_keys_stays_with_the_fallback_row(path: Path) -> None:
    old = replace(parse(path.read_text(), "sm_90"), nearest=frozenset({"colwise"}))
    assert merge(old, measured(1024, kernel="toy")).table.nearest == {"colwise"}
    assert merge(old, measured(1024, device=H200, block=64)).table.nearest == {"colwise"}
    assert merge(old, measured(1024, 2048)).table.nearest == frozenset()
    toy = measured(1024, kernel="toy")
    toy = replace(toy, table=replace(toy.table, nearest=frozenset({"toy"})))
    for entries in (toy.table.entries, toy.table.entries[:1]):  # with and without a row for other keys
        selected = replace(toy, table=replace(toy.table, entries=entries))
        assert merge(old, selected).table.nearest == {"colwise", "toy"}


@pytest.mark.parametrize("text", ["", "ROWS = 1", "import os\n", "ROWS: tuple = (1,)\n", "<<<<<<< HEAD\n", "(" * 9999])
def test_a_file_that_is_no_table_is_not_overwritten(tmp_path: Path, text: str) -> None:
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(UsageError, match=r"is no table[^\n]*\Z"):
        merge_file(tmp_path / "mine.py", measured(1024))
    assert (tmp_path / "mine.py").read_text() == text


@given(st.lists(st.tuples(st.booleans(), st.sampled_from([1024, 2048, 4096]), st.sampled_from([32, 64])), max_size=4))
@settings(max_examples=30)
def test_exports_in_turn_lose_no_row_and_a_second_time_change_nothing(exports: list[tuple[bool, int, int]]) -> None:
    old = LaunchTable("sm_90")
    for is_h200, K, block in exports:
        selection = measured(K, device=H200 if is_h200 else H100, block=block)
        merged = merge(old, selection)
        assert {entry[:3] for entry in merged.table.entries} >= {entry[:3] for entry in old.entries}
        again = merge(merged.table, selection)
        assert again.table.render() == merged.table.render()
        assert not again.added + again.changed
        old = merged.table


def export_repeatedly(path: Path, kernel: str) -> None:
    selections = [measured(1024 * place, kernel=kernel, block=32 * place) for place in (1, 2, 4)]
    for number in range(80):
        merge_file(path, selections[number % 3])


def test_two_exports_at_once_never_fail_and_never_mix(tmp_path: Path) -> None:
    """160 exports: each whole table that a reader sees has the rows of both, as far as they were exported."""
    path = tmp_path / "sm_90.py"
    merge_file(path, measured(512, kernel="first"))
    fork = multiprocessing.get_context("fork")
    writers = [fork.Process(target=export_repeatedly, args=(path, kernel)) for kernel in ("a", "b")]
    for writer in writers:
        writer.start()
    seen: set[tuple[str, str, int | None]] = set()
    while any(writer.is_alive() for writer in writers):
        rows = blocks(path)  # raises for a part of a table
        assert rows.keys() >= seen
        seen = set(rows)
    assert [writer.join() or writer.exitcode for writer in writers] == [0, 0]
    exported = {(kernel, "", K) for kernel in ("a", "b") for K in (1024, 2048, 4096, None)}
    assert blocks(path).keys() == exported | {("first", "", 512), ("first", "", None)}
    assert [file.name for file in tmp_path.iterdir()] == ["sm_90.py"]


# The command


@pytest.fixture
def toy(tmp_path: Path) -> tuple[str, ...]:
    """The command that exports a database of one toy kernel for sm_90."""
    with Store.open(str(tmp_path / "toy.db"), create=True) as store:
        finished_sweep(store, {problem(K=K): {config(32): 100.0, config(64): 120.0} for K in (1024, 2048)})
    return ("export", "--arch", "sm_90", "--db", str(tmp_path / "toy.db"), "--allow-quick")


def installed_at(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copy the committed tables to a folder below a checkout, from which kernels then read them."""
    shutil.copytree(SHIPPED, folder)
    monkeypatch.setattr(tables, "__file__", str(folder / "__init__.py"))
    return folder


def test_a_database_of_one_kernel_takes_nothing_from_the_table(
    tmp_path: Path, toy: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".git").mkdir()
    folder = installed_at(tmp_path / "tables", monkeypatch)
    monkeypatch.chdir(tmp_path)
    before = user_tables.parsed((folder / "sm_90.py").read_text())
    ended = fp8tune(*toy)
    after = user_tables.parsed((folder / "sm_90.py").read_text())
    assert {row[:3] for row in after.rows} >= {row[:3] for row in before.rows}
    assert [row for row in after.rows if row[0] != "colwise"] == [row for row in before.rows if row[0] != "colwise"]
    assert set(after.nearest) >= set(before.nearest) - {"colwise"}
    assert f"written: {len(after.rows) - len(before.rows)} rows added, " in ended.stdout
    assert fp8tune(*toy, "--check").returncode == 0
    text = (folder / "gfx942.py").read_bytes()
    for check in ((), ("--check",)):
        ended = fp8tune(*toy, "--arch", "gfx942", *check)
        assert (ended.returncode, "nothing to export for gfx942" in ended.stderr) == (2, True)
    assert (folder / "gfx942.py").read_bytes() == text


def test_an_installed_fp8tune_writes_the_users_own_table(
    tmp_path: Path, toy: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".git").mkdir()
    site = installed_at(tmp_path / ".venv/lib/site-packages/fp8tune_kernels/tables", monkeypatch)
    before = {file.name: file.read_bytes() for file in site.glob("*.*")}
    monkeypatch.setenv("FP8TUNE_TABLES", str(tmp_path / "mine" / "tables"))
    own = tmp_path / "mine" / "tables" / "sm_90.py"
    assert str(own) in fp8tune(*toy).stdout
    assert {row[0] for row in user_tables.parsed(own.read_text()).rows} == {"colwise"}
    assert {file.name: file.read_bytes() for file in site.glob("*.*")} == before
    assert fp8tune(*toy, "--check").returncode == 0
    monkeypatch.setenv("FP8TUNE_TABLES", "")
    assert "FP8TUNE_TABLES is empty" in fp8tune(*toy).stderr
