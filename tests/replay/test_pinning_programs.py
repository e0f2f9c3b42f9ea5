"""Programs whose kernels are pinned from outside: whenever they are imported, on every rank, and with a report."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from forked import ended
from places import ROOT
from programs import QUICK

from fp8tune.replay.recording import read

F32 = "torch.float32"
FLAT, ROW, TILE = (8192, F32, F32), (256, F32, F32), (32, 256, F32, F32)
KEYS = {
    **dict.fromkeys(("relu", "gelu"), FLAT),
    "add": (*FLAT, F32),
    "softmax": ROW,
    "transpose": TILE,
}
"""Kernel of the program -> its key on the interpreter."""

PROGRAM = "small_kernels"


def write_table(path: Path, kernel: str, rows: Mapping[object, Mapping[str, int]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    table = {"": {key: {"kwargs": dict(kwargs), "num_warps": 8} for key, kwargs in rows.items()}}
    path.write_text(f"\nKERNEL = {kernel!r}\nTABLE = {table!r}\n")


def start(folder: Path, *program: str, **variables: str) -> subprocess.Popen[str]:
    paths = os.pathsep.join(map(str, (folder, Path(__file__).parent, ROOT, ROOT / "kernels")))
    environment = {**os.environ, "PYTHONPATH": paths, "TRITON_INTERPRET": "1", "FP8TUNE_PIN_STALE": "use", **variables}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command = (sys.executable, *program)
    return subprocess.Popen(command, cwd=folder, env=environment, text=True, **pipes)  # type: ignore[call-overload, no-any-return]


RANKS = f"""
import datetime, json, multiprocessing, os, sys, time
import torch.distributed as dist  # once, for all ranks

def run(folder, rank, port):
    assert "triton" not in sys.modules
    os.environ.update(FP8TUNE_PIN=f"{{folder}}/{{rank}}:strict", RANK=str(rank), WORLD_SIZE="2")
    import fp8tune_kernels  # as fp8tune_kernels.pth does in a process with FP8TUNE_PIN
    from {PROGRAM} import step, KERNELS
    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0, timeout=datetime.timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    dist.barrier()
    began_s = time.perf_counter()
    try:
        total = float(step())
        error = ""
    except fp8tune_kernels.PinError as caught:
        error = str(caught)
    report = {{"error": error, "error_s": time.perf_counter() - began_s}}
    if not error:
        requests = []
        dist.distributed_c10d._get_default_store = requests.append  # none from now on
        step()
        configs = [str(kernel.best_config) for kernel in KERNELS]
        report |= fp8tune_kernels.pin_report() | {{"configs": configs, "requests": requests}}
    with open(f"{{folder}}/{{rank}}.json", "w") as file:
        json.dump(report, file)
    store.set(f"done{{rank}}", "")
    store.wait(["done0", "done1"])
    os._exit(0)

fork = multiprocessing.get_context("fork")
for folder, port in zip(sys.argv[1::2], sys.argv[2::2]):
    ranks = [fork.Process(target=run, args=(folder, rank, int(port))) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
"""


def test_two_ranks_launch_equal_configs_and_tune_none_or_say_which_table_differs(tmp_path: Path) -> None:
    """Five kernels, whose configs are not the first; then another block of ``gelu`` in the second rank's table."""
    arguments = []
    for gelu in (1024, 2048):
        with socket.socket() as server:
            server.bind(("127.0.0.1", 0))
            arguments += [str(tmp_path / str(gelu)), str(server.getsockname()[1])]
        for rank in range(2):
            for name, key in KEYS.items():
                kwargs = {"TILE": 32} if key is TILE else {"BLOCK": 256 if key is ROW else 1024}
                kwargs = {"BLOCK": gelu} if name == "gelu" and rank else kwargs
                write_table(tmp_path / str(gelu) / str(rank) / f"{name}.py", f"{PROGRAM}:{name}", {key: kwargs})
    _, errors = start(tmp_path, "-c", RANKS, *arguments).communicate(timeout=200)
    files = [tmp_path / gelu / f"{rank}.json" for gelu in ("1024", "2048") for rank in range(2)]
    assert all(file.exists() for file in files), errors
    *equal, first, second = (json.loads(file.read_text()) for file in files)
    assert equal[0]["configs"] == equal[1]["configs"]
    for rank in equal:
        assert (rank["error"], rank["waiting"], rank["requests"]) == ("", [], [])
        keys = {f"{PROGRAM}:{name}": {str(key): str(key)} for name, key in KEYS.items()}
        assert {row["kernel"]: row["keys"] for row in rank["kernels"]} == keys
        assert not any(row["tuned_s"] for row in rank["kernels"])
        assert all("num_warps: 8" in config for config in rank["configs"])
    (error, error_s), *_ = [(rank["error"], rank["error_s"]) for rank in (first, second) if rank["error"]]
    assert f"differ in table of {PROGRAM}:gelu: install the same" in error
    assert error.startswith(("rank 0 and rank 1 ", "rank 1 and rank 0 "))
    assert error_s < 1


LATER = """
import fp8tune_kernels, json, sys
if len(sys.argv) > 1:
    fp8tune_kernels.pin(sys.argv[1])
    assert "mine" not in sys.modules
import mine, triton
from mine import tl  # under another name, Triton's interpreter takes constants for tensors, and imports torch

made = triton.autotune(mine.quick.configs, key=["n"], do_bench=mine.timed)(mine.quick.fn)  # a copy

@triton.autotune(mine.quick.configs, key=["n"], do_bench=mine.timed)
@triton.jit
def here(n: tl.constexpr, BLOCK: tl.constexpr):
    pass

for kernel in (mine.quick, here, made):
    kernel[lambda meta: (640 // meta["BLOCK"],)](640)
print(json.dumps([kernel.best_config.kwargs["BLOCK"] for kernel in (mine.quick, here, made)]))
print(json.dumps(fp8tune_kernels.pin_report()))
"""


@pytest.mark.parametrize("is_in_environment", [True, False])
def test_kernels_are_pinned_whenever_they_are_made_and_the_rest_is_reported(
    tmp_path: Path, is_in_environment: bool
) -> None:
    """In a module that is imported later, and in the program itself, which is no module to import."""
    tables = tmp_path / "tables"
    write_table(tables / "quick.py", "mine:quick", {(640,): {"BLOCK": 128}})
    if is_in_environment:
        write_table(tables / "here.py", "later.py:here", {(500,): {"BLOCK": 128}})
        write_table(tables / "gone.py", "no_such_package.ops:gone", {(640,): {"BLOCK": 128}})
    (tmp_path / "mine.py").write_text(QUICK)
    (tmp_path / "later.py").write_text(LATER)
    variables = {"FP8TUNE_PIN": str(tables)} if is_in_environment else {}
    process = start(tmp_path, "later.py", *([] if is_in_environment else [str(tables)]), **variables)
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    blocks, report = map(json.loads, output.splitlines())
    assert blocks == [128, 128 if is_in_environment else 64, 128]
    rows = {row["kernel"]: (Path(row["table"]).name, row["keys"]) for row in report["kernels"] if row["table"]}
    near = {"later.py:here": ("here.py", {"(640,)": "(500,)"})} if is_in_environment else {}
    assert rows == {"mine:quick": ("quick.py", {"(640,)": "(640,)"}), **near}
    tuned = [row for row in report["kernels"] if row["tuned_s"]]
    assert [list(row["tuned_s"]) for row in tuned] == [["(640,)"]] * (0 if is_in_environment else 1)
    gone = ("no_such_package.ops:gone", "there is no no_such_package.ops any more")
    reason = gone if is_in_environment else ("__main__:here", "no table names it")
    assert [tuple(row.values()) for row in report["unpinned"]] == [reason]
    assert report["waiting"] == (["no_such_package.ops:gone"] if is_in_environment else [])


@pytest.mark.parametrize(
    ("variable", "message"),
    [
        ("nowhere", "FP8TUNE_PIN='nowhere': no such file or folder"),
        ("quick.py:strickt", "MODE of off, strict, nearest, tune"),
        ("quick.py:strict", r"no config for the key (640,): run fp8tune tune --kernel mine:quick -- python"),
        ("own.py", ""),  # the table of the environment stays, whatever the program pins
    ],
)
def test_a_process_is_pinned_by_its_environment_or_stops(tmp_path: Path, variable: str, message: str) -> None:
    (tmp_path / "mine.py").write_text(QUICK)
    write_table(tmp_path / "quick.py", "mine:quick", {(64,): {"BLOCK": 64}})
    write_table(tmp_path / "own.py", "mine:quick", {(640,): {"BLOCK": 128}})
    pins = "f.pin('quick.py'); f.pin('quick.py', mine.quick); " if not message else ""
    program = f"import fp8tune_kernels as f, mine; {pins}mine.run(640); print(mine.quick.best_config.kwargs)"
    process = start(tmp_path, "-c", program, FP8TUNE_PIN=variable)
    output, errors = process.communicate()
    assert (process.returncode, output) == ((1, "") if message else (0, "{'BLOCK': 128}\n")), errors
    if message:
        line = errors.splitlines()[-1]
        assert line.startswith("fp8tune_kernels.pinning.PinError: ")
        assert message in line


@pytest.mark.parametrize(("sizes", "code"), [("640", 0), ("640, 64", 1)])
def test_a_strict_recording_fails_where_a_kernel_tunes_at_run_time(tmp_path: Path, sizes: str, code: int) -> None:
    (tmp_path / "mine.py").write_text(QUICK + f"\nif __name__ == '__main__':\n    [run(n) for n in ({sizes},)]\n")
    write_table(tmp_path / "quick.py", "mine.py:quick", {(640,): {"BLOCK": 128}})
    command = ("record", "--strict", "-o", tmp_path / "run.json", "--", sys.executable, "mine.py")
    result = ended(*command, cwd=tmp_path, TRITON_INTERPRET="1", FP8TUNE_PIN="quick.py:tune", FP8TUNE_PIN_STALE="use")
    assert result[0] == code, result
    assert "1 of 1 kernel pinned: 1 key, 0 by a near key of the table" in result[1]
    (kernel,) = read(tmp_path / "run.json").kernels
    assert (kernel.table, kernel.table_keys) == ("quick.py", {"(640,)": "(640,)"})
    assert list(kernel.tuned_s) == ["(64,)"] * code


def test_a_strict_recording_lists_what_no_table_pins_and_why(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(QUICK)
    write_table(tmp_path / "gone.py", "mine:gone", {(640,): {"BLOCK": 128}})
    command = (
        "record",
        "--strict",
        "-o",
        tmp_path / "run.json",
        "--",
        sys.executable,
        "-c",
        "import mine; mine.run(64)",
    )
    result = ended(*command, cwd=tmp_path, TRITON_INTERPRET="1", FP8TUNE_PIN="gone.py")
    assert result[0] == 1
    reasons = {"mine:quick": "no table names it", "mine:gone": "mine has no gone any more"}
    assert read(tmp_path / "run.json").unpinned == reasons
    for name, reason in reasons.items():
        assert f"{name} is not pinned: {reason}" in result[1]


def test_a_file_at_the_start_of_python_arms_the_variable_and_does_nothing_without(tmp_path: Path) -> None:
    (tmp_path / "fp8tune_kernels.pth").write_text((ROOT / "kernels" / "fp8tune_kernels.pth").read_text())
    program = f"import site, sys; site.addsitedir({str(tmp_path)!r}); print('fp8tune_kernels' in sys.modules)"
    for variable, armed in (("", False), ("somewhere", True)):
        began_s = time.perf_counter()
        output, errors = start(tmp_path, "-c", program, FP8TUNE_PIN=variable).communicate()
        assert output == f"{armed}\n", errors
        assert time.perf_counter() - began_s < 30
