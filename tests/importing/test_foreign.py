"""Configs that others tuned, imported: which rows they become, and that they stand beside what was measured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from any_text import any_text
from command_line import fp8tune
from database_rows import H100, begin, row
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8tune.errors import UsageError
from fp8tune.importing import foreign
from fp8tune.records import Device, KernelVersion, Kind, NamedInts, Problem, Subject
from fp8tune.replay.configs import encoded
from fp8tune.replay.recording import Config, Grid, Kernel, Launch, as_json
from fp8tune.store.results import Store
from fp8tune.sweeping import picks

ONE = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 32, "num_warps": 4, "num_stages": 3}
CONFIG = NamedInts(ONE)
NAME = "maker.gemm:_matmul"
VERSION = KernelVersion(NAME, "aaaa", CONFIG, tuple((name, (value,)) for name, value in ONE.items()), ("M",))
PROBLEM = Problem(NAME, NamedInts(M=16, N=64, K=32), input_layout="recorded-0", fp8_dtype="", scale_mode="")


def write(path: Path, document: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document))
    return path


def gemm(folder: Path, **entries: object) -> Path:
    return write(folder / "N=64,K=32,device_name=NVIDIA_H100_80GB_HBM3.json", entries or {"16": ONE})


def triton(
    folder: Path, key: object = (16, 64, 32, "torch.bfloat16"), kernel: str = "_matmul", **config: object
) -> Path:
    tried = {"kwargs": {"BLOCK_SIZE_M": 16}, "num_warps": 4, "num_stages": 3, **config}
    document = {"key": key, "configs_timings": [[{**tried, "num_warps": 8}, 1.0], [tried, [0.0125, 0.012, 0.013]]]}
    return write(folder / "ABC" / f"{kernel}.autotune.json", document)


def recorded(store: Store, **changes: object) -> Kernel:
    """The kernel as a sweep of a recording leaves it in the database."""
    options = {"num_warps": 4, "num_stages": 3}
    kwargs = {name: value for name, value in ONE.items() if name not in options}
    kernel = replace(Kernel(NAME, key=("M", "N", "K"), configs=(Config(kwargs, **options),)), **changes)
    launch = Launch((), Grid((), ()), key=(16, 64, 32, "torch.bfloat16"))
    document = json.dumps({"kernel": as_json(kernel), "launch": as_json(launch)})
    store.record_launches({PROBLEM: document})
    return kernel


@pytest.fixture
def store(tmp_path):
    with Store.open(str(tmp_path / "results.db"), create=True) as opened:
        yield opened


def rows(store: Store, path: Path, kernel: str = "", device: str = ""):
    """The rows of a path, and the notices."""
    notices: list[str] = []
    result = foreign.read(path, notices.append, kernel)
    return foreign.RowMaker(store, device, notices.append).rows(result), notices


def test_a_file_by_sizes_becomes_rows_without_a_time(tmp_path, store):
    (row,), notices = rows(store, gemm(tmp_path), NAME)
    assert (row.problem.shape, row.config) == (NamedInts(N=64, K=32, M=16), CONFIG)
    assert (row.kind, row.outcome.time_us, row.version) == (Kind.PUBLISHED, None, None)
    assert row.device == Device("sm_90", "NVIDIA H100 80GB HBM3")
    assert row.source == "N=64,K=32,device_name=NVIDIA_H100_80GB_HBM3.json"
    assert not notices


def test_the_kernel_must_be_said_where_the_file_does_not(tmp_path, store):
    result, (notice,) = rows(store, gemm(tmp_path))
    assert not result
    assert "give --kernel" in notice


def test_configs_of_a_fused_moe_have_its_name(tmp_path, store):
    path = write(tmp_path / "E=8,N=64,device_name=NVIDIA_H200,dtype=fp8_w8a8.json", {"1": ONE, "triton_version": "3"})
    (row,), _ = rows(store, path)
    assert (row.problem.kernel, row.problem.in_dtype) == ("fused_moe_kernel", "fp8_w8a8")


@pytest.mark.parametrize("make", [gemm, triton])
def test_a_recorded_problem_takes_the_row(tmp_path, store, make):
    recorded(store)
    make(tmp_path / "others")
    (row,), notices = rows(store, tmp_path / "others", NAME if make is gemm else "")
    assert row.problem == PROBLEM
    assert not notices


def test_a_problem_that_nobody_recorded_keeps_its_own_words(tmp_path, store):
    recorded(store)
    triton(tmp_path / "others", [17, 64, 32, "torch.float16"])
    (row,), _ = rows(store, tmp_path / "others")
    assert (row.problem.kernel, row.problem.shape) == (NAME, NamedInts(M=17, N=64, K=32))
    assert (row.problem.input_layout, row.problem.in_dtype) == ("unstated", "float16")


def test_a_triton_cache_brings_its_time(tmp_path, store):
    triton(tmp_path / "cache")
    (row,), _ = rows(store, tmp_path / "cache", device="NVIDIA H200")
    assert row.outcome.time_us == 12.5
    assert row.problem.shape == NamedInts(key_0=16, key_1=64, key_2=32)
    assert row.device == Device("sm_90", "NVIDIA H200")


def test_values_are_numbered_as_the_recorded_kernel_does(tmp_path, store):
    configs = tuple(Config({"MODE": mode}) for mode in ("fast", "slow"))
    kernel = recorded(store, configs=configs)
    triton(tmp_path / "others" / "slow", kwargs={"MODE": "slow"})
    triton(tmp_path / "others" / "other", kwargs={"MODE": "other"})
    (row,), (notice,) = rows(store, tmp_path / "others")
    assert row.config == encoded(kernel, configs[1]) == NamedInts(MODE=1, num_warps=4, num_stages=3)
    assert "left out" in notice


def test_of_a_kernel_nobody_recorded_only_integers_and_flags_are_taken(tmp_path, store):
    gemm(tmp_path / "others", **{"1": {"EVEN": True, "num_ctas": 2}, "2": {"MODE": "fast"}})
    (row,), (notice,) = rows(store, tmp_path / "others", NAME)
    assert row.config == NamedInts(EVEN=1, num_warps=4, num_stages=3, num_ctas=2)
    assert "MODE='fast' is no integer" in notice


def test_damaged_files_are_named_and_the_others_read(tmp_path, store):
    folder = tmp_path / "others"
    gemm(folder)
    write(folder / "E=1,N=1,device_name=x.json", [7])
    write(folder / "metadata.json", {"name": "a kernel's metadata"})
    (folder / "device_name=broken.json").write_text("{")
    triton(folder, kwargs=7)
    result, notices = rows(store, folder, NAME)
    assert len(result) == 1
    assert len(notices) == 3
    assert all("\n" not in notice for notice in notices)


def test_a_bad_entry_is_named_and_the_others_of_its_file_are_read(tmp_path, store):
    path = gemm(tmp_path, **{"16": ONE, "512": None, "one": ONE, "32": {"num_warps": 0}, "64": ONE})
    result, notices = rows(store, path, NAME)
    assert [row.problem.shape["M"] for row in result] == [16, 64]
    assert len(notices) == 3
    for entry, notice in zip(("512", "one", "32"), notices, strict=True):
        assert f"{path} is damaged: {entry!r}: " in notice


def test_what_holds_no_configs_is_refused(tmp_path):
    for path in (tmp_path, write(tmp_path / "other.json", {"a": 1}), tmp_path / "absent.json"):
        with pytest.raises(UsageError, match="has no configs"):
            foreign.read(path, print)


def test_flags_and_blocks_in_a_name_are_sizes(tmp_path):
    name = "E=8,N=64,device_name=A_B-C,dtype=fp8_w8a8,block_shape=[128, 64],per_channel_quant=True_down.json"
    (pick,) = foreign.read(write(tmp_path / name, {"triton_version": "3.4.0", "2": {"BLOCK_SIZE_M": 16}}), print)
    assert pick.shape == NamedInts(E=8, N=64, block_n=128, block_k=64, per_channel_quant=1, down=1, M=2)
    assert (pick.kernel, pick.device, pick.dtype) == ("fused_moe_kernel", "A_B-C", "fp8_w8a8")


@pytest.mark.parametrize(
    "text",
    ["", "[]", "7", '{"1": 2}', '{"one": {"BLOCK": 1}}', '{"1": {"num_warps": 0}}', '{"1": null}', "[" * 9999],
)
def test_a_damaged_file_is_one_line(tmp_path, text):
    path = tmp_path / "E=1,N=1,device_name=x.json"
    path.write_text(text)
    with pytest.raises(UsageError, match="is damaged") as raised:
        foreign.read(path, print)
    assert "\n" not in str(raised.value)
    assert path.name in str(raised.value)


HOSTILE = any_text(max_size=20) | st.integers() | st.booleans() | st.none() | st.floats()


@settings(max_examples=10)
@given(
    any_text(max_size=70), st.dictionaries(any_text(max_size=70), HOSTILE, max_size=3), st.lists(HOSTILE, max_size=3)
)
def test_whatever_a_file_holds_can_be_stored_or_is_left_out(tmp_path_factory, kernel, kwargs, key):
    folder = tmp_path_factory.mktemp("hostile")
    triton(folder, key, "x", kwargs=kwargs)
    with Store.open(str(folder / "results.db"), create=True) as store:
        try:
            result, notices = rows(store, folder, kernel)
        except UsageError as error:
            assert "\n" not in str(error)
            return
        sweep = store.begin_sweep("x", H100, command="", commit="", timer="", seed=0)
        assert store.add_many(sweep, result) == len(result)
        assert len(result) + len(notices) == 1
        assert [row.config for row in store.rows()] == [row.config for row in result]


# The command


def test_imported_once_and_shown_beside_what_was_measured(tmp_path):
    db = tmp_path / "results.db"
    second = NamedInts(ONE | {"BLOCK_SIZE_M": 128})
    with Store.open(str(db), create=True) as store:
        recorded(store)
        sweep = begin(store)
        timed = {CONFIG: 12.0, second: 10.0}
        store.add_many(
            sweep,
            [
                replace(row(time_us, config=config, version=VERSION), problem=PROBLEM, lookup_key=PROBLEM.shape)
                for config, time_us in timed.items()
            ],
        )
        store.mark_complete(sweep, Subject(VERSION, H100, Kind.MEASURED, PROBLEM), len(timed))
    path = gemm(tmp_path, **{"16": ONE, "512": ONE})
    imported = fp8tune("db", "import", path, "--kernel", NAME, "--db", db)
    assert (imported.returncode, "2 results added, 0 already there" in imported.stdout) == (0, True), imported.stderr
    assert "0 results added, 2 already there" in fp8tune("db", "import", path, "--kernel", NAME, "--db", db).stdout
    with Store.open(str(db)) as store:
        (pick,) = picks.read(store)  # a file without times decides nothing
    assert (pick.kind, pick.config) == (Kind.MEASURED, second)


def test_several_paths_and_what_is_wrong_with_them(tmp_path):
    db = tmp_path / "results.db"
    done = fp8tune("db", "import", gemm(tmp_path), triton(tmp_path / "cache").parent, "--kernel", "gemm", "--db", db)
    assert (done.returncode, done.stdout.count("1 result added")) == (0, 2), done.stderr
    for arguments in ([], [tmp_path / "absent"], [gemm(tmp_path / "b")], [gemm(tmp_path / "c"), "--kernel", "a b"]):
        done = fp8tune("db", "import", *arguments, "--db", db)
        assert done.returncode == 2
        assert "Traceback" not in done.stderr
