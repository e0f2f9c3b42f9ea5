"""Guarantee 10: one line and a documented exit code for 300 generated command lines; a full disk keeps what it has."""

from __future__ import annotations

import os
import random
import resource
import sqlite3
from pathlib import Path
from unittest import mock

import pytest
import typer
from command_line import fp8tune
from database_rows import config, finished_sweep, problem
from forked import Forked

from fp8tune import cli
from fp8tune.cli.program import command_line
from fp8tune.errors import EXIT_CODES
from fp8tune.store.results import Store

COUNT = int(os.environ.get("FP8TUNE_COMMAND_LINES", "300"))

# hostile values, and ones that are right for some option
VALUES = [
    "", "-1", "0", "nan", "1e400", "9" * 40, "x" * 300, "\udcff", "\x1b[2J", "--", "-", ".", "/",
    "/dev/null", "a=b", "=",
    "K=1024", "M=16640,K=1024", "colwise", "colwse", "nowhere:SPEC", "missing.py:SPEC", "__main__:SPEC",
    "[/red]", "{0}",
    "tiny", "tiny,routing=zipf", "tiny,K", "lama4", "missing.toml", "rows.db", "missing.db", ":memory:", "sqlite://",
    "postgresql://me:secret@127.0.0.1:1/x", "mysql://x", "HEAD..HEAD", "HEAD", "a..b..c", "num_warps=4", "num_warp=4",
    "num_warps=", "exact", "1e-3,1e-3", "sm_90", "gfx942", "../x", "json", "table", "svg", "diff", "vllm", "90s", "2%",
    "simulated:1", "simulated:x", "sundial", "quick", "certified", "trial:1", "sweep:0", "colwise@K=1024", "none",
]  # fmt: skip

# what keeps a command from taking long, if it has nothing wrong
BOUNDS = {
    "sweep": ["--timer", "simulated:1", "--kernel", "rowwise-2d", "--shapes", "tiny", "--budget", "0"],
    "compare": ["--timer", "sundial"],
    "doctor": ["missing:KERNEL"],
    "report": ["--device", "none such"],
    "record": ["--", "true"],
    "tune": ["--budget", "0", "--", "true"],
}


def commands() -> dict[str, list[str]]:
    """Return each command with its options."""
    program, names = command_line(), {}
    for name, command in program.commands.items():
        if isinstance(command, typer.core.TyperGroup):
            names |= {f"{name} {child}": _options(sub) for child, sub in command.commands.items()}
        else:
            names[name] = _options(command)
    return names


def _options(command: typer.core.TyperCommand) -> list[str]:
    return [option for parameter in command.params for option in parameter.opts if option.startswith("-")]


def generated(seed: int) -> list[str]:
    chance, all_commands = random.Random(seed), commands()
    name = chance.choice(sorted(all_commands))
    words = name.split()
    for _ in range(chance.choice((0, 1, 1, 2, 3))):
        option = chance.choice([*all_commands[name], "--nonsense", chance.choice(VALUES)])
        if option not in ("--install-completion", "--show-completion"):
            words += [option] + [chance.choice(VALUES)] * chance.choice((0, 1, 1, 1))
    is_bounded = chance.random() < 0.9 or name in ("sweep", "compare")
    return words + (BOUNDS.get(name, []) if is_bounded else [])


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("rows") / "rows.db"
    with Store.open(str(path), create=True) as store:
        finished_sweep(store, {problem(K=K): {config(): 100.0, config(64): 110.0} for K in (1024, 2048)})
    return path.read_bytes()


@pytest.mark.parametrize("part", range(10))
def test_a_generated_command_line_ends_in_one_line(
    part: int, rows: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FP8TUNE_TIMER", "simulated:1")
    monkeypatch.setenv("FP8TUNE_TABLES", str(tmp_path / "tables"))
    (tmp_path / "fp8tune.db").write_bytes(rows)
    for seed in range(part * COUNT // 10, (part + 1) * COUNT // 10):
        (tmp_path / "rows.db").write_bytes(rows)
        arguments = generated(seed)
        code, out, error = fp8tune(*arguments, cwd=tmp_path)
        assert code in EXIT_CODES, arguments
        assert "Traceback" not in out + error, arguments
        assert "\x1b" not in out + error, arguments
        assert "secret" not in error, arguments
        if code == 2:
            *_, last = error.splitlines()
            assert last.startswith("fp8tune: "), (arguments, error)
            assert len(last) <= 300, (arguments, last)
            assert out == "", arguments


@pytest.mark.parametrize("size", [100, 60_000, 150_000])
def test_a_file_that_may_not_grow_keeps_what_it_has(size: int, tmp_path: Path) -> None:
    path = tmp_path / "results.db"
    sweep = ("sweep", "--kernel", "rowwise-2d", "--shapes", "tiny", "--timer", "simulated:5", "--quick", "--db", path)

    def limited() -> None:
        os.chdir(tmp_path)  # git would leave its lock behind in this checkout
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        with mock.patch("sys.argv", ["fp8tune", *map(str, sweep)]):
            cli.main()

    code, output = Forked(limited).wait()
    assert (code, output.splitlines()[-1][:9]) == (2, "fp8tune: "), output
    assert fp8tune(*sweep).returncode == 0  # there is room again
    with sqlite3.connect(path) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        doubled = "SELECT 1 FROM trials GROUP BY result_id, stage, process_id, round HAVING count(*) > 1"
        assert connection.execute(doubled).fetchall() == []
