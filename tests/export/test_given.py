from __future__ import annotations

from dataclasses import replace

import database_rows as rows
import pytest
import recorded_rows as recorded
from recorded_rows import CONFIGS, KERNEL, NAME, ROWS

from fp8tune.errors import DatabaseError, UsageError
from fp8tune.export.given import given_for, launched
from fp8tune.records import NamedInts
from fp8tune.replay.recording import Config
from fp8tune.store.results import Store


@pytest.fixture
def store(tmp_path):
    with Store.open(str(tmp_path / "results.db"), create=True) as opened:
        yield opened


def test_picks_come_with_the_recording_and_all_times(store):
    recorded.sweep(store, wrong={1024: 5})
    given = given_for(store, "sm_90", NAME)
    assert (given.kernel, given.device, given.recorded) == (NAME, rows.H200, KERNEL)
    assert [one.problem.shape["n"] for one in given.tuned] == [1024, 4096, 8192]
    first, second, _ = given.tuned
    assert first.launch == recorded.launch(1024)
    assert (first.config, first.launch_config, first.time_us) == (ROWS[0], CONFIGS[0], 10.0)
    assert first.times_us == dict(zip(ROWS[:5], recorded.TIMES[1024][:5], strict=True))
    assert first.failures == {ROWS[5]: ("wrong", "wrong")}
    assert second.slowdowns[ROWS[2]] == pytest.approx(1.01)
    assert (
        first.evidence
        == "quick, 10.00 us, 1 process, NVIDIA H200, driver 580.1, triton 3.6.0, commit c0ffee, code aaaa"
    )
    assert given.configs == dict(zip(ROWS, CONFIGS, strict=True))


def test_of_several_devices_the_one_with_the_most_problems_or_the_one_named(store):
    recorded.sweep(store)
    recorded.sweep(store, {1024: recorded.TIMES[1024]}, rows.H100)
    given = given_for(store, "sm_90", NAME)
    assert given.device.name == "NVIDIA H200"
    assert "NVIDIA H100 80GB HBM3 (1), NVIDIA H200 (3)" in given.notices[0]
    assert given_for(store, "sm_90", NAME, rows.H100.name).device == rows.H100
    with pytest.raises(UsageError, match=r"NVIDIA H100 80GB HBM3 \(1\), NVIDIA H200 \(3\)"):
        given_for(store, "sm_90", NAME, "H100")


def test_as_many_problems_on_two_devices_are_refused(store):
    recorded.sweep(store)
    recorded.sweep(store, device=rows.H100)
    with pytest.raises(UsageError, match="--device"):
        given_for(store, "sm_90", NAME)


def test_problems_that_were_not_swept_to_the_end_are_named(store):
    recorded.sweep(store)
    recorded.sweep(store, {512: (1.0,)}, complete=False)
    assert "n=512 left out, not swept to the end" in given_for(store, "sm_90", NAME).notices[0]
    assert len(given_for(store, "sm_90", NAME).tuned) == 3


def test_what_right_means_comes_with_the_pick(store):
    recorded.sweep(store, check="tolerance 1e-3")
    assert {one.check for one in given_for(store, "sm_90", NAME).tuned} == {"tolerance 1e-3"}


def test_a_doubtful_reference_is_named(store):
    recorded.sweep(store, {512: (1.0, None, None, None, None, 2.0)})
    (notice,) = given_for(store, "sm_90", NAME).notices
    assert notice.startswith("n=512: 4 of 6 configs are wrong: see that what they were compared with is right")


def test_nothing_swept_is_one_line(store):
    recorded.sweep(store, complete=False)
    with pytest.raises(UsageError, match="swept to the end"):
        given_for(store, "sm_90", NAME)
    with pytest.raises(UsageError, match="no timed rows"):
        given_for(store, "sm_100", NAME)


def test_problems_of_a_kernel_with_other_configs_are_left_out(store):
    older = replace(KERNEL, configs=CONFIGS[::-1], source_hash="older")
    recorded.sweep(store, {512: (1.0,) * 6}, kernel=older)
    recorded.sweep(store)
    given = given_for(store, "sm_90", NAME)
    assert [one.problem.shape["n"] for one in given.tuned] == [1024, 4096, 8192]
    assert "n=512 left out, recorded of a kernel with other configs" in given.notices[0]


def test_a_kernel_with_a_spec_has_its_configs_as_triton_takes_them(store):
    rows.finished_sweep(store, {rows.problem(): {rows.config(32): 10.0, rows.config(64, 8): 9.0}})
    given = given_for(store, "sm_90", "colwise")
    (one,) = given.tuned
    assert (given.recorded, one.launch) == (None, None)
    assert one.launch_config == Config({"BLOCK_SIZE": 64}, num_warps=8, num_stages=1)
    assert one.lookup_key == rows.key_of(rows.problem())


def test_options_are_no_arguments_and_a_maxnreg_of_zero_is_none():
    config = launched(None, NamedInts(BLOCK=32, num_warps=2, num_ctas=2, maxnreg=0, waves_per_eu=3))
    assert config == Config({"BLOCK": 32, "waves_per_eu": 3}, num_warps=2, num_ctas=2)


def test_a_number_that_stands_for_nothing_is_a_damaged_row():
    with pytest.raises(DatabaseError, match="EVEN=7"):
        launched(KERNEL, NamedInts({**ROWS[0], "EVEN": 7}))


def test_a_damaged_recording_is_one_line(store):
    recorded.sweep(store)
    store.record_launches({recorded.problem(1024): '{"kernel": {"name": 3}}'})
    with pytest.raises(DatabaseError, match="damaged"):
        given_for(store, "sm_90", NAME)
