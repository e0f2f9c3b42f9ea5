"""The command line as users, scripts and CI meet it: contracts of JSON, exit codes and one-line errors."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest
from command_line import Ended, environment, fp8tune
from database_rows import config, finished_sweep, problem
from forked import Forked, workers_forked_from_here
from places import PUBLISHED_OPERATIONS, ROOT

from fp8tune import cli
from fp8tune.importing import files as importing
from fp8tune.replay.loading import load_spec
from fp8tune.store.results import Store
from fp8tune_kernels.catalog import KERNELS

FAULTS = f"{ROOT / 'tests' / 'planted' / 'faults.py'}:SPEC"
PUBLISHED = ROOT / "sweeps" / "published" / "kernels.csv"
TRIAL_FIELDS = [
    "kernel",
    "arch",
    "device",
    "kind",
    "shape",
    "routing",
    "input_layout",
    "in_dtype",
    "fp8_dtype",
    "scale_mode",
    "config",
    "status",
    "time_us",
    "reason",
    "stage",
    "round",
]
WINNER_FIELDS = [
    "ceiling_share",
    "n",
    "source",
    "verdict",
    "noise_floor",
    "runner_up",
    "runner_up_us",
    "runner_up_stage",
    "why_not_runner_up",
    "today",
    "today_origin",
    "speedup",
    "timing",
    "codegen",
]


COMPILED = """
import json, sys
from command_line import fp8tune
print(json.dumps([fp8tune(*arguments) for arguments in json.load(sys.stdin)]))
"""


class Compiled(NamedTuple):
    """A folder with databases, and how the commands ended that wrote them."""

    folder: Path
    one_config: Ended
    published: Ended
    static: Ended


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    """Commands that compile, in one process: in this one Triton is on its interpreter."""
    folder = tmp_path_factory.mktemp("compiled")
    with Store.open(str(folder / "one-config.db"), create=True) as store:
        importing.import_file(store, PUBLISHED)
    one = ["BLOCK_SIZE=32", "BLOCK_SIZE_ITER=128", "LEAD=0", "num_warps=4", "num_stages=1", "maxnreg=0"]
    few = ["BLOCK_SIZE=1,2", "BLOCK_SIZE_ITER=1024", "num_stages=1"]
    static = ("sweep", "--static", "--arch", "gfx942", "--json")
    commands: tuple[tuple[object, ...], ...] = (
        (*static, "--kernel", "colwise", "--shapes", "tiny", *axes(one), "--db", folder / "one-config.db"),
        ("import", "--compile", PUBLISHED, "--db", folder / "published.db"),
        (*static, "--kernel", "rowwise-2d", *axes(few), "--db", folder / "static.db"),
    )
    done = subprocess.run(
        [sys.executable, "-c", COMPILED],
        input=json.dumps([[str(each) for each in command] for command in commands]),
        capture_output=True,
        text=True,
        env={**environment(), "PYTHONPATH": os.pathsep.join([*sys.path, str(ROOT / "tests")])},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return Compiled(folder, *(Ended(*each) for each in json.loads(done.stdout.splitlines()[-1])))


def axes(grid: list[str]) -> list[str]:
    return [part for axis in grid for part in ("--grid", axis)]


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Simulated rows of the fake kernel and the published ones."""
    path = tmp_path_factory.mktemp("cli") / "results.db"
    swept = fp8tune("sweep", "--kernel", FAULTS, "--shapes", "tiny", "--timer", "simulated:3", "--db", path, "--json")
    assert swept.returncode == 0, swept.stderr
    lines = [json.loads(line) for line in swept.stdout.splitlines()]
    assert len(lines) > 9
    for line in lines:
        assert list(line) == TRIAL_FIELDS
        assert (line["kind"], line["status"], line["arch"]) == ("simulated", "ok", "simulated")
        assert line["time_us"] > 0
    imported = fp8tune("import", PUBLISHED, "--db", path)
    assert imported.returncode == 0, imported.stderr
    assert "nothing was compiled" in imported.stderr
    with Store.open(str(path)) as store:
        finished_sweep(store, {problem(): {config(): 100.0}})
    return path


def test_help_names_every_declared_kernel() -> None:
    text = "".join(fp8tune("sweep", "--help").stdout.split())  # lines break at dashes
    assert all(kernel in text for kernel in KERNELS)


def test_show_json_has_the_contract_fields(database: Path) -> None:
    rows = json.loads(fp8tune("show", "--db", database, "--format", "json").stdout)
    assert rows
    for row in rows:
        assert list(row) == [*TRIAL_FIELDS[:-2], *WINNER_FIELDS]
        assert (row["source"] is None) == (row["kind"] != "published")
    assert {row["arch"] for row in rows} == {"simulated", "gfx942", "sm_90"}


def test_calibrate_says_what_it_measured_and_what_follows(tmp_path: Path) -> None:
    done = fp8tune("calibrate", "--timer", "simulated:3", "--db", tmp_path / "results.db", "--json")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert list(said) == ["arch", "device", "measured", "protocol"]
    assert said["protocol"]["processes"] >= 4
    assert 0 < said["measured"]["process_sd"] < 0.01


def test_export_twice_gives_the_same_bytes_and_check_tells_staleness(database: Path, tmp_path: Path) -> None:
    module = tmp_path / "sm_90.py"
    export = ["export", "--arch", "sm_90", "--db", database, "--output", module]
    assert fp8tune(*export, "--check").returncode == 1
    assert not module.exists()
    assert fp8tune(*export).returncode == 0
    before = module.read_bytes()
    assert "unchanged" in fp8tune(*export).stdout
    assert module.read_bytes() == before
    assert fp8tune(*export, "--check").returncode == 0
    module.write_text(module.read_text() + "\n")
    assert fp8tune(*export, "--check").returncode == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["sweep", "--kernel", "colwse"], "did you mean colwise"),
        (["sweep", "--shapes", "lama4", "--timer", "simulated:1"], "did you mean llama4"),
        (["sweep", "--grid", "num_warp=4", "--timer", "simulated:1"], "did you mean num_warps"),
        (["sweep", "--grid", "num_warps=three", "--timer", "simulated:1"], "num_warps"),
        (["sweep", "--arch", "gfx943"], "did you mean gfx942"),
        (["sweep", "--timer", "sundial"], "simulated:SEED"),
        (["sweep", "--routing", "jaged", "--timer", "simulated:1"], "did you mean jagged"),
        (["sweep", "--kernel", "nowhere.at.all:SPEC"], "nowhere.at.all"),
        (["sweep", "--kernel", "missing.py:SPEC"], "missing.py"),
        (["show", "--kernel", "colwse"], "did you mean colwise"),
        (["show", "--arch", "sm_99"], "sm_9"),
        (["show", "--db", "absent.db"], "absent.db"),
        (["export", "--arch", "../x"], "unknown arch"),
        (["export", "--arch", "gfx943"], "did you mean gfx942"),
        (["export"], "arch"),
        (["import", "absent.csv"], "absent.csv"),
        (["compare", "HEAD", "--repo", str(ROOT)], "A..B"),
        (["compare", "mian..HEAD", "--repo", str(ROOT)], "mian"),
        (["frobnicate"], "frobnicate"),
    ],
)
def test_bad_input_is_one_line_and_code_2(arguments: list[str], says: str, database: Path, tmp_path: Path) -> None:
    if "--db" not in arguments and arguments[0] in ("show", "export", "compare"):
        arguments = [*arguments, "--db", str(database)]
    before = sorted(tmp_path.rglob("*"))
    done = fp8tune(*arguments, cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stdout == ""
    assert says in done.stderr
    assert done.stderr.startswith("fp8tune: ")
    assert len(done.stderr.splitlines()) == 1
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("content", [b"", b"not a database" * 400, b"SQLite format 3\x00" + bytes(range(256)) * 40])
def test_damaged_database_is_one_line(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "broken.db"
    path.write_bytes(content)
    for arguments in (["show"], ["export", "--arch", "sm_90"], ["import", str(PUBLISHED)]):
        done = fp8tune(*arguments, "--db", path, cwd=tmp_path)
        if not content and arguments[0] == "import":
            continue  # an empty file is a new database
        assert done.returncode == 2, done.stdout + done.stderr
        assert "broken.db" in done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_killed_sweep_continues_without_loss_or_double(tmp_path: Path) -> None:
    """kill -9 in mid-sweep; then the database is what an unbroken sweep gives. Other moments: test_unbreakable.py."""
    sweep = ["sweep", "--kernel", FAULTS, "--shapes", "tiny", "--timer", "simulated:5", "--grid", "FAULT=0,1,2,3,4"]
    broken, whole = tmp_path / "broken.db", tmp_path / "whole.db"
    assert fp8tune(*sweep, "--db", whole).returncode == 0
    with mock.patch("sys.argv", ["fp8tune", *sweep, "--db", str(broken), "--json"]):
        running = Forked(cli.main)
    running.read(1)  # at least one trial is stored
    running.kill()
    assert fp8tune(*sweep, "--db", broken).returncode == 0
    assert contents(broken) == contents(whole)
    with sqlite3.connect(broken) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def contents(database: Path) -> list[tuple[object, ...]]:
    query = """
        SELECT problems.canonical, configs.canonical, trials.round, trials.status, trials.time_us
        FROM trials JOIN results ON results.id = result_id JOIN studies ON studies.id = study_id
        JOIN problems ON problems.id = problem_id JOIN configs ON configs.id = config_id
        ORDER BY 1, 2, 3, 4, 5
    """
    with sqlite3.connect(database) as connection:
        return connection.execute(query).fetchall()


@pytest.mark.slow
def test_sweep_without_gpu_checks_bytes_and_times_nothing(tmp_path: Path) -> None:
    database = tmp_path / "r.db"
    grid = ("--grid", "BLOCK_SIZE_ITER=128", "--grid", "BLOCK_SIZE=1", "--grid", "num_warps=4")
    with workers_forked_from_here():
        done = fp8tune("sweep", "--kernel", "rowwise-2d", "--shapes", "tiny", *grid, "--db", database, "--json")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    if rows[0]["kind"] == "measured":
        pytest.skip("there is a GPU here")
    assert {(row["arch"], row["status"], row["time_us"]) for row in rows} == {("interpreter", "ok", None)}
    assert "on small shapes" in done.stderr
    done = fp8tune("export", "--arch", "sm_90", "--db", database, "--output", tmp_path / "t.py")
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    assert "nothing to export for sm_90" in done.stderr
    assert not (tmp_path / "t.py").exists()


@pytest.mark.slow
def test_compiling_for_an_arch_compiles_what_was_published_for_it(compiled: Compiled) -> None:
    assert compiled.one_config.returncode == 0, compiled.one_config.stderr
    rows = [json.loads(line) for line in compiled.one_config.stdout.splitlines()]
    tiles = {(row["config"]["BLOCK_SIZE"], row["config"]["BLOCK_SIZE_ITER"]) for row in rows}
    default = load_spec("colwise").default  # is in every sweep
    swept = {(default["BLOCK_SIZE"], default["BLOCK_SIZE_ITER"]), (32, 128)}
    published = {(32, 128), (32, 32), (64, 32), (128, 32), (128, 128)}
    assert tiles == swept | published
    kinds = {(row["arch"], row["kind"], row["status"], row["time_us"]) for row in rows}
    assert kinds == {("gfx942", "static", "ok", None)}


def test_published_configs_that_import_compiles_are_exported(compiled: Compiled, tmp_path: Path) -> None:
    db, table = compiled.folder / "published.db", tmp_path / "gfx942.py"
    assert compiled.published.returncode == 0, compiled.published.stderr
    assert fp8tune("export", "--arch", "gfx942", "--db", db, "--output", table).returncode == 0
    assert '"colwise"' in table.read_text()


def test_published_operations_are_imported_and_shown_with_the_impossible_one(tmp_path: Path) -> None:
    db = tmp_path / "results.db"
    for said in ("8 rows added, 0 already there", "0 rows added, 8 already there"):
        assert said in fp8tune("import", PUBLISHED_OPERATIONS, "--db", db).stdout
    shown = fp8tune("show", "--op", "grouped-mm", "--db", db).stdout
    assert (shown.count("pytorch/ao#2998"), shown.count("not stated"), shown.count("impossible")) == (8, 8, 1)
    rows = json.loads(fp8tune("show", "--op", "grouped-mm", "--format", "json", "--db", db).stdout)
    assert [(row["shape"]["E"], row["note"]) for row in rows if row["impossible"]] == [(16, "before")]
    assert json.loads(fp8tune("show", "--op", "mxfp8-grouped-mm", "--format", "json", "--db", db).stdout) == rows
    (tmp_path / "again.csv").write_text(fp8tune("show", "--op", "grouped-mm", "--format", "csv", "--db", db).stdout)
    assert "0 rows added, 8 already there" in fp8tune("import", tmp_path / "again.csv", "--db", db).stdout
    assert fp8tune("show", "--op", "grouped-mm", "--kernel", "colwise", "--db", db).returncode == 2


def test_show_gives_the_best_single_config_of_a_kernel(database: Path) -> None:
    shown = fp8tune("show", "--arch", "gfx942", "--kernel", "colwise", "--db", database).stdout
    line = "BLOCK_SIZE=32 BLOCK_SIZE_ITER=128 num_warps=4; worst slowdown 1.215, other implementation"
    assert f"best single config: {line}" in shown
    slowdowns = [row.split()[-1] for row in shown.partition(line)[2].splitlines() if row.startswith("M=")]
    assert slowdowns == ["1.215", "1.000", "1.005", "1.060"]


def test_a_static_sweep_is_stored_and_not_exported(compiled: Compiled, tmp_path: Path) -> None:
    path, swept = compiled.folder / "static.db", compiled.static
    assert swept.returncode == 0, swept.stderr
    rows = [json.loads(line) for line in swept.stdout.splitlines()]
    assert {(row["kind"], row["fp8_dtype"], row["time_us"]) for row in rows} == {("static", "float8_e4m3fnuz", None)}
    assert len({json.dumps(row["shape"]) for row in rows}) == 1
    assert "nothing failed" in fp8tune("show", "--failed", "--arch", "gfx942", "--db", path).stderr
    table = tmp_path / "gfx942.py"
    assert fp8tune("export", "--arch", "gfx942", "--db", path, "--output", table).returncode == 2  # nobody measured it
    assert fp8tune("sweep", "--static", "--kernel", "rowwise-2d", "--db", path).returncode == 2
