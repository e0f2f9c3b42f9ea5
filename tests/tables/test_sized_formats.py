"""Files of Hugging Face, vLLM and SGLang: names as their readers make them, whole numbers for keys."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import format_picks as made
import pytest
from any_text import any_text
from hypothesis import given

from fp8tune.check.configs import check_folder
from fp8tune.errors import UsageError
from fp8tune.records import Device
from fp8tune.replay.recording import Config, Kernel
from fp8tune.tables import files
from fp8tune.tables.formats import Options, by_size, parse_options
from fp8tune.tables.formats.moe_defaults import LADDER
from fp8tune.tables.picks import KernelPicks

FLAT_SMALL = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 32, "num_warps": 4, "num_stages": 3}
NO_SIZES: dict[str, str | int] = {}
FLAT_LARGE = {"BLOCK_SIZE_M": 128, "BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": 64, "num_warps": 8, "num_stages": 2}


def documents(write, kernel: KernelPicks, sizes=NO_SIZES, notice=lambda message: None) -> dict[str, dict]:
    return {str(file.path): json.loads(file.text) for file in write([kernel], Options(sizes, notice=notice))}


def moe(device: Device = made.H200, **others: object) -> KernelPicks:
    sizes = ((1, (10.0, 20.0, 30.0)), (256, (90.0, 40.0, 50.0)))
    picks = (made.pick({"M": M, "N": 7168, "E": 8}, times_us, **others) for M, times_us in sizes)
    return made.kernel_picks(*picks, device=device)


def test_a_gemm_is_found_as_the_example_looks_it_up() -> None:
    written = documents(by_size.write_hugging_face, made.gemm())

    def looked_up(N: int, M: int) -> dict[str, int]:
        rows = {int(m): row for m, row in written[f"_matmul/N={N},K=4096,device_name=NVIDIA_H200.json"].items()}
        return rows[min(rows, key=lambda m: abs(math.log(M / m)))]

    assert looked_up(4096, 20) == FLAT_SMALL
    assert looked_up(4096, 900) == looked_up(14336, 1) == FLAT_LARGE


def test_the_dim_that_varies_most_is_inside_if_there_is_no_m() -> None:
    kernel = Kernel("maker.norm:_rms", key=("n_rows", "n_cols"), configs=made.GEMM.configs)
    picks = [made.pick({"n_rows": rows, "n_cols": 64, "seed": 7}, (1.0, 2.0, 3.0), kernel) for rows in (1, 2, 3)]
    rms = made.kernel_picks(*picks, kernel=kernel)
    ((name, rows),) = documents(by_size.write_hugging_face, rms).items()
    assert (name, list(rows)) == ("_rms/n_cols=64,device_name=NVIDIA_H200.json", ["1", "2", "3"])
    (name,) = documents(by_size.write_hugging_face, rms, {"M": "n_rows", "N": "n_cols"})
    assert name == "_rms/N=64,device_name=NVIDIA_H200.json"


def test_problems_of_one_name_share_the_config_that_loses_least() -> None:
    shape = {"M": 16, "N": 64, "K": 32}
    picks = [made.pick(shape, times_us) for times_us in ((10.0, 30.0, 11.0), (30.0, 10.0, 12.0))]
    (rows,) = documents(by_size.write_hugging_face, made.kernel_picks(*picks)).values()
    assert rows["16"]["BLOCK_SIZE_M"] == 64


def test_a_pick_that_ties_with_the_fastest_stays_for_launches_that_share_it() -> None:
    pick = made.pick({"M": 16, "N": 64, "K": 32}, (10.05, 10.0, 30.0))
    tied = replace(pick.study.choice, pick=pick.study.default)
    pick = replace(pick, study=replace(pick.study, decision=tied))
    (rows,) = documents(by_size.write_hugging_face, made.kernel_picks(pick, pick)).values()
    assert rows["16"] == FLAT_SMALL


BLOCKS = {"block_n": 128, "block_k": 128, "GROUP_SIZE_M": 8, "dtype": "fp8_w8a8"}


def test_vllm_and_sglang_have_their_own_names_and_constants() -> None:
    name = "E=8,N=7168,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128,{}128].json"
    ((vllm_name, vllm),) = documents(by_size.write_vllm, moe(), BLOCKS).items()
    ((sglang_name, sglang),) = documents(by_size.write_sglang, moe(), BLOCKS).items()
    assert (vllm_name, sglang_name) == (name.format(""), f"configs/triton_3_6_0/{name.format(' ')}")
    assert (vllm.pop("triton_version"), vllm["1"]) == ("3.6.0", {**FLAT_SMALL, "GROUP_SIZE_M": 8, "SPLIT_K": 1})
    assert sglang["256"] == {**FLAT_LARGE, "GROUP_SIZE_M": 8}  # SGLang's kernel takes no SPLIT_K, and no key but sizes


@pytest.mark.parametrize(
    ("write", "pinned"),
    [  # at 32 and 1024 tokens, from the sources of the two programs
        (by_size.write_vllm, ((16, 128, 128, 32, 4, 3), (64, 128, 128, 32, 4, 3))),
        (by_size.write_sglang, ((64, 128, 128, 32, 4, 3), (64, 128, 128, 32, 4, 3))),
    ],
)
def test_a_file_has_all_sizes_and_only_near_ones_take_a_swept_config(tmp_path, write, pinned) -> None:
    notices: list[str] = []
    (rows,) = documents(write, moe(), BLOCKS, notices.append).values()
    rows.pop("triton_version", None)
    assert [int(size) for size in rows] == [*LADDER]
    assert [size for size, row in rows.items() if row == rows["1"]] == ["1", "2"]
    assert [size for size, row in rows.items() if row == rows["256"]] == ["128", "256", "512"]
    names = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M", "num_warps", "num_stages")
    assert tuple(tuple(rows[size][name] for name in names) for size in ("32", "1024")) == pinned
    (notice,) = notices
    assert "M = 4, 8, 16, 24, 32, 48, 64, 96, 1024, 1536, 2048, 3072, 4096" in notice
    files.write(write([moe()], Options(BLOCKS)), tmp_path)
    (file,), _ = check_folder(tmp_path, "3.6.0")
    assert (file.problems, len(file.configs)) == ([], len(LADDER))


def test_sizes_without_a_known_default_are_left_out_and_named() -> None:
    notices: list[str] = []
    (rows,) = documents(by_size.write_vllm, moe(), {"dtype": "int4_w4a16"}, notices.append).values()
    assert [*rows] == ["triton_version", "1", "2", "128", "256", "512"]
    assert any("default is unknown for M = 4, 8," in notice for notice in notices)


def test_vllm_has_one_name_for_the_h200_family() -> None:
    nvl = moe(Device("sm_90", "NVIDIA H200 NVL", triton="3.6.0"))
    assert list(documents(by_size.write_vllm, nvl)) == ["E=8,N=7168,device_name=NVIDIA_H200.json"]
    (name,) = documents(by_size.write_sglang, nvl)
    assert name.endswith("device_name=NVIDIA_H200_NVL.json")


@pytest.mark.parametrize(("dim", "size", "text"), [("num_tokens", 3, "num_tokens"), ("num_rows", 24, "num_rows/8")])
def test_sizes_can_be_named_or_given(dim: str, size: int, text: str) -> None:
    options, _ = parse_options(["E=8", f"M={text}"])
    kernel = made.kernel_picks(made.pick({dim: size, "N": 64}, (1.0, 2.0, 3.0)))
    ((name, entries),) = documents(by_size.write_vllm, kernel, options.sizes).items()
    assert (name, "3" in entries) == ("E=8,N=64,device_name=NVIDIA_H200.json", True)


@pytest.mark.parametrize("text", ["E", "E=", "E=-1", "=8", "E=a b", "M=8/2", "M=rows/0", "M=rows/", "dtype=a-b"])
def test_a_text_that_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is no size"):
        parse_options([text])


def constants(**values: int) -> KernelPicks:
    """A fused-MoE kernel that sets more than a tile."""
    kernel = Kernel("maker:moe", key=("M",), configs=(Config({**made.SMALL.kwargs, **values}),))
    return made.kernel_picks(made.pick({"M": 1, "N": 64, "E": 8}, (1.0,), kernel), kernel=kernel)


def test_constants_of_a_config_come_first() -> None:
    notices: list[str] = []
    for write, split in ((by_size.write_vllm, {"SPLIT_K": 1}), (by_size.write_sglang, {})):
        (rows,) = documents(write, constants(GROUP_SIZE_M=4, SPLIT_K=1), {"GROUP_SIZE_M": 8}).values()
        assert rows["1"] == {**FLAT_SMALL, "GROUP_SIZE_M": 4, **split}
        documents(write, constants(), notice=notices.append)
    assert sum("GROUP_SIZE_M=1 is written" in notice for notice in notices) == 2


ODD = Kernel("maker:k", key=("M",), configs=(Config({"BLOCK": 32}, has_pre_hook=True), made.SMALL))
ODD_PICKS = made.kernel_picks(made.pick({"M": 1}, (1.0, 2.0), ODD), kernel=ODD)


@pytest.mark.parametrize(
    ("write", "kernel", "sizes", "message"),
    [
        (by_size.write_vllm, made.gemm(), {}, "has no dim E"),
        (by_size.write_vllm, made.gemm(), {"E": "experts"}, "has no dim experts"),
        (by_size.write_hugging_face, made.gemm(), {"M": "N/1000"}, "is no multiple of 1000"),
        (by_size.write_hugging_face, made.gemm(), {"dtype": "fp8"}, "has no dim fp8"),
        (by_size.write_hugging_face, made.gemm(device=Device("sm_90")), {}, "does not name the device"),
        (by_size.write_vllm, constants(SPLIT_K=2), {}, "sets SPLIT_K=2, which the kernel of vLLM"),
        (by_size.write_sglang, constants(STAGES=2), {}, "sets STAGES, which the kernel of SGLang"),
        (by_size.write_vllm, moe(in_dtype="float64"), {}, "no name for the dtype float64"),
        (by_size.write_vllm, ODD_PICKS, {}, "has no BLOCK_SIZE_M"),
        (by_size.write_hugging_face, ODD_PICKS, {}, "have a pre_hook: export --for python"),
    ],
)
def test_picks_that_a_format_cannot_hold_are_refused(write, kernel, sizes, message) -> None:
    with pytest.raises(UsageError, match=message):
        documents(write, kernel, sizes)


@given(any_text(max_size=80), any_text(min_size=1, max_size=40))
def test_hostile_names_stay_in_the_folder(kernel, device) -> None:
    hostile = Kernel(f"m:{kernel}", key=("M",), configs=made.GEMM.configs)
    pick = made.pick({"M": 1, "E": 1, "N": 1}, (1.0, 2.0, 3.0), hostile)
    picks = [made.kernel_picks(pick, kernel=hostile, device=Device("sm_90", device, triton=device))]
    for write in (by_size.write_hugging_face, by_size.write_vllm, by_size.write_sglang):
        for file in write(picks, Options({} if write is by_size.write_hugging_face else {"dtype": device})):
            assert not file.path.is_absolute()
            assert not {"..", ""} & set(file.path.parts)
            assert all("\\" not in part and len(part) <= 255 for part in file.path.parts)
