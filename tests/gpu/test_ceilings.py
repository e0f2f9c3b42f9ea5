"""Speed of this GPU as the bound of a kernel: the dense GEMM of each input dtype."""

from __future__ import annotations

import pytest
import torch

from fp8tune.measure.trial import gemm_flop_per_s

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_narrower_dtypes_compute_more() -> None:
    dtypes = ("float32", "bfloat16", "float16")
    peaks = {dtype: gemm_flop_per_s(dtype) for dtype in dtypes}
    assert 1e12 < peaks["float32"] < peaks["bfloat16"] < 1e17
    assert peaks["float16"] == pytest.approx(peaks["bfloat16"], rel=0.3)
    if torch.cuda.get_device_capability() >= (8, 9):
        assert gemm_flop_per_s("float8_e4m3fn") > peaks["bfloat16"]
