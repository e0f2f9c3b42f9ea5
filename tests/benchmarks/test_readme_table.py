from __future__ import annotations

from dataclasses import replace

from database_rows import H100, H200, config, evidence, problem, studies_of

from benchmarks.readme_table import markdown


def best(time_us: float, K: int, device=H100, kernel: str = "colwise"):
    of, others = replace(problem(K=K), kernel=kernel), {"bytes_moved": 3 * 16640 * K, "ceiling_gb_per_s": 3000.0}
    return evidence(time_us, of=of, config=config(), device=device, **others)


def test_a_line_says_the_spread_and_the_largest_problem_of_a_kernel():
    rows = [
        best(100.0, 1000),
        best(100.0, 5000),
        best(100.0, 4000),
        best(50.0, 1000, H200),
        best(60.0, 900, kernel="x"),
    ]
    _, _, *lines = markdown(studies_of(rows)).splitlines()
    assert lines == [
        "| NVIDIA H100 80GB HBM3 | `colwise` | 3 | 17 % | 67 % | 83 % | M=16640 K=5000 G=64 | 100.0 | 2,496 |",
        "| NVIDIA H100 80GB HBM3 | `x` | 1 | 25 % | 25 % | 25 % | M=16640 K=900 G=64 | 60.00 | 749 |",
        "| NVIDIA H200 | `colwise` | 1 | 33 % | 33 % | 33 % | M=16640 K=1000 G=64 | 50.00 | 998 |",
    ]
