"""The operations that ``fp8tune bench --op`` names."""

from __future__ import annotations

from collections.abc import Mapping

from fp8tune.bench.operation import Operation
from fp8tune.bench.operation_fp8 import FP8_GROUPED_MM
from fp8tune.bench.operation_mlp import MOE_MLP
from fp8tune.bench.operation_mxfp8 import MXFP8_GROUPED_MM

OPERATIONS: Mapping[str, Operation] = {
    operation.name: operation for operation in (FP8_GROUPED_MM, MXFP8_GROUPED_MM, MOE_MLP)
}
"""By name."""
