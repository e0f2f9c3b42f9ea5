"""The training comparison: its language, its runs, and what it says of them."""

from __future__ import annotations

import json
import multiprocessing
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

from benchmarks.training import __main__ as command
from benchmarks.training import run as runs

pytestmark = [
    pytest.mark.usefixtures("quantizers_in_plain_torch"),
    pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed"),
]

TINY = replace(command.SIZES["tiny"], steps=4)


@pytest.fixture(autouse=True)
def _as_it_was():
    threads, is_deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(is_deterministic)


def test_a_run_repeats_its_bits_and_is_read_once_it_is_done(tmp_path):
    results = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        results.append(runs.run("fp8", 1, TINY, "cpu", tmp_path / name))
    assert all(results[0][name] == results[1][name] for name in ("losses", "held_out", "digest"))
    assert [path.name for path in (tmp_path / "first").iterdir()] == ["fp8-1.json"]
    assert runs.run("fp8", 1, TINY, "cpu", tmp_path / "first") == results[0]


def test_the_command_trains_all_and_writes_what_it_found(tmp_path, capsys, monkeypatch):
    fork = multiprocessing.get_context("fork")  # a new Python takes six seconds to import what this one has
    monkeypatch.setattr(command, "get_context", lambda method: fork)
    file = tmp_path / "all.json"
    wish = ["--size", "tiny", "--steps", "2", "--seeds", "2", "--arms", "bf16", "fp8", "--processes", "1"]
    wish += ["--folder", str(tmp_path / "runs"), "--json", str(file), "--device", "cpu"]
    assert command.main(wish) == 0
    output = capsys.readouterr().out
    assert "4/4 " in output
    document = json.loads(file.read_text())
    assert [(run["arm"], run["seed"]) for run in document["runs"]] == [(a, s) for a in ("bf16", "fp8") for s in (0, 1)]
    assert all(len(run["losses"]) == 2 for run in document["runs"])
    assert command.main(wish) == 0  # finds all done
    assert json.loads(file.read_text()) == document
    capsys.readouterr()
    assert command.main([*wish, "--steps", "3"]) == 2
    assert "has runs of other settings" in capsys.readouterr().err


def test_an_arm_is_within_the_spread_of_the_seeds_or_not():
    held_out = {"bf16": (1.0, 1.2, 1.1), "fp8": (1.05, 1.25, 1.15), "layer": (1.2, 1.4, 1.3)}
    losses = [
        {"arm": arm, "seed": seed, "held_out": loss} for arm, all in held_out.items() for seed, loss in enumerate(all)
    ]
    _, _, bf16, fp8, layer = command.losses_table(losses).splitlines()
    assert bf16.startswith("| bf16 | 3 | 1.1000 | ")
    assert fp8.endswith("| 0.1000 | +0.0500 ± 0.0000 | yes |")
    assert layer.endswith("| +0.2000 ± 0.0000 | no |")
