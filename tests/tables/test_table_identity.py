"""A table is used for the kernel and the launches that it was measured on. Anything else is an error or a warning."""

from __future__ import annotations

import functools
import importlib
import math
import random
import runpy
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import format_picks as made
import pytest
import torch

from fp8tune.records import Kind
from fp8tune.replay.configs import as_autotuned
from fp8tune.replay.recording import Config, Kernel, Launch
from fp8tune.replay.watch.kernel import WatchedKernel
from fp8tune.tables.formats import Options
from fp8tune.tables.formats.python_file import write
from fp8tune_kernels.identity import code_hash
from fp8tune_kernels.pinning import PinError, installed, pin, unpin
from fp8tune_kernels.pinning.reach import own_class
from fp8tune_kernels.pinning.tables import tables_of

SOURCE = '''
import torch
import triton
import triton.language as tl
from {module}_helpers import twice

CONFIGS = [triton.Config({"BM": bm, "BN": bn}, num_warps=4) for bm in (8, 16) for bn in (16, 32)]
STEP = tl.constexpr(1)

@triton.autotune(configs=CONFIGS, key=["M", "N"])
@triton.jit
def double(x, y, M, N, BM: tl.constexpr, BN: tl.constexpr):
    m = tl.program_id(0) * BM + tl.arange(0, BM)[:, None] * STEP
    n = tl.program_id(1) * BN + tl.arange(0, BN)[None, :]
    inside = (m < M) & (n < N)
    tl.store(y + m * N + n, twice(tl.load(x + m * N + n, mask=inside)), mask=inside)

@triton.jit
def total(x, y, n, stride, BLOCK: tl.constexpr, ROWS: tl.constexpr, FLIP: tl.constexpr = False):
    """Sum of each row: BLOCK has to cover it, and the grid has to have a program for ROWS of them."""
    for index in range(ROWS):
        row = tl.program_id(0) * ROWS + index
        at = tl.arange(0, BLOCK)
        tl.store(y + row, tl.sum(tl.load(x + row * stride + at, mask=at < n, other=0.0), 0))

@triton.jit
def copy(x, y, BLOCK: tl.constexpr):
    """No size is an argument: the programs have to cover the tensor."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at))

@triton.jit
def backwards(x, y, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    """The caller counts the blocks, from the last of which the programs start."""
    at = (BLOCKS - 1 - tl.program_id(0)) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at))
'''
HELPERS = """
import triton
import triton.language as tl

@triton.jit
def twice(value):
    return value * 2
"""


@dataclass
class Program:
    """A module with kernels, and what its launches are like."""

    folder: Path
    module: str
    sizes: tuple[tuple[int, int], ...] = ((16, 32), (32, 16))
    source: str = SOURCE
    helpers: str = HELPERS
    loaded: list[str] = field(default_factory=list)

    def load(self) -> ModuleType:
        """Write the module, and import it anew."""
        for name, text in ((f"{self.module}_helpers", self.helpers), (self.module, self.source)):
            (self.folder / f"{name}.py").write_text(text.replace("{module}", self.module))
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        self.loaded.append(self.module)
        return importlib.import_module(self.module)

    def double(self, kernel: Any) -> list[tuple[bool, Any]]:
        """Launch on all sizes. Return if each is right, and its config."""
        results = []
        for M, N in self.sizes:
            x, y = torch.ones(M, N), torch.zeros(M, N)
            kernel[lambda meta, M=M, N=N: (-(-M // meta["BM"]), -(-N // meta["BN"]))](x, y, M, N)
            results.append((bool((y == 2).all()), kernel.cache[M, N, "torch.float32", "torch.float32"].kwargs))
        return results


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Program]:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    program = Program(tmp_path, f"pinned_{abs(hash(request.node.name))}")
    yield program
    unpin()
    for name in program.loaded:
        sys.modules.pop(name, None)
        sys.modules.pop(f"{name}_helpers", None)


def recorded(kernel: Any, launch: Callable[[], object]) -> Kernel:
    """Return a kernel as ``fp8tune record`` does, with the launches that the function makes."""
    kind = own_class(kernel)  # another one while a pin may reach it
    watched, original = WatchedKernel(kernel, hasattr(kernel, "configs")), kind.run

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        call = functools.partial(original, self)
        return watched.run(call, args, kwargs) if self is kernel else call(*args, **kwargs)

    with mock.patch.object(kind, "run", run):
        launch()
    document = watched.document({})
    return document if document.is_autotuned else as_autotuned(document)


def exported(
    kernel: Kernel,
    choose: Callable[[Launch], Config],
    path: Path,
    kind: Kind = Kind.MEASURED,
    name: str = "NVIDIA H100",
) -> Path:
    """Write the table of a sweep in which a config of each launch was the fastest."""
    picks = []
    for launch in kernel.launches:
        tried = replace(kernel, configs=(choose(launch), *(c for c in kernel.configs if c != choose(launch))))
        pick = made.pick({"n": 1}, [10.0, *[20.0] * (len(tried.configs) - 1)], tried)
        version = replace(pick.study.version, source_hash=code_hash(kernel.name))  # type: ignore[type-var]
        picks.append(replace(pick, study=replace(pick.study, version=version, kind=kind), launch=launch))
    table = made.kernel_picks(*picks, kernel=kernel, device=replace(made.H200, name=name))
    (file,) = write([table], Options())
    path.write_text(file.text)
    return path


def table_of_double(program: Program, kind: Kind = Kind.MEASURED) -> Path:
    module = program.load()
    with mock.patch.object(module.double, "_do_bench", return_value=[1.0] * 3):
        kernel = recorded(module.double, lambda: program.double(module.double))
    chosen = {16: Config({"BM": 16, "BN": 32}, num_warps=4), 32: Config({"BM": 8, "BN": 16}, num_warps=4)}
    return exported(kernel, lambda launch: chosen[launch.key[0]], program.folder / "table.py", kind)


WRONG_BUT_FOR_8 = ("arange(0, BM)[:, None] * STEP", "arange(0, BM)[:, None] % 8 * STEP")
CONFIGS_OF_8 = ("for bm in (8, 16)", "for bm in (8,)")
CHANGES: Mapping[str, tuple[tuple[str, str], ...]] = {
    "nothing": (),
    "comment": (("# ", "## "), ("import torch", "# a comment\nimport torch")),
    "list": (CONFIGS_OF_8,),
    "body": (WRONG_BUT_FOR_8, CONFIGS_OF_8),
    "constant": (("constexpr(1)", "constexpr(2)"),),
    "helper": (("value * 2", "value + value"),),
    "order of the key": (('["M", "N"]', '["N", "M"]'),),
    "names of the key": (("M, N, BM", "H, N, BM"), ('["M"', '["H"'), ("m < M", "m < H")),
}
STAYS = ("nothing", "comment", "list")


def outcome(launch: Callable[[], list[tuple[bool, Any]]], caplog: pytest.LogCaptureFixture) -> str:
    """Say how launches end, if not right and by the table: never wrong in silence."""
    caplog.clear()
    try:
        results = launch()
    except PinError as error:
        assert "\n" not in str(error)
        return "error"
    warned = [record.message for record in caplog.records if "is pinned to" not in record.message]
    assert warned or all(right for right, _ in results)
    return "warning" if warned else "pinned"


@pytest.mark.parametrize("mode", ["nearest", "strict"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_table_older_than_its_kernel_is_an_error_or_a_warning(
    program: Program, change: str, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    table = table_of_double(program)
    for before, after in CHANGES[change]:
        program.source = program.source.replace(before, after)
        program.helpers = program.helpers.replace(before, after)
    module = program.load()

    def launch() -> list[tuple[bool, Any]]:
        pin(table, unknown=mode)
        with mock.patch.object(module.double, "_do_bench", return_value=[1.0] * 3):
            return program.double(module.double)

    key_differs = change.endswith("key")
    expected = "pinned" if change in STAYS else "error" if key_differs or mode == "strict" else "warning"
    assert outcome(launch, caplog) == expected
    if expected == "pinned":
        assert [config for _, config in launch()] == [{"BM": 16, "BN": 32}, {"BM": 8, "BN": 16}]


def test_changed_code_is_an_error_where_ranks_could_disagree_and_used_by_who_insists(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = table_of_double(program)
    program.helpers = HELPERS.replace("value * 2", "value + value")
    module = program.load()
    with monkeypatch.context() as context:
        context.setattr(installed, "are_several_ranks", lambda: True)
        with pytest.raises(PinError, match="measured with other code"):
            pin(table)
    pin(table, stale="use")
    assert program.double(module.double) == [(True, {"BM": 16, "BN": 32}), (True, {"BM": 8, "BN": 16})]
    monkeypatch.setenv("FP8TUNE_PIN_STALE", "use")
    pin(table)
    assert program.double(module.double)[0] == (True, {"BM": 16, "BN": 32})
    monkeypatch.setenv("FP8TUNE_PIN_STALE", "us")
    with pytest.raises(PinError, match="choose one of unpin, use"):
        pin(table)


def test_a_kernel_that_moved_keeps_its_table_and_another_kernel_gets_none(program: Program) -> None:
    table = table_of_double(program)
    program.module += "_moved"
    module = program.load()
    pin(table, module.double)
    assert program.double(module.double)[0] == (True, {"BM": 16, "BN": 32})
    program.source = program.source.replace("def double", "def triple")
    program.helpers = program.helpers.replace("value * 2", "value * 3")
    program.module += "_again"
    with pytest.raises(PinError, match=r"no table in .* is of \S+:triple"):
        pin(table, program.load().triple)


def test_a_device_that_was_not_measured_gets_no_config_of_another(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    pin(table_of_double(program))
    monkeypatch.setattr(installed, "_device_name", lambda: "NVIDIA A100")
    with pytest.raises(PinError, match="has no config for the key"):
        program.double(sys.modules[program.module].double)


def test_each_flipped_bit_of_the_data_is_noticed(program: Program) -> None:
    table = table_of_double(program)
    data = table.read_bytes()
    start, end = data.index(b"\nFORMAT"), data.index(b'"\n', data.index(b"\nCHECKSUM"))
    known = tables_of(table)
    places = [(at, bit) for at in range(start, end) for bit in range(8)]
    silent = []
    for at, bit in random.Random(1).sample(places, 400):
        table.write_bytes(data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :])
        try:
            silent += [(at, bit)] if tables_of(table) != known or tables_of(table)[0].codes else []
        except PinError:
            continue
    assert not silent
    table.write_bytes(data.replace(b"\n", b"\r\n"))
    assert tables_of(table) == known


def test_a_damaged_file_answers_no_lookup_of_its_own(program: Program) -> None:
    table = table_of_double(program)
    sys.modules.pop("table", None)
    module = importlib.import_module("table")
    key = (16, 32, "torch.float32", "torch.float32")
    assert module.config_for(key, "NVIDIA H100")["kwargs"] == {"BM": 16, "BN": 32}
    program.source = program.source.replace("constexpr(1)", "constexpr(2)")
    program.load()
    module.is_current.cache_clear()
    with pytest.warns(UserWarning, match="is not the code that"):
        assert module.config_for(key, "NVIDIA H100") is None
    table.write_text(table.read_text().replace('"BM": 16', '"BM": 17'))
    module.is_current.cache_clear()
    with pytest.raises(ValueError, match="damaged"):
        module.config_for(key, "NVIDIA H100")
    sys.modules.pop("table")


ROW = {"kwargs": {"BM": 16, "BN": 32}, "num_warps": 4}
KEY = (16, 32, "torch.float32", "torch.float32")


@pytest.mark.parametrize(
    ("key", "row"),
    [
        *((KEY, {**ROW, "num_warps": warps}) for warps in (0, -4, 3, "4", 10**9, True, 4.0, None, math.inf)),
        *((KEY, {**ROW, "num_stages": stages}) for stages in (-1, "2", 10**6, False)),
        *((KEY, {**ROW, "num_ctas": ctas}) for ctas in (0, 3)),
        *((KEY, {**ROW, "kwargs": {"BM": bm, "BN": 32}}) for bm in ("16", 16.0, None, (16,))),
        *((KEY, {**ROW, "kwargs": kwargs}) for kwargs in ({"BN": 32}, {"BN": 32, "M": 16}, {**ROW["kwargs"], "BX": 1})),  # type: ignore[dict-item]
        ((math.nan, 32, *KEY[2:]), ROW),
        (16, ROW),
    ],
)
def test_what_no_kernel_can_have_is_refused_whoever_insists(program: Program, key: Any, row: Any) -> None:
    module = program.load()
    for stale in ("unpin", "use"):
        with pytest.raises(PinError):
            pin({key: row}, module.double, stale=stale)


def test_a_config_that_is_not_declared_is_used_only_where_it_was_checked(program: Program) -> None:
    table = table_of_double(program)
    module = program.load()
    undeclared = {KEY: {"kwargs": {"BM": 32, "BN": 32}, "num_warps": 4}}
    with pytest.raises(PinError, match="stale='use'"):
        pin(undeclared, module.double)
    pin(undeclared, module.double, stale="use")
    assert program.double(module.double)[0] == (True, {"BM": 32, "BN": 32})
    # One that was swept belongs to its key alone.
    kernel = replace(Kernel(f"{program.module}:double"), key=("M", "N"), parameters=tuple(module.double.arg_names))
    kernel = replace(kernel, launches=(Launch((), made.Grid((), ()), KEY),))
    exported(kernel, lambda _: Config({"BM": 32, "BN": 32}), table)
    pin(table)
    with pytest.raises(PinError, match="whose config it declares"):
        program.double(module.double)
    assert module.double.cache[KEY].kwargs == {"BM": 32, "BN": 32}
    exported(kernel, lambda _: Config({"BM": 32, "BN": 32}), table, Kind.SIMULATED)
    with pytest.raises(PinError, match="stale='use'"):
        pin(table)


def test_a_declared_config_is_used_though_no_output_was_checked(program: Program) -> None:
    table = table_of_double(program, Kind.SIMULATED)
    assert table.read_text().count("outputs not checked") == 2
    pin(table, unknown="strict")
    module = sys.modules[program.module]
    assert program.double(module.double) == [(True, {"BM": 16, "BN": 32}), (True, {"BM": 8, "BN": 16})]


def test_two_tables_of_one_kernel_and_device_are_an_error(program: Program, tmp_path: Path) -> None:
    table, folder = table_of_double(program), tmp_path / "tables"
    folder.mkdir()
    for name in ("a", "b"):
        (folder / f"{name}.py").write_text(table.read_text())
    with pytest.raises(PinError, match=r"a\.py and .*b\.py are both of .* on NVIDIA H100: remove one"):
        pin(folder)


def test_a_table_without_identity_is_read_with_a_warning(program: Program, caplog: pytest.LogCaptureFixture) -> None:
    module = program.load()
    table = program.folder / "old.py"
    rows = {"NVIDIA H100": {KEY: ROW, (32, 16, *KEY[2:]): {**ROW, "kwargs": {"BM": 8, "BN": 16}}}}
    names = (*module.double.keys, "the dtype of each tensor")
    text = f'import math\nKEY = {names}\nTABLE = {rows}\nEVIDENCE = {{}}\nKERNEL = "{program.module}:double"\n'
    table.write_text(text)
    pin(table)
    assert "it cannot be compared" in caplog.text
    assert [config for _, config in program.double(module.double)] == [{"BM": 16, "BN": 32}, {"BM": 8, "BN": 16}]
    table.write_text(text.replace("'BM': 16", "'BM': 64"))
    with pytest.raises(PinError, match="does not declare"):
        pin(table)


# Kernels without an autotuner.


def sums(kernel: Any, n: int, rows: int = 8, *, grid: Any = None, **constants: Any) -> tuple[bool, int, Any]:
    """Launch ``total``. Return if it is right, and its BLOCK and programs."""
    x, y, seen = torch.ones(rows, n), torch.zeros(rows), list[Any]()
    own = {"BLOCK": 2 ** math.ceil(math.log2(n)), "ROWS": 1, **constants}

    def by_rows(meta: Mapping[str, Any]) -> tuple[int, ...]:
        seen.append((meta["BLOCK"], meta["ROWS"]))
        return (-(-rows // meta["ROWS"]),)

    kernel[by_rows if grid is None else grid](x, y, n, x.stride(0), num_warps=4, **own)
    return bool((y == n).all()), *(seen[-1] if seen else (0, 0))


def table_of_total(program: Program, choice: Config, kind: Kind = Kind.MEASURED, **how: Any) -> Path:
    module = program.load()
    kernel = recorded(module.total, lambda: sums(module.total, 16, **how))
    return exported(kernel, lambda _: choice, program.folder / "total.py", kind)


CHOICE = Config({"BLOCK": 32, "ROWS": 2}, num_warps=8)


def test_a_checked_launch_takes_the_whole_config_and_any_other_keeps_its_constants(
    program: Program, caplog: pytest.LogCaptureFixture
) -> None:
    pin(table_of_total(program, CHOICE))
    kernel = sys.modules[program.module].total
    assert sums(kernel, 16) == (True, 32, 2)
    assert "its own" not in caplog.text
    for n, rows in ((64, 8), (3, 8), (128, 24), (16, 6)):  # the last has an equal key, and other shapes
        right, block, per_program = sums(kernel, n, rows)
        assert (right, block, per_program) == (True, 2 ** math.ceil(math.log2(n)), 1)
    assert caplog.text.count("and its own BLOCK, ROWS") == 1
    assert sums(kernel, 16) == (True, 32, 2)


@pytest.mark.parametrize(
    "call",
    [
        {"BLOCK": 64},  # the caller's constant is another
        {"ROWS": 4},
        {"grid": (8,)},  # the tuple was made for ROWS=1
        {"FLIP": True},  # a flag is no part of the key
    ],
)
def test_a_launch_that_differs_from_the_checked_one_in_one_thing_keeps_its_constants(
    program: Program, call: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    table = table_of_total(program, CHOICE)
    for mode, error in (("nearest", False), ("tune", False), ("strict", True)):
        pin(table, unknown=mode)
        kernel = sys.modules[program.module].total
        if error:
            with pytest.raises(PinError, match="was checked with its"):
                sums(kernel, 16, **call)
            continue
        right, block, rows = sums(kernel, 16, **call)
        assert right
        assert "grid" in call or (block, rows) == (call.get("BLOCK", 16), call.get("ROWS", 1))
    assert "no such launch was checked" in caplog.text


def test_a_tuple_as_grid_takes_constants_that_were_checked_with_it(program: Program) -> None:
    table = table_of_total(program, replace(CHOICE, kwargs={}), grid=(8,))
    pin(table, unknown="strict")
    kernel = sys.modules[program.module].total
    assert sums(kernel, 16, grid=(8,))[0]
    assert sums(kernel, 16) == (True, 16, 1)


def copied(kernel: Any, n: int, **constants: Any) -> tuple[bool, int]:
    """Launch a kernel that copies, in blocks of 64. Return if it is right, and its block."""
    x, y, blocks = torch.ones(n), torch.zeros(n), list[int]()

    def grid(meta: Mapping[str, Any]) -> tuple[int]:
        blocks.append(meta["BLOCK"])
        return (n // meta["BLOCK"],)

    kernel[grid](x, y, BLOCK=64, **constants)
    return bool((y == 1).all()), blocks[-1]


def test_sizes_that_are_no_arguments_count_by_the_shapes(program: Program) -> None:
    kernel = program.load().copy
    document = recorded(kernel, lambda: copied(kernel, 512))
    pin(exported(document, lambda _: Config({"BLOCK": 256}), program.folder / "copy.py"))
    assert [copied(kernel, n) for n in (512, 576, 64, 512)] == [(True, 256), (True, 64), (True, 64), (True, 256)]


@pytest.mark.parametrize("kind", [Kind.SIMULATED, Kind.PUBLISHED])
def test_constants_that_nothing_checked_are_used_in_no_launch(
    program: Program, kind: Kind, caplog: pytest.LogCaptureFixture
) -> None:
    """Another block alone would leave half of what ``backwards`` stores unwritten."""
    kernel = program.load().backwards
    document = recorded(kernel, lambda: copied(kernel, 512, BLOCKS=8))
    table = exported(document, lambda _: Config({"BLOCK": 128}, num_warps=8), program.folder / "backwards.py", kind)
    pin(table)
    assert copied(kernel, 512, BLOCKS=8) == (True, 64)
    assert "and its own BLOCK: no such launch was checked" in caplog.text
    pin(table, unknown="strict")
    with pytest.raises(PinError, match="was checked with its BLOCK"):
        copied(kernel, 512, BLOCKS=8)
    names = runpy.run_path(str(table))
    ((device, rows),) = names["TABLE"].items()
    (key,) = rows
    config = names["config_for"](key, device)
    assert (config["kwargs"], config["num_warps"], names["UNCHECKED"]) == ({}, 8, {device: {key: kind}})
    assert "outputs not checked" in names["EVIDENCE"][device][key]


def test_the_recorded_launch_of_a_simulated_sweep_keeps_its_constants(program: Program) -> None:
    pin(table_of_total(program, CHOICE, Kind.SIMULATED))
    assert sums(sys.modules[program.module].total, 16) == (True, 16, 1)


def test_a_bare_kernel_that_changed_keeps_its_own_config(program: Program, caplog: pytest.LogCaptureFixture) -> None:
    table = table_of_total(program, CHOICE)
    program.source = program.source.replace("other=0.0", "other=0")
    module = program.load()
    pin(table)
    assert sums(module.total, 16) == (True, 16, 1)
    assert caplog.text.count("measured with other code") == 1
    assert textwrap.shorten(caplog.text, 10**4).count("is pinned to") == 0
