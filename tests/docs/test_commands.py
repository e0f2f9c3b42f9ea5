"""Every command line of README, documentation and ``--help`` runs, and commands in text have the options they name."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import fp8tune
from database_rows import config, finished_sweep, problem
from markdown_it import MarkdownIt
from places import ROOT

from benchmarks.printed import BLOCK
from fp8tune.cli.program import command_line
from fp8tune.records import NamedInts
from fp8tune.store.results import Store

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MARKDOWN = MarkdownIt("commonmark").enable("table")
EXAMPLES = ROOT / "docs" / "examples"
TILES = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K")

# Programs of the machine's owner, which a test must not run, and stand-ins for a scheduler.
NOT_RUN = {"pip", "git", "cd", "pytest", "gh", "rm", "sudo", "echo", "chmod", "export", "sbatch"}
WRAPPERS = re.compile(r"^((\w+=\S+|srun|--gpus=1|taskset|-c \d+-\d+) )+")


def blocks(page: Path) -> Iterator[str]:
    """Yield the blocks of commands of a page, without those that show what a command printed."""
    for token in MARKDOWN.parse(BLOCK.sub("", page.read_text(encoding="utf-8"))):
        if token.type == "code_block" or (token.type == "fence" and token.info in ("bash", "console")):
            yield token.content


def examples() -> Iterator[str]:
    """Yield the examples of each command's help, with the kernel of the pages."""
    program = command_line()
    for command in (program, *program.commands.values(), *program.commands["db"].commands.values()):  # type: ignore[attr-defined]
        for line in (command.epilog or "").replace("ops:softmax", "ops:swiglu").splitlines():
            if line.strip().startswith("$ "):
                yield line.strip().replace("torchrun --nproc-per-node 8", "python")


def lines() -> list[str]:
    """List the commands of all pages and of ``--help``, without comments and redirections."""
    texts: dict[str, None] = {}
    for page in (*PAGES, None):
        for block in blocks(page) if page else examples():
            for line in block.replace("\n  ", " ").splitlines():
                for command in re.split(r" && (?=\w)", line.removeprefix("$ ")):
                    text = re.sub(r"\s+(#|>).*", "", command).strip()
                    if text and not text.startswith(("[", "t4 =")) and text.split()[0] not in NOT_RUN:
                        texts[text] = None
    return [*texts]


def in_text() -> list[str]:
    """List the commands that stand within sentences and tables."""
    texts: dict[str, None] = {}
    for page in PAGES:
        for token in MARKDOWN.parse(page.read_text(encoding="utf-8")):
            for part in token.children or ():
                if part.type == "code_inline" and re.match(r"fp8tune [a-z]", part.content):
                    texts[part.content] = None
    return [*texts]


def commands() -> dict[str, dict[str, bool]]:
    """Map each command to its options and whether they take a value."""
    program = command_line().commands
    both = {**program, **{f"db {name}": child for name, child in program["db"].commands.items()}}  # type: ignore[attr-defined]
    return {
        name: {option: not getattr(item, "is_flag", False) for item in command.params for option in item.opts}
        for name, command in both.items()
    }


@pytest.mark.parametrize("text", in_text())
def test_a_command_in_the_text_has_its_options(text: str) -> None:
    words = text.split(" -- ")[0].split()[1:]
    name = " ".join(words[:2]) if words[0] == "db" and len(words) > 1 else words[0]
    if name == "COMMAND":
        return
    assert {word for word in words if word.startswith("-")} - {"--help"} <= {*commands()[name]}


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with what the pages name: databases, a recording, kernels, a repository."""
    folder = tmp_path_factory.mktemp("workplace")
    for name in ("benchmarks", "docs", "sweeps"):
        (folder / name).symlink_to(ROOT / name)
    source = (EXAMPLES / "swiglu.py").read_text()
    (folder / "swiglu.py").write_text(source)
    own = re.sub(r"\bkernel\b", "swiglu", source.replace("def swiglu(", "def activation("))
    own += (
        "\n\ndef swiglu_in_torch(gate_ptr, up_ptr, **others):\n    return torch.nn.functional.silu(gate_ptr) * up_ptr\n"
    )
    (folder / "ops.py").write_text(own)
    recorded = (EXAMPLES / "swiglu.json").read_text()
    (folder / "swiglu.json").write_text(recorded)
    (folder / "run.json").write_text(recorded.replace("swiglu:kernel", "ops:swiglu").replace("swiglu.py", "ops.py"))
    for name in ("train.py", "run_swiglu.py"):
        (folder / name).write_text("raise SystemExit(7)\n")
    shutil.copy(EXAMPLES / "mine.toml", folder)
    tuned_file = folder / "vllm" / "configs" / "E=8,N=14336,device_name=NVIDIA_H100_80GB_HBM3.json"
    tuned_file.parent.mkdir(parents=True)
    tuned_file.write_text(
        json.dumps({"16": {**dict.fromkeys(TILES, 64), "GROUP_SIZE_M": 1, "num_warps": 4, "num_stages": 3}})
    )
    (folder / "vllm/model_executor/layers/fused_moe").mkdir(parents=True)
    (folder / "vllm/model_executor/layers/fused_moe/configs").symlink_to("../../../configs")
    (folder / "parts").mkdir()
    for name in (
        "parts/0.db",
        "parts/1.db",
        "parts/2.db",
        "results.db",
        "other.db",
        "node1.db",
        "node2.db",
        "fp8tune.db",
        "ci.db",
        "all.db",
        "NEW.db",
    ):
        with Store.open(str(folder / name), create=True) as store:
            finished_sweep(store, {problem(K=K, G=16): {config(): 100.0, config(64): 110.0} for K in (1024, 5120)})
    archive = ("--archive", str(folder / "trials.db.xz"), "--db", str(folder / "other.db"))
    assert fp8tune("db", "prune", *archive).returncode == 0
    cache = folder / ".triton" / "cache" / "K"
    cache.mkdir(parents=True)
    timing = [{"kwargs": {"BLOCK": 1024}, "num_warps": 4, "num_ctas": 1, "num_stages": 3, "maxnreg": None}, [0.1] * 3]
    (cache / "swiglu.autotune.json").write_text(json.dumps({"key": [64], "configs_timings": [timing]}))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(str(folder))
        for recording in ("run.json", "swiglu.json"):
            options = ("--timer", "simulated:5", "--grid", "BLOCK=1024", "--grid", "num_warps=4", "--db", "swept.db")
            assert fp8tune("sweep", "--recording", recording, *options).returncode == 0
    git = ("git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(folder))
    for command in ("init -q -b main", "add ops.py", "commit -q -m a", "branch branch"):
        subprocess.run([*git, *command.split()], check=True)
    return folder


@pytest.fixture
def here(workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copy the folder, and work in it on a simulated GPU."""
    folder = tmp_path / "here"
    shutil.copytree(workplace, folder, symlinks=True)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    for name in ("ops", "swiglu"):
        sys.modules.pop(name, None)
    variables = {"HOME": str(folder), "FP8TUNE_TIMER": "simulated:1", "FP8TUNE_BASE": "", "FP8TUNE_DB": ""}
    for name, value in {**variables, "FP8TUNE_TABLES": str(tmp_path / "tables")}.items():
        monkeypatch.setenv(name, value)
    return folder


# Commands that find something here: a part of the line, the exit code and a part of the message.
FINDINGS = (
    ("fp8tune record", 7, "failed with exit code 7"),
    ("fp8tune tune", 7, "the program failed with exit code 7"),
    ("--check --db results.db", 1, ""),  # there is no table yet
    ("--device interpreter", 2, "unknown device 'interpreter'"),
    ("recheck --arch sm_90", 2, "TRITON_INTERPRET=1 is set"),
    ("--outputs-only", 2, "a simulated clock runs none"),  # FP8TUNE_TIMER names one
    ("--for triton-cache", 2, "no GPU: export it --for python"),
)
# Commands that start other programs or compile for minutes: their folders have tests.
ONLY_PARSED = re.compile("--on ray|sweep --arch|fp8tune (report|recheck(?! --arch| softmax))")


@pytest.mark.parametrize("line", lines())
def test_a_command_line_runs(line: str, here: Path) -> None:
    """Sweeps plan everything and time nothing, so that this takes seconds."""
    words = shlex.split(WRAPPERS.sub("", f"{line} ").rstrip(" &").replace("~", str(here)))
    if words[0] == "sqlite3":
        with sqlite3.connect(words[1]) as connection:
            connection.execute(words[2])
        return
    if words[0] == "python":
        if words[1].endswith("pull_request.py"):  # other tests run the others
            environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
            subprocess.run([sys.executable, *words[1:]], env=environment, check=True, capture_output=True)
        return
    assert words[0] == "fp8tune", line
    if ONLY_PARSED.search(line):
        name = words[1]
        assert {word for word in words if word.startswith("--")} <= {*commands()[name]}
        return
    prepare(words)
    if words[1] == "compare" and "colwise" in words:  # the repository of this folder has kernels of its own
        words = [word for word in words if word not in ("--kernel", "colwise")]
    words = [{"python": sys.executable}.get(word, word) if "--" in words else word for word in words]
    done = fp8tune(*words[1:], *extra(words))
    code, message = next(((code, message) for part, code, message in FINDINGS if part in line), (0, ""))
    assert done.returncode == code, done
    assert message in done.stderr


def prepare(words: list[str]) -> None:
    """Make what a command builds on."""
    if words[1] == "export" and "ops:swiglu" in words:
        shutil.copy("swept.db", "fp8tune.db")
    if words[1] == "export" and "swiglu:kernel" in words:
        shutil.copy("swept.db", "swiglu.db")
    if "softmax_sm_90.py" in words:
        assert fp8tune("sweep", "--recording", "run.json", "--grid", "num_warps=4").returncode == 0
        assert fp8tune("export", "--for", "python", "--kernel", "ops:swiglu", "--arch", "simulated").returncode == 0
        Path("swiglu_simulated.py").rename("softmax_sm_90.py")
    if "--archive" in words:  # after rm
        Path("trials.db.xz").unlink()
    if "moe:fused" in words:
        size = replace(problem(), kernel="moe:fused", shape=NamedInts(M=16, num_tokens=16, K=64, G=8, E=8, N=14336))
        with Store.open("fp8tune.db") as store:
            finished_sweep(store, {size: {NamedInts(dict.fromkeys(TILES, 64), num_warps=4): 100.0}})
    if "gfx942" in words or "H100" in words:
        os.environ["FP8TUNE_BASE"] = str(ROOT / "results.db")


def extra(words: list[str]) -> list[str]:
    """Return options that make a command short, without changing what it shows."""
    if words[1] == "sweep" and "--on" not in words:
        own = "--recording" in words or any(":" in word for word in words)
        return ["--budget", "0"] if own else ["--budget", "0", "--grid", "num_stages=1"]
    if words[1] == "compare":
        own = [] if "--kernel" in words else ["--kernel", "ops:swiglu"]
        return [*([] if "--outputs-only" in words else ["--db", "results.db"]), *own]
    if words[1] == "export" and "gfx942" not in words:
        return ["--arch", "simulated"] if "ops:swiglu" in words else ["--allow-quick"]
    return []
