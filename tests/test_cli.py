"""The command line as users, scripts and CI meet it: one-line errors, exported files, record and db."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import fp8tune
from database_rows import config, finished_sweep, problem
from places import PLANTED, PUBLISHED, ROOT

from fp8tune.store.results import Store
from fp8tune.tables import launch_table

FAULTS = f"{PLANTED / 'faults.py'}:SPEC"
SWEEP = ("sweep", "--kernel", FAULTS, "--shapes", "tiny", "--grid", "FAULT=0", "--timer", "simulated:3", "--quick")
QUICK = "--allow-quick"
LONG = "x" * 300


@pytest.fixture
def database(tmp_path: Path) -> Path:
    """Quick picks of two sizes."""
    path = tmp_path / "rows.db"
    with Store.open(str(path), create=True) as store:
        finished_sweep(store, {problem(K=K): {config(): 100.0, config(64): 110.0} for K in (1024, 5120)})
    return path


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("sweep --kernel colwse", "did you mean colwise"),
        ("sweep --shapes lama4 --timer simulated:1", "did you mean llama4? A file needs its suffix: lama4.toml"),
        ("sweep --shapes llama4,routing=jaged", "did you mean jagged"),
        ("sweep --grid num_warp=4 --timer simulated:1", "did you mean num_warps"),
        ("sweep --arch gfx943", "did you mean gfx942"),
        ("sweep --timer sundial", "simulated:SEED"),
        ("sweep --kernel nowhere.at.all:SPEC", "nowhere.at.all"),
        ("sweep --kernel missing.py:SPEC", "missing.py"),
        ("sweep --tolerance loose", "exact, exact-sums, auto or RTOL,ATOL"),
        ("sweep --budget soon", "write 90s, 10m or 2h"),
        ("sweep --on moon", "--on"),
        ("show colwse", "did you mean colwise"),
        ("show colwise --verdict provn", "did you mean proven"),
        ("show --device sm_99", "device 'sm_99'"),
        ("show --top 0", "--top must be at least 1, got 0"),
        ("show colwise K=77", "the nearest are 1024, 5120"),
        ("show --db absent.db", "absent.db"),
        ("export --arch ../x", "unknown arch"),
        ("export --within 2", "write 2%"),
        ("export --within 2%", "--within goes with --for FORMAT"),
        ("export --kernel colwise --allow-quick", "-o PATH"),
        ("export -o t.py", "2 quick picks left out"),
        ("db import absent.csv", "absent.csv"),
        ("db import", "nothing to import"),
        ("db forget colwise", "add --yes"),
        ("compare HEAD", "main..branch"),
        ("record", "the program to record is missing"),
        ("record -o . -- true", "'.' cannot be written"),
        ("frobnicate", "unknown command 'frobnicate'"),
        ("sweep --shaeps tiny", "did you mean --shapes"),
        ("show --db", "needs a value: see fp8tune show --help"),
        ("show --format xml", "'xml' is not one of"),
        ("export --arch sm_90 -o .", "is a folder"),
        (f"export --arch sm_90 --allow-quick -o {LONG}.py", "File name too long"),
        (f"show --db {LONG}", "File name too long"),
        ("show --db \udcff.db", "\\udcff.db does not exist"),
        ("db import \udcff.csv", "\\udcff.csv"),
        (f"sweep --kernel {LONG}.py:SPEC", "File name too long"),
        ("sweep --kernel \udcff.py:SPEC", "\\udcff.py"),
        ("sweep --db=", "in memory"),
        *((f"sweep --budget {text}", f"'{text}' is not a time") for text in ("nan", "1e9")),
    ],
)
def test_bad_input_is_one_line_and_code_2(line: str, message: str, database: Path, tmp_path: Path) -> None:
    arguments = line.split()
    if (arguments[0] in ("show", "export") and "--db" not in arguments) or arguments[:2] == ["db", "forget"]:
        arguments += ["--db", str(database)]
    before = sorted(tmp_path.rglob("*"))
    done = fp8tune(*arguments, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done
    assert done.stderr.startswith("fp8tune: ")
    assert message in done.stderr
    assert len(done.stderr) <= 301
    assert sorted(tmp_path.rglob("*")) == before


def test_an_export_is_stable_and_check_finds_what_is_out_of_date(database: Path, tmp_path: Path) -> None:
    module = tmp_path / "sm_90.py"
    export = ["export", "--arch", "sm_90", "--db", database, "-o", module, QUICK]
    assert fp8tune(*export, "--check").returncode == 1
    assert not module.exists()
    assert fp8tune(*export).returncode == 0
    before = module.read_bytes()
    assert "unchanged" in fp8tune(*export).stdout
    assert fp8tune(*export, "--check").returncode == 0
    table = launch_table.parse(module.read_text(), "sm_90")
    module.write_text(replace(table, entries=table.entries[1:]).render())
    checked = fp8tune(*export, "--check")
    assert (checked.returncode, "is out of date" in checked.stdout) == (1, True)
    assert fp8tune(*export).returncode == 0
    assert module.read_bytes() == before
    module.write_text(module.read_text() + "\n")  # an edit by hand
    for arguments in (export, [*export, "--check"]):
        assert fp8tune(*arguments).returncode == 2
    module.unlink()
    assert fp8tune(*export).returncode == 0
    assert module.read_bytes() == before


def test_quick_picks_are_exported_only_if_asked_for(database: Path, tmp_path: Path) -> None:
    """A row that is there stays: picks that were not confirmed neither add nor change one."""
    module = tmp_path / "sm_90.py"
    export = ["export", "--arch", "sm_90", "--db", database]
    assert "2 quick picks left out" in fp8tune(*export, "-o", module).stderr
    assert not module.exists()
    for name in ("python", "hf"):
        done = fp8tune(*export, "--for", name, "--kernel", "colwise", "--size", "N=G", cwd=tmp_path)
        assert done.returncode == 2
    done = fp8tune(*export, "--for", "python", "--kernel", "colwise", cwd=tmp_path)
    assert (done.returncode, "--allow-quick" in done.stderr) == (2, True)
    assert fp8tune(*export, "--for", "python", "--kernel", "colwise", QUICK, cwd=tmp_path).returncode == 0


def test_an_export_writes_only_where_the_user_is(
    database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fp8tune is installed from this checkout; the table in it is not touched from another folder."""
    monkeypatch.setenv("FP8TUNE_TABLES", str(tmp_path / "tables"))
    shipped = ROOT / "kernels" / "fp8tune_kernels" / "tables" / "sm_90.py"
    before = shipped.read_bytes()
    done = fp8tune("export", "--arch", "sm_90", "--db", database, QUICK, cwd=tmp_path)
    assert done.stdout.startswith("tables/sm_90.py: written")
    assert shipped.read_bytes() == before
    swept = tmp_path / "simulated.db"
    assert fp8tune(*SWEEP, "--db", swept).returncode == 0
    done = fp8tune("export", "--arch", "simulated", "--db", swept, QUICK, cwd=tmp_path)
    assert (done.returncode, "simulated picks are not for lookups" in done.stderr) == (2, True)


def test_strict_makes_a_wrong_config_a_finding(tmp_path: Path) -> None:
    sweep = ("sweep", "--kernel", "rowwise-2d", "--shapes", "tiny", "--grid", "num_stages=1", "--quick")
    sweep += ("--timer", "simulated:3,wrong=0.2", "--db", str(tmp_path / "rows.db"))
    assert fp8tune(*sweep).returncode == 0
    strict = fp8tune(*sweep, "--strict")
    assert (strict.returncode, "gave a wrong output" in strict.stderr) == (1, True)


def test_a_program_that_records_nothing_says_why(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("raise SystemExit(7)\n")
    done = fp8tune("record", "-o", "mine.py", "--", sys.executable, "mine.py", cwd=tmp_path)
    assert (done.returncode, "'mine.py' is not a recording, and stays as it is" in done.stderr) == (2, True)
    done = fp8tune("record", "--", sys.executable, "mine.py", cwd=tmp_path)
    assert (done.returncode, "the program failed with exit code 7" in done.stderr) == (7, True)
    done = fp8tune("record", "--", "true", cwd=tmp_path)
    assert (done.returncode, "no process imported Triton" in done.stderr) == (2, True)
    assert not (tmp_path / "run.json").exists()


def test_imports_are_counted_once(tmp_path: Path) -> None:
    db = tmp_path / "rows.db"
    count = len(PUBLISHED.read_text().splitlines()) - 1
    for counts in (f"{count} results added, 0 already there", f"0 results added, {count} already there"):
        assert counts in fp8tune("db", "import", PUBLISHED, "--db", db).stdout
    shown = json.loads(fp8tune("show", "--verdict", "published", "--db", db, "--format", "json").stdout)
    assert shown["kernels"]


def test_forget_deletes_what_its_targets_name(database: Path) -> None:
    def sizes() -> int:
        with Store.open(str(database), writable=False) as store:
            return sum(bool(study.results) for study in store.studies())

    assert fp8tune("db", "forget", "colwise@K=77", "--yes", "--db", database).returncode == 2
    assert "1 size deleted" in fp8tune("db", "forget", "colwise@K=1024", "--yes", "--db", database).stdout
    assert sizes() == 1
    assert "1 result deleted" in fp8tune("db", "forget", "trial:3", "--yes", "--db", database).stdout
    assert fp8tune("db", "forget", "colwise", "--yes", "--db", database).returncode == 0
    assert sizes() == 0


def test_the_version_names_torch_and_triton() -> None:
    assert {word for word in fp8tune("--version").stdout.split() if word.isalnum()} >= {"torch", "triton"}


def test_completion_prints_a_script_and_names(monkeypatch: pytest.MonkeyPatch) -> None:
    import subprocess

    words = {"_FP8TUNE_COMPLETE": "complete_bash", "COMP_WORDS": "fp8tune sweep --kernel colw", "COMP_CWORD": "3"}
    command = [sys.executable, "-m", "fp8tune"]
    done = subprocess.run(command, env={**os.environ, **words}, capture_output=True, text=True)
    assert done.stdout.split()[0] == "colwise"
