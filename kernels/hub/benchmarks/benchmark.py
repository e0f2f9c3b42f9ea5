"""A grouped GEMM in FP8, whose casts count, beside torch's in bf16: ``kernels benchmark FOLDER``."""

import torch
from kernels.benchmark import Benchmark


class GroupedMM(Benchmark):
    """The gate and up projection of a layer with 16 experts."""

    seed = 0

    def setup(self) -> None:
        """Make the operands; small ones where there is no GPU."""
        rows, contraction, columns = (16_384, 5120, 8192) if self.device == "cuda" else (256, 128, 64)
        self.x = torch.randn(rows, contraction, dtype=torch.bfloat16, device=self.device)
        self.w = torch.randn(16, columns, contraction, dtype=torch.bfloat16, device=self.device)
        self.offs = torch.arange(rows // 16, rows + 1, rows // 16, dtype=torch.int32, device=self.device)

    def benchmark_grouped_mm(self) -> None:
        """Cast both operands and multiply."""
        self.out = self.kernel.fp8_grouped_mm(self.x, self.w.transpose(1, 2), offs=self.offs)

    def benchmark_bf16(self) -> None:
        """Multiply without casts."""
        self.out = torch._grouped_mm(self.x, self.w.transpose(1, 2), offs=self.offs)
