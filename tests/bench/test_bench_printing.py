"""What `fp8tune bench` says of rows: rates, ratios, tables and the JSON that scripts read."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest
from bench_fakes import COPY_US, row

from fp8tune import cli
from fp8tune.bench import kernels as bench
from fp8tune.bench.cells import Timing
from fp8tune.bench.kernels import Ceiling, Kernel
from fp8tune.records import NamedInts, Problem
from fp8tune.render import bench as render_bench


def test_rates_shares_and_ratios() -> None:
    timed = row(2.0, COPY_US, torchao=5.0)
    ceiling = Ceiling.of([timed])
    assert timed.gb_per_s == pytest.approx(1500)
    assert ceiling.gb_per_s == pytest.approx(2000)
    assert ceiling.share(timed) == pytest.approx(0.75)
    assert ceiling.time_us(timed) == pytest.approx(1.5)
    assert timed.ratio("torchao") == pytest.approx(2.5)


def test_the_fastest_kernel_of_a_run_is_the_ceiling_where_it_is_faster_than_the_copy() -> None:
    slow, fast, cached = row(2.0, COPY_US), row(1.4, COPY_US), row(1.0, COPY_US)
    assert Ceiling.of([slow, fast]).gb_per_s == pytest.approx(3000 / 1.4)
    assert Ceiling.of([slow, fast]).share(fast) == 1.0
    assert Ceiling.of([slow, cached]).gb_per_s == pytest.approx(2000)  # no memory gives 3,000
    assert Ceiling.of([row(2.0, None), fast]) == Ceiling() == Ceiling.of([])


def test_a_recorded_kernel_is_no_ceiling_and_has_no_least_time() -> None:
    """Its launch may address a part of its tensors."""
    recorded = Problem("module:kernel", NamedInts(n=1), input_layout="recorded-0123456789ab")
    slow, fast, gather = (replace(row(us, COPY_US), problem=recorded) for us in (2.0, 1.4, 0.2))
    ceiling = Ceiling.of([slow, fast, gather])
    assert ceiling.gb_per_s == pytest.approx(2000)
    assert [ceiling.share(each) for each in (slow, fast, gather)] == [0.75, 1.0, None]
    assert {ceiling.time_us(each) for each in (slow, fast, gather)} == {None}


def test_what_was_not_timed_enters_no_share_ratio_or_mean() -> None:
    rows = [row(2.0, COPY_US, torchao=4.0), row(2.0, COPY_US, torchao=16.0), row(None, COPY_US, torchao=3.0)]
    rows.append(row(2.0, COPY_US, torchao=None))
    assert [Ceiling.of(rows).share(each) for each in rows] == [0.75, 0.75, None, 0.75]
    assert [each.ratio("torchao") for each in rows] == [2.0, 8.0, None, None]
    kernel = Kernel("colwise", rows)
    assert kernel.geomean("torchao") == pytest.approx(4.0)
    assert kernel.geomean("torch.compile") is None


def test_what_is_wrong_keeps_its_time_and_enters_no_share_ratio_or_mean() -> None:
    ours, theirs = row(2.0, COPY_US, wrong="fp8tune", torchao=4.0), row(2.0, COPY_US, wrong="torchao", torchao=1.0)
    assert (ours.ours.time_us, ours.gb_per_s, ours.ratio("torchao"), ours.is_wrong) == (2.0, None, None, True)
    assert (theirs.timings["torchao"].time_us, theirs.ratio("torchao"), theirs.is_wrong) == (1.0, None, False)
    kernel = Kernel("colwise", [ours, theirs, row(2.0, COPY_US, torchao=6.0)])
    assert kernel.geomean("torchao") == pytest.approx(3.0)


# What is printed


@pytest.mark.parametrize(("who", "code"), [("fp8tune", 1), ("torchao", 0)])
def test_our_own_wrong_output_is_a_finding(
    who: str, code: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = Kernel("colwise", [row(2.0, COPY_US, wrong=who, torchao=1.0)])
    monkeypatch.setattr(bench, "run", lambda *_: iter([kernel, *kernel.rows]))
    command = [
        "fp8tune",
        "bench",
        "--kernel",
        "colwise",
        "--shapes",
        "tiny",
        "--timer",
        "simulated:1",
        "--format",
        "json",
    ]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert int(ended.value.code or 0) == code
    said = capsys.readouterr()
    assert ("our own output is wrong" in said.err) == bool(code)
    assert f"{who} wrong: 84 % of codes" in said.err or "us, wrong: 84 % of codes" in said.err
    assert json.loads(said.out)[0]["wrong_codes_share"] == (0.84 if code else None)


def test_json_is_a_list_of_problems_and_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    kernel = Kernel("colwise", [row(2.0, COPY_US, torchao=6.0)], {"fp8tune": Timing(18.0)})
    kernel.rows.append(row(2.0, COPY_US, wrong="torchao", torchao=1.0))
    render_bench.print_bench([kernel], ("torchao",), "json")
    problem, wrong, summary = json.loads(capsys.readouterr().out)
    assert (problem["row"], problem["time_us"], problem["ceiling_share"]) == ("problem", 2.0, 0.75)
    unchecked = {"wrong_codes_share": None, "wrong_scales_share": None}
    assert problem["rivals"] == {"torchao": {"time_us": 6.0, "ratio": 3.0, "reason": "", **unchecked}}
    shares = {"wrong_codes_share": 0.84, "wrong_scales_share": 0.31}
    reason = "wrong: 84 % of codes, 31 % of scales"
    assert wrong["rivals"] == {"torchao": {"time_us": 1.0, "ratio": None, "reason": reason, **shares}}
    assert summary["check"] == "exact"
    assert (summary["row"], summary["geomean_ratio"]["torchao"]) == ("kernel", pytest.approx(3.0))
    assert summary["host"] == {"fp8tune": {"time_us": 18.0, "reason": ""}}
