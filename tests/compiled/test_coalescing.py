from __future__ import annotations

import pytest

from fp8tune.compiled.coalescing import Runs, runs

LAYOUTS = """\
#blocked = #ttg.blocked<{sizePerThread = [1, 8], threadsPerWarp = [8, 4], warpsPerCTA = [4, 1], order = [1, 0]}>
#blocked1 = #ttg.blocked<{sizePerThread = [16, 1], threadsPerWarp = [8, 4], warpsPerCTA = [1, 4], order = [0, 1]}>
#blocked2 = #ttg.blocked<{sizePerThread = [1], threadsPerWarp = [32], warpsPerCTA = [4], order = [0]}>
"""
NVIDIA = """
    %n = tt.load %p, %m : !tt.ptr<i32>
    %x = tt.load %q, %m, %c : tensor<128x32x!tt.ptr<bf16>, #blocked>
    %y = ttg.async_copy_global_to_local %q, %s mask %m : tensor<128x16x!tt.ptr<bf16>, #blocked> -> <128x16xbf16>
    tt.store %r, %v, %m : tensor<128x32x!tt.ptr<f8E4M3FN>, #blocked1>
    tt.store %s, %scale, %m : tensor<32x!tt.ptr<f32>, #blocked2>
"""
AMD = """
    %x = amdg.buffer_load %p[%o], %m {contiguity = 8 : i32} : tensor<512x64xf32, #blocked>
    amdg.buffer_store %v, %p[%o], %m {contiguity = 16 : i32} : tensor<512x16xf8E4M3FNUZ, #blocked1>
"""


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (NVIDIA, Runs(load_bytes=32, store_bytes=128)),  # the narrower tile of the two; scales are no tile
        (AMD, Runs(load_bytes=128, store_bytes=128)),
        ("    tt.store %s, %scale : tensor<32x!tt.ptr<f32>, #blocked2>", Runs(0, 128)),
        ("    %x = tt.load %q : tensor<8x8x!tt.ptr<bf16>, #linear>", Runs(0, 0)),
    ],
)
def test_runs_follow_the_contiguous_dim(body, expected):
    assert runs(LAYOUTS + body) == expected
