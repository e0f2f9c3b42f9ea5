"""``fp8tune export --for``: what is written and printed, and what is refused."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import database_rows as rows
import pytest
import recorded_rows as recorded
from command_line import Ended, fp8tune
from places import ROOT
from recorded_rows import CONFIGS, NAME, TIMES

from fp8tune.errors import UsageError
from fp8tune.exporting import read_for_format, select_rows
from fp8tune.records import FinalsRun
from fp8tune.store.results import Store

H200 = rows.H200.name


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with Store.open(str(tmp_path / "fp8tune.db"), create=True) as store:
        recorded.sweep(store, wrong=(1024, 5))
    recorded.package(tmp_path)
    return tmp_path


def export(folder: Path, name: str, *more: object) -> Ended:
    return fp8tune("export", "--for", name, "--arch", "sm_90", "--kernel", NAME, "--allow-quick", *more, cwd=folder)


def test_files_are_written_and_then_up_to_date(folder: Path) -> None:
    assert export(folder, "python", "-o", "out", "--check").returncode == 1
    assert not (folder / "out").exists()
    done = export(folder, "python", "-o", "out")
    assert done.stdout == "out/_kernel_sm_90.py: written\n"
    assert "next: put the file beside the kernel" in done.stderr
    for code, state in ((0, "unchanged"), (1, "out of date")):
        checked = export(folder, "python", "-o", "out", "--check")
        assert (checked.returncode, checked.stdout) == (code, f"out/_kernel_sm_90.py: {state}\n")
        (folder / "out" / "_kernel_sm_90.py").write_text("else")


def test_the_diff_goes_to_stdout_and_applies(folder: Path) -> None:
    ended = export(folder, "diff")
    assert ended.returncode == 0
    assert "next: in the folder above the package: git apply FILE, or patch -p1 < FILE\n" in ended.stderr
    assert "6 configs -> 1, worst loss 1.0 %" in ended.stdout
    subprocess.run(["patch", "-p1"], input=ended.stdout, text=True, cwd=folder, check=True, capture_output=True)
    source = (folder / "maker" / "scales.py").read_text()
    config = 'triton.Config({"BLOCK": 128, "EVEN": True}, num_warps=4, num_stages=2)'
    assert f'    configs=[\n        {config},\n    ],\n    key=["n"],  # the size\n' in source


def test_the_arch_is_that_of_the_named_kernel(folder: Path) -> None:
    with Store.open(str(folder / "fp8tune.db"), create=True) as store:
        rows.finished_sweep(store, {rows.problem(): {rows.config(32): 9.0}}, replace(rows.H100, arch="gfx942"))
    command = ("export", "--for", "python", "--allow-quick", "-o", "out")
    assert fp8tune(*command, "--kernel", NAME, cwd=folder).stdout == "out/_kernel_sm_90.py: written\n"
    ended = fp8tune("export", cwd=folder)
    assert ended.returncode == 2
    assert "gfx942 and sm_90" in ended.stderr


def test_the_diff_as_a_file(folder: Path) -> None:
    command = (folder, "diff", "-o", "configs.diff", "--within")
    assert export(*command, "0%").stdout == "configs.diff: written\n"
    assert "6 configs -> 2, worst loss 0.0 %" in (folder / "configs.diff").read_text()
    assert [export(*command, within, "--check").returncode for within in ("0%", "2 %")] == [0, 1]


EVERY_FORMAT = """
import sys
from command_line import fp8tune
for name in ("python", "hf", "diff"):
    output = f"{sys.argv[1]}/{name}{'.diff' * (name == 'diff')}"
    command = ("export", "--for", name, "--arch", "sm_90", "--kernel", sys.argv[2], "--allow-quick", "-o", output)
    ended = fp8tune(*command)
    assert ended.returncode == 0, ended.stderr
"""


def test_the_order_of_sets_changes_no_file(folder: Path) -> None:
    """Sets have one order in this process and another in the one that it starts."""

    def files(name: str) -> dict[Path, bytes]:
        return {path.relative_to(folder / name): path.read_bytes() for path in (folder / name).rglob("*.*")}

    for name in ("here", "there"):
        (folder / name).mkdir()
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run([sys.executable, "-c", EVERY_FORMAT, "there", NAME], cwd=folder, env=environment, check=True)
    with mock.patch.object(sys, "argv", ["-c", "here", NAME]), contextlib.chdir(folder):
        exec(EVERY_FORMAT, {})
    assert len(files("here")) == 3
    assert files("here") == files("there")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["yaml"], "unknown format 'yaml': known: diff, hf, python"),
        (["vllm"], "has no BLOCK_SIZE_M"),
        (["python", "--within", "2%"], "--within does not go with --for python"),
        (["diff", "--within", "2"], "'2' is not a percentage: write 2%"),
        (["diff", "--within", "200%"], "is not a percentage"),
        (["diff", "--check"], "-o FILE"),
        (["diff", "-o", "."], "is a folder: name the file of the diff"),
        (["hf", "--size", "dtype=fp8_w8a8"], "has no dim fp8_w8a8"),
        (["python", "--size", "M=n"], "--size does not go with --for python"),
        (["python", "-o", "fp8tune.db"], "cannot be"),
        (["hf", "--kernel", "colwise"], "--for hf writes the picks of one kernel: name it with --kernel"),
    ],
)
def test_wrong_options_are_refused_in_one_line(folder: Path, arguments: list[str], reason: str) -> None:
    ended = export(folder, *arguments)
    assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (2, "", 1)
    assert reason in ended.stderr


def test_all_devices_of_an_arch_are_written_and_a_diff_is_of_the_first(folder: Path) -> None:
    with Store.open(str(folder / "fp8tune.db")) as store:
        recorded.sweep(store, {1024: TIMES[1024]}, rows.H100)
    assert export(folder, "python").returncode == 0
    table = runpy.run_path(str(folder / "_kernel_sm_90.py"))["TABLE"]
    assert {device: len(configs) for device, configs in table.items()} == {rows.H100.name: 1, H200: 3}
    lines = export(folder, "hf").stdout.splitlines()
    devices = {line.partition("device_name=")[2].partition(".json")[0].partition(",")[0] for line in lines}
    assert devices == {name.replace(" ", "_") for name in (rows.H100.name, H200)}
    assert f"the diff is for {H200}, which has the most sizes of 2 GPUs" in export(folder, "diff").stderr


def test_picks_of_another_declaration_and_unfinished_ones_are_left_out(folder: Path) -> None:
    with Store.open(str(folder / "fp8tune.db")) as store:
        newer = replace(recorded.KERNEL, configs=CONFIGS[:4], source_hash="b")
        recorded.sweep(store, {2048: (10.0, 11.0, 12.0, 13.0)}, kernel=newer)
        recorded.sweep(store, {512: (10.0,) * 6}, complete=False)
    ended = export(folder, "hf", "--check")
    assert "n=512 left out, not swept to the end" in ended.stderr
    assert ended.stderr.count("recorded of a kernel with other configs") in (1, 3)  # which was stored last


def test_a_kernel_with_a_specification(tmp_path: Path) -> None:
    with Store.open(str(tmp_path / "fp8tune.db"), create=True) as store:
        rows.finished_sweep(store, {rows.problem(): {rows.config(32): 10.0, rows.config(64, 8): 9.0}})
    command = ("export", "--arch", "sm_90", "--kernel", "colwise", "--allow-quick", "--for")
    assert fp8tune(*command, "python", cwd=tmp_path).returncode == 0
    assert '(5120, 64): {"kwargs": {"BLOCK_SIZE": 64}, ' in (tmp_path / "colwise_sm_90.py").read_text()
    assert "no configs=[...] to change" in fp8tune(*command, "diff", cwd=tmp_path).stderr
    misspelled = ("export", "--arch", "sm_90", "--kernel", "colwse", "--for", "hf")
    assert "did you mean colwise" in fp8tune(*misspelled, cwd=tmp_path).stderr


# A format of another package


def test_a_package_adds_a_format(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "examples"))
    info = folder / "site" / "research-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: research\nVersion: 1.0\n")
    points = ("t4 = t4_format:FORMAT", "absent = nowhere:FORMAT", "other = json:dumps")
    (info / "entry_points.txt").write_text("\n".join(["[fp8tune.formats]", *points]))
    monkeypatch.syspath_prepend(str(folder / "site"))
    assert "next: any reader of T4 takes out" in export(folder, "t4", "-o", "out").stderr
    documents = [json.loads(path.read_text()) for path in sorted((folder / "out" / "_kernel").iterdir())]
    assert [len(document["results"]) for document in documents] == [6, 6, 6]
    assert [result["invalidity"] for result in documents[0]["results"]] == [*["correct"] * 5, "correctness"]
    for name, reason in (("absent", "cannot be imported"), ("other", "is no"), ("yaml", "known: absent, diff")):
        assert reason in export(folder, name).stderr


# The own table


def sweep_of(path: Path, kernel: str, K: int = 5120) -> None:
    """Store a confirmed sweep of one problem of a kernel."""
    size, version = replace(rows.problem(K), kernel=kernel), replace(rows.KERNEL, kernel=kernel)
    with Store.open(str(path), create=True) as store:
        sweep = rows.begin(store, request=f"{kernel} {K}")
        trial = functools.partial(rows.row, size=size, version=version, stage="final")
        store.add_many(
            sweep,
            [
                trial(100.0 + block, config=rows.config(block), process=f"final {number:02}")
                for number, block in itertools.product(range(6), (32, 64))
            ],
        )
        subject = rows.subject(size, version=version)
        store.mark_complete(sweep, subject, 2)
        store.end_finals(sweep, subject, FinalsRun("", 0.01, 0.015))
        store.finish_sweep(sweep)


def test_the_own_table_gets_kernels_with_own_results_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, table = tmp_path / "base.db", tmp_path / "tables" / "sm_90.py"
    monkeypatch.setenv("FP8TUNE_BASE", str(base))
    monkeypatch.setenv("FP8TUNE_TABLES", str(table.parent))
    for kernel in ("colwise", "rowwise-2d"):
        sweep_of(base, kernel)
    ended = fp8tune("export", "--arch", "sm_90", cwd=tmp_path)
    assert (ended.returncode, table.exists(), "no results of your own" in ended.stdout) == (0, False, True)
    sweep_of(tmp_path / "fp8tune.db", "colwise", K=2048)
    for database, kernels in (((), {"colwise"}), (("--db", base), {"colwise", "rowwise-2d"})):
        assert fp8tune("export", "--arch", "sm_90", *database, cwd=tmp_path).returncode == 0
        assert {row[0] for row in runpy.run_path(str(table))["ROWS"]} == kernels


def test_a_config_that_a_search_tried_alone_is_left_out_until_it_is_confirmed(tmp_path: Path) -> None:
    size = replace(rows.problem(2048), kernel="colwise")
    with Store.open(str(tmp_path / "results.db"), create=True) as store:
        sweep = rows.begin(store, request="colwise 2048")
        store.add_many(sweep, [rows.row(100.0, config=rows.config(32), size=size)])
        store.mark_complete(sweep, rows.subject(size), 1)
        store.finish_sweep(sweep)
        for allow_quick, count in ((False, 0), (True, 2)):
            assert len(select_rows(store, "sm_90", allow_quick=allow_quick).table.entries) == count


def test_stale_picks_are_left_out_where_that_is_decided(tmp_path: Path) -> None:
    sweep_of(tmp_path / "results.db", "colwise")
    updated = replace(rows.H100, driver="590.1")
    with Store.open(str(tmp_path / "results.db")) as store:
        for here, count in ((None, 2), (updated, 0), (replace(updated, name="another"), 2)):
            selection = select_rows(store, "sm_90", allow_quick=False, here=here)
            assert len(selection.table.entries) == count
            assert count or selection.notices[0].startswith("1 stale picks left out")
        assert read_for_format(store, "sm_90", ["colwise"], allow_quick=False)[0].picks
        with pytest.raises(UsageError, match="no pick is proven"):
            read_for_format(store, "sm_90", ["colwise"], allow_quick=False, here=updated)


LAUNCH = """
import os
from pathlib import Path
import torch
from fp8tune.measure import compiling
from fp8tune_kernels import pin
from maker.scales import _kernel

def compiled():
    return len(list(Path(os.environ["TRITON_CACHE_DIR"]).rglob("*.cubin")))

for size, mode in ((1024, "strict"), (4096, "strict"), (1023, "nearest")):
    pin("table/_kernel_sm_90.py", unknown=mode, stale="use")  # the made-up results have a made-up hash
    before = compiled()
    with compiling.recording("sm_90") as launches:
        _kernel[(16,)](torch.empty(size, dtype=torch.bfloat16), size)
    print(len(launches), before, compiled() - before, launches[0].kernel.metadata.num_warps)
"""


def test_a_pinned_program_finds_its_kernels_compiled_ahead_without_a_gpu(folder: Path) -> None:
    """Sizes that divide by 16 share a program; of another size it is a new one, which shows that programs count."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}:{folder}", "TRITON_CACHE_DIR": "cache/NVIDIA_H200"}

    def run(*command: object) -> str:
        program = [sys.executable, *map(str, command)]
        ended = subprocess.run(program, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    exported = ("export", "--arch", "sm_90", "--kernel", NAME, "--allow-quick", "--for", "triton-cache", "-o", "cache")
    assert "cache/NVIDIA_H200: 3 launches compiled in" in run("-m", "fp8tune", *exported)
    assert export(folder, "python", "-o", "table").returncode == 0
    pinned = runpy.run_path(str(folder / "table" / "_kernel_sm_90.py"))["TABLE"][H200]
    count = len({str(config) for config in pinned.values()})
    warps = [pinned[(size, "torch.bfloat16")]["num_warps"] for size in (1024, 4096, 1024)]
    lines = [list(map(int, line.split())) for line in run("-c", LAUNCH).splitlines()]
    assert lines == [[1, count, int(place == 2), warps[place]] for place in range(3)]
