"""A pin reaches every launch of its kernel, however it is made, or is reported with the reason."""

from __future__ import annotations

import copy
import functools
import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import triton
from programs import QUICK
from test_pinning_programs import start, write_table
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import KernelInterface

from fp8tune_kernels.identity import code_hash
from fp8tune_kernels.pinning import PinError, pin, pin_report, unpin

CONFIGS = [triton.Config({"BLOCK": block}) for block in (64, 128, 256)]
CONFIGS += [triton.Config({"BLOCK": 256}, num_warps=8)]
CHECKED = {(4096,): ({"arguments": {"n": 4096}, "constants": ({"BLOCK": 32},), "grid": (1,)},)}
TABLE = {(4096,): {"kwargs": {"BLOCK": 256}, "num_warps": 8}}


class Jitted(KernelInterface[Any]):
    """Stand-in for a ``triton.jit`` function; notes the block of each launch."""

    arg_names = ("n", "BLOCK")

    def __init__(self, name: str = "kernel") -> None:
        def kernel(n: int, BLOCK: int) -> None: ...

        kernel.__name__ = kernel.__qualname__ = name
        self.fn = kernel
        self.blocks: list[int] = []

    def run(self, *args: Any, **kwargs: Any) -> None:
        self.blocks.append(kwargs["BLOCK"])


class Fast(Autotuner):
    """Stand-in for a tuner of a library: it tunes nothing, and its first config wins."""

    def run(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn.run(*args, **kwargs, **self.configs[0].all_kwargs())


class Faster(Fast):
    """Inherits ``run``, as each policy of such a library does."""


class Called(Autotuner):
    """Is called without a grid."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self[(1,)](*args, **kwargs)


def timed(call: Callable[[], None], quantiles: object) -> list[float]:
    call()
    return [1.0] * 3


def tuner(kind: Any = Autotuner, configs: Any = CONFIGS, keys: Any = ("n",), jitted: Any = None) -> Any:
    jitted = jitted or Jitted()
    return kind(jitted, jitted.arg_names, configs, list(keys), None, None, do_bench=timed)


def block(kernel: Any, n: int = 4096) -> int:
    """Launch and return the block of the launch."""
    kernel[(1,)](n)
    while not isinstance(kernel, Jitted):
        kernel = kernel.fn
    return int(kernel.blocks[-1])


@pytest.fixture(autouse=True)
def unpinned() -> Any:
    yield
    unpin()


def again(kernel: Any) -> Any:
    return triton.autotune(CONFIGS, key=["n"], do_bench=timed)(kernel.fn)


COPIES = [copy.copy, copy.deepcopy, again, lambda kernel: triton.heuristics({})(kernel)]


@pytest.mark.parametrize("make", COPIES)
@pytest.mark.parametrize("kind", [Autotuner, Faster])
@pytest.mark.parametrize("launches", [0, 1])
def test_copies_of_a_pinned_tuner_are_pinned(make: Any, kind: Any, launches: int) -> None:
    kernel = tuner(kind)
    pin(TABLE, kernel, unknown="strict")
    for _ in range(launches):
        assert block(kernel) == 256
    copied = make(kernel)
    assert block(copied) == block(kernel) == 256
    with pytest.raises(PinError, match="no config for the key"):
        block(copied, 5)
    unpin()
    assert block(copied) == block(kernel) == 64


def calls_in_launch(kernel: Any) -> int:
    """Count the Python functions that a launch calls after the first one."""
    calls = []
    block(kernel)
    sys.setprofile(lambda frame, event, _: calls.append(frame.f_code) if event == "call" else None)
    try:
        kernel[(1,)](4096)
    finally:
        sys.setprofile(None)
    return len(calls)


@pytest.mark.parametrize(("prune", "more"), [(None, 1), ({"early_config_prune": lambda configs, *_, **__: configs}, 2)])
def test_a_pinned_launch_calls_little_more_than_tritons_own(prune: Any, more: int) -> None:
    own, pinned = (
        triton.autotune(CONFIGS, key=["n"], prune_configs_by=prune, do_bench=timed)(Jitted()) for _ in range(2)
    )
    pin(TABLE, pinned)
    assert calls_in_launch(pinned) <= calls_in_launch(own) + more  # a call costs up to 2 us
    copy.deepcopy(pinned)
    assert calls_in_launch(pinned) <= calls_in_launch(own) + more


def reasons() -> dict[str, str]:
    return {row["kernel"].rpartition(":")[2]: row["reason"] for row in json.loads(json.dumps(pin_report()))["unpinned"]}


def test_a_tuner_of_the_same_function_with_another_list_or_key_is_reported_and_launches_its_own() -> None:
    kernel = tuner()
    pin(TABLE, kernel)
    assert block(kernel) == 256
    assert reasons() == {}
    shorter = tuner(configs=CONFIGS[:2], jitted=kernel.fn)
    assert block(shorter) == 64
    assert "configs" in reasons()["kernel"]
    assert block(tuner(keys=(), jitted=kernel.fn)) == 64
    assert "key" in " ".join(row["reason"] for row in pin_report()["unpinned"])


def test_a_copy_launches_what_it_wraps_and_not_what_the_original_does() -> None:
    kernel = tuner()
    pin(TABLE, kernel)
    changed = copy.copy(kernel)
    changed.fn = Jitted("other")
    assert block(changed) == 64
    assert kernel.fn.blocks == []


def test_a_launch_past_the_tuner_is_reported() -> None:
    kernel = tuner()
    pin(TABLE, kernel)
    assert block(kernel) == 256
    assert reasons() == {}
    kernel.fn[(1,)](n=4096, BLOCK=32)
    assert kernel.fn.blocks[-1] == 32
    assert "its autotuner" in reasons()["kernel"]


def wrapped(run: Callable[..., Any], calls: list[Any], *args: Any, **kwargs: Any) -> Any:
    calls.append(args)
    return run(*args, **kwargs)


def bare_table(folder: Path) -> Path:
    rows = f"TABLE = {{'': {TABLE}}}\nLAUNCHES = {{'': {CHECKED}}}\n"
    (folder / "bare.py").write_text(f"\nKERNEL = 'm:kernel'\nKEY = ('n',)\n{rows}")
    return folder / "bare.py"


@pytest.mark.parametrize("is_before", [True, False])
@pytest.mark.parametrize("launches", [0, 1])
@pytest.mark.parametrize("kind", [Autotuner, Faster, Jitted])
def test_a_wrapper_of_run_is_called_and_the_pin_holds(
    is_before: bool, launches: int, kind: Any, tmp_path: Path
) -> None:
    kernel = Jitted() if kind is Jitted else tuner(kind)
    calls: list[Any] = []
    arguments = {"n": 4096, **({"BLOCK": 32} if kind is Jitted else {})}
    launched = kernel if kind is Jitted else kernel.fn

    def wrap() -> None:
        kernel.run = functools.partial(wrapped, kernel.run, calls)

    def launch() -> int:
        kernel[(1,)](**arguments)
        return int(launched.blocks[-1])

    if is_before:
        wrap()
    own = vars(kernel).get("run")
    if kind is Faster and is_before:
        with pytest.raises(PinError, match="which the program has wrapped"):
            pin(TABLE, kernel)
        return
    pin(bare_table(tmp_path), kernel)
    for _ in range(launches):
        assert launch() == 256
    if not is_before:
        wrap()
    calls.clear()
    assert [launch(), launch()] == [256, 256]
    assert len(calls) == 2
    unpin(kernel)
    assert launch() == (32 if kind is Jitted else 64)
    assert len(calls) == 3
    if is_before:
        assert vars(kernel)["run"] is own


@pytest.mark.parametrize("is_before", [True, False])
def test_a_wrapper_of_the_class_is_called_and_the_pin_holds(is_before: bool, monkeypatch: Any) -> None:
    class Own(Autotuner):
        def run(self, *args: Any, **kwargs: Any) -> Any:
            return super().run(*args, **kwargs)

    calls: list[Any] = []
    original = Own.run

    def wrap() -> None:
        monkeypatch.setattr(
            Own, "run", lambda self, *args, **kwargs: calls.append(self) or original(self, *args, **kwargs)
        )

    if is_before:
        wrap()
    kernel = tuner(Own)
    pin(TABLE, kernel)
    if not is_before:
        wrap()
    assert (block(kernel), calls) == (256, [kernel])
    unpin()
    assert type(kernel) is Own
    assert (block(kernel), calls) == (64, [kernel] * 2)


def test_a_tuner_that_is_called_or_inherits_its_run_is_pinned() -> None:
    for kernel in (tuner(Called), tuner(Faster)):
        pin(TABLE, kernel)
        if isinstance(kernel, Called):
            kernel(4096)
            assert kernel.fn.blocks == [256]
        assert block(kernel) == 256
        assert isinstance(kernel, Autotuner)
        assert not pin_report()["unpinned"]


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A process with an A100 and an H200; the item is the current one."""
    import torch

    current = [0]
    names = ("NVIDIA A100", "NVIDIA H200")
    cuda = {
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "get_device_name": lambda device=None: names[current[0] if device is None else device],
    }
    for name, function in cuda.items():
        monkeypatch.setattr(torch.cuda, name, function)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current[0], raising=False)
    return current


@pytest.mark.parametrize("kind", [Autotuner, Faster, Jitted])
def test_configs_go_by_the_device_of_the_launch(kind: Any, devices: list[int], tmp_path: Path) -> None:
    rows = {name: {(4096,): {"kwargs": {"BLOCK": size}}} for name, size in (("NVIDIA A100", 128), ("NVIDIA H200", 256))}
    checked = f"LAUNCHES = {dict.fromkeys(rows, CHECKED)}"
    (tmp_path / "t.py").write_text(f"\nKERNEL = 'm:kernel'\nKEY = ('n',)\nTABLE = {rows}\n{checked}\n")
    kernel = Jitted() if kind is Jitted else tuner(kind)
    pin(tmp_path / "t.py", kernel, unknown="strict")
    blocks = []
    for device in (0, 1, 0, 1, 1, 0):
        devices[0] = device
        kernel[(1,)](n=4096, **({"BLOCK": 32} if kind is Jitted else {}))
        blocks.append((kernel if kind is Jitted else kernel.fn).blocks[-1])
    assert blocks == [128, 256, 128, 256, 256, 128]


def test_options_of_a_backend_are_pinned_and_other_names_are_refused() -> None:
    options = {"waves_per_eu": 2, "matrix_instr_nonkdim": 16, "kpack": 2, "schedule_hint": "none"}
    declared = [triton.Config({"BLOCK": 64, **options}), triton.Config({"BLOCK": 128, "of_a_fork": 1})]
    kernel = tuner(configs=declared)
    rows = {(n,): {"kwargs": config.kwargs} for n, config in zip((4096, 64), declared, strict=True)}
    pin(rows, kernel, unknown="strict")
    assert [block(kernel), block(kernel, 64)] == [64, 128]
    nvidia = {(4096,): {"kwargs": {"BLOCK": 64, "enable_fp_fusion": False}, "maxnreg": 64}}
    pin(nvidia, tuner(configs=[*declared, *CONFIGS]), stale="use")
    with pytest.raises(PinError, match="no argument 'waves_per_ue'"):
        pin({(4096,): {"kwargs": {"BLOCK": 64, "waves_per_ue": 2}}}, kernel)


class Failing(Jitted):
    def run(self, *args: Any, **kwargs: Any) -> None:
        super().run(*args, **kwargs)
        raise ZeroDivisionError


@pytest.mark.parametrize("kind", [Autotuner, Faster])
def test_threads_that_launch_first_and_launches_that_fail_leave_the_pin(kind: Any) -> None:
    kernel = tuner(kind, jitted=Failing())
    pin(TABLE, kernel)
    copied = copy.copy(kernel)
    barrier, errors = threading.Barrier(8), []

    def launch() -> None:
        barrier.wait()
        for item in (kernel, copied):
            try:
                item[(1,)](4096)
            except ZeroDivisionError as error:
                errors.append(error)

    threads = [threading.Thread(target=launch) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 16
    assert kernel.fn.blocks == [256] * 16
    before = dict(vars(kernel))
    unpin()
    assert type(kernel) is kind
    assert vars(kernel).keys() <= before.keys()
    with pytest.raises(ZeroDivisionError):
        kernel[(1,)](4096)
    assert kernel.fn.blocks[-1] == 64


def test_a_table_of_a_specification_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text("\nKERNEL = 'colwise-dual'\nKEY = ('M',)\nTABLE = {'': {}}\n")
    with pytest.raises(PinError, match=r"is of colwise-dual, which is a specification.*config_for") as error:
        pin(tmp_path / "t.py")
    assert "\n" not in str(error.value)


HUB = """
import importlib.util, json, sys
import fp8tune_kernels
from fp8tune_kernels import pin_report

def loaded(path, name, is_listed):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    if is_listed:
        sys.modules[name] = module
    spec.loader.exec_module(module)
    return module

blocks = []
for number, (path, is_listed) in enumerate(json.loads(sys.argv[1])):
    module = loaded(path, f"quick_{number:x}", is_listed)
    module.run(640)
    blocks.append(module.quick.best_config.kwargs["BLOCK"])
print(json.dumps([blocks, pin_report()]))
"""


def programmed(folder: Path, program: str, *arguments: str, **variables: str) -> tuple[Any, str]:
    """Run a program and return the JSON that it prints, and what it says."""
    (folder / "program.py").write_text(program)
    process = start(folder, "program.py", *arguments, **variables)
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    return json.loads(output.splitlines()[-1]), errors


@pytest.mark.parametrize("listed", [True, False])
def test_modules_with_made_up_names_are_pinned_by_their_file_and_code(tmp_path: Path, listed: bool) -> None:
    """One file twice under two names, a copy of it in another folder, and another revision."""
    for folder in ("a", "b", "c"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "quick.py").write_text(
            QUICK.replace("pass", "tl.static_assert(n > 1)") if folder == "c" else QUICK
        )
    write_table(tmp_path / "table.py", "a/quick.py:quick", {(640,): {"BLOCK": 128}})
    code = code_hash("a/quick.py:quick", tmp_path / "a" / "quick.py")
    with (tmp_path / "table.py").open("a") as file:
        file.write(f"CODE = {{'': {code!r}}}\n")
    paths = json.dumps(
        [["a/quick.py", listed], ["a/quick.py", not listed], ["b/quick.py", listed], ["c/quick.py", listed]]
    )
    (blocks, report), errors = programmed(tmp_path, HUB, paths, FP8TUNE_PIN="table.py", FP8TUNE_PIN_STALE="unpin")
    assert blocks == [128, 128, 128, 64]
    assert [row["kernel"] for row in report["unpinned"]] == ["quick_3:quick"]
    assert errors.count("its code is not that of a/quick.py:quick") == 1


def test_a_module_is_pinned_under_another_name_than_that_of_its_table(tmp_path: Path) -> None:
    (tmp_path / "quick.py").write_text(QUICK)
    for code, block in ((code_hash("quick:quick", tmp_path / "quick.py"), 128), ("0" * 16, 64)):
        write_table(tmp_path / "table.py", "quick:quick", {(640,): {"BLOCK": 128}})
        with (tmp_path / "table.py").open("a") as file:
            file.write(f"CODE = {{'': {code!r}}}\n")
        paths = json.dumps([["quick.py", True]])
        (blocks, _), errors = programmed(tmp_path, HUB, paths, FP8TUNE_PIN="table.py", FP8TUNE_PIN_STALE="unpin")
        assert (blocks, "its code is not that of quick:quick" in errors) == ([block], block == 64)


MOVED = """
import json, mine, fp8tune_kernels
mine.run(640)
print(json.dumps(fp8tune_kernels.pin_report()))
"""


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("mine:slow", "mine has no slow any more"),
        ("yours:quick", "there is no yours any more"),
        ("other:quick", ""),
        ("pack.gone:quick", "there is no pack.gone any more"),
        ("gone.py:quick", "there is no gone.py any more"),
    ],
)
def test_a_table_whose_kernel_was_renamed_or_moved_is_reported_and_said_once(
    tmp_path: Path, name: str, reason: str
) -> None:
    for module in ("mine", "other", "pack/__init__"):
        (tmp_path / module).parent.mkdir(exist_ok=True)
        (tmp_path / f"{module}.py").write_text(QUICK)
    write_table(tmp_path / "table.py", name, {(640,): {"BLOCK": 128}})
    report, errors = programmed(tmp_path, MOVED, FP8TUNE_PIN="table.py")
    assert report["waiting"] == [name]
    assert {row["kernel"]: row["reason"] for row in report["unpinned"]}.get(name, "") == reason
    assert errors.count(f"{name} is not pinned, as {reason}") == (1 if reason else 0)


COMPILED = """
import json, sys
import torch, torch.utils._triton
torch.utils._triton.has_triton = lambda **_: True  # there is no GPU: nothing runs after it was traced
import triton, triton.language as tl
from fp8tune_kernels import pin, pin_report, unpin
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

@triton.autotune([triton.Config({"B": b}) for b in (32, 64, 128)], key=["n"])
@triton.jit
def fill(x, n, B: tl.constexpr):
    at = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(x + at, B, mask=at < n)

traced = []

def backend(graph, inputs):
    for node in graph.graph.nodes:
        if "kernel_idx" in node.kwargs:
            configs = kernel_side_table.get_kernel(node.kwargs["kernel_idx"]).configs
            traced.append([config.kwargs["B"] for config in configs])
    return lambda *arguments: (arguments[0],)

def launch(x, n):
    fill[lambda meta: (triton.cdiv(n, meta["B"]),)](x, n)
    return x + 1

pin({(n, "torch.float32"): {"kwargs": {"B": b}} for n, b in ((640, 64), (1280, 128))}, fill, unknown="strict")
result = []
for dynamic in (False, True):
    torch._dynamo.reset()
    compiled = torch.compile(launch, backend=backend, dynamic=dynamic)
    for n in (640, 1280):
        compiled(torch.empty(n), n)
    result.append([list(traced), pin_report()["unpinned"]])
    traced.clear()
print(json.dumps(result))
"""


def test_launches_inside_torch_compile_are_pinned_or_one_warning_names_them(tmp_path: Path) -> None:
    (static, dynamic), errors = programmed(tmp_path, COMPILED, TRITON_INTERPRET="0")
    assert static == [[[64], [128]], []]
    assert dynamic[0] == [[32, 64, 128]]
    assert "dynamic=False" in dynamic[1][0]["reason"]
    assert errors.count("is not pinned: inside torch.compile") == 1
