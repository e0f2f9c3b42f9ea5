from __future__ import annotations

import ast
import subprocess
import sys
from dataclasses import replace

import format_picks as picks
import pytest
from hypothesis import given as drawn
from hypothesis import strategies as st

from fp8tune.errors import UsageError
from fp8tune.export.formats.python_file import write
from fp8tune.export.given import Given
from fp8tune.records import Device, NamedInts
from fp8tune.replay.recording import Config, Kernel

SMALL = {"kwargs": dict(picks.SMALL.kwargs), "num_warps": 4, "num_stages": 3}
LARGE = {"kwargs": dict(picks.LARGE.kwargs), "num_warps": 8, "num_stages": 2}
BF16 = "torch.bfloat16"


def loaded(*givens: Given) -> dict[str, object]:
    """The names of the file, run by itself."""
    (file,) = write(*givens)
    namespace: dict[str, object] = {"__builtins__": __builtins__}
    exec(compile(file.text, str(file.path), "exec"), namespace)
    return namespace


def test_a_key_has_its_config_and_the_evidence_stands_above():
    (file,) = write(picks.gemm())
    assert str(file.path) == "_matmul_sm_90.py"
    assert "# M=16 N=4096 K=4096 bfloat16: winner on M=16 N=4096 K=4096; exact\n        (16, 4096, 4096, " in file.text
    module = loaded(picks.gemm())
    assert module["KEY"] == ("M", "N", "K", "the dtype of each tensor")
    assert module["config_for"]((16, 4096, 4096, BF16)) == SMALL
    assert module["TABLE"]["NVIDIA H200"][1024, 4096, 4096, BF16] == LARGE


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ((100, 4096, 4096, BF16), SMALL),  # 16 * 1024 = 128 * 128: below it 16 is nearer
        ((200, 4096, 4096, BF16), LARGE),
        ((16, 4096, 4096, "torch.float16"), None),
        ((16, 4096, BF16), None),
        ((0, 4096, 4096, BF16), None),
    ],
)
def test_any_other_key_has_that_of_the_nearest_with_the_same_dtypes(key, expected):
    assert loaded(picks.gemm())["config_for"](key) == expected


def test_a_device_is_known_by_its_name():
    config_for = loaded(picks.gemm())["config_for"]
    assert config_for((16, 4096, 4096, BF16), "NVIDIA H200") == SMALL
    assert config_for((16, 4096, 4096, BF16), "NVIDIA H100") is None


def test_one_file_has_every_device():
    slower = picks.gemm(device=replace(picks.H200, name="NVIDIA H100"))
    slower = replace(slower, tuned=tuple(replace(one, evidence=f"slower {one.evidence}") for one in slower.tuned[1:]))
    module = loaded(picks.gemm(), slower)
    assert module["config_for"]((16, 4096, 4096, BF16)) == SMALL
    assert module["config_for"]((16, 4096, 4096, BF16), "NVIDIA H100") == LARGE  # of the nearest key
    assert module["EVIDENCE"]["NVIDIA H100"][1024, 4096, 4096, BF16].startswith("slower")


def test_devices_with_other_keys_are_refused():
    with pytest.raises(UsageError, match="other keys on other devices: name one with --device"):
        write(picks.gemm(), picks.gemm(kernel=replace(picks.GEMM, key=("M",))))


def test_what_a_caller_takes_out_of_a_config_stays_in_the_table():
    config_for = loaded(picks.gemm())["config_for"]
    config_for((16, 4096, 4096, BF16)).pop("kwargs")
    assert config_for((16, 4096, 4096, BF16)) == SMALL


def test_problems_of_one_key_share_the_config_whose_largest_loss_is_least():
    kernel = replace(picks.GEMM, key=("N", "K"))
    one, two, _ = picks.gemm().tuned
    key = picks.launch(4096, 4096)
    given = picks.given(replace(one, launch=key), replace(two, launch=key), kernel=kernel)
    assert loaded(given)["config_for"]((4096, 4096, BF16))["kwargs"] == dict(picks.EVEN.kwargs)
    assert write(given)[0].text.count("        # M=") == 2


def test_a_kernel_with_a_spec_is_looked_up_by_its_lookup_key():
    given = picks.gemm(recorded=False)
    given = replace(given, tuned=tuple(replace(one, launch=None) for one in given.tuned))
    module = loaded(given)
    assert module["KEY"] == ("M", "N", "K")
    assert module["config_for"]((16, 4096, 4096)) == SMALL


def test_it_is_imported_without_anything_installed(tmp_path):
    (file,) = write(picks.gemm())
    (tmp_path / file.path).write_text(file.text)
    code = f"import {file.path.stem} as table; print(table.config_for((16, 4096, 4096, '{BF16}'))['num_warps'])"
    run = [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {code}"]
    assert subprocess.run(run, capture_output=True, text=True, check=True).stdout == "4\n"


def test_the_autotuner_of_the_docstring_looks_it_up():
    triton = pytest.importorskip("triton")
    cache = {key: triton.Config(**config) for key, config in loaded(picks.gemm())["TABLE"]["NVIDIA H200"].items()}
    assert cache[16, 4096, 4096, BF16].all_kwargs().items() >= {**SMALL["kwargs"], "num_warps": 4}.items()


def of(config: Config, device: str = "NVIDIA H200", key: tuple = (1,), evidence: str = "measured") -> Given:
    """One problem of a kernel with one config."""
    tuned = replace(
        picks.gemm().tuned[0],
        config=NamedInts(A=1),
        times_us={NamedInts(A=1): 1.0},
        launch=replace(picks.launch(), key=key),
        evidence=evidence,
    )
    kernel = Kernel("maker.gemm:_matmul", key=("n",), configs=(config,))
    return Given(kernel.name, Device("sm_90", device), (tuned,), {NamedInts(A=1): config}, kernel)


def test_dtypes_are_imported():
    text = write(of(Config({"ACC": {"dtype": "tl.float32"}}), key=({"dtype": "torch.float8_e4m3fn"},)))[0].text
    assert "import torch\nimport triton.language as tl\n" in text
    assert '(torch.float8_e4m3fn,): {"kwargs": {"ACC": tl.float32}' in text


@pytest.mark.parametrize(
    "value", [{"dtype": "torch.load"}, {"dtype": "tl.float32()"}, {"function": "os:system"}, {"tuple": "ab"}]
)
def test_what_is_no_value_is_refused(value):
    with pytest.raises(UsageError, match="no value that a table can hold"):
        write(of(Config({"A": value})))


def test_a_pre_hook_is_refused():
    with pytest.raises(UsageError, match="pre_hook"):
        write(of(Config({"A": 1}, has_pre_hook=True)))


texts = st.text() | st.sampled_from(['"', "\\", "'''", '"""', "\n", "\r", "\x0c", "\u2028", "{0}", "\\N{DASH}", "#"])
values = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts
nested = st.recursive(values, lambda inner: st.builds(lambda each: {"tuple": tuple(each)}, st.lists(inner, max_size=2)))


@drawn(
    st.dictionaries(texts, nested, max_size=3), texts, st.lists(values, min_size=1, max_size=3).map(tuple), texts, texts
)
def test_no_row_becomes_code(kwargs, device, key, evidence, kernel):
    given = replace(of(Config(kwargs), device, key, evidence), kernel=kernel)
    (file,) = write(given)
    module = ast.parse(file.text.encode())
    names = [type(node).__name__ for node in module.body]
    assert names == ["Expr", "Import", "Assign", "Assign", "Assign", "Assign", "FunctionDef"]

    def plain(value):
        return tuple(map(plain, value["tuple"])) if isinstance(value, dict) else value

    table = loaded(given)["TABLE"]
    assert loaded(given)["KERNEL"] == kernel
    assert list(loaded(given)["EVIDENCE"][device]) == [key]
    assert list(table) == [device]
    ((found, config),) = table[device].items()
    assert found == key
    assert config["kwargs"] == {name: plain(value) for name, value in kwargs.items()}


def test_the_same_picks_give_the_same_text():
    assert write(picks.gemm()) == write(picks.gemm())
