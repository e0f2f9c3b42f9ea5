"""Reports on kernels of other libraries, from recordings and rows."""

from __future__ import annotations

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


def test_kernels_are_studied_launch_by_launch(tmp_path, capsys):
    """At K = 512 the first config is best, at K = 1024 the second, and the third is wrong there."""
    path = fill(tmp_path / "real.db", {512: (100.0, 110.0, 130.0), 1024: (103.0, 100.0, None)})
    runs = [recorded({512: 0, 1024: 0, 2048: 0}, 9.0), recorded({512: 1, 1024: 0}), recorded({512: 0, 1024: 2})]
    with Store.open(str(path), writable=False) as store:
        (studied,) = real_kernels.study(runs, store)
    first, second, unswept = studied.launches
    assert [item.study and item.study.pick.config for item in studied.launches] == [config(32), config(64), None]
    assert (first.ratios, second.ratios, unswept.ratios) == ([1.0, 1.1, 1.0], [1.03, 1.03], [])  # one pick is wrong
    assert [len(item.configs) for item in studied.covers()] == [2, 2, 1]
    assert [*studied.covers()][-1].worst == pytest.approx(0.03)
    assert studied.not_right == {config(128): 1}
    paths = [tmp_path / f"run{number}.json" for number in range(3)]
    for file, run in zip(paths, runs, strict=True):
        file.write_text(recording.text_of(run))
    real_kernels.main(str(path), *map(str, paths))
    output = capsys.readouterr().out
    assert "| 2 of 3 | 2 (0.0%) | 2 (0.0%) | 1 (3.0%) | 9.0 / 1.0 | 0 of 3 | 1.031 (1.100) | 1 |" in output
    assert "on 1 of 3 launches, wrong: output 0 differs\n" in output


def test_a_config_that_is_wrong_on_one_launch_is_in_no_covering_set(tmp_path):
    path = fill(tmp_path / "real.db", {512: (120.0, 110.0, 100.0), 1024: (103.0, 100.0, None)})
    with Store.open(str(path), writable=False) as store:
        (studied,) = real_kernels.study([recorded({512: 2, 1024: 1})], store)
    assert [item.configs for item in studied.covers()] == [(config(64),)] * 3
