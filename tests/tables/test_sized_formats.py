"""Files of Hugging Face, vLLM and SGLang: names as their readers make them, whole numbers for keys."""

from __future__ import annotations

import json
import math

import format_picks as made
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8tune.errors import UsageError
from fp8tune.records import Device
from fp8tune.replay.recording import Config, Kernel
from fp8tune.tables.formats import Options, by_size
from fp8tune.tables.picks import KernelPicks

FLAT_SMALL = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 32, "num_warps": 4, "num_stages": 3}
FLAT_LARGE = {"BLOCK_SIZE_M": 128, "BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": 64, "num_warps": 8, "num_stages": 2}


def documents(write, kernel: KernelPicks, **options: object) -> dict[str, dict]:
    return {str(file.path): json.loads(file.text) for file in write([kernel], Options(**options))}


def moe(device: Device = made.H200, **others: object) -> KernelPicks:
    sizes = ((1, (10.0, 20.0, 30.0)), (256, (90.0, 40.0, 50.0)))
    picks = (made.pick({"M": M, "N": 7168, "E": 8}, times_us, **others) for M, times_us in sizes)
    return made.kernel_picks(*picks, device=device)


def test_a_gemm_is_found_as_the_example_looks_it_up() -> None:
    files = documents(by_size.write_hugging_face, made.gemm())

    def looked_up(N: int, M: int) -> dict[str, int]:
        rows = {int(m): row for m, row in files[f"_matmul/N={N},K=4096,device_name=NVIDIA_H200.json"].items()}
        return rows[min(rows, key=lambda m: abs(math.log(M / m)))]

    assert looked_up(4096, 20) == FLAT_SMALL
    assert looked_up(4096, 900) == looked_up(14336, 1) == FLAT_LARGE


def test_the_dim_that_varies_most_is_inside_if_there_is_no_m() -> None:
    kernel = Kernel("maker.norm:_rms", key=("n_rows", "n_cols"), configs=made.GEMM.configs)
    picks = [made.pick({"n_rows": rows, "n_cols": 64, "seed": 7}, (1.0, 2.0, 3.0), kernel) for rows in (1, 2, 3)]
    rms = made.kernel_picks(*picks, kernel=kernel)
    ((name, rows),) = documents(by_size.write_hugging_face, rms).items()
    assert (name, list(rows)) == ("_rms/n_cols=64,device_name=NVIDIA_H200.json", ["1", "2", "3"])
    (name,) = documents(by_size.write_hugging_face, rms, sizes={"M": "n_rows", "N": "n_cols"})
    assert name == "_rms/N=64,device_name=NVIDIA_H200.json"


def test_problems_of_one_name_share_the_config_that_loses_least() -> None:
    shape = {"M": 16, "N": 64, "K": 32}
    picks = [made.pick(shape, times_us) for times_us in ((10.0, 30.0, 11.0), (30.0, 10.0, 12.0))]
    (rows,) = documents(by_size.write_hugging_face, made.kernel_picks(*picks)).values()
    assert rows["16"]["BLOCK_SIZE_M"] == 64


def test_vllm_and_sglang_have_their_own_names() -> None:
    options = {"sizes": {"block_n": 128, "block_k": 128}, "dtype": "fp8_w8a8"}
    name = "E=8,N=7168,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128,{}128].json"
    rows = {"1": FLAT_SMALL, "256": FLAT_LARGE}
    vllm = documents(by_size.write_vllm, moe(), **options)
    assert vllm == {name.format(""): {"triton_version": "3.6.0", **rows}}
    # SGLang takes every key for a size
    assert documents(by_size.write_sglang, moe(), **options) == {f"configs/triton_3_6_0/{name.format(' ')}": rows}


def test_vllm_has_one_name_for_the_h200_family() -> None:
    nvl = moe(Device("sm_90", "NVIDIA H200 NVL", triton="3.6.0"))
    assert list(documents(by_size.write_vllm, nvl)) == ["E=8,N=7168,device_name=NVIDIA_H200.json"]
    (name,) = documents(by_size.write_sglang, nvl)
    assert name.endswith("device_name=NVIDIA_H200_NVL.json")


def test_sizes_can_be_named_or_given() -> None:
    kernel = made.kernel_picks(made.pick({"num_tokens": 3, "N": 64}, (1.0, 2.0, 3.0)))
    (name,) = documents(by_size.write_vllm, kernel, sizes=by_size.parse_sizes(["E=8", "M=num_tokens"]))
    assert name == "E=8,N=64,device_name=NVIDIA_H200.json"
    by_rows = made.kernel_picks(made.pick({"num_rows": 24, "N": 64}, (1.0, 2.0, 3.0)))
    (entries,) = documents(by_size.write_vllm, by_rows, sizes=by_size.parse_sizes(["E=8", "M=num_rows/8"])).values()
    assert "3" in entries
    for text in ("E", "E=", "E=-1", "=8", "E=a b", "M=8/2", "M=rows/0", "M=rows/"):
        with pytest.raises(UsageError, match="is no size"):
            by_size.parse_sizes([text])


ODD = Kernel("maker:k", key=("M",), configs=(Config({"BLOCK": 32}, has_pre_hook=True), made.SMALL))


@pytest.mark.parametrize(
    ("write", "kernel", "options", "message"),
    [
        (by_size.write_vllm, made.gemm(), {}, "has no dim E"),
        (by_size.write_vllm, made.gemm(), {"sizes": {"E": "experts"}}, "has no dim experts"),
        (by_size.write_hugging_face, made.gemm(), {"sizes": {"M": "N/1000"}}, "is no multiple of 1000"),
        (by_size.write_hugging_face, made.gemm(device=Device("sm_90")), {}, "does not name the device"),
        (by_size.write_vllm, moe(in_dtype="float64"), {}, "no name for the dtype float64"),
        (by_size.write_vllm, moe(), {"dtype": "a/b"}, "is no name"),
        (by_size.write_vllm, made.kernel_picks(made.pick({"M": 1}, (1.0, 2.0), ODD)), {}, "has no BLOCK_SIZE_M"),
        (
            by_size.write_hugging_face,
            made.kernel_picks(made.pick({"M": 1}, (1.0, 2.0), ODD), kernel=ODD),
            {},
            "have a pre_hook: export --for python",
        ),
    ],
)
def test_what_a_format_cannot_hold_is_refused(write, kernel, options, message) -> None:
    with pytest.raises(UsageError, match=message):
        documents(write, kernel, **options)


@given(st.text(max_size=80), st.text(min_size=1, max_size=40))
def test_hostile_names_stay_in_the_folder(kernel, device) -> None:
    hostile = Kernel(f"m:{kernel}", key=("M",), configs=made.GEMM.configs)
    pick = made.pick({"M": 1, "E": 1, "N": 1}, (1.0, 2.0, 3.0), hostile)
    picks = [made.kernel_picks(pick, kernel=hostile, device=Device("sm_90", device, triton=device))]
    for write in (by_size.write_hugging_face, by_size.write_vllm, by_size.write_sglang):
        for file in write(picks, Options()):
            assert not file.path.is_absolute()
            assert not {"..", ""} & set(file.path.parts)
            assert all("\\" not in part and len(part) <= 255 for part in file.path.parts)
