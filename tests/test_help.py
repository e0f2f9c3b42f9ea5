"""``--help``: its options, its width, its speed, and its examples, each of which runs."""

from __future__ import annotations

import inspect
import json
import os
import re
import resource
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import typer
from command_line import fp8tune
from database_rows import config, finished_sweep, problem
from places import ROOT

from fp8tune.cli.program import command_line
from fp8tune.cli.renamed import COMMANDS, OPTIONS
from fp8tune.plan.shapes import list_sets
from fp8tune.records import NamedInts
from fp8tune.store.results import Store
from fp8tune.tables.tuned_files import GROUPED_TILE


def commands() -> dict[str, typer.core.TyperCommand]:
    """Return each command by its full name."""
    result = {}
    for name, command in command_line().commands.items():
        children = getattr(command, "commands", None)
        result |= {name: command} if children is None else {f"{name} {child}": sub for child, sub in children.items()}
    return result


def examples() -> list[str]:
    epilogs = [command_line().epilog, *(command.epilog for command in commands().values())]
    return [line.strip()[2:] for text in epilogs for line in (text or "").splitlines() if line.strip().startswith("$ ")]


@pytest.mark.parametrize("name", ["", *commands(), "db"])
def test_help_fits_80_columns(name: str) -> None:
    with mock.patch.dict(os.environ, COLUMNS="80"):
        done = fp8tune(*name.split(), "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert done.stdout.startswith(f"Usage: {' '.join(['fp8tune', *name.split()])} ")
    assert "..." not in done.stdout.partition("Commands:")[2]  # no summary is cut


def test_there_are_at_most_85_options_and_each_has_a_text() -> None:
    options = [
        parameter
        for command in commands().values()
        for parameter in command.params
        if parameter.param_type_name == "option" and not parameter.hidden
    ]
    assert len(options) <= 85
    assert all(option.help for option in options)


def test_sweep_names_every_shape_set() -> None:
    text = " ".join(fp8tune("sweep", "--help").stdout.split())
    assert all(name in text for name in list_sets())


def test_help_takes_little_cpu_time() -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-X", "importtime", "-m", "fp8tune", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    for module in ("torch", "triton", "pandas", "numpy", "sqlalchemy", "pydantic", "rich.console"):
        assert not re.search(rf"\| +{re.escape(module)}$", done.stderr, re.MULTILINE), module
    assert after.ru_utime - before.ru_utime < 1.0  # 0.2 s on an idle machine


@pytest.mark.parametrize(
    ("line", "new"),
    [*COMMANDS.items(), *((f"bench {old}", new) for old, new in OPTIONS.items())],
)
def test_an_old_name_is_one_line_with_the_new_one(line: str, new: str) -> None:
    done = fp8tune(*line.split(), "x")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert new in done.stderr


def test_hidden_aliases_work(workplace: Path) -> None:
    plain = fp8tune("show", "colwise", "--device", "sm_90", "--format", "json", cwd=workplace)
    alias = fp8tune("show", "--kernel", "colwise", "--arch", "sm_90", "--json", cwd=workplace)
    assert plain == alias
    assert plain.returncode == 0


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the examples name: a database, a recording, kernels and tuned files of others."""
    folder = tmp_path_factory.mktemp("workplace")
    source = (ROOT / "docs" / "examples" / "swiglu.py").read_text()
    (folder / "ops.py").write_text(re.sub(r"\bkernel\b", "softmax", source))
    recorded = (ROOT / "docs" / "examples" / "swiglu.json").read_text()
    (folder / "run.json").write_text(recorded.replace("swiglu:kernel", "ops:softmax").replace("swiglu.py", "ops.py"))
    (folder / "train.py").write_text("raise SystemExit(7)\n")
    tuned = folder / "vllm/model_executor/layers/fused_moe/configs/E=8,N=512,device_name=NVIDIA_H200.json"
    tuned.parent.mkdir(parents=True)
    tuned.write_text(json.dumps({"1": {**dict.fromkeys(GROUPED_TILE, 64), "num_warps": 4}}))
    for name in ("results.db", "other.db", "fp8tune.db"):
        with Store.open(str(folder / name), create=True) as store:
            finished_sweep(store, {problem(K=K, G=16): {config(): 100.0, config(64): 110.0} for K in (1024, 5120)})
    cache = folder / ".triton" / "cache" / "K"
    cache.mkdir(parents=True)
    timing = [{"kwargs": {"BLOCK": 1024}, "num_warps": 4, "num_ctas": 1, "num_stages": 3, "maxnreg": None}, [0.1] * 3]
    content = {"key": [64], "configs_timings": [timing]}
    (cache / "softmax.autotune.json").write_text(json.dumps(content))
    return folder


# Exit codes and messages of examples that find something here.
EXPECTED = {
    "record": (7, "nothing recorded: the program failed with exit code 7"),
    "tune": (7, "nothing to tune: the program failed with exit code 7"),
    "recheck --arch sm_90": (2, "TRITON_INTERPRET=1 is set"),
    "export --arch sm_90 --check --db results.db": (1, ""),  # this folder has no table yet
}


@pytest.mark.parametrize("line", dict.fromkeys(examples()))
def test_every_example_of_help_runs(
    line: str, workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sweeps plan everything and time nothing, so that this takes seconds."""
    shutil.copytree(workplace, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.syspath_prepend(str(tmp_path / "here"))
    for name in ("ops", "moe"):
        sys.modules.pop(name, None)
    monkeypatch.setenv("HOME", str(tmp_path / "here"))
    monkeypatch.setenv("FP8TUNE_TIMER", "simulated:1")
    monkeypatch.setenv("FP8TUNE_BASE", "")
    monkeypatch.setenv("FP8TUNE_TABLES", str(tmp_path / "tables"))
    text = line.partition("#")[0].partition(">")[0].replace("~", str(tmp_path / "here"))
    arguments = [{"python": sys.executable, "torchrun": sys.executable}.get(word, word) for word in shlex.split(text)]
    arguments = [word for word in arguments if word not in ("--nproc-per-node", "8")]
    code, reason = EXPECTED.get(arguments[1]) or EXPECTED.get(" ".join(arguments[1:])) or (0, "")
    prepare(arguments)
    done = fp8tune(*arguments[1:], *extra(arguments))
    assert done.returncode == code, done
    assert reason in done.stderr


def prepare(arguments: list[str]) -> None:
    """Make what an example builds on."""
    quick = ("--timer", "simulated:1", "--quick")
    if "ops:softmax" in arguments:
        assert (
            fp8tune("sweep", "--recording", "run.json", "--timer", "simulated:1", "--grid", "BLOCK=1024").returncode
            == 0
        )
    if "softmax_sm_90.py" in arguments:
        assert fp8tune("sweep", "--recording", "run.json", "--timer", "simulated:1").returncode == 0
        table = ("--for", "python", "--kernel", "ops:softmax", "--arch", "simulated")
        assert fp8tune("export", *table).returncode == 0
        Path("softmax_simulated.py").rename("softmax_sm_90.py")
    if "moe:fused" in arguments:
        size = replace(problem(), kernel="moe:fused", shape=NamedInts(M=16, K=64, G=8, E=8, N=14336))
        with Store.open("fp8tune.db") as store:
            finished_sweep(store, {size: {NamedInts(dict.fromkeys(GROUPED_TILE, 64)): 100.0}})
    if "gfx942" in arguments:
        os.environ["FP8TUNE_BASE"] = str(ROOT / "results.db")
    if arguments[1] == "compare":
        for command in ("init -q -b main", "add ops.py", "commit -q -m a", "branch branch"):
            subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *command.split()], check=True)
    if arguments[1:3] == ["worker", "--kernel"]:
        assert fp8tune("sweep", "--kernel", "rowwise-2d", "--shapes", "tiny", "--on", "queue", *quick).returncode == 0


def extra(arguments: list[str]) -> list[str]:
    """Return options that make an example short, without changing what it shows."""
    if arguments[1] == "sweep":
        return ["--budget", "0", "--grid", "num_stages=1"] if "--recording" not in arguments else ["--budget", "0"]
    if arguments[1] == "compare":  # the repository of this folder has kernels of its own
        return ["--db", "results.db", "--kernel", "ops:softmax"]
    if arguments[1] == "export" and "gfx942" not in arguments:  # the picks of this folder are quick, or simulated
        return ["--arch", "simulated"] if "ops:softmax" in arguments else ["--allow-quick"]
    return []


def test_the_api_does_not_import_typer() -> None:
    text = "import sys, fp8tune.api; print('typer' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True).stdout == "False\n"


def test_signatures_of_the_api_are_plain() -> None:
    import fp8tune as package

    for name in ("open", "sweep", "compare", "lookup", "export", "pin", "unpin"):
        assert inspect.isfunction(getattr(package, name)), name
        assert len(inspect.signature(getattr(package, name)).parameters) <= 8
