"""``fp8tune export --for``: what is written and printed, and what is refused."""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from unittest import mock

import database_rows as rows
import pytest
import recorded_rows as recorded
from command_line import fp8tune
from recorded_rows import CONFIGS, NAME, TIMES

from fp8tune.store.results import Store


@pytest.fixture
def folder(tmp_path):
    with Store.open(str(tmp_path / "fp8tune.db"), create=True) as store:
        recorded.sweep(store, wrong={1024: 5})
    recorded.package(tmp_path)
    return tmp_path


def export(folder, name: str, *more: object):
    return fp8tune("export", "--for", name, "--arch", "sm_90", "--kernel", NAME, *more, cwd=folder)


def test_files_are_written_and_then_up_to_date(folder):
    assert export(folder, "python", "--output", "out", "--check").returncode == 1
    dry = export(folder, "python", "--output", "out", "--dry")
    assert dry.stdout == "out/_kernel_sm_90.py: would be written\n"
    assert not (folder / "out").exists()
    written = export(folder, "python", "--output", "out")
    first, next = written.stdout.splitlines()
    assert first == "out/_kernel_sm_90.py: written"
    assert next.startswith("next: put the file beside the kernel")
    checked = export(folder, "python", "--output", "out", "--check")
    assert (checked.returncode, checked.stdout) == (0, "out/_kernel_sm_90.py: unchanged\n")
    assert export(folder, "python", "--output", "out").stdout.startswith("out/_kernel_sm_90.py: unchanged\n")
    (folder / "out" / "_kernel_sm_90.py").write_text("else")
    checked = export(folder, "python", "--output", "out", "--check")
    assert (checked.returncode, checked.stdout) == (1, "out/_kernel_sm_90.py: stale\n")


def test_the_diff_and_its_table_go_to_stdout_and_apply(folder):
    ended = export(folder, "diff")
    assert ended.returncode == 0
    assert ended.stderr == (
        f"{NAME}: `CONFIGS` has no other use in maker/scales.py: remove it in the same change\n"
        "next: in the folder above the package: git apply FILE, or patch -p1 < FILE\n"
    )
    assert "### `maker.scales:_kernel`: 6 configs -> 1, worst loss 1.0 %" in ended.stdout
    assert "- `BLOCK=256 EVEN=False num_warps=8 num_stages=2` at n=1024" in ended.stdout
    assert "| run-time tuning's pick |" in ended.stdout
    assert "| +10.0 % |" in ended.stdout  # what run-time tuning took for n=1024
    subprocess.run(["patch", "-p1"], input=ended.stdout, text=True, cwd=folder, check=True, capture_output=True)
    source = (folder / "maker" / "scales.py").read_text()
    assert (
        '    configs=[\n        triton.Config({"BLOCK": 128, "EVEN": True}, num_warps=4, num_stages=2),\n    ],'
        in source
    )
    assert '    key=["n"],  # the size\n' in source


def test_the_diff_as_files(folder):
    ended = export(folder, "diff", "--output", "configs.diff", "--within", "0%")
    assert ended.stdout == (
        "configs.diff: written\nconfigs.diff.md: written\n"
        "next: in the folder above the package: git apply configs.diff, or patch -p1 < configs.diff\n"
    )
    assert "6 configs -> 2, worst loss 0.0 %" in (folder / "configs.diff.md").read_text()
    assert export(folder, "diff", "--output", "configs.diff", "--within", "0%", "--check").returncode == 0
    assert export(folder, "diff", "--output", "configs.diff", "--within", "2 %", "--check").returncode == 1


def test_json_says_it_to_programs(folder):
    found = json.loads(export(folder, "diff", "--json", "--dry", "--output", "x").stdout)
    assert found["covering"]["configs"] == [dict(recorded.ROWS[2])]
    assert found["covering"]["worst_loss"] == pytest.approx(0.01)
    assert [file["state"] for file in found["files"]] == ["would be written"] * 2
    assert [problem["shape"] for problem in found["problems"]] == [{"n": n} for n in TIMES]
    assert len(CONFIGS) == found["covering"]["before"]
    assert not (folder / "x").exists()


EVERY_FORMAT = """
import sys
from command_line import fp8tune
for name in ("python", "fla", "json", "t4", "diff"):
    output = f"{sys.argv[1]}/{name}"
    ended = fp8tune("export", "--for", name, "--arch", "sm_90", "--kernel", sys.argv[2], "--output", output)
    assert ended.returncode == 0, ended.stderr
"""


def test_the_order_of_sets_changes_no_file(folder):
    """Sets have one order in this process and another in the one that it starts."""

    def files(name: str) -> dict[Path, bytes]:
        below = folder / name
        return {path.relative_to(below): path.read_bytes() for path in below.rglob("*") if path.is_file()}

    for name in ("here", "there"):
        (folder / name).mkdir()
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run([sys.executable, "-c", EVERY_FORMAT, "there", NAME], cwd=folder, env=environment, check=True)
    with mock.patch.object(sys, "argv", ["-c", "here", NAME]), contextlib.chdir(folder):
        exec(EVERY_FORMAT, {})
    assert len(files("here")) == 1 + 1 + 2 + 4 + 2
    assert files("here") == files("there")


@pytest.mark.parametrize("name", ["fla", "json", "t4"])
def test_the_other_formats_are_written(folder, name):
    ended = export(folder, name, "--output", "out")
    assert ended.returncode == 0
    assert export(folder, name, "--output", "out", "--check").returncode == 0
    assert list((folder / "out").rglob("*.json"))


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--for", "yaml"], "unknown format 'yaml': known: diff, fla, json"),
        (["--for", "vllm"], "have no BLOCK_SIZE_M"),
        (["--for", "python", "--within", "2%"], "--within is for --for diff"),
        (["--for", "diff", "--within", "2"], "'2' is no percentage: give one such as 2%"),
        (["--for", "diff", "--within", "200%"], "is no percentage"),
        (["--for", "diff", "--check"], "--output FILE"),
        (["--for", "diff", "--output", "."], "is a folder: name the file of the diff"),
        (["--for", "json", "--dtype", "fp8_w8a8"], "--dtype is for --for vllm"),
        (["--for", "python", "--prune"], "--prune is for the table"),
        (["--for", "python", "--device", "H100"], "name one of these, with their problems: NVIDIA H200 (3)"),
        (["--for", "python", "--output", "fp8tune.db"], "cannot be"),
        (["--dry"], "--dry goes with --for FORMAT"),
        (["--device", "x"], "--device goes with --for FORMAT"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(folder, arguments, why):
    ended = fp8tune("export", "--arch", "sm_90", "--kernel", NAME, *arguments, cwd=folder)
    assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (2, "", 1)
    assert why in ended.stderr


def test_one_kernel_is_named(folder):
    assert "name it with --kernel" in fp8tune("export", "--for", "t4", "--arch", "sm_90", cwd=folder).stderr
    unknown = fp8tune("export", "--for", "t4", "--arch", "sm_90", "--kernel", "colwse", cwd=folder).stderr
    assert "did you mean colwise" in unknown


def test_a_file_for_python_holds_each_device(folder):
    with Store.open(str(folder / "fp8tune.db")) as store:
        recorded.sweep(store, {1024: TIMES[1024]}, rows.H100)
    found = json.loads(export(folder, "python", "--json").stdout)
    assert found["devices"] == [rows.H100.name, rows.H200.name]
    assert [problem["device"] for problem in found["problems"]] == [rows.H100.name, *[rows.H200.name] * 3]
    table = runpy.run_path(str(folder / "_kernel_sm_90.py"))["TABLE"]
    assert {device: len(configs) for device, configs in table.items()} == {rows.H100.name: 1, rows.H200.name: 3}
    assert export(folder, "python", "--device", rows.H200.name, "--check").returncode == 1


def test_what_was_left_out_is_said_on_stderr(folder):
    with Store.open(str(folder / "fp8tune.db")) as store:
        recorded.sweep(store, {1024: TIMES[1024]}, rows.H100)
    assert "which has the most problems of" in export(folder, "t4", "--dry").stderr


def test_a_kernel_with_a_spec_of_its_own(tmp_path):
    with Store.open(str(tmp_path / "fp8tune.db"), create=True) as store:
        rows.finished_sweep(store, {rows.problem(): {rows.config(32): 10.0, rows.config(64, 8): 9.0}})
    command = ("export", "--arch", "sm_90", "--kernel", "colwise", "--for")
    assert fp8tune(*command, "python", cwd=tmp_path).returncode == 0
    assert '(5120, 64): {"kwargs": {"BLOCK_SIZE": 64}, ' in (tmp_path / "colwise_sm_90.py").read_text()
    assert "no configs=[...] to shrink" in fp8tune(*command, "diff", cwd=tmp_path).stderr
