"""flash-linear-attention's cache, read by its own code where that is installed."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import sys

import format_picks as picks
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8tune.errors import UsageError
from fp8tune.export.formats import fla
from fp8tune.records import NamedInts
from fp8tune.replay.recording import Config, Kernel


class Tensor:
    dtype = "torch.bfloat16"


@pytest.fixture
def look_up(tmp_path, monkeypatch):
    """What fla finds for a key of M, N, K and one tensor: by its cache module alone, as all of fla takes seconds."""
    try:
        files = importlib.metadata.files("fla-core") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("fla-core is not installed: pip install fla-core")
    (path,) = (file.locate() for file in files if file.match("fla/ops/utils/cache.py"))
    monkeypatch.setenv("FLA_CONFIG_DIR", str(tmp_path / "NVIDIA_H200"))

    def looked_up(mode: str, *values: int):
        monkeypatch.setenv("FLA_CACHE_MODE", mode)  # read when it is imported
        spec = importlib.util.spec_from_file_location("fla_cache", path)
        cache = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "fla_cache", cache)  # its dataclasses ask for it
        spec.loader.exec_module(cache)
        key = cache.AutotuneKey.build(["a", "M", "N", "K"], ["M", "N", "K"], (Tensor(), *values), {})
        return cache.load_cached_config("_matmul", key)

    return looked_up


def test_fla_finds_each_pick_by_its_own_key(tmp_path, look_up):
    picks.written(fla.write(picks.gemm()), tmp_path)
    assert look_up("strict", 16, 4096, 4096) == {
        "kwargs": picks.SMALL.kwargs,
        "num_warps": 4,
        "num_stages": 3,
        "num_ctas": 1,
        "maxnreg": None,
    }
    assert look_up("strict", 1024, 14336, 4096)["kwargs"] == picks.LARGE.kwargs
    assert look_up("strict", 17, 4096, 4096) is None
    assert look_up("default", 17, 4096, 4096)["kwargs"] == picks.EVEN.kwargs


def test_entries_are_by_the_md5_of_the_key():
    ((path, document),) = picks.documents(fla.write(picks.gemm())).items()
    assert path == "NVIDIA_H200/_matmul.json"
    key = '[16,4096,4096,"torch.bfloat16"]'
    entry = document["autotune_entries"][hashlib.md5(key.encode()).hexdigest()]
    assert entry["autotune_key"] == json.loads(key)
    assert entry["evidence"][0]["evidence"] == "winner on M=16 N=4096 K=4096"


def test_the_default_loses_least_where_it_loses_most():
    ((_, document),) = picks.documents(fla.write(picks.gemm())).items()
    assert document["default_config"]["kwargs"] == picks.EVEN.kwargs
    assert document["evidence"]["default_slowdown"] == 1.1


def test_a_config_that_is_wrong_for_a_key_is_no_default():
    wrong_once = picks.tuned(NamedInts(M=2, N=2, K=2), picks.LARGE, {0: 50.0, 1: 10.0})
    (file,) = fla.write(picks.given(*picks.gemm().tuned, wrong_once))
    assert json.loads(file.text)["default_config"]["kwargs"] == picks.LARGE.kwargs


def test_launches_of_one_key_share_an_entry():
    shape = NamedInts(M=16, N=64, K=32)
    tuned = [picks.tuned(shape, picks.SMALL, {0: 1.0, 1: 2.0}), picks.tuned(shape, picks.LARGE, {0: 9.0, 1: 3.0})]
    (file,) = fla.write(picks.given(*tuned))
    (entry,) = json.loads(file.text)["autotune_entries"].values()
    assert entry["config"]["kwargs"] == picks.LARGE.kwargs
    assert len(entry["evidence"]) == 2


def test_what_fla_cannot_hold_is_refused():
    shape = NamedInts(M=16, N=64, K=32)
    with pytest.raises(UsageError, match="fp8tune record"):
        fla.write(picks.given(picks.tuned(shape, picks.SMALL, {0: 1.0}, launch=None)))
    strange = picks.launch({"dtype": "tl.float32"})
    with pytest.raises(UsageError, match="no JSON value"):
        fla.write(picks.given(picks.tuned(shape, picks.SMALL, {0: 1.0}, launch=strange)))
    hooked = Kernel("m:k", key=("M",), configs=(Config({"BLOCK": 32}, has_pre_hook=True),))
    with pytest.raises(UsageError, match="pre_hook"):
        fla.write(picks.given(picks.tuned(NamedInts(M=1), hooked.configs[0], {0: 1.0}, kernel=hooked), kernel=hooked))


def test_what_was_written_is_read_again(tmp_path):
    (path,) = picks.written(fla.write(picks.gemm()), tmp_path)
    read = {pick.key: pick for pick in fla.read(path)}
    assert read[16, 4096, 4096, "torch.bfloat16"].config == picks.SMALL
    assert read[1024, 4096, 4096, "torch.bfloat16"].config == picks.LARGE
    assert {(pick.kernel, pick.device, pick.time_us) for pick in read.values()} == {("_matmul", "NVIDIA_H200", None)}


@pytest.mark.parametrize(
    "document",
    [
        [],
        {},
        {"autotune_entries": {}},
        {"autotune_entries": [], "default_config": None},
        {"autotune_entries": {"a": 1}, "default_config": None},
        {"autotune_entries": {"a": {"autotune_key": [1]}}, "default_config": None},
        {"autotune_entries": {"a": {"autotune_key": [1], "config": {"kwargs": {"B": {}}}}}, "default_config": None},
        {"autotune_entries": {}, "default_config": None, "kernel_name": 7},
    ],
)
def test_a_damaged_file_is_one_line(tmp_path, document):
    path = tmp_path / "kernel.json"
    path.write_text(json.dumps(document))
    with pytest.raises(UsageError) as raised:
        fla.read(path)
    assert "\n" not in str(raised.value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["config", "kwargs", "autotune_key"]), inner)
    ),
    max_leaves=8,
)


@given(JSON)
def test_any_entry_is_a_pick_or_one_line(tmp_path_factory, entry):
    path = tmp_path_factory.getbasetemp() / "any.json"
    path.write_text(json.dumps({"autotune_entries": {"a": entry}, "default_config": None}))
    try:
        assert len(fla.read(path)) == 1
    except UsageError as error:
        assert "\n" not in str(error)


@given(st.text(max_size=80), st.text(max_size=40))
def test_hostile_names_stay_in_the_folder(kernel, device):
    assert fla.gpu_name(device).replace("_", "a").isalnum()
    made = Kernel(f"m:{kernel}", key=("M",), configs=picks.GEMM.configs)
    tuned = picks.tuned(NamedInts(M=1), picks.SMALL, {0: 1.0}, kernel=made)
    (file,) = fla.write(picks.given(tuned, kernel=made))
    assert len(file.path.parts) == 2
    assert ".." not in file.path.parts
