from __future__ import annotations

import ast
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import format_picks as picks
import pytest
from hypothesis import given as drawn
from hypothesis import strategies as st

from fp8tune.errors import UsageError
from fp8tune.export.formats.diff import replaced, shrink, unified
from fp8tune.records import NamedInts
from fp8tune.render.given import markdown
from fp8tune.replay.configs import encoded
from fp8tune.replay.recording import Config, Kernel
from fp8tune.revisions import source

SMALL, LARGE = Config({"BLOCK": 32}, num_warps=2, num_stages=1), Config({"BLOCK": 256}, num_warps=8, num_stages=4)
KERNEL = Kernel("maker.scales:_kernel", configs=(SMALL, LARGE, replace(SMALL, num_warps=4)), key=("n",))
HEAD = "import triton\nimport triton.language as tl\nfrom triton import Config as C\n\n"
JIT = "@triton.jit\ndef _kernel(x, BLOCK: tl.constexpr):\n    pass\n"


def shrunk_text(text: str, *configs: Config, kernel: Kernel = KERNEL) -> tuple[str, list[str]]:
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


@pytest.mark.parametrize("decorator", DECORATORS.values(), ids=DECORATORS)
@pytest.mark.parametrize("command", [("patch", "-p1"), ("git", "apply", "-")], ids=["patch", "git"])
def test_the_diff_applies_and_the_file_has_the_configs(tmp_path, decorator, command):
    before = f"{HEAD}{decorator}{JIT}"
    after, _ = shrunk_text(before)
    assert applied(tmp_path, before, after, *command) == after
    assert configs_of(after) == [SMALL, LARGE]
    assert ("# size" in after) == ("# size" in decorator)


def configs_of(text: str) -> list[Config]:
    """The configs of the file's first decorator, read with a stand-in for triton."""
    call = next(node.decorator_list[0] for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef))
    value = next((keyword.value for keyword in call.keywords if keyword.arg == "configs"), None) or call.args[0]
    triton = type("triton", (), {"Config": Config})
    return eval(compile(ast.Expression(value), "", "eval"), {"triton": triton, "C": Config})


def test_below_an_if_in_a_class_and_without_a_last_newline(tmp_path):
    indented = "".join(f"    {line}\n" for line in f"{DECORATORS['a list on one line']}{JIT}".splitlines())
    for head, name in (("if True:\n", "_kernel"), ("class Maker:\n", "Maker._kernel")):
        before = f"{HEAD}{head}{indented}".rstrip()
        after, _ = shrunk_text(before, kernel=replace(KERNEL, name=f"maker.scales:{name}"))
        assert applied(tmp_path, before, after, "git", "apply", "-") == after
        assert "\n        triton.Config(" in after
        assert not after.endswith("\n")


def test_line_ends_of_windows_stay(tmp_path):
    before = f"{HEAD}{DECORATORS['a list over several lines']}{JIT}".replace("\n", "\r\n")
    after, _ = shrunk_text(before)
    assert after.count("\n") == after.count("\r\n")
    assert applied(tmp_path, before, after, "git", "apply", "-") == after


def test_the_spelling_of_config_is_the_files_own():
    decorator = "@triton.autotune(configs=[C({'BLOCK': 32})], key=['n'])\n"
    assert '    C({"BLOCK": 32}, num_warps=2, num_stages=1),\n' in shrunk_text(f"{HEAD}{decorator}{JIT}")[0]
    renamed = "import triton as tr\n\n@tr.autotune(configs=make(), key=['n'])\ndef _kernel():\n    pass\n"
    assert "    tr.Config({" in shrunk_text(renamed)[0]


def test_an_autotuner_that_is_made_by_a_call():
    text = f"{HEAD}def f():\n    pass\n\n_kernel = triton.autotune(configs=[C({{}})], key=['n'])(triton.jit(f))\n"
    assert "_kernel = triton.autotune(configs=[\n    C({" in shrunk_text(text)[0]


def test_a_list_with_a_name_stays_where_it_is_and_that_is_said():
    text = f"{HEAD}CONFIGS = [C({{}})]\n\n@triton.autotune(configs=CONFIGS, key=['n'])\n{JIT}"
    after, notes = shrunk_text(text)
    assert "CONFIGS = [C({})]" in after
    assert notes == ["`CONFIGS` has no other use in maker/scales.py: remove it in the same change"]
    other = "\n@triton.autotune(configs=CONFIGS, key=['n'])\n@triton.jit\ndef _other(x):\n    pass\n"
    assert shrunk_text(text + other)[1] == ["`CONFIGS` stays: maker/scales.py uses it in line 12 too"]


def test_values_are_written_as_the_file_calls_them():
    kwargs = {"EVEN": True, "MODE": 'a"b', "DTYPE": {"dtype": "tl.float32"}, "SIZES": {"tuple": (1,)}, "X": None}
    config = Config(kwargs, num_warps=4, num_stages=2, num_ctas=2, maxnreg=128)
    text = f"{HEAD}{DECORATORS['a list on one line']}{JIT}"
    assert (
        '{"EVEN": True, "MODE": \'a"b\', "DTYPE": tl.float32, "SIZES": (1,), "X": None}, '
        "num_warps=4, num_stages=2, num_ctas=2, maxnreg=128)"
    ) in shrunk_text(text, config)[0]
    with pytest.raises(UsageError, match="cannot be written"):
        shrunk_text(text, Config({"F": {"function": "os:system"}}))
    with pytest.raises(UsageError, match="cannot be written"):
        shrunk_text(text, Config({"F": {"dtype": "torch.float32"}}))  # the file does not import torch


HOOKED = replace(SMALL, has_pre_hook=True)


def test_a_pre_hook_that_has_a_name_stays():
    function = "def configs():\n    return [C({'BLOCK': b}, pre_hook=hook) for b in (32, 64)]\n\n"
    text = f"{HEAD}def hook(args):\n    pass\n\n{function}@triton.autotune(configs=configs(), key=['n'])\n{JIT}"
    after, notes = shrunk_text(text, HOOKED)
    assert "pre_hook=hook),\n" in after
    assert notes == ["`configs` has no other use in maker/scales.py: remove it in the same change"]
    listed = (
        f"{HEAD}def hook(args):\n    pass\n\n@triton.autotune(configs=[C({{}}, pre_hook=hook)] * 3, key=['n'])\n{JIT}"
    )
    assert shrunk_text(listed, HOOKED)[1] == []  # hook is still used


def test_a_decorator_that_somebody_derived_and_one_that_prunes():
    given = "configs=[C({})] * 3, key=['n'], prune_configs_by={'early_config_prune': prune}"
    text = f"{HEAD}@cached_autotune({given})\n{JIT}"
    after, notes = shrunk_text(text)
    assert configs_of(after) == [SMALL, LARGE]
    assert notes == ["`prune_configs_by` stays: see that it leaves one of these configs for each key"]


@pytest.mark.parametrize(
    ("configs", "why"),
    [
        ("[C({}, pre_hook=lambda args: None)]", "none that has a name"),
        ("[C({}, pre_hook=a), C({}, pre_hook=b)]", "2 different ones"),
        ("elsewhere()", "0|none"),
    ],
)
def test_a_pre_hook_that_cannot_be_read_is_refused(configs, why):
    text = f"{HEAD}@triton.autotune(configs={configs}, key=['n'])\n{JIT}"
    with pytest.raises(UsageError, match=f"pre_hook.*({why})"):
        shrunk_text(text, HOOKED)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (f"{HEAD}{JIT}", "has no @triton.autotune on _kernel"),
        (f"{HEAD}@triton.autotune(**SETTINGS)\n{JIT}", "does not name its configs"),
        (2 * f"{HEAD}{DECORATORS['a list on one line']}{JIT}", "in lines 5 and 13"),
        ("from triton import autotune\n@autotune(configs=[], key=[])\ndef _kernel():\n    pass\n", "no name for"),
        ("def (", "does not parse"),
    ],
)
def test_what_cannot_be_replaced_is_refused_with_the_reason(text, why):
    with pytest.raises(UsageError, match=why):
        shrunk_text(text)


values = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()


@drawn(st.dictionaries(st.text(min_size=1), values, max_size=4), st.integers(1, 32))
def test_any_value_reads_back_and_no_text_becomes_code(kwargs, warps):
    config = Config(kwargs, num_warps=warps)
    after, _ = shrunk_text(f"{HEAD}{DECORATORS['a list on one line']}{JIT}", config)
    assert configs_of(after) == [config]
    decorator = ast.parse(after).body[-1].decorator_list[0]
    called = [ast.unparse(node.func) for node in ast.walk(decorator) if isinstance(node, ast.Call)]
    assert called == ["triton.autotune", "triton.Config"]


def test_the_same_configs_in_another_style_change_nothing():
    same = "triton.Config({'BLOCK': 32}, num_warps=2, num_stages=1)"
    text = f"{HEAD}@triton.autotune(configs=[{same}], key=['n'])\n{JIT}"
    assert shrunk_text(text, SMALL) == (text, ["the file has exactly these configs already"])


@pytest.fixture
def package(tmp_path, monkeypatch):
    file = tmp_path / "maker" / "gemm.py"
    file.parent.mkdir()
    (file.parent / "__init__.py").write_text("raise RuntimeError('imported')\n")
    file.write_text(f"{HEAD}{DECORATORS['a comprehension']}{JIT.replace('_kernel', '_matmul')}")
    monkeypatch.chdir(tmp_path)
    return file


def test_the_smallest_set_of_a_kernel_whose_package_is_not_imported(package):
    found = shrink(picks.gemm(), 0.12)
    assert found.headline == "3 configs -> 1, worst loss 10.0 %"
    assert found.diff.startswith(
        "maker.gemm:_matmul on NVIDIA H200: 3 configs -> 1, worst loss 10.0 %\n--- a/maker/gemm.py"
    )
    assert len(shrink(picks.gemm(), 0.02).covering.configs) == 2
    assert "maker.gemm" not in sys.modules


def test_a_config_that_is_wrong_somewhere_is_in_no_list(package):
    given = picks.gemm()
    even = encoded(picks.GEMM, picks.EVEN)
    first, *others = given.tuned
    first = replace(
        first,
        failures={even: ("wrong", "codes differ")},
        slowdowns={config: loss for config, loss in first.slowdowns.items() if config != even},
    )
    found = shrink(replace(given, tuned=(first, *others)), 0.12)
    assert found.covering.configs == tuple(encoded(picks.GEMM, c) for c in (picks.LARGE, picks.SMALL))
    text = markdown(found)
    assert "disagreed with what is right" in text
    assert "- `BLOCK_SIZE_M=64 BLOCK_SIZE_N=64 BLOCK_SIZE_K=64 num_warps=4 num_stages=2` at M=16 N=4096 K=4096" in text


def test_the_markdown_has_each_problem_with_its_loss(package):
    given = picks.gemm(kernel=replace(picks.GEMM, tuning_s=12.0))
    lines = markdown(shrink(given, 0.12)).splitlines()
    assert lines[0] == "### `maker.gemm:_matmul`: 3 configs -> 1, worst loss 10.0 %"
    assert "Run-time tuning took 12.0 s" in lines[3]
    assert "With one config there is none." in lines[3]
    assert "| M=16 N=4096 K=4096 bfloat16 | BLOCK_SIZE_M=16" in lines[7]
    assert "| +10.0 % |" in lines[7]
    assert "winner on M=16 N=4096 K=4096; exact |" in lines[7]
    assert "| 2 % | 2 | 0.0 % | 0.0 % |" in lines


def test_problems_of_one_shape_are_told_apart_by_their_layout(package):
    given = picks.gemm()
    other = replace(given.tuned[0], problem=replace(given.tuned[0].problem, input_layout="recorded-1"))
    text = markdown(shrink(replace(given, tuned=(*given.tuned, other)), 0.12))
    assert "| M=16 N=4096 K=4096 bfloat16 recorded-0 |" in text
    assert "| M=16 N=4096 K=4096 bfloat16 recorded-1 |" in text
    assert "| M=1024 N=4096 K=4096 bfloat16 |" in text


def test_a_kernel_without_configs_of_its_own_is_refused():
    with pytest.raises(UsageError, match="not recorded as an autotuned kernel"):
        shrink(picks.gemm(recorded=False), 0.02)


def test_a_file_that_is_not_here_is_named():
    with pytest.raises(UsageError, match=r"source of maker\.gemm is not here"):
        shrink(picks.gemm(), 0.02)


def test_a_recorded_file_outside_the_path_is_found(package, monkeypatch):
    monkeypatch.chdir("/")
    kernel = replace(picks.GEMM, file=str(package))
    assert "--- a/maker/gemm.py" in shrink(picks.gemm(kernel=kernel), 0.02).diff


def test_code_that_changed_since_it_was_recorded_is_said(package):
    here = source.source_hash(picks.GEMM.name, source.in_folder(package.parent.parent))
    assert shrink(picks.gemm(kernel=replace(picks.GEMM, source_hash=here)), 0.02).notes == ()
    found = shrink(picks.gemm(kernel=replace(picks.GEMM, source_hash="0123")), 0.02)
    assert found.notes == (
        f"maker/gemm.py has other code ({here}) than was recorded (0123): record and sweep it again",
    )
    assert f"- {found.notes[0]}" in markdown(found)


def test_every_config_wrong_somewhere_is_refused(package):
    given = picks.gemm()
    wrong = dict.fromkeys(given.configs, ("wrong", ""))
    tuned = (*given.tuned, replace(given.tuned[0], failures=wrong, slowdowns={NamedInts(BLOCK=1): 1.0}))
    with pytest.raises(UsageError, match="no list is right"):
        shrink(replace(given, tuned=tuned), 0.02)
