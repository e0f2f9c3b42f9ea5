from __future__ import annotations

import ast
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import format_picks as made
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8tune.errors import UsageError
from fp8tune.records import Status
from fp8tune.replay.recording import Config, Kernel
from fp8tune.revisions import source
from fp8tune.tables.formats.diff import replaced, shrink, unified

SMALL, LARGE = Config({"BLOCK": 32}, num_warps=2, num_stages=1), Config({"BLOCK": 256}, num_warps=8, num_stages=4)
KERNEL = Kernel("maker.scales:_kernel", configs=(SMALL, LARGE, replace(SMALL, num_warps=4)), key=("n",))
HEAD = "import triton\nimport triton.language as tl\nfrom triton import Config as C\n\n"
JIT = "@triton.jit\ndef _kernel(x, BLOCK: tl.constexpr):\n    pass\n"


def changed(text: str, *configs: Config, kernel: Kernel = KERNEL) -> tuple[str, list[str]]:
    return replaced(text, kernel, configs or (SMALL, LARGE), "maker/scales.py")


def applied(folder: Path, before: str, after: str, *command: str) -> str:
    """The file after the diff was applied by a program."""
    path = folder / "maker" / "scales.py"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(before.encode())
    diff = "3 configs -> 2\n" + unified(before, after, path.relative_to(folder))
    subprocess.run(command, input=diff.encode(), cwd=folder, check=True, capture_output=True)
    return path.read_bytes().decode()


DECORATORS = {
    "a list on one line": "@triton.autotune(configs=[triton.Config({'BLOCK': 32})], key=['n'])\n",
    "a list over several lines": (
        "@triton.autotune(\n    configs=[\n        triton.Config({'BLOCK': 32}),  # small\n    ],\n"
        "    key=['n'],  # size\n    reset_to_zero=['x'],\n)\n"
    ),
    "a comprehension": "@triton.autotune(\n    [triton.Config({'BLOCK': b}) for b in (32, 64)],\n    key=['n'],\n)\n",
    "parentheses": "@triton.autotune(key=['n'], configs=(\n    # all\n    [triton.Config({'BLOCK': 32})]\n))\n",
    "a call with umlauts before it": "@triton.autotune(key=['ä', 'ö'], configs=list(map(triton.Config, ({},))))\n",
}
LIST = DECORATORS["a list on one line"]


@pytest.mark.parametrize("decorator", DECORATORS.values(), ids=DECORATORS)
@pytest.mark.parametrize("command", [("patch", "-p1"), ("git", "apply", "-")], ids=["patch", "git"])
def test_the_diff_applies_and_the_file_has_the_configs(tmp_path, decorator, command) -> None:
    before = f"{HEAD}{decorator}{JIT}"
    after, _ = changed(before)
    assert applied(tmp_path, before, after, *command) == after
    assert configs_of(after) == [SMALL, LARGE]
    assert ("# size" in after) == ("# size" in decorator)


def configs_of(text: str) -> list[Config]:
    """The configs of the file's first decorator, read with a stand-in for triton."""
    call = next(node.decorator_list[0] for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef))
    value = next((keyword.value for keyword in call.keywords if keyword.arg == "configs"), None) or call.args[0]
    triton = type("triton", (), {"Config": Config})
    return eval(compile(ast.Expression(value), "", "eval"), {"triton": triton, "C": Config})


def test_below_an_if_in_a_class_and_without_a_last_newline(tmp_path) -> None:
    indented = "".join(f"    {line}\n" for line in f"{LIST}{JIT}".splitlines())
    for head, name in (("if True:\n", "_kernel"), ("class Maker:\n", "Maker._kernel")):
        before = f"{HEAD}{head}{indented}".rstrip()
        after, _ = changed(before, kernel=replace(KERNEL, name=f"maker.scales:{name}"))
        assert applied(tmp_path, before, after, "git", "apply", "-") == after
        assert "\n        triton.Config(" in after
        assert not after.endswith("\n")


def test_line_ends_of_windows_stay(tmp_path) -> None:
    before = f"{HEAD}{DECORATORS['a list over several lines']}{JIT}".replace("\n", "\r\n")
    after, _ = changed(before)
    assert after.count("\n") == after.count("\r\n")
    assert applied(tmp_path, before, after, "git", "apply", "-") == after


def test_the_spelling_of_config_is_the_files_own() -> None:
    decorator = "@triton.autotune(configs=[C({'BLOCK': 32})], key=['n'])\n"
    assert '    C({"BLOCK": 32}, num_warps=2, num_stages=1),\n' in changed(f"{HEAD}{decorator}{JIT}")[0]
    renamed = "import triton as tr\n\n@tr.autotune(configs=make(), key=['n'])\ndef _kernel():\n    pass\n"
    assert "    tr.Config({" in changed(renamed)[0]


def test_an_autotuner_that_is_made_by_a_call() -> None:
    text = f"{HEAD}def f():\n    pass\n\n_kernel = triton.autotune(configs=[C({{}})], key=['n'])(triton.jit(f))\n"
    assert "_kernel = triton.autotune(configs=[\n    C({" in changed(text)[0]


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


HOOKED = replace(SMALL, has_pre_hook=True)
HOOK = "def hook(args):\n    pass\n\n"


def test_a_pre_hook_that_has_a_name_stays() -> None:
    function = "def configs():\n    return [C({'BLOCK': b}, pre_hook=hook) for b in (32, 64)]\n\n"
    text = f"{HEAD}{HOOK}{function}@triton.autotune(configs=configs(), key=['n'])\n{JIT}"
    assert "pre_hook=hook),\n" in changed(text, HOOKED)[0]


def test_an_expression_of_names_that_the_module_has_stays_the_pre_hook() -> None:
    text = f"{HEAD}{HOOK}@triton.autotune(configs=[C({{}}, pre_hook=lambda args: hook(args))] * 2, key=['n'])\n{JIT}"
    assert "pre_hook=lambda args: hook(args)),\n" in changed(text, HOOKED)[0]


@pytest.mark.parametrize(
    "configs",
    ["[C({}, pre_hook=lambda args: absent(args))]", "[C({}, pre_hook=hook), C({}, pre_hook=b)]", "elsewhere()"],
)
def test_a_pre_hook_without_one_name_is_refused(configs) -> None:
    with pytest.raises(UsageError, match=r"pre_hook .* is not one function of the module"):
        changed(f"{HEAD}{HOOK}@triton.autotune(configs={configs}, key=['n'])\n{JIT}", HOOKED)


def test_a_decorator_that_somebody_derived_and_one_that_prunes() -> None:
    arguments = "configs=[C({})] * 3, key=['n'], prune_configs_by={'early_config_prune': prune}"
    after, notes = changed(f"{HEAD}@cached_autotune({arguments})\n{JIT}")
    assert configs_of(after) == [SMALL, LARGE]
    assert notes == ["`prune_configs_by` stays: see that it leaves one of these configs for each key"]


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
def test_what_cannot_be_replaced_is_refused_with_the_reason(text, reason) -> None:
    with pytest.raises(UsageError, match=reason):
        changed(text)


values = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()


@given(st.dictionaries(st.text(min_size=1), values, max_size=4), st.integers(1, 32))
def test_any_value_reads_back_and_no_text_becomes_code(kwargs, warps) -> None:
    config = Config(kwargs, num_warps=warps)
    after, _ = changed(f"{HEAD}{LIST}{JIT}", config)
    assert configs_of(after) == [config]
    decorator = ast.parse(after).body[-1].decorator_list[0]
    called = [ast.unparse(node.func) for node in ast.walk(decorator) if isinstance(node, ast.Call)]
    assert called == ["triton.autotune", "triton.Config"]


def test_the_same_configs_in_another_style_change_nothing() -> None:
    text = f"{HEAD}@triton.autotune(configs=[triton.Config({{'BLOCK': 32}}, num_warps=2, num_stages=1)], key=[])\n{JIT}"
    assert changed(text, SMALL) == (text, ["the file has exactly these configs already"])


@pytest.fixture
def package(tmp_path, monkeypatch) -> Path:
    file = tmp_path / "maker" / "gemm.py"
    file.parent.mkdir()
    (file.parent / "__init__.py").write_text("raise RuntimeError('imported')\n")
    file.write_text(f"{HEAD}{DECORATORS['a comprehension']}{JIT.replace('_kernel', '_matmul')}")
    monkeypatch.chdir(tmp_path)
    return file


def test_few_configs_of_a_kernel_whose_package_is_not_imported(package) -> None:
    head = "maker.gemm:_matmul on NVIDIA H200: 3 configs -> 1, worst loss 10.0 %"
    assert shrink(made.gemm(), 0.12)[0].startswith(f"{head}\n--- a/maker/gemm.py")
    assert "3 configs -> 2" in shrink(made.gemm(), 0.02)[0]
    assert "maker.gemm" not in sys.modules


def test_a_config_that_is_wrong_somewhere_is_in_no_list(package) -> None:
    wrong = made.pick({"M": 16, "N": 4096, "K": 4096}, (10.0, 20.0, Status.WRONG))
    text, _ = shrink(made.kernel_picks(wrong, *made.gemm().picks[1:]), 0.12)
    assert re.findall(r'\+ .*"BLOCK_SIZE_M": (\d+)', text) == [
        str(config.kwargs["BLOCK_SIZE_M"]) for config in (made.LARGE, made.SMALL)
    ]
    everywhere = [
        made.pick({"M": 1, "N": 1, "K": 1}, times_us)
        for times_us in ((1.0, Status.WRONG, 1.0), (Status.WRONG, 1.0, Status.WRONG))
    ]
    with pytest.raises(UsageError, match="no list is right"):
        shrink(made.kernel_picks(*everywhere), 0.02)


def test_a_kernel_without_configs_or_source_is_refused(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"was not recorded with @triton\.autotune"):
        shrink(made.gemm(is_recorded=False), 0.02)
    with pytest.raises(UsageError, match=r"source of maker\.gemm is not here"):
        shrink(made.gemm(), 0.02)


def test_a_recorded_file_outside_the_path_is_located(package, monkeypatch) -> None:
    monkeypatch.chdir("/")
    assert "--- a/maker/gemm.py" in shrink(made.gemm(replace(made.GEMM, file=str(package))), 0.02)[0]


def test_code_that_changed_since_it_was_recorded_is_reported(package) -> None:
    here = source.source_hash(made.GEMM.name, source.in_folder(package.parent.parent))
    assert shrink(made.gemm(replace(made.GEMM, source_hash=here)), 0.02)[1] == []
    (note,) = shrink(made.gemm(replace(made.GEMM, source_hash="0123")), 0.02)[1]
    assert note == f"maker/gemm.py has other code ({here}) than was recorded (0123): record and sweep it again"
