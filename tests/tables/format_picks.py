"""Picks for the tests of the formats: a GEMM with three problems on a made-up H200."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fp8tune.records import Device, KernelVersion, Kind, NamedInts, Problem, Status
from fp8tune.replay.configs import axes, encoded
from fp8tune.replay.recording import Config, Grid, Kernel, Launch, Tensor
from fp8tune.stats.decide import decide_study
from fp8tune.stats.study import Result, Study
from fp8tune.tables.picks import KernelPicks, Pick

H200 = Device("sm_90", "NVIDIA H200", torch="2.13.0", triton="3.6.0", driver="580.1", runtime="cuda 13.0")
SMALL = Config({"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 32}, num_warps=4, num_stages=3)
LARGE = Config({"BLOCK_SIZE_M": 128, "BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": 64}, num_warps=8, num_stages=2)
EVEN = Config({"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 64}, num_warps=4, num_stages=2)
GEMM = Kernel("maker.gemm:_matmul", key=("M", "N", "K"), configs=(SMALL, LARGE, EVEN))
TIMES_US = {
    (16, 4096, 4096): (10.0, 20.0, 11.0),
    (1024, 4096, 4096): (90.0, 40.0, 42.0),
    (1024, 14336, 4096): (300.0, 120.0, 130.0),
}
"""M, N, K -> microseconds of each config of the GEMM."""


def pick(
    shape: Mapping[str, int],
    times_us: Sequence[float | Status],
    kernel: Kernel = GEMM,
    *,
    key: tuple[object, ...] | None = None,
    evidence: str = "",
    in_dtype: str = "bfloat16",
    is_recorded: bool = True,
) -> Pick:
    """``times_us``: the time of each of the kernel's configs, or how it failed."""
    configs = [encoded(kernel, config) for config in kernel.configs]
    outcomes = dict(zip(configs, times_us, strict=True))
    problem = Problem(kernel.name, NamedInts(shape), input_layout="recorded-0", in_dtype=in_dtype)
    study = Study(
        problem,
        H200,
        Kind.MEASURED,
        KernelVersion(kernel.name, kernel.source_hash or "aaaa", configs[0], tuple(axes(kernel).items()), ()),
        tuple(Result(config, coarse_us=us) for config, us in outcomes.items() if not isinstance(us, Status)),
        {config: status for config, status in outcomes.items() if isinstance(status, Status)},
        lookup_key=NamedInts(shape),
    )
    of_shape = (*(shape[name] for name in kernel.key if name in shape), f"torch.{in_dtype}")
    launch = Launch((Tensor("a", in_dtype, (1,), (1,)),), Grid((), ()), key=of_shape if key is None else key)
    return Pick(decide_study(study), evidence or f"measured on {problem.shape}", launch if is_recorded else None)


def kernel_picks(*picks: Pick, kernel: Kernel = GEMM, device: Device = H200, is_recorded: bool = True) -> KernelPicks:
    return KernelPicks(kernel.name, device, picks, kernel if is_recorded else None)


def gemm(kernel: Kernel = GEMM, device: Device = H200, *, is_recorded: bool = True) -> KernelPicks:
    """All three problems."""
    picks = (
        pick(dict(zip("MNK", size, strict=True)), TIMES_US[size], kernel, is_recorded=is_recorded) for size in TIMES_US
    )
    return kernel_picks(*picks, kernel=kernel, device=device, is_recorded=is_recorded)
