from __future__ import annotations

import ast
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import format_picks as made
import pytest
from any_text import any_text
from hypothesis import given
from hypothesis import strategies as st

from fp8tune.errors import UsageError
from fp8tune.records import Status
from fp8tune.replay.recording import Config, Kernel
from fp8tune.revisions import source
from fp8tune.tables.formats import Options
from fp8tune.tables.formats.diff import replaced, unified, write
from fp8tune.tables.picks import KernelPicks

SMALL, LARGE = Config({"BLOCK": 32}, num_warps=2, num_stages=1), Config({"BLOCK": 256}, num_warps=8, num_stages=4)
KERNEL = Kernel("maker.scales:_kernel", configs=(SMALL, LARGE, replace(SMALL, num_warps=4)), key=("n",))
HEAD = "import triton\nimport triton.language as tl\nfrom triton import Config as C\n\n"
JIT = "@triton.jit\ndef _kernel(x, BLOCK: tl.constexpr):\n    pass\n"


def changed(text: str, *configs: Config, kernel: Kernel = KERNEL) -> tuple[str, list[str]]:
    return replaced(text, kernel, configs or (SMALL, LARGE), "maker/scales.py")


def configs_of(text: str) -> list[Config]:
    """The configs of the file's first decorator, read with a stand-in for triton."""
    call = next(node.decorator_list[0] for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef))
    value = next((keyword.value for keyword in call.keywords if keyword.arg == "configs"), None) or call.args[0]
    triton = type("triton", (), {"Config": Config})
    return eval(compile(ast.Expression(value), "", "eval"), {"triton": triton, "C": Config})


LIST = "@triton.autotune(configs=[triton.Config({'BLOCK': 32})], key=['n'])\n"
COMPREHENSION = "@triton.autotune(\n    [triton.Config({'BLOCK': b}) for b in (32, 64)],\n    key=['n'],\n)\n"
LINES = (
    "@triton.autotune(\n    configs=[\n        triton.Config({'BLOCK': 32}),  # small\n    ],\n"
    "    key=['n'],  # size\n    reset_to_zero=['x'],\n)\n"
)
INDENTED = "".join(f"    {line}\n" for line in f"{LIST}{JIT}".splitlines())
TEXTS = {
    "one line": f"{LIST}{JIT}",
    "several lines": f"{LINES}{JIT}",
    "comprehension": f"{COMPREHENSION}{JIT}",
    "parentheses": f"@triton.autotune(key=['n'], configs=(\n    # all\n    [triton.Config({{'BLOCK': 32}})]\n))\n{JIT}",
    "umlauts": f"@triton.autotune(key=['ä', 'ö'], configs=list(map(triton.Config, ({{}},))))\n{JIT}",
    "if": f"if True:\n{INDENTED}".rstrip(),  # without a last newline
    "line ends of Windows": f"{LINES}{JIT}".replace("\n", "\r\n"),
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
@pytest.mark.parametrize("command", [("patch", "-p1", "--binary"), ("git", "apply", "-")], ids=["patch", "git"])
def test_the_diff_applies_and_the_file_has_the_configs(tmp_path, text, command) -> None:
    before = HEAD.replace("\n", "\r\n" if "\r" in text else "\n") + text
    after, _ = changed(before)
    path = tmp_path / "maker" / "scales.py"
    path.parent.mkdir()
    path.write_bytes(before.encode())
    diff = "3 configs -> 2\n" + unified(before, after, path.relative_to(tmp_path))
    subprocess.run(command, input=diff.encode(), cwd=tmp_path, check=True, capture_output=True)
    assert path.read_bytes().decode() == after
    assert configs_of(after) == [SMALL, LARGE]
    assert ("# size" in after, after.endswith("\n")) == ("# size" in before, before.endswith("\n"))
    assert after.count("\r\n") == (after.count("\n") if "\r" in before else 0)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            f"{HEAD}@triton.autotune(configs=[C({{}})], key=['n'])\n{JIT}",
            '    C({"BLOCK": 32}, num_warps=2, num_stages=1),',
        ),
        ("import triton as tr\n\n@tr.autotune(configs=make(), key=[])\ndef _kernel():\n    pass\n", "    tr.Config({"),
        (
            f"{HEAD}def f():\n    pass\n\n_kernel = triton.autotune(configs=[C({{}})], key=[])(f)\n",
            "configs=[\n    C({",
        ),
        (f"{HEAD}class Maker:\n{INDENTED}", "\n        triton.Config("),
    ],
)
def test_the_spelling_is_the_files_own(text: str, expected: str) -> None:
    name = "Maker._kernel" if "Maker" in text else "_kernel"
    assert expected in changed(text, kernel=replace(KERNEL, name=f"maker.scales:{name}"))[0]


def test_values_are_written_as_the_file_calls_them() -> None:
    kwargs = {"EVEN": True, "MODE": 'a"b', "DTYPE": {"dtype": "tl.float32"}, "SIZES": {"tuple": (1,)}, "X": None}
    config = Config(kwargs, num_warps=4, num_stages=2, num_ctas=2, maxnreg=128)
    text = f"{HEAD}{LIST}{JIT}"
    assert (
        '{"EVEN": True, "MODE": "a\\"b", "DTYPE": tl.float32, "SIZES": (1,), "X": None}, '
        "num_warps=4, num_stages=2, num_ctas=2, maxnreg=128)"
    ) in changed(text, config)[0]
    for value in ({"function": "os:system"}, {"dtype": "torch.float32"}):  # the file does not import torch
        with pytest.raises(UsageError, match="cannot be written"):
            changed(text, Config({"F": value}))


values = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | any_text()


@given(st.dictionaries(any_text(min_size=1), values, max_size=4), st.integers(1, 32))
def test_no_value_becomes_code(kwargs, num_warps) -> None:
    config = Config(kwargs, num_warps=num_warps)
    after, _ = changed(f"{HEAD}{LIST}{JIT}", config)
    assert configs_of(after) == [config]
    decorator = ast.parse(after).body[-1].decorator_list[0]
    called = [ast.unparse(node.func) for node in ast.walk(decorator) if isinstance(node, ast.Call)]
    assert called == ["triton.autotune", "triton.Config"]


HOOKED = f"{HEAD}def hook(args):\n    pass\n\ndef made():\n    return [C({{}}, pre_hook=hook) for _ in (1, 2)]\n\n"


@pytest.mark.parametrize(
    ("configs", "written"),
    [
        ("made()", "pre_hook=hook),\n"),
        ("[C({}, pre_hook=lambda args: hook(args))] * 2", None),  # beside that of made()
        ("[C({}, pre_hook=lambda args: absent(args))]", None),
        ("[C({}, pre_hook=hook), C({}, pre_hook=b)]", None),
    ],
)
def test_a_pre_hook_stays_if_it_is_one_expression_of_names_that_the_module_has(configs, written) -> None:
    text = f"{HOOKED}@triton.autotune(configs={configs}, key=['n'])\n{JIT}"
    with_hook = replace(SMALL, has_pre_hook=True)
    if written is None:
        with pytest.raises(UsageError, match=r"pre_hook .* is not one function of the module"):
            changed(text, with_hook)
        text = text.replace("def made():\n    return [C({}, pre_hook=hook) for _ in (1, 2)]\n\n", "")
        written = "pre_hook=lambda args: hook(args)),\n" if "* 2" in configs else None
    if written is not None:
        assert written in changed(text, with_hook)[0]


def test_a_derived_decorator_that_prunes_and_one_with_the_same_configs() -> None:
    arguments = "configs=[C({})] * 3, key=['n'], prune_configs_by={'early_config_prune': prune}"
    after, (note,) = changed(f"{HEAD}@cached_autotune({arguments})\n{JIT}")
    assert (configs_of(after), "`prune_configs_by` stays" in note) == ([SMALL, LARGE], True)
    text = f"{HEAD}@triton.autotune(configs=[triton.Config({{'BLOCK': 32}}, num_warps=2, num_stages=1)], key=[])\n{JIT}"
    assert changed(text, SMALL) == (text, ["the file has exactly these configs already"])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (f"{HEAD}{JIT}", "must have one @triton.autotune on _kernel, it has none"),
        (f"{HEAD}@triton.autotune(**SETTINGS)\n{JIT}", "does not name its configs"),
        (2 * f"{HEAD}{LIST}{JIT}", "in lines 5, 13"),
        ("from triton import autotune\n@autotune(configs=[], key=[])\ndef _kernel():\n    pass\n", "no name for"),
        ("def (", "does not parse"),
    ],
)
def test_a_text_without_one_list_is_refused_with_the_reason(text, reason) -> None:
    with pytest.raises(UsageError, match=reason):
        changed(text)


def shrunk(kernel: KernelPicks, within: float = 0.02) -> tuple[str, list[str]]:
    notes: list[str] = []
    (file,) = write([kernel], Options(within=within, notice=notes.append))
    return file.text, notes


@pytest.fixture
def package(tmp_path, monkeypatch) -> Path:
    file = tmp_path / "maker" / "gemm.py"
    file.parent.mkdir()
    (file.parent / "__init__.py").write_text("raise RuntimeError('imported')\n")
    file.write_text(f"{HEAD}{COMPREHENSION}{JIT.replace('_kernel', '_matmul')}")
    monkeypatch.chdir(tmp_path)
    return file


def test_few_configs_of_a_kernel_whose_package_is_not_imported(package, monkeypatch) -> None:
    head = "maker.gemm:_matmul on NVIDIA H200: 3 configs -> 1, worst loss 10.0 %"
    assert shrunk(made.gemm(), 0.12)[0].startswith(f"{head}\n--- a/maker/gemm.py")
    assert "3 configs -> 2" in shrunk(made.gemm())[0]
    monkeypatch.chdir("/")  # a recorded file outside the path is located
    assert "--- a/maker/gemm.py" in shrunk(made.gemm(replace(made.GEMM, file=str(package))))[0]
    assert "maker.gemm" not in sys.modules
    with pytest.raises(UsageError, match=r"source of maker\.gemm is not here"):
        shrunk(made.gemm())
    with pytest.raises(UsageError, match=r"was not recorded with @triton\.autotune"):
        shrunk(made.gemm(is_recorded=False))


def test_a_config_that_is_wrong_somewhere_is_in_no_list(package) -> None:
    wrong = made.pick({"M": 16, "N": 4096, "K": 4096}, (10.0, 20.0, Status.WRONG))
    text, _ = shrunk(made.kernel_picks(wrong, *made.gemm().picks[1:]), 0.12)
    sizes = [str(config.kwargs["BLOCK_SIZE_M"]) for config in (made.LARGE, made.SMALL)]
    assert re.findall(r'\+ .*"BLOCK_SIZE_M": (\d+)', text) == sizes
    times = (1.0, Status.WRONG, 1.0), (Status.WRONG, 1.0, Status.WRONG)
    everywhere = [made.pick({"M": 1, "N": 1, "K": 1}, times_us) for times_us in times]
    with pytest.raises(UsageError, match="no list is right"):
        shrunk(made.kernel_picks(*everywhere))


@pytest.mark.parametrize(
    ("old", "new", "difference"),
    [
        ("pass", "x + 1", "other code of maker.gemm:_matmul"),
        ("(32, 64)", "(32, 64, 128)", "other configs, key or hooks of maker.gemm:_matmul"),
        ("['n']", "['n', 'm']", "other configs, key or hooks"),
        ("key=['n'],", "key=['n'], reset_to_zero=['x'],", "other code of maker.gemm:_matmul"),
        ("import triton\n", "import triton  # comment\n\n", None),
    ],
)
def test_code_and_configs_that_changed_since_they_were_swept_are_reported(package, old, new, difference) -> None:
    hashes = (
        function(made.GEMM.name, [package.parent.parent]) for function in (source.source_hash, source.declaration_hash)
    )
    names = ("source_hash", "declaration_hash")
    picks = made.gemm(replace(made.GEMM, **dict(zip(names, hashes, strict=True))))
    assert shrunk(picks)[1] == []
    before = package.read_text()
    package.write_text(before.replace(old, new))
    assert package.read_text() != before
    diff, notes = shrunk(picks)
    assert "@@" in diff
    assert [difference in note for note in notes] == [True] * (difference is not None) if difference else notes == []
