"""Launches that share a config: their inputs follow it, they are timed together, and they get one pick."""

from __future__ import annotations

import os
import runpy
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from command_line import fp8tune
from forked import workers_forked_from_here
from places import ROOT
from programs import record

from fp8tune.errors import UsageError
from fp8tune.records import Status
from fp8tune.replay.loading import load_spec
from fp8tune.replay.spec import RecordedSpec
from fp8tune.store.read import subjects_of
from fp8tune.store.results import Store
from fp8tune_kernels import PinError, pin

KERNEL = "shared_config.py:expert_mm"  # of a script
RECORDED = f"{KERNEL}@run.json?check=tolerance&sizes=recorded"
GRID = ("--grid", "BLOCK_M=16,32", "--grid", "BLOCK_N=32,64")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example of the documentation, recorded."""
    folder = tmp_path_factory.mktemp("shared")
    shutil.copy(ROOT / "docs/examples/shared_config.py", folder)
    ended = record(folder, "--kernel", "shared_config:*", program=(sys.executable, "shared_config.py"))
    assert "120 tokens: right" in ended.stdout + ended.stderr
    assert ended.recording is not None
    assert len(ended.recording.kernels[0].launches) == 4
    return folder


@pytest.fixture(autouse=True)
def _modules(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
    yield
    load_spec.cache_clear()


def test_a_config_launches_all_that_share_it_with_inputs_of_its_own() -> None:
    options = ("&shared=tokens&inputs=shared_config.py:inputs", "&shared=tokens", "")
    specs = [load_spec(RECORDED + text) for text in options]
    made, as_recorded, _ = specs
    assert isinstance(made, RecordedSpec)
    assert [len(launches) for launches in made.launches.values()] == [2, 2]
    assert [dict(made.lookup_key(problem)) for problem in made.recorded] == [{"tokens": 60}, {"tokens": 120}]
    assert len({sum(map(spec.bytes_of, spec.recorded)) for spec in specs}) == 1
    for problem in made.recorded:
        for block, spec, is_right in (
            (16, made, True),
            (32, made, True),
            (16, as_recorded, True),
            (32, as_recorded, False),
        ):
            inputs = spec.inputs(problem, "cpu")
            outputs = spec.outputs(*inputs)
            spec.launch({**spec.default, "BLOCK_M": block}, inputs, outputs)
            pairs = zip(inputs[-1].arguments(inputs, outputs), outputs, strict=True)
            assert all(_is_right(arguments, y) for arguments, y in pairs) == is_right
    with pytest.raises(UsageError, match=r"shared=batch: not every launch of .* has a whole number of that name"):
        load_spec(f"{RECORDED}&shared=batch")


def _is_right(arguments: dict[str, torch.Tensor], y: torch.Tensor) -> bool:
    rows, experts = arguments["rows"], arguments["experts"].repeat_interleave(16)
    expert_of_row = torch.empty(len(y), dtype=torch.long)
    expert_of_row[rows[rows >= 0].long()] = experts[rows >= 0].long()
    expected = torch.einsum("tk,tnk->tn", arguments["x"].double(), arguments["w"].double()[expert_of_row])
    return torch.allclose(y.double(), expected, rtol=1e-3, atol=1e-3)


def test_a_sweep_has_one_pick_for_all_and_an_export_gives_it_to_each_key(folder: Path) -> None:
    name = f"{RECORDED}&shared=tokens&inputs=shared_config.py:inputs"
    ended = fp8tune("sweep", *GRID, "--kernel", name, "--timer", "simulated:1", "--db", "rows.db", cwd=folder)
    assert (ended.returncode, "2 sizes x 4 configs" in ended.stderr) == (0, True), ended.stderr
    where = ("--arch", "simulated", "--kernel", KERNEL, "--db", "rows.db")
    ended = fp8tune("export", "--for", "python", *where, cwd=folder)
    assert ended.returncode == 0, ended.stderr
    (rows,) = runpy.run_path(str(folder / "expert_mm_simulated.py"))["TABLE"].values()
    assert [key[:2] for key in rows] == [(60, 64), (60, 32), (120, 64), (120, 32)]
    configs = list(rows.values())
    assert (configs[0], configs[2]) == (configs[1], configs[3])
    with pytest.raises(PinError, match="its inputs depend on the config"):  # a pinned program would sort for another
        pin(folder / "expert_mm_simulated.py")
    with workers_forked_from_here():  # on the interpreter, where outputs are checked
        ended = fp8tune("sweep", *GRID[:2], "--kernel", name, "--db", "checked.db", cwd=folder)
    assert ended.returncode == 0, ended.stderr
    with Store.open(str(folder / "checked.db"), writable=False) as store:
        tallies = [store.tally(subject) for subject in subjects_of(store.pools(KERNEL))]
    assert [item.status for tally in tallies for item in tally.outcomes.values()] == [Status.OK] * 4
