"""Findings of ``doctor`` on machines and in databases: one line, and a fix unless it is ok."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import fp8tune
from database_rows import H100, begin, config, end_finals, finished_sweep, problem, row

from fp8tune.check import databases, gpus, machine
from fp8tune.check.findings import Finding, Level
from fp8tune.measure import device
from fp8tune.records import ClockLimits, Telemetry
from fp8tune.revisions import source
from fp8tune.store.results import Store
from fp8tune.studies import installed_hash
from fp8tune.sweeping import picks
from fp8tune.tables.launch_table import Entry, LaunchTable

CALM = Telemetry(1980, 2619, 40, 120.0, 0)


def texts(findings: Iterable[Finding], level: Level) -> str:
    findings = list(findings)
    for finding in findings:
        assert bool(finding.fix) == (finding.level is not Level.OK), finding
        assert "\n" not in finding.text + finding.fix
    return "; ".join(f"{finding.text} -> {finding.fix}" for finding in findings if finding.level is level)


# The machine


def test_a_healthy_machine_has_nothing_to_repair() -> None:
    findings = [
        *machine.check_gpu(H100, "2.11.0", "3.6.0"),
        *machine.check_versions("2.11.0+cu130", "3.6.0", "2.3.5", "3.6.0"),
        *machine.check_clocks(H100, CALM, 0),
    ]
    assert {finding.level for finding in findings} == {Level.OK}
    assert "NVIDIA H100 80GB HBM3 (sm_90), driver 580.1; torch 2.11.0, Triton 3.6.0" in texts(findings, Level.OK)


@pytest.mark.parametrize(
    ("findings", "level", "message"),
    [
        (machine.check_gpu(None, "2.11", "3.6"), Level.WARNING, "no GPU is visible"),
        (machine.check_gpu(replace(H100, arch="sm_70"), "2.11", "3.6"), Level.ERROR, "add sm_70 to"),
        (machine.check_gpu(replace(H100, runtime=""), "2.11", "3.6"), Level.ERROR, "built without GPU support"),
        (machine.check_versions("2.11", "3.5.1", "2.3"), Level.ERROR, "Triton 3.5.1 is not supported"),
        (machine.check_versions("2.11", "3.10.0", "2.3"), Level.ERROR, "Triton 3.10.0 is not supported"),
        (machine.check_versions("2.9.1", "3.6.0", "2.3"), Level.ERROR, "older than 2.11"),
        (machine.check_versions("2.11", "3.9.0", "2.3", "3.6.0"), Level.WARNING, "pip install triton==3.6.0"),
        (machine.check_versions("", "3.6.0", "2.3"), Level.ERROR, "torch is not installed"),
        (machine.check_versions("2.11", "3.6.0", "2.4.0"), Level.ERROR, "numpy<2.4"),
        (machine.check_clocks(H100, Telemetry(), 0), Level.WARNING, "cannot be read"),
        (machine.check_clocks(H100, replace(CALM, throttle_reasons=0x64), 0), Level.WARNING, "hardware thermal"),
        (machine.check_clocks(H100, CALM, 2), Level.WARNING, "2 other processes use this GPU"),
    ],
)
def test_each_fault_of_a_machine_is_found(findings: Iterable[Finding], level: Level, message: str) -> None:
    assert message in texts(findings, level)


def test_gpus_beside_the_first_are_checked() -> None:
    usual, hot = ClockLimits(1980, 2619, 700.0), replace(CALM, throttle_reasons=0x40)
    alike = {"0": (hot, usual), "1": (CALM, usual), "2": (CALM, ClockLimits())}
    assert [*machine.check_others("sm_90", alike), *machine.check_others("sm_90", {})] == []
    states = alike | {"3": (hot, usual), "5": (CALM, replace(usual, power_limit_w=500.0))}
    warnings = texts(machine.check_others("sm_90", states), Level.WARNING)
    assert "GPU 3 is slowed down: hardware thermal" in warnings
    assert "power limit of GPU 0 is 700 W, of GPU 5 500 W" in warnings


def test_no_compiler_and_no_folder_to_compile_in_are_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file" / "cache"))
    errors = texts(machine.check_compiling(), Level.ERROR)
    assert "no C compiler no-such-compiler: Triton cannot launch kernels -> install gcc or clang, or set CC" in errors
    assert "TRITON_CACHE_DIR" in errors


# Databases


@pytest.fixture
def path(tmp_path: Path) -> str:
    """A database with a finished sweep of one size."""
    path = str(tmp_path / "results.db")
    with Store.open(path, create=True) as store:
        finished_sweep(store, {problem(): {config(32): 100.0, config(64): 110.0}})
    return path


def checked(db: object, level: Level, **options: bool) -> str:
    return texts(databases.check_database(str(db), H100, **options), level)


def test_a_sound_database_is_counted(path: str) -> None:
    assert f"{path}: 1 picks" in checked(path, Level.OK)
    assert checked(path, Level.ERROR) == ""


def test_damage_is_an_error_that_says_how_to_restore(path: str, tmp_path: Path) -> None:
    whole = Path(path).read_bytes()
    for name, damage in {
        "cut": whole[: len(whole) // 2],
        "overwritten": whole[:100] + b"\xff" * 8000 + whole[8100:],
        "text": b"no database",
    }.items():
        damaged = tmp_path / f"{name}.db"
        damaged.write_bytes(damage)
        errors = checked(damaged, Level.ERROR)
        assert f"mv {damaged} {damaged}.damaged" in errors, name
        assert "fp8tune db import" in errors


def test_a_row_that_was_changed_behind_its_checksum_is_damage(path: str) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE results SET crc = crc + 1")
    assert "is damaged" in checked(path, Level.ERROR)


def test_what_was_not_finished_and_what_cannot_be_written_are_named(path: str, tmp_path: Path) -> None:
    with Store.open(path) as store:
        begin(store, request="another")
    assert "run the same command again" in checked(path, Level.WARNING)
    assert "run the same command again" not in checked(path, Level.WARNING, is_shipped=True)
    assert "your first sweep makes it" in checked(tmp_path / "new.db", Level.OK)
    assert "cannot be made" in checked(tmp_path / "none" / "new.db", Level.WARNING)


def test_picks_of_this_gpu_are_stale_after_an_upgrade(path: str) -> None:
    with Store.open(path, writable=False) as store:
        (pick,) = picks.read(store)
    assert pick.version is not None
    version = replace(pick.version, source_hash=source.source_hash("colwise"))
    known, changed = [replace(pick, version=version)], [pick]
    assert [*databases.check_stale(known, H100)] == []
    assert [*databases.check_stale(known, replace(H100, name="NVIDIA H200", triton="3.9.0"))] == []
    assert [*databases.check_stale(known, None)] == []
    upgraded = texts(databases.check_stale(known, replace(H100, triton="3.9.0"), " --db x.db"), Level.WARNING)
    text = "1 pick of colwise is stale: timed with Triton 3.6.0, you have 3.9.0"
    assert upgraded == f"{text} -> fp8tune sweep --kernel colwise --db x.db"
    assert "its code has changed since" in texts(databases.check_stale(changed, H100), Level.WARNING)


def store_finals(store: Store, gpu: str, processes_us: Sequence[float]) -> None:
    """Store a sweep whose finals took so long in each process; block size 64 takes twice as long."""
    device = replace(H100, uuid_hash=gpu * 16)
    finished_sweep(store, {problem(): {config(32): 100.0, config(64): 200.0}}, device, request=gpu)
    sweep = begin(store, device, request=gpu)
    for process, time_us in enumerate(processes_us):
        for block, factor in ((32, 1), (64, 2)):
            options = {"config": config(block), "device": device, "process": f"final {process:02d}", "stage": "final"}
            store.add(sweep, row(time_us * factor, **options))
    end_finals(store, sweep, device=device)


def test_a_gpu_that_is_slower_than_others_of_its_name_is_found(tmp_path: Path) -> None:
    with Store.open(str(tmp_path / "equal.db"), create=True) as store:
        store_finals(store, "a", [100.0, 100.2, 99.8])
        assert [*gpus.check_gpus(store)] == []
        store_finals(store, "b", [100.4, 100.6, 100.2])
        (equal,) = gpus.agreements(store)
        assert (equal.agreeing, len(equal.spreads), equal.losses, equal.is_proven) == (2, 2, (0.0,), False)
        store_finals(store, "c", [103.0, 103.2, 102.8])
        (slow,) = gpus.agreements(store)
    assert [name[0] for name in slow.slowdowns] == ["a", "b", "c"]
    assert slow.slowdowns["c" * 16] == pytest.approx(0.03, abs=1e-3)
    assert slow.spreads == pytest.approx([0.03, 0.03])
    assert (slow.agreeing, slow.is_proven) == (0, True)
    assert "3 GPUs named NVIDIA H100 80GB HBM3: cccc is 3.0% slower" in checked(tmp_path / "equal.db", Level.WARNING)


def test_noise_of_processes_is_no_slow_gpu(tmp_path: Path) -> None:
    with Store.open(str(tmp_path / "noise.db"), create=True) as store:
        store_finals(store, "a", [100.0, 96.0, 100.0])
        store_finals(store, "b", [103.0, 103.0, 97.0])
        (finding,) = gpus.check_gpus(store)
    assert finding.level is Level.OK
    assert "slower" in finding.text


def test_a_table_that_an_export_would_change_is_out_of_date(path: str, tmp_path: Path) -> None:
    table, confirmed = tmp_path / "sm_90.py", str(tmp_path / "confirmed.db")
    with Store.open(path, writable=False) as store:
        assert [*databases.check_tables(store, path, lambda arch: table)] == []  # quick picks are left out
    with Store.open(confirmed, create=True) as store:
        store_finals(store, "a", [100.0, 100.2, 99.8])
        findings = [*databases.check_tables(store, confirmed, lambda arch: table)]
    assert "sm_90.py is out of date -> fp8tune export --arch sm_90 --db" in texts(findings, Level.WARNING)


# The command


def test_errors_come_first_and_give_exit_code_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(device, "probe", lambda: None)
    (tmp_path / "text.db").write_text("no database")
    result = fp8tune("doctor", "--db", "text.db", cwd=tmp_path)
    assert result.returncode == 1
    lines = result.stdout.splitlines()
    assert lines[0].startswith("error    text.db is not a database")
    assert lines[1].startswith("         -> mv text.db text.db.damaged")
    assert max(map(len, lines)) <= 80
    document = json.loads(fp8tune("doctor", "--db", "text.db", "--format", "json", cwd=tmp_path).stdout)
    assert [item["level"] for item in document["findings"]][:2] == ["error", "warning"]
    assert fp8tune("doctor", cwd=tmp_path).returncode == 0


def test_passwords_are_not_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP8TUNE_DB", "postgresql://me:secret@127.0.0.1:1/none")
    result = fp8tune("doctor", cwd=tmp_path)
    assert result.returncode == 1
    assert "secret" not in result.stdout + result.stderr


def test_own_tables_that_are_damaged_or_older_than_their_kernels_are_found(tmp_path: Path) -> None:
    rows = [
        Entry("colwise", "", None, (("num_warps", 4),), code=code) for code in (installed_hash("colwise"), "0" * 16)
    ]
    for name, entry in zip(("sm_90", "sm_100"), rows, strict=True):
        (tmp_path / f"{name}.py").write_text(LaunchTable(name, (entry,)).render())
    (tmp_path / "gfx942.py").write_text(LaunchTable("gfx942", (rows[0],)).render().replace("num_warps", "num_wraps"))
    damaged, changed = databases.check_own_tables(tmp_path)
    assert (damaged.level, changed.level) == (Level.ERROR, Level.WARNING)
    assert "gfx942.py" in damaged.text
    assert "sm_100.py: colwise has changed" in changed.text
    assert list(databases.check_own_tables(None)) == []
