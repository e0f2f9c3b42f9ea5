"""Reports on kernels of other libraries, from recordings and rows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from database_rows import KERNEL, begin, config, row, subject
from database_rows import problem as swept_problem

from benchmarks import real_kernels
from fp8tune.records import Status
from fp8tune.replay import recording
from fp8tune.replay.recording import Config, Grid, Kernel, Launch, Recording, Scalar
from fp8tune.store.results import Store

BLOCKS = (32, 64, 128)
CONFIGS = tuple(Config({"BLOCK_SIZE": block}, num_stages=1) for block in BLOCKS)


def launch(K: int, picked: int) -> Launch:
    return Launch((Scalar("K", K),), Grid((), (((), (K,)),)), key=(K,), config=CONFIGS[picked])


def recorded(picks: dict[int, int], tuning_s: float = 1.0) -> Recording:
    """K -> the number of the config that was picked."""
    launches = tuple(launch(K, picked) for K, picked in picks.items())
    kernel = Kernel(KERNEL.kernel, key=("K",), configs=CONFIGS, tuning_s=tuning_s, launches=launches)
    return Recording("python train.py", kernels=(kernel,))


def fill(path: Path, times_us: dict[int, tuple[float | None, ...]]) -> Path:
    """K -> the time of each config; None where it is wrong."""
    with Store.open(str(path), create=True) as store:
        for K, times in times_us.items():
            target = replace(swept_problem(K=K), input_layout=f"recorded-{launch(K, 0).id}")
            sweep = begin(store, request=str(K))
            for block, time_us in zip(BLOCKS, times, strict=True):
                status = Status.OK if time_us else Status.WRONG
                tried = row(time_us, of=target, config=config(block), status=status)
                reason = "the first stable of 2 blocks" if time_us else "output 0 differs"
                store.add(sweep, replace(tried, outcome=replace(tried.outcome, reason=reason)))
            store.mark_complete(sweep, subject(target), len(BLOCKS))
            store.finish_sweep(sweep)
    return path


@pytest.fixture
def database(tmp_path):
    """Two launches: at K = 512 the first config is best, at K = 1024 the second, and the third is wrong there."""
    return fill(tmp_path / "real.db", {512: (100.0, 110.0, 130.0), 1024: (103.0, 100.0, None)})


def test_a_kernel_is_studied_launch_by_launch(database):
    runs = [recorded({512: 0, 1024: 0}, 9.0), recorded({512: 1, 1024: 0}), recorded({512: 0, 1024: 2})]
    with Store.open(str(database), writable=False) as store:
        (studied,) = real_kernels.study(runs, store)
    first, second = studied.launches
    assert (first.ours, second.ours) == (str(config(32)), str(config(64)))
    assert first.theirs_over_ours == (1.0, 1.1, 1.0)
    assert second.theirs_over_ours == (1.03, 1.03, None)  # the third run picked a wrong config
    assert (studied.agreed, len(studied.picks)) == (0, 2)
    assert studied.tuning_s == (9.0, 1.0, 1.0)
    assert [(item.within, len(item.configs)) for item in studied.covered] == [(0.01, 2), (0.02, 2), (0.05, 1)]
    assert studied.covered[-1].worst == pytest.approx(0.03)
    assert studied.not_right == {str(config(128)): 1}


def test_a_config_that_is_wrong_on_one_launch_is_in_no_covering_set(tmp_path):
    path = fill(tmp_path / "real.db", {512: (120.0, 110.0, 100.0), 1024: (103.0, 100.0, None)})
    with Store.open(str(path), writable=False) as store:
        (studied,) = real_kernels.study([recorded({512: 2, 1024: 1})], store)
    assert studied.launches[0].ours == str(config(128))
    assert [item.configs for item in studied.covered] == [(str(config(64)),)] * 3


def test_the_table_and_its_json_are_written(database, tmp_path, capsys):
    paths = []
    for number in range(2):
        paths.append(tmp_path / f"run{number}.json")
        paths[-1].write_text(recording.text_of(recorded({512: 0, 1024: 1, 2048: 0})))
    out = tmp_path / "study"
    real_kernels.main([*map(str, paths), "--db", str(database), "--output", str(out)])
    output = capsys.readouterr().out
    assert "2 of 3" in output  # launches swept
    assert "on 1 of 3 launches, wrong: output 0 differs\n" in output
    assert "stable" not in output
    (studied,) = json.loads((out / "study.json").read_text())
    assert [item["ours"] is None for item in studied["launches"]] == [False, False, True]
    assert (out / "study.md").read_text() in output
