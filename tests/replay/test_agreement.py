"""Sweeps without a reference: what is said of configs that agree with the first config, or do not."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import fp8tune
from forked import workers_forked_from_here
from toy_recording import by_blocks, floats, write, written

from fp8tune.replay.loading import load_spec
from fp8tune.replay.recording import Config, Kernel, Launch, Scalar

# ``half`` copies 128 elements; ``wrapped`` adds the first elements again unless the block divides n.
KERNELS = """
import triton
import triton.language as tl

def tuned(function, *configs):
    return triton.autotune([triton.Config(config) for config in configs], key=["n"])(triton.jit(function))

def half(x, y, n, FROM: tl.constexpr, B: tl.constexpr, SAME: tl.constexpr = 0):
    at = FROM + tl.arange(0, B)
    tl.store(y + at, tl.load(x + at, mask=at < n), mask=at < n)

def wrapped(x, y, n, B: tl.constexpr):
    at = (tl.program_id(0) * B + tl.arange(0, B)) % n
    tl.atomic_add(y, tl.sum(tl.load(x + at), 0))

halves = tuned(half, {"FROM": 0, "B": 128}, {"FROM": 128, "B": 128})
same_half = tuned(half, {"FROM": 0, "B": 128, "SAME": 0}, {"FROM": 0, "B": 128, "SAME": 1})
whole = tuned(half, {"FROM": 0, "B": 256, "SAME": 0}, {"FROM": 0, "B": 256, "SAME": 1})
single = tuned(half, {"FROM": 0, "B": 256})
sums = tuned(wrapped, {"B": 64}, {"B": 128}, {"B": 32})

def copied(x, **_):
    return x
"""
CONFIGS = {
    "halves": ({"FROM": 0, "B": 128}, {"FROM": 128, "B": 128}),
    "same_half": ({"FROM": 0, "B": 128, "SAME": 0}, {"FROM": 0, "B": 128, "SAME": 1}),
    "whole": ({"FROM": 0, "B": 256, "SAME": 0}, {"FROM": 0, "B": 256, "SAME": 1}),
    "single": ({"FROM": 0, "B": 256},),
    "sums": ({"B": 64}, {"B": 128}, {"B": 32}),
}
UNWRITTEN = "the first, which leaves 128 of 256 elements unwritten"


def recorded(attribute: str) -> Kernel:
    n, y = 256, written("y", 256)
    if attribute == "sums":
        n, y = 96, floats("y", 1, is_stored=True, storage=1)
    launch = Launch((floats("x", n), y, Scalar("n", n)), by_blocks(n, 32, 64, 128, 256))
    declared = tuple(map(Config, CONFIGS[attribute]))
    return Kernel(f"planted:{attribute}", configs=declared, key=("n",), launches=(launch,))


@pytest.fixture(autouse=True)
def _module(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    (tmp_path / "planted.py").write_text(KERNELS)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    yield
    load_spec.cache_clear()


def run(folder: Path, *arguments: str) -> tuple[int, str]:
    with workers_forked_from_here():
        done = fp8tune(*arguments, "--db", "rows.db", cwd=folder)
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    ("attribute", "counts", "line"),
    [
        ("halves", "1 agree, 1 disagree", f"1 of 2 configs disagrees with {UNWRITTEN}: which are right is not known"),
        ("same_half", "2 agree, 0 disagree", f"2 configs agree with {UNWRITTEN}"),
        ("sums", "2 agree, 1 disagree", "1 of 3 configs disagrees with the first: which are right is not known"),
        ("whole", "2 agree, 0 disagree", ""),
    ],
)
def test_without_a_reference_it_is_said_what_is_known(tmp_path: Path, attribute: str, counts: str, line: str) -> None:
    """By a sweep, by the same command again, and by ``show``."""
    write(tmp_path, recorded(attribute))
    for _ in range(2):
        code, output = run(tmp_path, "sweep", "--recording", "run.json", "--tolerance", "1e-4,1e-4")
        assert (code, f"configs: {counts};" in output, "right," in output) == (0, True, False), output
        assert line in output
        assert ("not known" in output or "unwritten" in output) == bool(line)
    assert line in run(tmp_path, "show")[1]
    code, _ = run(tmp_path, "sweep", "--recording", "run.json", "--tolerance", "1e-4,1e-4", "--strict")
    assert code == int("not known" in line)


def test_with_a_reference_configs_are_right_or_wrong(tmp_path: Path) -> None:
    write(tmp_path, recorded("halves"))
    code, output = run(tmp_path, "sweep", "--recording", "run.json", "--reference", "planted:copied")
    assert (code, "0 right, 2 wrong" in output, "disagree" in output) == (1, True, False), output


def test_a_config_without_a_rival_has_no_verdict(tmp_path: Path) -> None:
    write(tmp_path, recorded("single"))
    options = ("--recording", "run.json", "--timer", "simulated:1")
    output = run(tmp_path, "sweep", *options)[1]
    assert "one config: nothing to compare" in output
    assert not {"proven", "in use"} & {word for word in ("proven", "in use") if word in output}
    output = run(tmp_path, "show", "planted:single", "--format", "json")[1]
    (pick,) = json.loads(output)["picks"]
    assert (pick["verdict"], pick["in_use"], pick["speedup"]) == ("alone", False, None)
    export = ("export", "--arch", "simulated", "--for", "python", "--kernel", "planted:single", "--db", "rows.db")
    done = fp8tune(*export, cwd=tmp_path)
    assert (done.returncode, "nothing to compare" in done.stderr) == (0, True), done.stderr


def test_a_simulated_sweep_says_that_nothing_was_checked(tmp_path: Path) -> None:
    write(tmp_path, recorded("halves"))
    options = ("--recording", "run.json", "--timer", "simulated:1")
    output = run(tmp_path, "sweep", *options)[1]
    assert "2 configs: 2 timed; outputs not checked;" in output
    assert "right" not in output
    assert "no output was checked" in run(tmp_path, "show")[1]
    assert "no output was checked" in run(tmp_path, "show", "planted:halves")[1]
    finished = json.loads(run(tmp_path, "sweep", *options, "--format", "json")[1].splitlines()[-1])
    assert (finished["event"], finished["checked"]) == ("finished", False)
    assert not json.loads(run(tmp_path, "show", "planted:halves", "--format", "json")[1])["checked"]
