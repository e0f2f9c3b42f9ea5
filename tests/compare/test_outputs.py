"""Comparisons without a GPU: both revisions run on Triton's interpreter, and only their outputs are compared."""

from __future__ import annotations

from pathlib import Path

import pytest
from git_repositories import commit, git
from places import PLANTED

from fp8tune.comparing import live
from fp8tune.comparing.sides import checked_out
from fp8tune.comparing.verdicts import AGREED, ComparedRow, Comparison
from fp8tune.errors import UsageError
from fp8tune.measure.backends import GpuBackend, interpreter
from fp8tune.plan.shapes import Selection
from fp8tune.records import Device, NamedInts
from fp8tune.replay.recording import Config, Grid, Kernel, Launch, Recording, Scalar, Tensor, text_of

VERSIONED = (PLANTED / "versioned.py").read_text()
SELECTIONS = [Selection((NamedInts(M=30, K=8),))]
WRITES = "out[0].copy_(FACTOR * values[0])"
FLAT = "out[0].view(-1)[:{end}].copy_((FACTOR * values[0]).view(-1)[:{end}])"
OUTPUTS = "torch.empty(x.shape, dtype=x.dtype, device=x.device)"
EDGE = 'edges=lambda problem: [Edge("33 rows", Problem(problem.kernel, NamedInts(M=33, K=8)))],'
NO_ROWS = EDGE.replace("33 rows", "no rows").replace("M=33", "M=0")
SUMS = {OUTPUTS: "torch.empty(8, device=x.device)", WRITES: "out[0].copy_(FACTOR * values[0].sum(0))"} | {
    "2 * x,": "2 * x.sum(0),"
}


def edged(edge: str) -> dict[str, str]:
    return {"scaled_down=": f"{edge}\n    scaled_down=", "import KernelSpec": "import Edge, KernelSpec"}


def returning(output: str) -> dict[str, str]:
    """Replace the kernel's output and its reference alike, so that they agree with each other."""
    return {OUTPUTS: output, "2 * x,": "(2 * x).to(torch.float64)," if "float64" in output else "2 * x,"}


# name -> changes of the text on main, changes on the branch, verdict, words of the reason
CHANGES: dict[str, tuple[dict[str, str], dict[str, str], str, str]] = {
    "harmless": ({}, {WRITES: "out[0].copy_(values[0] * FACTOR)"}, "OPEN", AGREED),
    "off-by-one": ({}, {WRITES: FLAT.format(end="values[0].numel() - 1")}, "WRONG", "1 of 240 elements differ"),
    "odd-sizes": ({}, {WRITES: FLAT.format(end="values[0].numel() // 2 * 2")}, "WRONG", "'odd sizes' (M=29 K=7)"),
    "nan": ({}, {WRITES: "out[0].copy_(FACTOR * values[0].nan_to_num(0.0))"}, "WRONG", "expected nan"),
    "infinite": ({}, {WRITES: "out[0].copy_(FACTOR * values[0].clamp(-1e9, 1e9))"}, "WRONG", "expected -inf"),
    "unwritten": ({}, {WRITES: "out[0][1:].copy_(FACTOR * values[0][1:])"}, "WRONG", "8 of 240 elements differ"),
    "raises": ({}, {WRITES: "raise ValueError('no')"}, "WRONG", "ValueError: no"),
    "crashes": ({}, {WRITES: "__import__('os')._exit(1)"}, "WRONG", "crashed"),
    "both-changed": ({}, {"FACTOR = 2": "FACTOR = 3", "2 * x": "3 * x"}, "WRONG", "not what main"),
    "dtype": ({}, returning("torch.empty(x.shape, dtype=torch.float64, device=x.device)"), "WRONG", "torch.float64"),
    "layout": ({}, returning("torch.empty(x.T.shape, dtype=x.dtype, device=x.device).T"), "WRONG", "strides (1, 30)"),
    "inputs": (
        {},
        {"torch.arange(1, M * K + 1": "torch.arange(2, M * K + 2", WRITES: "out[0].copy_(values[0] * FACTOR)"},
        "OPEN",
        "inputs are not those of main",
    ),
    "lost-default": (
        {},
        {"(32, 64, 128)": "(32, 128)", "BLOCK_SIZE=64": "BLOCK_SIZE=32"}
        | {WRITES: f"config['BLOCK_SIZE'] == 32 or {WRITES}"},
        "WRONG",
        "elements differ",
    ),
    "one-config": ({}, {WRITES: f"config['BLOCK_SIZE'] == 128 or {WRITES}"}, "WRONG", "with BLOCK_SIZE=128"),
    "always-wrong-config": (
        {WRITES: f"config['BLOCK_SIZE'] == 128 or {WRITES}"},
        {WRITES: "config['BLOCK_SIZE'] == 128 or out[0].copy_(values[0] * FACTOR)"},
        "OPEN",
        AGREED,
    ),
    "both-wrong": ({"FACTOR = 2": "FACTOR = 3"}, {"FACTOR = 2": "FACTOR = 5"}, "OPEN", "wrong on both sides"),
    "edge": (edged(EDGE), edged(EDGE) | {WRITES: "out[0][:32].copy_(FACTOR * values[0][:32])"}, "WRONG", "'33 rows'"),
    "edge-gone": (edged(EDGE), {WRITES: "out[0][:32].copy_(FACTOR * values[0][:32])"}, "WRONG", "'33 rows'"),
    "no-rows": (
        SUMS | edged(NO_ROWS),
        SUMS | edged(NO_ROWS) | {WRITES: "values[0].numel() and out[0].copy_(FACTOR * values[0].sum(0))"},
        "WRONG",
        "'no rows'",
    ),
    "same": ({}, {"FACTOR = 2": "FACTOR = 2  # in other words"}, "SAME-CODE", ""),
}


def changed(text: str, changes: dict[str, str]) -> str:
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    return text


def version(name: str, changes: dict[str, str]) -> str:
    return changed(VERSIONED.replace('"versioned"', f'"{name}"'), changes)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repository")
    git(folder, "init", "-q", "-b", "main")
    commit(folder, {f"{name}.py": version(name, before) for name, (before, *_) in CHANGES.items()})
    git(folder, "checkout", "-q", "-b", "branch")
    commit(folder, {f"{name}.py": version(name, after) for name, (_, after, *_) in CHANGES.items()})
    git(folder, "checkout", "-q", "main")
    return folder


def compared(repository: Path, *names: str, outputs_only: bool = False, picks: str = "own") -> Comparison:
    with checked_out("main..branch", [f"{repository}/{name}.py:SPEC" for name in names]) as sides:
        return live.compare(sides, SELECTIONS, picks, interpreter(), lambda *_: None, outputs_only=outputs_only)


@pytest.fixture(scope="module")
def rows(repository: Path) -> dict[str, ComparedRow]:
    return {row.kernel: row for row in compared(repository, *CHANGES).rows}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_gets_its_verdict(rows: dict[str, ComparedRow], name: str) -> None:
    *_, verdict, words = CHANGES[name]
    assert (rows[name].verdict, words in rows[name].reason) == (verdict, True), rows[name].reason


def test_outputs_alone_may_be_asked(repository: Path) -> None:
    comparison = compared(repository, "harmless", "same", outputs_only=True)
    assert {row.kernel: str(row.verdict) for row in comparison.rows} == {"harmless": "AGREE", "same": "SAME-CODE"}
    assert comparison.exit_code == 0
    assert compared(repository, "inputs", outputs_only=True).exit_code == 3
    with pytest.raises(UsageError, match="retune"):
        compared(repository, "harmless", picks="retune")


def test_a_gpu_compares_outputs_with_each_other_too(repository: Path) -> None:
    """Plain torch runs on a stand-in whose GPU is the CPU."""
    backend = GpuBackend(Device("sm_90"), None, torch_device="cpu")
    with checked_out(
        "main..branch", [f"{repository}/{name}.py:SPEC" for name in ("both-changed", "edge-gone")]
    ) as sides:
        rows = live.compare(sides, SELECTIONS, "own", backend, lambda *_: None, outputs_only=True).rows
    assert {row.kernel: str(row.verdict) for row in rows} == {"both-changed": "WRONG", "edge-gone": "WRONG"}


# Recorded kernels

OPS = """
import triton
import triton.language as tl

@triton.autotune([triton.Config({"B": block}) for block in (64, 128)], key=["n"])
@triton.jit
def positive(x, y, n, B: tl.constexpr):
    at = tl.program_id(0) * B + tl.arange(0, B)
    value = tl.load(x + at, mask=at < n)
    tl.store(y + at, tl.where(value > 0, value, 0.0), mask=at < n)
"""
RECORDED: dict[str, tuple[dict[str, str], str]] = {
    "harmless": ({"value > 0": "value > -0.0"}, "OPEN"),
    "early": ({"0.0), mask=at < n)": "0.0), mask=at < n - 1)"}, "WRONG"),
    "odd": ({"0.0), mask=at < n)": "0.0), mask=at < n // 32 * 32)"}, "WRONG"),
    "nan": ({"value > 0, value, 0.0": "value <= 0, 0.0, value"}, "WRONG"),
    "default": ({"(64, 128)": "(128,)"}, "OPEN"),
    "wrong-default": ({"(64, 128)": "(128,)", "0.0), mask=at < n)": "0.0), mask=at < n - (B > 64))"}, "WRONG"),
    "unwritten": ({"0.0), mask=at < n)": "0.0), mask=(at < n) & (value > 0))"}, "WRONG"),
    "does-not-compile": ({"tl.where": "tl.where_"}, "WRONG"),
}


def test_a_recorded_kernel_is_compared_without_a_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    form = {"dtype": "float32", "shape": (256,), "strides": (1,), "least": -3.0, "most": 3.0}
    x = Tensor("x", **form, is_loaded=True, is_stored=False)  # type: ignore[arg-type]
    y = Tensor("y", **form, is_loaded=False, is_stored=True, storage=1)  # type: ignore[arg-type]
    grid = Grid(("B",), (((64,), (4,)), ((128,), (2,))))
    before, after, kernels = dict[str, str | None](), dict[str, str | None](), list[Kernel]()
    for name, (changes, _) in RECORDED.items():
        module = f"ops_{name.replace('-', '_')}"
        before[f"{module}.py"] = OPS
        after[f"{module}.py"] = changed(OPS, changes)
        launches = (Launch((x, y, Scalar("n", 256)), grid),)
        configs = Config({"B": 64}), Config({"B": 128})
        file = str(tmp_path / f"{module}.py")
        kernels.append(Kernel(f"{module}:positive", file=file, configs=configs, key=("n",), launches=launches))
    git(tmp_path, "init", "-q", "-b", "main")
    commit(tmp_path, before | {"run.json": text_of(Recording(kernels=tuple(kernels)))})
    git(tmp_path, "checkout", "-q", "-b", "branch")
    commit(tmp_path, after)
    monkeypatch.chdir(tmp_path)
    names = [f"{kernel.name}@run.json" for kernel in kernels]
    names[0] = f"{kernels[0].file}:positive@run.json"
    with checked_out("main..branch", names) as sides:
        rows = live.compare(sides, SELECTIONS, "own", interpreter(), lambda *_: None).rows
    verdicts = {row.kernel: (str(row.verdict), row.reason) for row in rows}
    expected = {kernel.name: verdict for kernel, (_, verdict) in zip(kernels, RECORDED.values(), strict=True)}
    assert {name: verdict for name, (verdict, _) in verdicts.items()} == expected, verdicts
