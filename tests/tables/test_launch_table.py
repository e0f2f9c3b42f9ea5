from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from any_text import any_text
from database_rows import (
    H100,
    begin,
    config,
    evidence,
    finished_sweep,
    installed,
    problem,
    row,
    studies_of,
    subject,
)
from hypothesis import example, given
from hypothesis import strategies as st

from fp8tune.errors import DatabaseError, UsageError
from fp8tune.exporting import select_rows, shipped_tables
from fp8tune.records import FinalsRun, Problem, ProcessTimes
from fp8tune.stats.study import Study
from fp8tune.store.results import Store
from fp8tune.studies import installed_hash
from fp8tune.tables.current import NO_TABLES, CurrentTables
from fp8tune.tables.launch_table import Entry, LaunchTable, default_path, parse, shipped_path
from fp8tune.tables.merge import merge_file
from fp8tune.tables.select import Selection, select
from fp8tune_kernels import tables
from fp8tune_kernels.arches import ARCHES
from fp8tune_kernels.runtime import user_tables

KEY = (("G", 64), ("K", 5120))
CONFIG = (("BLOCK_SIZE", 32), ("num_warps", 4))
BLOCKS = (32, 64, 128)


def selection(rows: list[Study], current: CurrentTables = NO_TABLES) -> Selection:
    return select(studies_of(rows, current), [], "sm_90", current)


def run(text: str) -> ModuleType:
    """The module of a text, which can call nothing."""
    module = ModuleType("generated")
    vars(module)["__builtins__"] = {"tuple": tuple, "str": str, "int": int}
    exec(compile(text, "generated", "exec"), vars(module))
    return module


def test_a_module_holds_the_rows_and_where_they_come_from() -> None:
    entries = (Entry("colwise", "", KEY, CONFIG, ("NVIDIA H100",)), Entry("colwise", "", None, CONFIG))
    text = LaunchTable("sm_90", entries, frozenset({"colwise"})).render()
    module = run(text)
    assert module.ROWS == (("colwise", "", KEY, CONFIG, 1), ("colwise", "", None, CONFIG, 0))
    assert (module.ORIGINS, module.NEAREST) == (((), ("NVIDIA H100",)), ("colwise",))
    assert parse(text, "sm_90") == LaunchTable("sm_90", entries, frozenset({"colwise"}))
    assert run(LaunchTable("sm_90").render()).ROWS == ()


@pytest.mark.parametrize(("arch", "triton"), [(arch, at) for arch in ARCHES for at in ("", *tables.versions(arch))])
def test_the_committed_tables_are_read_back_as_they_are(arch: str, triton: str) -> None:
    if (path := shipped_path(arch, triton)).exists():
        text = path.read_text()
        assert replace(parse(text, arch), triton=triton).render() == text


ONE_ROW = LaunchTable("sm_90", (Entry("colwise", "", KEY, CONFIG, code="0123456789abcdef"),))


def test_shipped_rows_were_measured_with_the_code_that_is_shipped() -> None:
    """A kernel that is edited is swept again, or its hash is migrated, before its rows are shipped."""
    for triton in ("", *tables.versions("sm_90")):
        codes: dict[str, set[str]] = {}
        for entry in parse(shipped_path("sm_90", triton).read_text(), "sm_90").entries:
            codes.setdefault(entry.kernel, set()).add(entry.code)
        assert [kernel for kernel, known in codes.items() if installed_hash(kernel) not in known] == []


def test_each_flipped_bit_of_a_table_is_noticed() -> None:
    data = ONE_ROW.render().encode()
    known = user_tables.parsed(data.decode())
    places = [(at, bit) for at in range(data.index(b"CHECKSUM: str"), len(data)) for bit in range(8)]
    for at, bit in random.Random(1).sample(places, 400):
        text = (data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]).decode(errors="replace")
        try:  # the name of the checksum may be lost, and no row
            same = user_tables.parsed(text)
        except ValueError:
            continue
        assert (same, same.codes) == (known, known.codes)


def test_each_triton_that_was_measured_has_a_file_with_the_keys_that_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "__file__", str(tmp_path / "__init__.py"))
    same, moved, new = problem(K=1024), problem(K=2048), problem(K=4096)

    def measured(store: Store, triton: str, fastest: Mapping[Problem, int]) -> None:
        times_us = {
            size: {config(block): 80.0 if block == best else 100.0 for block in BLOCKS}
            for size, best in fastest.items()
        }
        finished_sweep(store, times_us, replace(H100, triton=triton), request=triton)

    def exported() -> dict[str, set[tuple[int | None, int]]]:
        files = {}
        for path, chosen in shipped_tables(store, "sm_90"):
            table = merge_file(path, chosen)[0].table
            assert path.read_text() == table.render()
            rows = {(dict(entry.key or ()).get("K"), dict(entry.config)["BLOCK_SIZE"]) for entry in table.entries}
            files[path.name] = rows
        return files

    with Store.open(str(tmp_path / "results.db"), create=True) as store:
        measured(store, "3.6.0", {same: 32, moved: 32})
        older = {(1024, 32), (2048, 32), (None, 32)}
        assert exported() == {"sm_90.py": older}
        measured(store, "3.10.0", {same: 32, moved: 64, new: 128})
        newer = {(2048, 64), (4096, 128), (None, 32)}
        assert exported() == {"sm_90.py": older, "sm_90_triton_3_10.py": newer}
        assert exported() == {"sm_90.py": older, "sm_90_triton_3_10.py": newer}
        measured(store, "3.9.0", {moved: 128})
        assert exported()["sm_90_triton_3_9.py"] == {(2048, 128), (None, 32)}
        assert exported()["sm_90_triton_3_10.py"] == newer


@pytest.mark.parametrize("place", range(40))
def test_a_table_that_is_cut_is_refused(place: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    whole = shipped_path("gfx942").read_text()
    lines = [match + 1 for match in range(len(whole)) if whole.startswith("\n", match)][:-1]
    draw = random.Random(place)
    end = (0, len(whole) - 3, draw.choice(lines), draw.randrange(len(whole) - 2))[place if place < 2 else 2 + place % 2]
    (tmp_path / "gfx942.py").write_text(whole[:end])
    monkeypatch.setenv("FP8TUNE_TABLES", str(tmp_path))
    user_tables.user_table.cache_clear()
    with pytest.raises(ValueError, match="is no table"):
        user_tables.user_table("gfx942")
    user_tables.user_table.cache_clear()
    with pytest.raises((SyntaxError, AttributeError, NameError)):  # as the shipped table is imported
        _ = (module := run(whole[:end])).ROWS, module.NEAREST
    with pytest.raises(UsageError, match="is no table"):
        merge_file(tmp_path / "gfx942.py", Selection(LaunchTable("gfx942")))


def test_any_order_of_insertion_gives_the_same_bytes(tmp_path: Path, postgresql_url: str) -> None:
    """In two files and on a server."""
    sizes = [
        problem(K=K, G=G, routing=routing) for K in (1024, 5120) for G in (4, 64) for routing in ("jagged", "zipf")
    ]
    trials = [(size, config(block), 100.0 + block) for size in sizes for block in (32, 64)]
    texts = set()
    for number, database in enumerate((tmp_path / "0.db", tmp_path / "1.db", postgresql_url)):
        random.Random(number).shuffle(trials)
        with Store.open(str(database), create=True) as store:
            sweep = begin(store)
            store.add_many(sweep, [row(time_us, size=size, config=name) for size, name, time_us in trials])
            for size in sizes:
                store.mark_complete(sweep, subject(size), 2)
            texts.add(select_rows(store, "sm_90").table.render())
    assert len(texts) == 1


def measured(times_us: dict[int, tuple[float, ...]], draw: random.Random, has_finals: bool) -> list[Study]:
    """K -> the times of blocks 32, 64 and 128; every process agrees on a time, the next sweep has another factor."""
    session = FinalsRun("a sweep", tie_band=0.01, keep_band=0.015)
    rows = []
    for K, times in times_us.items():
        for block, true_us in zip((32, 64, 128), times, strict=True):
            time_us = true_us * draw.uniform(0.9991, 1.0009)
            visits = tuple(ProcessTimes(session, f"final {n:02d}", ((0, time_us), (1, time_us))) for n in range(4))
            finals = visits if has_finals else ()
            rows.append(evidence(*[time_us] * 4, size=problem(K=K), config=config(block), finals=finals))
    return rows


near = st.floats(100.0, 108.0)
timed = st.dictionaries(st.sampled_from([512, 1024, 2048, 4096, 8192]), st.tuples(near, near, near), min_size=1)


@given(st.booleans(), timed, st.integers(0, 2**32))
@example(True, {512: (100.0, 100.0, 103.0), 1024: (100.0, 105.0, 102.0), 2048: (105.0, 100.0, 105.0)}, 0)
def test_a_table_keeps_its_rows_while_times_move_by_less_than_the_bands(has_finals, times_us, seed) -> None:
    """From scratch a pick is within 1 % of the best, and it stays within 1.5 %.

    The rule for unseen keys rests on what others chose, which is no such promise.
    """
    draw = random.Random(seed)
    first = selection(measured(times_us, draw, has_finals)).table
    current = installed(*(entry.row for entry in first.entries), nearest=tuple(first.nearest))
    again = selection(measured(times_us, draw, has_finals), current).table
    assert {entry.row for entry in again.entries} == {entry.row for entry in first.entries}


@pytest.mark.parametrize("arch", ["../x", "/etc/passwd", "", ".", "sm_90/../x", "sm_90\n", "SM_90", "a" * 99])
def test_an_arch_that_is_no_name_makes_no_path(arch: str) -> None:
    for path in (shipped_path, default_path):
        with pytest.raises(UsageError, match=r"has no table[^\n]*\Z"):
            path(arch)


@pytest.mark.parametrize(
    ("place", "is_own"),
    [
        ("kernels/fp8tune_kernels/tables", False),
        (".venv/lib/python3.12/site-packages/fp8tune_kernels/tables", True),
        ("usr/lib/python3/dist-packages/fp8tune_kernels/tables", True),
    ],
)
def test_a_checkout_is_a_work_tree_and_no_installation(
    tmp_path: Path, place: str, is_own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "__file__", str(tmp_path / place / "__init__.py"))
    monkeypatch.setenv("FP8TUNE_TABLES", str(tmp_path / "own"))
    monkeypatch.chdir(tmp_path)  # from outside, an export leaves the checkout alone
    assert default_path("sm_90").parent == tmp_path / "own"
    (tmp_path / ".git").write_text("gitdir: elsewhere\n")  # as a further work tree has it
    assert default_path("sm_90").parent == tmp_path / ("own" if is_own else place)


names = st.sampled_from(["K", "num_warps", "BLOCK_SIZE", "a b"]) | any_text(max_size=8)
numbers = st.integers(0, 2**63 - 1) | st.integers() | st.sampled_from([-1, 2**63, 1.5, "1", True, None])
items = st.dictionaries(names, numbers, max_size=3).map(lambda values: tuple(sorted(values.items())))
texts = st.sampled_from(["", "colwise", '", __import__("os"), "', "\\", "${x}", "é", "\u202e", "a\nb"]) | any_text(
    max_size=12
)


@given(items, items, texts, texts, texts)
@example((), (("BLOCK_SIZE", -1),), "colwise", "", "")
@example((), (("BLOCK_SIZE", True),), "colwise", "", "")
def test_any_row_reads_back_or_is_refused(key, launch, kernel, device, origin) -> None:
    entry = Entry(kernel, device, key, launch, (origin,))
    try:
        text = LaunchTable("sm_90", (entry,), frozenset({kernel})).render()
    except DatabaseError as error:
        assert "\n" not in str(error)
        return
    module = run(text)
    assert ((*entry.row, 0),) == module.ROWS
    assert ((kernel,), ((origin,),)) == (module.NEAREST, module.ORIGINS)
    assert all(type(value) is int and 0 <= value < 2**63 for _, value in (*key, *launch))
