"""Kernels of other libraries, from a recording of their program to a sweep and a pinned program."""

from __future__ import annotations

import importlib
import logging
import os
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import triton
from command_line import fp8tune
from forked import Forked, workers_forked_from_here
from programs import Recorded, record

from fp8tune.check.machine import release
from fp8tune.errors import UsageError
from fp8tune.exporting import read_for_format
from fp8tune.records import Kind, Status
from fp8tune.replay.loading import load_spec
from fp8tune.replay.recording import Kernel, Scalar, text_of
from fp8tune.store.read import subjects_of
from fp8tune.store.results import Store
from fp8tune.tables.formats import Options
from fp8tune.tables.formats.python_file import write
from fp8tune_kernels.pinning import PinError, installed, pin
from fp8tune_kernels.tuners import resolved

MODULE = "foreign_ops"
TRAIN = """
import sys, torch, triton, triton.language as tl
import foreign_ops

@triton.autotune(foreign_ops.CONFIGS, key=["n"])
@triton.jit
def in_main(x, n, B: tl.constexpr):
    tl.store(x + tl.arange(0, B), 0.0, mask=tl.arange(0, B) < n)

def make():
    @triton.autotune(foreign_ops.CONFIGS[:1], key=[])
    @triton.jit
    def closed(x, B: tl.constexpr):
        tl.store(x + tl.arange(0, B), 0.0)
    return closed

class Odd:
    pass

foreign_ops.main()
in_main[(1,)](torch.empty(64), 64)
make()[(1,)](torch.empty(64))
try:
    foreign_ops.rounded[(1,)](torch.empty(64), Odd())
except TypeError:
    print("the program's own output", sys.argv[1:])
sys.exit(3)
"""
COMPILED = """
import torch, torch.utils._triton
torch.utils._triton.has_triton = lambda **_: True  # there is no GPU: nothing can run after tracing
import foreign_ops, triton
import triton.language as tl

def half(x):
    y = torch.empty_like(x, dtype=torch.float16)
    foreign_ops.cast[foreign_ops.blocks(x.numel())](x, y, x.numel(), 0.5, "silu", tl.float16)
    return y

try:
    torch.compile(half, backend="aot_eager")(torch.ones(4096))
except RuntimeError as error:
    assert "active drivers" in str(error)
"""
ADDRESSES = {"double_all": "at_ptr", "fill_at": "to"}
EXCLUDED = ("fails", "increment", "wrong_block", "drops_tail", "gather", "in_main", "make.<locals>.closed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("foreign")
    shutil.copy(Path(__file__).parent / "foreign_kernels.py", folder / f"{MODULE}.py")
    (folder / "train.py").write_text(TRAIN)
    return folder


@pytest.fixture(scope="module")
def recorded(folder: Path) -> Recorded:
    return record(folder, "--kernel", "*", program=(sys.executable, "train.py", "--lr", "3"))


@pytest.fixture(scope="module")
def kernels(recorded: Recorded) -> dict[str, Kernel]:
    assert recorded.recording is not None
    return {kernel.name.rpartition(":")[2]: kernel for kernel in recorded.recording.kernels}


@pytest.fixture(autouse=True)
def _modules(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))
    yield
    load_spec.cache_clear()


@pytest.fixture(scope="module")
def checked(folder: Path, recorded: Recorded) -> Iterator[tuple[str, Store]]:
    """Output and rows of a whole sweep on Triton's interpreter."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("TRITON_INTERPRET", "1")
        patched.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))
        patched.syspath_prepend(str(folder))
        with workers_forked_from_here():
            ended = fp8tune("sweep", "--recording", "run.json", "--db", "checked.db", cwd=folder)
    assert ended.returncode == 0, ended.stderr
    with Store.open(str(folder / "checked.db"), writable=False) as store:
        yield ended.stderr, store


@pytest.fixture(scope="module")
def timed(folder: Path, recorded: Recorded) -> str:
    """Output of a whole sweep on a simulated GPU."""
    options = ("--timer", "simulated:1", "--quick", "--db", "timed.db")
    ended = fp8tune("sweep", "--recording", "run.json", *options, cwd=folder)
    assert ended.returncode == 0, ended.stderr
    return ended.stderr


def test_launches_are_counted_by_everything_but_values(recorded: Recorded, kernels: dict[str, Kernel]) -> None:
    assert recorded.returncode == 3, recorded.stderr
    assert "the program's own output ['--lr', '3']" in recorded.stdout
    assert "next: fp8tune sweep" in recorded.stdout
    softmax, fill, rounded = (kernels[name] for name in ("softmax", "fill", "rounded"))
    assert (softmax.name, softmax.key, len(softmax.source_hash)) == (f"{MODULE}:softmax", ("columns",), 16)
    assert [(launch.arguments[0].shape, launch.count) for launch in softmax.launches] == [((4, 64), 3), ((2, 128), 1)]
    assert [launch.key for launch in softmax.launches] == [(n, "torch.float32", "torch.float32") for n in (64, 128)]
    launch = softmax.launches[0]
    assert (launch.grid.programs({"ROWS": 2}), launch.config) == ((2,), softmax.configs[0])
    assert (fill.is_autotuned, fill.configs, "twice" in kernels) == (False, (), False)
    assert [(item.count, item.options) for item in fill.launches] == [(1, {"num_warps": 2})] * 2
    assert [(item.count, item.scalars["n"]) for item in kernels["number"].launches] == [(1, 640)]
    assert fill.launches[0].arguments[3] == Scalar("B", 256, is_constexpr=True)
    assert [config.kwargs["B"] for config in rounded.configs] == [64, 128]  # though it has put others in their place
    assert [launch.config for launch in rounded.launches] == [rounded.configs[0]] * 3
    assert [reason.partition(",")[0] for reason in rounded.skipped] == ["argument n is of type __main__.Odd"]


def test_arguments_have_layout_values_and_whether_they_are_read_and_written(kernels: dict[str, Kernel]) -> None:
    (launch, infinite) = kernels["gather"].launches
    x, index, count = launch.tensors
    assert (x.dtype, x.shape, x.alignment, x.is_loaded, x.is_stored) == ("bfloat16", (100,), 8, True, True)
    assert (x.least, x.most, x.mean, x.deviation, x.zeros, x.not_finite) == (1.0, 1.0, 1.0, 0.0, 0.0, 0.0)
    assert (index.integers, index.is_sorted, index.is_loaded, index.is_stored) == (tuple(range(100)), True, True, False)
    assert (count.values, count.is_loaded, count.is_stored) == ((0,), True, True)
    assert launch.arguments[3:] == (
        Scalar("n", 100),
        Scalar("scale", 2.0),
        Scalar("DTYPE", {"dtype": "tl.float32"}, is_constexpr=True),
        Scalar("FUNCTION", {"function": f"{MODULE}:twice"}, is_constexpr=True),
    )
    assert infinite.arguments[4] == Scalar("scale", {"float": "inf"})
    (launch,) = kernels["blend"].launches  # items of tuples are arguments
    assert [item.name for item in launch.arguments] == ["parts[0]", "parts[1][0]", "parts[1][1]", "weights", "y", "n"]
    assert [(item.is_loaded, item.is_stored) for item in launch.tensors] == [
        (True, False),
        (True, False),
        (False, True),
    ]
    assert launch.arguments[2:4] == (Scalar("parts[1][1]", 5), Scalar("weights", {"tuple": (2, 3)}))


def test_kernels_have_the_names_by_which_they_can_be_imported(kernels: dict[str, Kernel]) -> None:
    launches = {name: [launch.count for launch in kernel.launches] for name, kernel in kernels.items()}
    tuners = {"rounded": [1, 1, 1], "BY_WIDTH[1]": [1], "BY_WIDTH[4]": [1], "LAYER.kernel": [1]}
    assert {name: launches[name] for name in tuners} == tuners
    assert [config.kwargs["B"] for config in kernels["BY_WIDTH[4]"].configs] == [256, 128]
    refusals = {name: kernel.refusal for name, kernel in kernels.items() if kernel.refusal}
    assert "defined in __main__" in refusals.pop("in_main")
    assert "closure, made inside make" in refusals.pop("make.<locals>.closed")
    assert not refusals


def outcomes(store: Store, name: str) -> list[tuple[int, Status, str]]:
    """Return the block, the status and the reason of a kernel's outcomes."""
    tallies = [store.tally(subject) for subject in subjects_of(store.pools(f"{MODULE}:{name}"))]
    every = [item for tally in tallies for item in tally.outcomes.items()]
    return sorted((config.get("B", 0), outcome.status, outcome.reason) for config, outcome in every)


def test_right_kernels_pass_and_faults_are_found(checked: tuple[str, Store], kernels: dict[str, Kernel]) -> None:
    printed, store = checked
    assert f"{MODULE}:fails was launched in no process" in printed
    rejected = f"{MODULE}:cast: its key names 'gone', which is no argument: Triton 3.9 rejects that"
    assert (rejected in printed) != (release(triton.__version__) >= (3, 9))
    for name in kernels.keys() - {*EXCLUDED, *ADDRESSES}:
        assert {item[1:] for item in outcomes(store, name)} == {(Status.OK, "")}, name
    disagrees = r"output 0 disagrees with the first config: 256 of 256 elements are out of bound.*; fingerprint \d+$"
    for name, reason in (("wrong_block", disagrees), ("drops_tail", r"on the edge 'odd sizes' \(n=208\)")):
        (right, wrong) = outcomes(store, name)
        assert (right[:2], wrong[:2]) == ((64, Status.OK), (128, Status.WRONG))
        assert re.search(reason, wrong[2])


def test_addresses_of_the_recorded_process_are_never_swept(
    checked: tuple[str, Store], kernels: dict[str, Kernel], folder: Path
) -> None:
    """Kernels that cast integers of a tensor, or a number, to pointers are named; the other kernels are swept."""
    assert kernels["add_seed"].launches[0].addresses == ()
    for kernel, argument in ADDRESSES.items():
        assert kernels[kernel].launches[0].addresses == (argument,)
        (line,) = [line for line in checked[0].splitlines() if line.startswith(f"{MODULE}:{kernel} ")]
        assert f"{argument} holds addresses of the recorded process" in line
        options = ("--recording", "run.json", "--timer", "simulated:1", "--db", "none.db")
        alone = fp8tune("sweep", "--kernel", f"{MODULE}:{kernel}", *options, cwd=folder)
        assert (alone.returncode, alone.stdout, argument in alone.stderr) == (2, "", True)


def test_configs_that_a_pruner_makes_are_swept_and_in_no_diff(
    checked: tuple[str, Store], timed: str, folder: Path
) -> None:
    """Triton times whatever early_config_prune returns."""
    assert "early_config_prune makes configs" in checked[0]
    for database in ("checked.db", "timed.db"):
        with Store.open(database, writable=False) as store:
            rows = [row for row in store.rows() if row.problem.kernel == f"{MODULE}:increment"]
        right = [row for row in rows if row.outcome.status is Status.OK and row.config]
        sizes = {(row.problem.shape["n"], row.config["B"], row.config["EVEN"]) for row in right if row.config}
        assert sizes == {(5000, 1024, 0), (5000, 512, 0), (4096, 1024, 1), (4096, 512, 1), (100, 128, 0)}
    where = ("--arch", "simulated", "--kernel", f"{MODULE}:increment", "--db", "timed.db", "--allow-quick")
    ended = fp8tune("export", "--for", "diff", *where, cwd=folder)
    assert (ended.returncode, "early_config_prune" in ended.stderr) == (2, True)


def test_a_sweep_that_ends_without_a_pick_exits_with_1(
    recorded: Recorded, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every config of one problem is pruned where it is swept: it was exit code 0, without a word."""
    monkeypatch.setenv("LARGEST", "1000")
    options = ("--kernel", f"{MODULE}:limited", "--recording", "run.json", "--timer", "simulated:1", "--db", "none.db")
    for _ in range(2):  # the second is answered from the database
        swept = fp8tune("sweep", *options, cwd=folder)
        assert swept.returncode == 1
        start = f"{MODULE}:limited: every config is pruned"
        (line,) = [line for line in swept.stderr.splitlines() if line.startswith(start)]
        assert all(text in line for text in ("on 1 of 2 sizes", "at n=5000", "early_config_prune"))


def test_an_output_whose_size_nobody_tells_the_kernel_keeps_it(recorded: Recorded) -> None:
    """The literal 32 is in its code: on fewer elements it would write behind them."""
    spec = load_spec(f"{MODULE}:column_sum@run.json")
    (odd,) = [edge.problem for edge in spec.edges(spec.recorded[0]) if edge.name == "odd sizes"]
    x, total, case = spec.inputs(odd, "cpu")
    assert (x.numel() % 256 != 0, total.shape, case.launches[0].scalars["n"]) == (True, (32,), x.numel())


def test_texts_and_dtypes_of_keys_are_shown_as_such(timed: str, folder: Path) -> None:
    shown = fp8tune("show", f"{MODULE}:cast", "--db", "timed.db", cwd=folder).stdout
    assert "TO=float16" in shown
    assert [line.split()[0] for line in shown.splitlines() if line.startswith(("none", "silu"))] == ["none", "silu"]


PINNED = {
    "increment": "run_pruned(increment, 5000, 4096, 100)",
    "column_sum": "run_column_sum()",
    "copy_rows": "run_copy_rows()",
    "fill": "run_fill()",
    "blend": "run_blend()",
    # the other tuners of that function have no table
    "BY_WIDTH[4]": "run_number(BY_WIDTH[4], 2000)",
    "rounded": "run_number(rounded, 1010)",
}


def checked_table(folder: Path, attribute: str) -> Path:
    """Write the table of the simulated rows as if they were of a GPU, where outputs are checked."""
    with Store.open(str(folder / "timed.db"), writable=False) as store:
        (kernel,) = read_for_format(store, "simulated", [f"{MODULE}:{attribute}"])
    picks = tuple(replace(pick, study=replace(pick.study, kind=Kind.MEASURED)) for pick in kernel.picks)
    (file,) = write([replace(kernel, picks=picks)], Options())
    path = folder / f"checked_{file.path.name}"
    path.write_text(file.text)
    return path


@pytest.mark.parametrize("attribute", PINNED)
def test_a_sweep_ends_in_a_pinned_program(timed: str, folder: Path, attribute: str) -> None:
    export = ("export", "--for", "python", "--arch", "simulated", "--kernel", f"{MODULE}:{attribute}")
    ended = fp8tune(*export, "--db", "timed.db", "--allow-quick", "-o", "tables", cwd=folder)
    assert ended.returncode == 0, ended.stderr

    def run() -> None:
        module = importlib.import_module(MODULE)
        torch.set_num_threads(1)  # a fork has none of its parent's threads
        logging.basicConfig(force=True)
        installed._device_name = lambda: "simulated:1"
        module.triton.testing.do_bench = None
        kernel, table = resolved(module, attribute), folder / "tables"
        if attribute == "increment":  # its early_config_prune makes configs that it does not declare
            with pytest.raises(PinError, match="does not declare"):
                pin(table, kernel)
            table = checked_table(folder, attribute)
        pin(table, kernel, unknown="strict")
        exec(PINNED[attribute], vars(module))

    code, output = Forked(run).wait()
    assert code == 0, output
    assert "is pinned to" in output


def test_launches_of_torch_compile_are_those_of_the_kernel_itself(
    recorded: Recorded, folder: Path, tmp_path: Path
) -> None:
    program = ("env", "TRITON_INTERPRET=0", sys.executable, "-c", COMPILED)
    ended = record(tmp_path, program=program, PYTHONPATH=os.environ["PYTHONPATH"])
    assert ended.recording is not None, ended.stderr
    (kernel,) = ended.recording.kernels
    (launch,) = kernel.launches
    assert (kernel.name, launch.is_traced, launch.in_graph) == (f"{MODULE}:cast", True, True)
    tensors = [(item.dtype, item.shape, item.is_stored) for item in launch.tensors]
    assert tensors == [("float32", (4096,), False), ("float16", (4096,), True)]
    assert (launch.grid.programs({"B": 64}), launch.scalars["MODE"]) == ((64, 1, 1), "silu")
    assert launch.key == (4096, "silu", {"dtype": "tl.float16"}, "torch.float32", "torch.float16")
    options = ("--timer", "simulated:1", "--quick", "--db", "rows.db")
    swept = fp8tune("sweep", "--recording", "run.json", *options, cwd=tmp_path)
    assert "torch.compile launches copies of it: the kernel itself is swept" in swept.stderr
    assert swept.returncode == 0


def test_configs_come_from_the_code_after_a_change(recorded: Recorded, kernels: dict[str, Kernel]) -> None:
    assert recorded.recording is not None
    kernel = kernels["blend"]
    (launch,) = kernel.launches
    renamed = replace(launch, arguments=(*launch.arguments, Scalar("m", 3)))
    for change in ({"configs": kernel.configs[:1]}, {"launches": (renamed,)}):
        Path("older.json").write_text(text_of(replace(recorded.recording, kernels=(replace(kernel, **change),))))
        load_spec.cache_clear()
        if "configs" in change:
            spec = load_spec(f"{MODULE}:blend@older.json")
            assert [config["B"] for config in spec.configs] == [64, 128]
            assert "its configs are taken from the code, its sizes from the recording" in "".join(spec.notices)
        else:
            with pytest.raises(UsageError, match="has no argument 'm' any more: record it again"):
                load_spec(f"{MODULE}:blend@older.json")
