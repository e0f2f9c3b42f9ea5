"""SGLang's fused MoE kernel on Qwen3-30B-A3B: the two GEMMs of a layer share a config, which SGLang looks up by tokens.

    python -m benchmarks.real.sglang_moe unpack sglang-0.5.23-*.whl FOLDER     # without SGLang's other packages
    export PYTHONPATH=FOLDER:$PYTHONPATH
    fp8tune record --kernel 'sglang.*:fused_moe_kernel' -o moe.json -- python -m benchmarks.real.sglang_moe run 64 512
    fp8tune sweep --grid BLOCK_SIZE_M=16,64 --kernel "$(python -m benchmarks.real.sglang_moe name moe.json)"
    fp8tune export --for sglang $(python -m benchmarks.real.sglang_moe sizes) -o tuned
    python -m benchmarks.real.sglang_moe compare tuned 64 512                  # by SGLang's own lookup

``--dtype bf16`` takes the unquantized model instead of FP8 in blocks of 128 x 128, ``--tiny`` sizes for the
interpreter. Quantization, activation and the sum over experts are no part of it.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton

from benchmarks.real.steps import DEVICE

KERNEL = "sglang.kernels.ops.moe.fused_moe_triton_kernels:fused_moe_kernel"
LOOKUP = "sglang/srt/layers/moe/moe_runner/triton_utils"
UNPACKED = (f"{KERNEL.partition(':')[0].replace('.', '/')}.py", f"{LOOKUP}/fused_moe_triton_config.py")

_REFUSED = "def refused(*_, **__):\n    raise NotImplementedError\n\n\n"
STANDINS = {
    f"{LOOKUP}/__init__": "def get_config():\n    return None\n",
    "sglang/kernels/jit/utils": "from sglang.srt.utils import capability\n\n\n"
    "def is_arch_support_pdl():\n    return capability() >= 9\n",
    "sglang/kernels/ops/quantization/fp8_kernel": _REFUSED
    + "per_token_group_quant_fp8 = scaled_fp8_quant = sglang_per_token_group_quant_fp8 = refused\n",
    "sglang/kernels/ops/quantization/int8_kernel": _REFUSED
    + "per_token_group_quant_int8 = per_token_quant_int8 = sglang_per_token_group_quant_int8 = refused\n",
    "sglang/srt/batch_invariant_ops": "def is_batch_invariant_mode_enabled():\n    return False\n",
    "sglang/srt/environ": "class envs:\n    class SGLANG_USE_AITER:\n        get = staticmethod(lambda: False)\n",
    "sglang/srt/layers/moe/utils": "def get_moe_padding_size(use_aiter):\n    return 0\n",
    "sglang/srt/runtime_context": "class get_exec:\n    class deterministic:\n"
    "        enable_deterministic_inference = False\n",
    "sglang/srt/utils": """import functools

import pynvml


@functools.cache
def of_first_gpu(question):  # creates no CUDA context: processes that only compile have none
    try:
        pynvml.nvmlInit()
        return getattr(pynvml, question)(pynvml.nvmlDeviceGetHandleByIndex(0))
    except pynvml.NVMLError:
        return None


def capability():
    return (of_first_gpu("nvmlDeviceGetCudaComputeCapability") or [0])[0]


def get_device_name():
    return of_first_gpu("nvmlDeviceGetName") or "simulated 1"


is_cuda = is_sm90_supported = lambda: capability() == 9
is_cpu = is_hip = cpu_has_amx_support = lambda: False
""",
}
"""Modules that SGLang's kernel and lookup import, and that import much more: what they say on one Hopper GPU."""

BLOCK = 128
"""Rows and columns of the blocks of quantized weights."""


@dataclass(frozen=True)
class Model:
    """Sizes of a layer's experts."""

    experts: int = 128
    top_k: int = 8
    hidden: int = 2048
    width: int = 768
    is_fp8: bool = True

    @property
    def shapes(self) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        """Shapes of both weights: gate and up projection, then down projection."""
        return (self.experts, 2 * self.width, self.hidden), (self.experts, self.hidden, self.width)


def unpack(wheel: Path, folder: Path) -> None:
    """Write the kernel, the lookup with its tuned files, and stand-ins for what else they import."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if f"{LOOKUP}/configs/triton_" in name and "E=128,N=768," in name]
        archive.extractall(folder, [*UNPACKED, *names])
    for module, text in STANDINS.items():
        file = folder / f"{module}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def align(expert_of_row: torch.Tensor, experts: int, block: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sort rows by expert, each expert filled up to whole blocks with the number of rows.

    Return rows, the expert of each block, and the number of places in use; the rest is as long as any routing needs.
    """
    count = len(expert_of_row)
    places = count * block if count < experts + 1 else count + (experts + 1) * (block - 1)
    counts = torch.bincount(expert_of_row.long(), minlength=experts)
    blocks = (counts + block - 1) // block
    order = expert_of_row.argsort(stable=True)
    of_order = expert_of_row[order].long()
    shift = block * (blocks.cumsum(0) - blocks) - (counts.cumsum(0) - counts)
    rows = expert_of_row.new_full((-(-places // 4) * 4,), count, dtype=torch.int32)
    rows[torch.arange(count, device=rows.device) + shift[of_order]] = order.int()
    experts_of_blocks = torch.repeat_interleave(torch.arange(experts, device=rows.device), blocks).int()
    unused = triton.cdiv(len(rows), block) - len(experts_of_blocks)
    return rows, torch.nn.functional.pad(experts_of_blocks, (0, unused), value=-1), (block * blocks.sum()).int()[None]


def expert_of_each_row(rows: torch.Tensor, experts: torch.Tensor, count: int) -> torch.Tensor:
    """Return what :func:`align` sorted; the length of a block is a power of two."""
    block = triton.next_power_of_2(triton.cdiv(len(rows), len(experts)))
    of_place = experts.repeat_interleave(block)[: len(rows)]
    is_row = (rows < count) & (of_place >= 0)
    result = experts.new_zeros(count)
    result[rows[is_row].long()] = of_place[is_row]
    return result


def inputs(
    config: Mapping[str, Any],
    *,
    b_ptr: Any,
    sorted_token_ids_ptr: Any,
    expert_ids_ptr: Any,
    num_valid_tokens: int,
    K: int,
    use_fp8_w8a8: bool,
    **_: Any,
) -> dict[str, Any]:
    """Return the arguments that SGLang makes for a config, and the grid that goes with them."""
    from sglang.kernels.ops.moe.fused_moe_triton_kernels import should_enable_swap_ab

    block_m, block_n, block_k = (config[f"BLOCK_SIZE_{size}"] for size in "MNK")
    expert_of_row = expert_of_each_row(sorted_token_ids_ptr, expert_ids_ptr, num_valid_tokens)
    rows, experts, places = align(expert_of_row, len(b_ptr), block_m)
    return {
        "sorted_token_ids_ptr": rows,
        "expert_ids_ptr": experts,
        "num_tokens_post_padded_ptr": places,
        "EM": len(rows),
        "even_Ks": K % block_k == 0,
        "swap_ab": use_fp8_w8a8 and should_enable_swap_ab(block_m, block_n),
        "grid": (triton.cdiv(len(rows), block_m) * triton.cdiv(b_ptr.shape[1], block_n),),
    }


def reference(
    a_ptr: Any,
    b_ptr: Any,
    c_ptr: Any,
    a_scale_ptr: Any,
    b_scale_ptr: Any,
    topk_weights_ptr: Any,
    sorted_token_ids_ptr: Any,
    expert_ids_ptr: Any,
    num_valid_tokens: int,
    top_k: int,
    MUL_ROUTED_WEIGHT: bool,
) -> torch.Tensor:
    """Compute a GEMM in plain torch, expert by expert."""
    a, (_, N, K) = a_ptr.double(), b_ptr.shape
    if a_scale_ptr is not None:
        a = a * a_scale_ptr.double().repeat_interleave(BLOCK, 1)[:, :K]
    expert_of_row = expert_of_each_row(sorted_token_ids_ptr, expert_ids_ptr, num_valid_tokens)
    result: torch.Tensor = a.new_zeros(num_valid_tokens, N)
    for expert in expert_of_row.unique().tolist():
        (rows,) = torch.where(expert_of_row == expert)
        b = b_ptr[expert].double()
        if b_scale_ptr is not None:
            scale = b_scale_ptr[expert].double().repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
            b = b * scale[:N, :K]
        result[rows] = a[rows // top_k] @ b.T
    if MUL_ROUTED_WEIGHT:
        result *= topk_weights_ptr.double().view(-1, 1)
    return result.view(c_ptr.shape)


@functools.cache
def weights(model: Model) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    """Return both weights with their scales, the same in every process."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    result: list[tuple[torch.Tensor, torch.Tensor | None]] = []
    for shape in model.shapes:
        w = torch.randn(shape, generator=generator, device=DEVICE, dtype=torch.bfloat16)
        scales = torch.rand(shape[0], shape[1] // BLOCK, shape[2] // BLOCK, generator=generator, device=DEVICE) / 64
        result.append((w.to(torch.float8_e4m3fn), scales) if model.is_fp8 else (w / 32, None))
    return result


class Layer:
    """Both GEMMs of a layer on some tokens, with every expert as likely."""

    def __init__(self, model: Model, tokens: int) -> None:
        generator = torch.Generator(DEVICE).manual_seed(tokens)
        self.model = model
        scores = torch.rand(tokens, model.experts, generator=generator, device=DEVICE)
        self.topk_weights, ids = (item.contiguous() for item in scores.topk(model.top_k))
        self.topk_ids = ids.int()
        self.operands = []
        for (_, N, K), rows in zip(model.shapes, (tokens, tokens * model.top_k), strict=True):
            a = torch.randn(rows, K, generator=generator, device=DEVICE, dtype=torch.bfloat16)
            scale = torch.rand(rows, K // BLOCK, generator=generator, device=DEVICE) if model.is_fp8 else None
            c = a.new_empty(tokens, model.top_k, N)
            self.operands.append((a.to(torch.float8_e4m3fn) if model.is_fp8 else a, scale, c))

    def aligned(self, config: Mapping[str, int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the order of rows for a config."""
        return align(self.topk_ids.flatten(), self.model.experts, config["BLOCK_SIZE_M"])

    def launch(self, config: Mapping[str, int], order: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
        """Launch both GEMMs as SGLang does, with one config."""
        from sglang.kernels.ops.moe.fused_moe_triton_kernels import invoke_fused_moe_kernel

        model = self.model
        for is_down, ((w, scales), (a, scale, c)) in enumerate(zip(weights(model), self.operands, strict=True)):
            invoke_fused_moe_kernel(
                *(a, w, None, c, scale, scales, None, self.topk_weights, self.topk_ids, *order),
                mul_routed_weight=bool(is_down),
                top_k=1 if is_down else model.top_k,
                config=dict(config),
                compute_type=triton.language.bfloat16,
                use_fp8_w8a8=model.is_fp8,
                **{"use_int8_w8a8": False, "use_int8_w8a16": False, "use_int4_w4a16": False},
                per_channel_quant=False,
                block_shape=[BLOCK, BLOCK] if model.is_fp8 else None,
            )


def looked_up(model: Model, tokens: int, folder: str | None) -> dict[str, int]:
    """Return the config that SGLang looks up for a number of tokens, without TMA.

    ``folder``: that of tuned files; None for those that come with SGLang, empty for its default heuristic.
    """
    from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe_triton_config as lookup

    with tempfile.TemporaryDirectory() as empty:
        Path(empty, "configs").mkdir()
        os.environ.pop("SGLANG_MOE_CONFIG_DIR", None)
        if folder is not None:
            os.environ["SGLANG_MOE_CONFIG_DIR"] = folder or empty
        lookup.get_moe_configs.cache_clear()
        dtype, block = ("fp8_w8a8", [BLOCK, BLOCK]) if model.is_fp8 else (None, None)
        config = lookup.try_get_optimal_moe_config(*model.shapes, model.top_k, dtype, tokens, block_shape=block)
    return {name: value for name, value in config.items() if name != "USE_TMA"}


def times_us(layer: Layer, configs: Mapping[str, Mapping[str, int]], rounds: int) -> dict[str, float]:
    """Return the median time of both GEMMs with each config, in turn and with a cold L2 cache."""
    orders = {name: layer.aligned(config) for name, config in configs.items()}
    cold = torch.empty(2**28, dtype=torch.int8, device=DEVICE)
    samples: dict[str, list[float]] = {name: [] for name in configs}
    for number in range(rounds + 3):
        for name, config in configs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            cold.zero_()
            torch.cuda._sleep(1_000_000)  # launches are enqueued meanwhile
            start.record()
            layer.launch(config, orders[name])
            end.record()
            end.synchronize()
            if number >= 3:
                samples[name].append(start.elapsed_time(end) * 1e3)
    return {name: statistics.median(sample) for name, sample in samples.items()}


def compare(model: Model, folder: str, token_counts: Sequence[int], rounds: int = 50) -> None:
    """Print what SGLang looks up in a folder, beside its shipped files and its default heuristic, with times."""
    print("| tokens | default us | shipped us | tuned us | over default | over shipped | config in the folder |")
    print("|---:|---:|---:|---:|---:|---:|---|")
    for tokens in token_counts:
        configs = {
            name: looked_up(model, tokens, where)
            for name, where in {"default": "", "shipped": None, "tuned": folder}.items()
        }
        line = ", ".join(f"{name} {value}" for name, value in configs["tuned"].items())
        if DEVICE == "cpu":
            print(f"| {tokens} | - | - | - | - | - | {line} |")
            continue
        us = times_us(Layer(model, tokens), configs, rounds)
        default_us, shipped_us, tuned_us = us.values()
        times = f"{default_us:.1f} | {shipped_us:.1f} | {tuned_us:.1f}"
        shipped = "no file" if configs["shipped"] == configs["default"] else f"{shipped_us / tuned_us:.3f}x"
        print(f"| {tokens} | {times} | {default_us / tuned_us:.3f}x | {shipped} | {line} |", flush=True)


def main() -> int:
    """Do one of the steps above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=["unpack", "run", "name", "sizes", "compare"])
    parser.add_argument("values", nargs="*")
    parser.add_argument("--dtype", choices=["fp8", "bf16"], default="fp8")
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_intermixed_args()
    is_fp8, values = arguments.dtype == "fp8", arguments.values
    model = Model(4, 2, 256, 128, is_fp8) if arguments.tiny else Model(is_fp8=is_fp8)
    match arguments.step:
        case "unpack":
            unpack(Path(values[0]), Path(values[1]))
        case "run":
            config = looked_up(model, 1 << 20, "")  # SGLang's default for many tokens
            for layer in (Layer(model, int(tokens)) for tokens in values):
                layer.launch(config, layer.aligned(config))
        case "name":
            options = "&".join(f"{name}=benchmarks.real.sglang_moe:{name}" for name in ("inputs", "reference"))
            print(f"{KERNEL}@{values[0]}?check=tolerance&sizes=recorded&shared=num_valid_tokens&{options}")
        case "sizes":
            sizes = {"M": f"num_valid_tokens/{model.top_k}", "E": model.experts, "N": model.width}
            sizes |= {"dtype": "fp8_w8a8", "block_n": BLOCK, "block_k": BLOCK} if is_fp8 else {"dtype": ""}
            print(f"--kernel {KERNEL} " + " ".join(f"--size {name}={value}" for name, value in sizes.items()))
        case "compare":
            compare(model, values[0], list(map(int, values[1:])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
