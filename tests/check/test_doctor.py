"""What doctor finds on planted machines and in planted databases; every finding that is not ok says what to do."""

from __future__ import annotations

import json
import random
import sqlite3
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import fp8tune

from fp8tune.check import doctor, machine, stored, tables
from fp8tune.check.doctor import Versions, timed_sources
from fp8tune.check.finding import Finding, Level
from fp8tune.check.machine import Machine
from fp8tune.exporting import select_rows
from fp8tune.measure.device import Software
from fp8tune.records import Device, KernelVersion, Kind, NamedInts, Outcome, Problem, Row, Status, Subject, Telemetry
from fp8tune.render.documents import DOCUMENTS
from fp8tune.store import location
from fp8tune.store.results import Store
from fp8tune_kernels.catalog import KERNELS

H100 = Device("sm_90", "NVIDIA H100", "1" * 16, 132, "580.95", "cuda 13.0", "2.11.0+cu130", "3.6.0")
SOFTWARE = Software("2.11.0+cu130", "3.6.0", "cuda 13.0")
WELL = Machine(H100, SOFTWARE, "2.3.5", "3.6.0", Telemetry(1980, 2619, 40, 120.0, 0), 0)


def told(findings: Iterable[Finding], level: Level) -> str:
    findings = list(findings)
    assert all(finding.fix for finding in findings if finding.level is not Level.OK)
    assert all("\n" not in finding.what + finding.fix for finding in findings)
    return "; ".join(f"{finding.what} -> {finding.fix}" for finding in findings if finding.level is level)


def test_a_well_machine_has_nothing_to_mend() -> None:
    findings = machine.check(WELL)
    assert {finding.level for finding in findings} == {Level.OK}
    assert any("NVIDIA H100 (sm_90), 132 multiprocessors, driver 580.95, cuda 13.0" in f.what for f in findings)


@pytest.mark.parametrize(
    ("change", "level", "says"),
    [
        ({"device": None}, Level.WARNING, "no GPU is visible"),
        ({"device": replace(H100, arch="sm_70")}, Level.ERROR, "add sm_70 to"),
        ({"device": replace(H100, runtime="")}, Level.ERROR, "built without GPU support"),
        ({"software": replace(SOFTWARE, triton="3.5.1")}, Level.ERROR, "triton 3.5.1 is not supported"),
        ({"software": replace(SOFTWARE, triton="3.10.0")}, Level.ERROR, "triton 3.10.0 is not supported"),
        ({"software": replace(SOFTWARE, torch="2.9.1")}, Level.ERROR, "older than 2.11"),
        ({"software": replace(SOFTWARE, triton="3.9.0")}, Level.WARNING, "built for triton 3.6.0, not 3.9.0"),
        ({"software": Software()}, Level.ERROR, "torch is not installed"),
        ({"numpy": ""}, Level.ERROR, "pip install numpy"),
        ({"numpy": "2.4.0"}, Level.ERROR, "numpy<2.4"),
        ({"telemetry": Telemetry()}, Level.WARNING, "cannot be read"),
        ({"telemetry": Telemetry(345, 2619, 88, 700.0, 0x64)}, Level.WARNING, "software thermal, hardware thermal"),
        ({"other_processes": 2}, Level.WARNING, "use the GPU: 2"),
    ],
)
def test_each_fault_of_a_machine_is_found(change: dict[str, object], level: Level, says: str) -> None:
    assert says in told(machine.check(replace(WELL, **change)), level)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("requirement", "pin"),
    [
        ('triton==3.6.0; platform_system == "Linux"', "3.6.0"),
        ("pytorch-triton-rocm==3.6.0", "3.6.0"),
        ("triton>=3", ""),
        ("filelock", ""),
    ],
)
def test_the_triton_a_torch_pins_is_read_from_its_metadata(requirement: str, pin: str) -> None:
    assert machine._triton_wanted([requirement]) == pin


def test_this_machine_can_be_read() -> None:
    here = machine.probe()
    assert here.software.torch
    assert here.numpy
    assert machine.check(here)


def row(source_hash: str) -> Row:
    config = NamedInts(BLOCK_SIZE=32, BLOCK_SIZE_ITER=128, num_warps=4, num_stages=1)
    axes = tuple((name, (value,)) for name, value in config.items())
    return Row(
        Problem("colwise", NamedInts(M=16640, K=5120, G=64), routing="jagged"),
        config,
        H100,
        Kind.MEASURED,
        Outcome(Status.OK, time_us=150.0, samples_us=(150.0,)),
        version=KernelVersion("colwise", source_hash, config, axes, ("M_bucket", "K", "G")),
        lookup_key=NamedInts(M_bucket=16384, K=5120, G=64),
        bytes_moved=3 * 16640 * 5120,
        process="1",
    )


@pytest.fixture
def database(tmp_path: Path) -> Path:
    """One finished sweep of one config."""
    path = tmp_path / "results.db"
    stored = row("0" * 16)
    assert stored.version is not None
    with Store.open(str(path), create=True) as store:
        sweep = store.begin_sweep("r", H100, command="fp8tune sweep", commit="", timer="do_bench", seed=0)
        store.add(sweep, stored)
        store.mark_complete(sweep, Subject(stored.version, H100, Kind.MEASURED, stored.problem), 1)
        store.finish_sweep(sweep)
    return path


def test_a_sound_database_is_counted(database: Path) -> None:
    with Store.open(str(database), writable=False) as store:
        findings = stored.check(str(database), store)
    assert [finding.level for finding in findings] == [Level.OK]
    assert "sm_90 1 measured" in findings[0].what


def cut_off(text: bytes) -> bytes:
    return text[: len(text) // 2]


def noise_inside(text: bytes) -> bytes:
    return text[:8192] + random.Random(0).randbytes(len(text) - 8192)


def noise(text: bytes) -> bytes:
    return random.Random(0).randbytes(len(text))


@pytest.mark.parametrize("damage", [cut_off, noise_inside, noise])
def test_a_damaged_database_has_a_way_back(database: Path, damage: object) -> None:
    assert callable(damage)
    database.write_bytes(damage(database.read_bytes()))
    assert f"mv {database}" in told(doctor.check_database(str(database)), Level.ERROR)


def test_a_foreign_or_newer_database_is_not_called_damaged(database: Path, tmp_path: Path) -> None:
    foreign = tmp_path / "foreign.db"
    with sqlite3.connect(foreign) as connection:
        connection.execute("create table songs (name text)")
    assert "--db" in told(doctor.check_database(str(foreign)), Level.ERROR)
    with sqlite3.connect(database) as connection:
        connection.execute("update meta set value = '99'")
    said = told(doctor.check_database(str(database)), Level.ERROR)
    assert "newer fp8tune" in said
    assert "mv " not in said


def test_an_unfinished_sweep_names_its_command(database: Path) -> None:
    with Store.open(str(database)) as store:
        store.begin_sweep("s", H100, command="fp8tune sweep -k colwise", commit="", timer="do_bench", seed=0)
    with Store.open(str(database), writable=False) as store:
        assert "fp8tune sweep -k colwise" in told(stored.check(str(database), store), Level.WARNING)


def test_a_stale_table_is_found_and_an_exported_one_is_not(database: Path, tmp_path: Path) -> None:
    def table_path(arch: str) -> Path:
        return tmp_path / f"{arch}.py"

    with Store.open(str(database), writable=False) as store:
        assert "fp8tune export --arch sm_90" in told(tables.check_tables(store, table_path), Level.WARNING)
        table_path("sm_90").write_text(select_rows(store, "sm_90").table.render())
        assert "sm_90.py" in told(tables.check_tables(store, table_path), Level.OK)


def test_a_kernel_whose_code_changed_is_found(database: Path) -> None:
    with Store.open(str(database), writable=False) as store:
        timed = timed_sources(store.pools())
    hashes = {"colwise": "0" * 16, "rowwise-2d": "1" * 16}
    assert "colwise: timed" in told(tables.check_sources(timed, hashes), Level.OK)
    assert "rowwise-2d: never timed" in told(tables.check_sources(timed, hashes), Level.WARNING)
    said = told(tables.check_sources(timed, {"colwise": "f" * 16}), Level.WARNING)
    assert "changed since" in said
    assert "fp8tune sweep --kernel colwise" in said


def test_a_damaged_result_is_named(database: Path) -> None:
    with sqlite3.connect(database) as connection:
        connection.execute("update results set coarse_us = coarse_us + 1")
    said = told(doctor.check_database(str(database)), Level.ERROR)
    assert "results:1 is damaged, its checksum differs" in said


def test_every_declared_kernel_has_a_current_hash() -> None:
    assert set(tables.current_hashes()) == set(KERNELS)


def test_all_of_it_together(database: Path) -> None:
    assert told(doctor.diagnose(str(database)), Level.OK)


TIMED = (Versions("2.11.0+cu130", "3.6.0"),)


@pytest.mark.parametrize(
    ("torch", "triton", "gpu", "level", "says"),
    [
        ("2.11.0+cu126", "3.6.0", H100, Level.OK, "timed with torch 2.11.0+cu130 and triton 3.6.0: as installed here"),
        ("2.12.0", "3.7.1", H100, Level.WARNING, "you have torch 2.12.0 and triton 3.7.1: a config may be compiled"),
        ("2.12.0", "3.7.1", None, Level.OK, "which matters once there is a GPU"),
    ],
)
def test_the_versions_of_the_rows_are_held_against_those_installed(
    torch: str, triton: str, gpu: Device | None, level: Level, says: str
) -> None:
    here = replace(WELL, device=gpu, software=Software(torch, triton))
    assert says in told(doctor.check_versions(TIMED, here), level)


def test_the_users_own_database_is_looked_at(database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(location.VARIABLE, str(database))
    found = doctor.check_own(location.own())
    assert "sm_90 1 measured" in told(found, Level.OK)
    assert "colwise: its code has changed since you timed it -> fp8tune sweep --kernel colwise" in told(
        found, Level.WARNING
    )
    assert "table" not in " ".join(finding.what for finding in found)
    assert list(doctor.check_changed({"colwise": {tables.current_hashes()["colwise"]}, "somebodys": {"0"}})) == []


def test_a_damaged_own_database_has_a_way_back_without_git(database: Path) -> None:
    database.write_bytes(cut_off(database.read_bytes()))
    said = told(doctor.check_own(str(database)), Level.ERROR)
    assert f"mv {database}" in said
    assert "git" not in said


def test_what_compiling_needs_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    assert f"kept in {tmp_path / 'cache'}" in told(machine.check_compiling(), Level.OK)
    assert "set CC" in told(machine.check_compiling({"CC": "no-such-compiler"}), Level.ERROR)
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file"))
    assert "TRITON_CACHE_DIR" in told(machine.check_compiling(), Level.ERROR)


def test_json_has_the_declared_fields(database: Path) -> None:
    code, out, _ = fp8tune("doctor", "--format", "json", "--db", database)
    rows = json.loads(out)
    assert (code, {tuple(row) for row in rows}) == (0, {("level", "what", "fix")})
    assert [field.name for field in DOCUMENTS["finding"].fields] == ["level", "what", "fix"]
