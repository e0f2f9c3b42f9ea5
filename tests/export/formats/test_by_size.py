"""Hugging Face's, vLLM's and SGLang's files: names as their readers make them, integers for keys, and back."""

from __future__ import annotations

import json
import math

import format_picks as picks
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8tune.errors import UsageError
from fp8tune.export.formats import by_size, huggingface, vllm
from fp8tune.records import Device, NamedInts
from fp8tune.replay.recording import Config, Kernel

FLAT_SMALL = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 32, "num_warps": 4, "num_stages": 3}
FLAT_LARGE = {"BLOCK_SIZE_M": 128, "BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": 64, "num_warps": 8, "num_stages": 2}


def looked_up(folder, name: str, M: int) -> dict[str, int]:
    """As the example of Hugging Face's documentation looks a config up."""
    tuned = {int(m): config for m, config in json.loads((folder / name).read_text()).items()}
    return tuned[min(tuned, key=lambda m: abs(math.log(M / m)))]


def moe(E: int = 8, device: Device = picks.H200, **fields):
    return picks.given(
        picks.tuned(NamedInts(M=1, N=7168, E=E), picks.SMALL, {0: 10.0, 1: 20.0}, **fields),
        picks.tuned(NamedInts(M=256, N=7168, E=E), picks.LARGE, {0: 90.0, 1: 40.0}, **fields),
        device=device,
    )


def test_a_gemm_is_found_under_the_names_of_the_example(tmp_path):
    picks.written(huggingface.write(picks.gemm()), tmp_path)
    folder = tmp_path / "_matmul"
    assert looked_up(folder, "N=4096,K=4096,device_name=NVIDIA_H200.json", 20) == FLAT_SMALL
    assert looked_up(folder, "N=4096,K=4096,device_name=NVIDIA_H200.json", 900) == FLAT_LARGE
    assert looked_up(folder, "N=14336,K=4096,device_name=NVIDIA_H200.json", 1) == FLAT_LARGE


def test_the_evidence_lies_beside(tmp_path):
    documents = picks.documents(huggingface.write(picks.gemm()))
    beside = documents["_matmul/N=4096,K=4096,device_name=NVIDIA_H200.evidence.json"]
    assert beside["device"] == "NVIDIA H200"
    assert beside["entries"]["16"]["problems"][0]["evidence"] == "winner on M=16 N=4096 K=4096"


def test_what_varies_most_is_inside_where_there_is_no_m():
    kernel = Kernel("maker.norm:_rms", key=("n_rows", "n_cols"), configs=picks.GEMM.configs)
    tuned = [picks.tuned(NamedInts(n_rows=rows, n_cols=64), picks.SMALL, {0: 1.0}, kernel=kernel) for rows in (1, 2, 3)]
    (file, _) = huggingface.write(picks.given(*tuned, kernel=kernel))
    assert str(file.path) == "_rms/n_cols=64,device_name=NVIDIA_H200.json"
    assert list(json.loads(file.text)) == ["1", "2", "3"]
    renamed = huggingface.write(picks.given(*tuned, kernel=kernel), sizes={"M": "n_rows", "N": "n_cols"})
    assert str(renamed[0].path) == "_rms/N=64,device_name=NVIDIA_H200.json"
    by_column = huggingface.write(picks.given(*tuned, kernel=kernel), inside="n_cols")
    assert len(by_column) == 2 * 3


def test_dims_that_no_lookup_goes_by_are_in_no_name():
    tuned = picks.tuned(NamedInts(M=16, N=64, K=32, seed=7), picks.SMALL, {0: 1.0})
    (file, _) = huggingface.write(picks.given(tuned))
    assert file.path.name == "N=64,K=32,device_name=NVIDIA_H200.json"


def test_problems_that_a_name_does_not_tell_apart_share_the_config_that_loses_least():
    shape = NamedInts(M=16, N=64, K=32)
    tuned = [
        picks.tuned(shape, picks.SMALL, {0: 10.0, 1: 30.0, 2: 11.0}),
        picks.tuned(shape, picks.LARGE, {0: 30.0, 1: 10.0, 2: 12.0}),
    ]
    config, beside = huggingface.write(picks.given(*tuned))
    assert json.loads(config.text)["16"]["BLOCK_SIZE_M"] == 64
    assert json.loads(beside.text)["entries"]["16"]["worst_slowdown"] == 1.2


def test_vllm_and_sglang_have_their_own_names():
    documents = picks.documents(vllm.write(moe(), sizes={"block_n": 128, "block_k": 128}, dtype="fp8_w8a8"))
    name = "E=8,N=7168,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128,{}128].json"
    for_vllm = documents["vllm/" + name.format("")]
    assert for_vllm.pop("triton_version") == "3.6.0"
    # SGLang takes every key for a size
    assert (
        documents["sglang/configs/triton_3_6_0/" + name.format(" ")]
        == for_vllm
        == {
            "1": FLAT_SMALL,
            "256": FLAT_LARGE,
        }
    )


def test_vllm_has_one_name_for_the_h200_family():
    paths = [str(file.path) for file in vllm.write(moe(device=Device("sm_90", "NVIDIA H200 NVL", triton="3.6.0")))]
    assert "vllm/E=8,N=7168,device_name=NVIDIA_H200.json" in paths
    assert "sglang/configs/triton_3_6_0/E=8,N=7168,device_name=NVIDIA_H200_NVL.json" in paths


def test_sizes_can_be_named_or_given():
    tuned = picks.tuned(NamedInts(num_tokens=3, N=64), picks.SMALL, {0: 1.0})
    files = vllm.write(picks.given(tuned), sizes=by_size.sizes(["E=8", "M=num_tokens"]))
    assert str(files[0].path) == "vllm/E=8,N=64,device_name=NVIDIA_H200.json"
    for text in ("E", "E=", "E=-1", "=8", "E=a b"):
        with pytest.raises(UsageError, match="is no size"):
            by_size.sizes([text])


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda: vllm.write(picks.gemm()), "has no dim E"),
        (lambda: vllm.write(picks.gemm(), sizes={"E": "experts"}), "has no dim experts"),
        (lambda: huggingface.write(picks.gemm(), inside="rows"), "has no dim rows"),
        (lambda: huggingface.write(picks.gemm(device=Device("sm_90"))), "does not name the device"),
    ],
)
def test_what_is_missing_is_said(write, message):
    with pytest.raises(UsageError, match=message):
        write()


def test_configs_that_their_code_cannot_launch_are_refused():
    kernel = Kernel("maker:k", key=("M",), configs=(Config({"BLOCK": 32}),))
    tuned = picks.tuned(NamedInts(E=1, N=1, M=1), kernel.configs[0], {0: 1.0}, kernel=kernel)
    with pytest.raises(UsageError, match="have no BLOCK_SIZE_M"):
        vllm.write(picks.given(tuned, kernel=kernel))
    hooked = Kernel("maker:k", key=("M",), configs=(Config({"BLOCK": 32}, has_pre_hook=True),))
    tuned = picks.tuned(NamedInts(M=1), hooked.configs[0], {0: 1.0}, kernel=hooked)
    with pytest.raises(UsageError, match="pre_hook"):
        huggingface.write(picks.given(tuned, kernel=hooked))


def test_dtypes_with_one_name_are_not_mixed():
    mixed = picks.given(*moe().tuned, *moe_in("float16").tuned)
    with pytest.raises(UsageError, match="one at a time"):
        vllm.write(mixed)
    with pytest.raises(UsageError, match="no name for the dtype float64"):
        vllm.write(moe_in("float64"))


def moe_in(dtype: str):
    from dataclasses import replace

    made = moe()
    return replace(made, tuned=tuple(replace(one, problem=replace(one.problem, in_dtype=dtype)) for one in made.tuned))


def test_nothing_tuned_is_no_file():
    assert huggingface.write(picks.given()) == vllm.write(picks.given()) == []


# Reading


def test_what_was_written_is_read_again(tmp_path):
    paths = picks.written(vllm.write(moe(), dtype="fp8_w8a8"), tmp_path)
    read = [vllm.read(path) for path in paths if by_size.is_named(path)]
    assert len(read) == 2
    for found in read:
        assert [(pick.shape, pick.config) for pick in found] == [
            (NamedInts(E=8, N=7168, M=1), picks.SMALL),
            (NamedInts(E=8, N=7168, M=256), picks.LARGE),
        ]
        assert {(pick.kernel, pick.device, pick.dtype) for pick in found} == {
            ("fused_moe_kernel", "NVIDIA_H200", "fp8_w8a8")
        }


def test_flags_and_blocks_are_sizes(tmp_path):
    name = "E=8,N=64,device_name=A_B-C,dtype=fp8_w8a8,block_shape=[128, 64],per_channel_quant=True_down.json"
    path = tmp_path / name
    path.write_text('{"triton_version": "3.4.0", "2": {"BLOCK_SIZE_M": 16}}')
    (pick,) = vllm.read(path)
    assert pick.shape == NamedInts(E=8, N=64, block_n=128, block_k=64, per_channel_quant=1, down=1, M=2)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "7", '{"1": 2}', '{"one": {"BLOCK": 1}}', '{"1": {"num_warps": 0}}', '{"1": {"B": [1]}}', "[" * 9999],
)
def test_a_damaged_file_is_one_line(tmp_path, text):
    path = tmp_path / "E=1,N=1,device_name=x.json"
    path.write_text(text)
    with pytest.raises(UsageError) as raised:
        vllm.read(path)
    assert "\n" not in str(raised.value)
    assert path.name in str(raised.value)


@given(st.text(st.characters(blacklist_characters="/\0", blacklist_categories=["Cs"]), max_size=60))
def test_any_name_is_read(tmp_path_factory, name):
    path = tmp_path_factory.getbasetemp() / f"device_name={name}.json"
    try:
        path.write_text('{"8": {"BLOCK_SIZE_M": 16}}')
    except OSError:  # longer than a file system takes
        return
    (pick,) = by_size.read(path)
    assert pick.shape["M"] == 8
    path.unlink()


@given(st.text(max_size=80), st.text(min_size=1, max_size=40))
def test_hostile_names_stay_in_the_folder(kernel, device):
    made = Kernel(f"m:{kernel}", key=("M",), configs=picks.GEMM.configs)
    tuned = picks.tuned(NamedInts(M=1, E=1, N=1), picks.SMALL, {0: 1.0}, kernel=made)
    hostile = picks.given(tuned, kernel=made, device=Device("sm_90", device, triton=device))
    for file in [*huggingface.write(hostile), *vllm.write(hostile)]:
        assert not file.path.is_absolute()
        assert not {"..", ""} & set(file.path.parts)
        assert all("\\" not in part and len(part) <= 255 for part in file.path.parts)
