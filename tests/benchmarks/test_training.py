"""The training comparison: its language, its runs that go on where they were, and what it says of them."""

from __future__ import annotations

import json
import math
import multiprocessing
from collections import Counter
from dataclasses import replace
from importlib.util import find_spec
from itertools import pairwise

import pytest
import torch

from benchmarks.training import __main__ as command
from benchmarks.training import killed
from benchmarks.training import run as runs
from benchmarks.training.language import CHANCES, FLOOR, Language
from benchmarks.training.summary import PUBLISHED, lines, table

pytestmark = [
    pytest.mark.usefixtures("quantizers_in_plain_torch"),
    pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed"),
]

TINY = replace(command.SIZES["tiny"], steps=6)


@pytest.fixture(autouse=True)
def _as_it_was():
    threads, is_deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(is_deterministic)


def test_a_text_follows_its_topic_and_its_entropy_is_the_floor():
    language = Language(vocabulary=16, topics=2)
    device = torch.device("cpu")
    texts = language.texts(400, 100, seed=3, device=device)
    successors = language.successors(device).tolist()
    places = Counter()
    for topic, *text in texts.tolist():
        for token, after in pairwise(text):
            places[successors[topic - 16][token].index(after)] += 1
    shares = [places[place] / places.total() for place in range(4)]
    assert shares == pytest.approx(CHANCES, abs=0.01)
    assert pytest.approx(1.75 * math.log(2)) == FLOOR
    assert torch.equal(texts, language.texts(400, 100, seed=3, device=device))
    assert not torch.equal(texts, language.texts(400, 100, seed=4, device=device))


@pytest.mark.parametrize("arm", ["bf16", "fp8"])
def test_a_run_that_was_stopped_goes_on_to_the_same_bits(arm, tmp_path, monkeypatch):
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    whole.mkdir()
    stopped.mkdir()
    wanted = runs.run(arm, 1, TINY, "cpu", whole)
    step = runs.Trainer.step

    def dies(self, text, number):
        if number == 5:
            raise KeyboardInterrupt
        return step(self, text, number)

    monkeypatch.setattr(runs.Trainer, "step", dies)
    with pytest.raises(KeyboardInterrupt):
        runs.run(arm, 1, TINY, "cpu", stopped, save_every=2)
    assert [path.name for path in stopped.iterdir()] == [f"{arm}-1.pt"]
    monkeypatch.setattr(runs.Trainer, "step", step)
    found = runs.run(arm, 1, TINY, "cpu", stopped, save_every=2)
    assert found["resumed_at"] == 4
    assert all(found[name] == wanted[name] for name in killed.COMPARED)
    assert (found["held_out_in_bf16"] == found["held_out"]) == (arm == "bf16")
    assert [path.name for path in stopped.iterdir()] == [f"{arm}-1.json"]
    assert runs.run(arm, 1, TINY, "cpu", stopped) == found  # done: read, not run


def test_arms_differ_in_their_experts_alone(tmp_path):
    texts = TINY.language.texts(TINY.sequences, TINY.length, 0, torch.device("cpu"))
    losses = {}
    arms = ("fp8", "mxfp8", "mlp", "layer")
    for arm in ("bf16", *arms):
        trainer = runs.Trainer(arm, 0, TINY, torch.device("cpu"), is_graph=True)
        losses[arm] = [trainer.step(texts, number).item() for number in range(2)]
    for arm in arms:
        assert losses[arm][0] == pytest.approx(losses["bf16"][0], rel=1e-3)
        assert losses[arm] != losses["bf16"]


def test_the_command_trains_all_and_writes_what_it_found(tmp_path, capsys, monkeypatch):
    from benchmarks.training.picture import svgs

    fork = multiprocessing.get_context("fork")  # a new Python takes six seconds to import what this one has
    monkeypatch.setattr(command, "get_context", lambda method: fork)
    file = tmp_path / "all.json"
    wish = ["--size", "tiny", "--steps", "3", "--seeds", "2", "--arms", "bf16", "fp8", "--processes", "1"]
    wish += ["--folder", str(tmp_path / "runs"), "--json", str(file), "--device", "cpu"]
    assert command.main(wish) == 0
    said = capsys.readouterr().out
    assert "4/4 " in said
    document = json.loads(file.read_text())
    assert [(run["arm"], run["seed"]) for run in document["runs"]] == [(a, s) for a in ("bf16", "fp8") for s in (0, 1)]
    assert all(len(run["losses"]) == 3 for run in document["runs"])
    assert command.main(wish) == 0  # finds all done
    assert json.loads(file.read_text()) == document
    capsys.readouterr()
    assert command.main([*wish, "--steps", "4"]) == 2
    assert "has runs of other settings" in capsys.readouterr().err
    assert all(svg.startswith("<svg") and "currentColor" not in svg for svg in svgs(document).values())


def test_an_arm_is_within_the_spread_of_the_seeds_or_not():
    held_out = {
        "bf16": {0: 1.0, 1: 1.2, 2: 1.1},
        "near": {0: 1.05, 1: 1.25, 2: 1.15},
        "far": {0: 1.2, 1: 1.4, 2: 1.3},
    }
    bf16, near, far = lines(held_out)
    assert (bf16.spread, bf16.difference) == (pytest.approx(0.1), 0)
    assert (near.difference, near.spread_of_differences) == (pytest.approx(0.05), pytest.approx(0))
    assert (near.is_within, far.is_within) == (True, False)
    text = table([bf16, near, far], floor=0.9).splitlines()
    assert text[2] == "| bf16 | 3 | 1.1000 | 0.2000 | 0.1000 |  |  |"
    assert text[3] == "| near | 3 | 1.1500 | 0.2500 | 0.1000 | +0.0500 ± 0.0000 | yes |"
    assert text[4].endswith("| +0.2000 ± 0.0000 | no |")


def test_the_published_pictures_are_of_the_published_run():
    from benchmarks.training.picture import svgs

    document = json.loads(PUBLISHED.read_text(encoding="utf-8"))
    images = PUBLISHED.parents[1] / "images"
    for theme, text in svgs(document).items():
        assert (images / f"training-{theme}.svg").read_text(encoding="utf-8") == text
