"""Hash of a kernel's timed path: what changes it, what does not, and where it can be computed."""

from __future__ import annotations

import ast
import contextlib
import re
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from any_text import any_text
from hypothesis import given
from hypothesis import strategies as st
from places import ROOT

from fp8tune import errors
from fp8tune.revisions import git, source
from fp8tune.revisions.reference import locate
from fp8tune_kernels import catalog
from fp8tune_kernels.identity.walk import template

KERNEL = '''
"""A kernel file."""
import triton
import triton.language as tl

import torch
from other.arithmetic import UNUSED, to_fp8 as cast
from .sizes import GRID
from fp8tune_kernels.spec import KernelSpec

EPSILON = 1e-12
INPUTS_ONLY = 3


@triton.jit
def _kernel(pointer, BLOCK: tl.constexpr):
    """Docstring."""
    # a comment
    tl.store(pointer, cast(tl.load(pointer)) + EPSILON)


def launch(config, inputs, outputs):
    _kernel[GRID](inputs[0], **config)


def outputs(x):
    return (torch.empty_like(x),)


def inputs(problem, device):
    return (INPUTS_ONLY,)


def reference(x):
    return (x,)


SPEC = KernelSpec(
    name="planted", axes={"BLOCK": (1, 2)}, launch=launch, outputs=outputs, inputs=inputs, reference=reference
)
'''
FILES = {
    "other/__init__.py": "",
    "other/kernel.py": KERNEL,
    "other/arithmetic.py": "FACTOR = 2\nUNUSED = 1\ndef to_fp8(x):\n    return x * FACTOR\ndef spare(x):\n    return x",
    "other/sizes.py": "GRID = (1,)\n",
}

# Commits that declare versions in results.db which are not today's. Rows of other versions were timed on edits that no
# commit has.
OLDER = {
    "ee3a4433ae": {"gathered-transpose": "5b0690b02447204c"},
    "b1c715d002": {
        "rowwise-factored": "afd7386a5a9ac076",
        "transposed-codes": "84523c286f560560",
        "transposed-codes-3d": "57735d14639dede0",
    },
}


def hash_of(files: Mapping[str, str], kernel: str = "other.kernel:SPEC") -> str:
    with written(files) as folder:
        return source.source_hash(kernel, [folder])


@contextlib.contextmanager
def written(files: Mapping[str, str]) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        for path, text in files.items():
            file = Path(folder, path)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        yield Path(folder)


def edited(path: str, old: str, new: str) -> dict[str, str]:
    assert old in FILES[path]
    return {**FILES, path: FILES[path].replace(old, new)}


def test_every_python_version_gives_the_same_hash() -> None:
    """Results of one Python are matched by another: a change of this value orphans every stored result."""
    assert hash_of(FILES) == "2a4ce21acf2d7be8"


def test_every_version_in_the_database_keeps_its_hash() -> None:
    with contextlib.closing(sqlite3.connect(f"file:{ROOT / 'results.db'}?mode=ro", uri=True)) as database:
        stored = set(database.execute("SELECT kernel, source_hash FROM versions"))
    kernels = {kernel for kernel, _ in stored} & {*catalog.KERNELS}
    assert {(kernel, source.source_hash(kernel)) for kernel in kernels} <= stored
    for commit, versions in OLDER.items():
        assert versions.items() <= stored
        try:
            full = git.resolve(ROOT, commit)
        except errors.Fp8tuneError:  # an archive of the tree, or a shallow clone
            continue
        with git.checkouts(ROOT, [full]) as (folder,):
            roots = source.source_roots(folder)
            assert {kernel: source.source_hash(kernel, roots) for kernel in versions} == versions


def test_variables_of_a_comprehension_are_not_names_of_the_module() -> None:
    """From Python 3.12 on symbol tables show them in the scope around it."""
    with_comprehension = edited("other/sizes.py", "GRID = (1,)", "GRID = tuple(spare for spare in (1,))")
    with_comprehension["other/sizes.py"] += "def spare():\n    return 1\n"
    other_spare = with_comprehension["other/sizes.py"].replace("return 1", "return 2")
    assert hash_of(with_comprehension) == hash_of({**with_comprehension, "other/sizes.py": other_spare})
    assert hash_of(with_comprehension) == "d9a92f3f6c9217b0"


NOT_TIMED = [
    ("other/kernel.py", "    # a comment\n", ""),
    ("other/kernel.py", "Docstring.", "Another."),
    ("other/kernel.py", "\n\n\ndef launch", "\n\n\n\n\n\ndef launch"),
    ("other/kernel.py", "config, inputs, outputs):", "config,\n           inputs, outputs):"),
    ("other/kernel.py", "def outputs(x):", "def outputs(x: torch.Tensor) -> tuple[torch.Tensor]:"),
    ("other/kernel.py", "INPUTS_ONLY = 3", "INPUTS_ONLY = 4"),
    ("other/kernel.py", "return (INPUTS_ONLY,)", "return (1, 2, 3)"),  # a parameter of launch has the same name
    ("other/kernel.py", "return (x,)", "return (x + 0,)"),
    ("other/kernel.py", '"BLOCK": (1, 2)', '"BLOCK": (1, 2, 4)'),
    ("other/arithmetic.py", "UNUSED = 1", "UNUSED = 2"),
    ("other/arithmetic.py", "def spare(x):\n    return x", "def spare(x):\n    return -x"),
]
TIMED = [
    ("other/kernel.py", "EPSILON = 1e-12", "EPSILON = 1e-11"),
    ("other/kernel.py", "@triton.jit", "@triton.jit(do_not_specialize=['pointer'])"),
    ("other/kernel.py", "tl.constexpr", "int"),
    ("other/kernel.py", "torch.empty_like(x)", "torch.empty_like(x).t()"),
    ("other/kernel.py", "import triton.language as tl", "import triton.other as tl"),
    ("other/kernel.py", "UNUSED, to_fp8 as cast", "to_fp8, spare as cast"),
    ("other/arithmetic.py", "FACTOR = 2", "FACTOR = 3"),
    ("other/arithmetic.py", "FACTOR = 2", "FACTOR = 2.0"),
    ("other/arithmetic.py", "return x * FACTOR", "return FACTOR * x"),
    ("other/sizes.py", "(1,)", "(2,)"),
]


def test_edits_of_the_timed_path_alone_change_the_hash() -> None:
    assert [edit for edit in NOT_TIMED if hash_of(edited(*edit)) != hash_of(FILES)] == []
    assert [edit for edit in TIMED if hash_of(edited(*edit)) == hash_of(FILES)] == []


def test_moved_helpers_and_exported_specs_keep_the_hash() -> None:
    moved = edited("other/kernel.py", "from .sizes import GRID", "from .grids import GRID")
    moved["other/grids.py"] = moved.pop("other/sizes.py")
    assert hash_of(moved) == hash_of(FILES)
    assert hash_of({**FILES, "other/api.py": "from .kernel import SPEC as S"}, "other.api:S") == hash_of(FILES)


@pytest.mark.parametrize(
    ("statement", "use"),
    [
        ("from other import arithmetic", "arithmetic.to_fp8"),
        ("from . import arithmetic as a", "a.to_fp8"),
        ("import other.arithmetic", "other.arithmetic.to_fp8"),
        ("import other.arithmetic as a", "a.to_fp8"),
        ("from .arithmetic import *", "to_fp8"),
        ("from .reexport import to_fp8", "to_fp8"),
        ("try:\n    from .arithmetic import to_fp8\nexcept ImportError:\n    to_fp8 = None", "to_fp8"),
        ("if True:\n    from .arithmetic import to_fp8", "to_fp8"),
        ("from . import arithmetic\npassed_around = {'x': arithmetic}", "passed_around['x'].to_fp8"),
    ],
)
def test_helpers_are_found_through_every_form_of_import(statement: str, use: str) -> None:
    kernel = KERNEL.replace("from other.arithmetic import UNUSED, to_fp8 as cast", statement)
    files = {**FILES, "other/kernel.py": kernel.replace("cast(", f"{use}(")}
    files["other/reexport.py"] = "from other.arithmetic import to_fp8\n"
    changed = {**files, "other/arithmetic.py": FILES["other/arithmetic.py"].replace("FACTOR = 2", "FACTOR = 3")}
    unused = {**files, "other/arithmetic.py": FILES["other/arithmetic.py"].replace("UNUSED = 1", "UNUSED = 2")}
    assert hash_of(files) != hash_of(changed)
    assert (hash_of(files) == hash_of(unused)) == ("passed_around" not in statement)


def test_circular_imports_end() -> None:
    files = {
        "ring/a.py": "from .b import *\nfrom .b import f\nSPEC = K(launch=f, outputs=g)\n",
        "ring/b.py": "from .a import *\nfrom .a import f\n\ndef g():\n    return f() + g()\n",
    }
    assert hash_of(files, "ring.a:SPEC")
    with pytest.raises(source.NoSuchKernel):
        hash_of({"x.py": "from y import SPEC", "y.py": "from x import SPEC"}, "x.py:SPEC")


def test_a_spec_without_a_launch_keyword_is_hashed_with_all_it_mentions() -> None:
    files = {"k.py": "def f(): return 1\nSPEC = make(f)\n"}
    assert hash_of(files, "k:SPEC") != hash_of({"k.py": files["k.py"].replace("1", "2")}, "k:SPEC")


def test_the_name_is_read_from_the_text() -> None:
    with written({**FILES, "mine.py": AUTOTUNED}) as folder:
        assert source.kernel_name("other.kernel:SPEC", [folder]) == "planted"
        assert source.kernel_name("mine:_kernel@run.json?check=exact", [folder]) == "mine:_kernel"
    without = edited("other/kernel.py", 'name="planted"', "name=NAME")
    with written(without) as folder, pytest.raises(errors.UsageError, match="literal name"):
        source.kernel_name("other.kernel:SPEC", [folder])


@pytest.mark.parametrize(
    ("files", "kernel", "message"),
    [
        (FILES, "colwse", "did you mean colwise"),
        (FILES, "other.kernel:", "attribute name"),
        (FILES, "../x:SPEC", "module name"),
        (FILES, "other.kernel:OTHER", "assigns no OTHER"),
        (FILES, "other.missing:SPEC", "no module other.missing"),
        ({**FILES, "other/sizes.py": "GRID = ("}, "other.kernel:SPEC", r"other/sizes\.py is not Python"),
    ],
)
def test_errors_are_one_line(files: dict[str, str], kernel: str, message: str) -> None:
    with pytest.raises(errors.UsageError, match=message) as raised:
        hash_of(files, kernel)
    assert "\n" not in str(raised.value)


def test_a_file_in_a_package_and_a_loose_file_find_their_neighbours(tmp_path: Path) -> None:
    for path, text in FILES.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    reference = f"{tmp_path}/other/kernel.py:SPEC"
    assert source.source_hash(reference) == hash_of(FILES)
    assert locate(reference) == ("other.kernel", "SPEC", tmp_path)
    loose, hashes = f"{tmp_path}/loose.py:SPEC", set()
    (tmp_path / "loose.py").write_text("from neighbour import f\nSPEC = K(launch=f)\n")
    for value in (1, 2):
        (tmp_path / "neighbour.py").write_text(f"def f(): return {value}\n")
        hashes.add(source.source_hash(loose))
    assert len(hashes) == 2


def test_a_module_reference_follows_its_siblings() -> None:
    files = {"a.py": "from b import f\nSPEC = K(launch=f)\n", "b.py": "def f(): return 1\n"}
    assert hash_of(files, "a:SPEC") != hash_of({**files, "b.py": "def f(): return 2\n"}, "a:SPEC")


def test_a_module_may_lie_in_the_current_folder_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "planted_here.py").write_text("def f(): return 1\nSPEC = K(launch=f)\n")
    monkeypatch.chdir(tmp_path)
    assert source.source_hash("planted_here:SPEC")
    with pytest.raises(source.NoSuchKernel, match="no module named"):
        source.source_hash("planted_nowhere:SPEC")


def test_the_hash_of_every_kernel_covers_its_jit_functions(tmp_path: Path) -> None:
    body = re.compile(r"(@triton\.jit(?:.|\n)*?\n    )(tl\.|[a-z_]+ = )")
    for file in (ROOT / "kernels").rglob("*.py"):
        copy = tmp_path / file.relative_to(ROOT / "kernels")
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(body.sub(r"\1tl.static_print(1)\n    \2", file.read_text()))
    unchanged = []
    for kernel in catalog.KERNELS:
        if source.source_hash(kernel, [tmp_path]) == source.source_hash(kernel):
            unchanged.append(kernel)
    assert unchanged == []


def test_hashing_imports_neither_torch_nor_triton_nor_the_kernel() -> None:
    code = (
        "import sys; from fp8tune.revisions import source; source.source_hash('colwise');"
        "sys.exit(any(name in sys.modules for name in ('torch', 'triton', 'fp8tune_kernels.quantize.colwise')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@given(st.text(alphabet=" \n\t#abc=()1'\"\\:", max_size=40))
def test_any_text_parses_or_is_refused(text: str) -> None:
    try:
        hash_of({"k.py": text + "\nSPEC = K(launch=f)\n"}, "k:SPEC")
    except errors.UsageError as error:
        assert "\n" not in str(error)


@given(st.recursive(st.integers() | st.floats(allow_nan=False) | any_text() | st.binary(), st.lists, max_leaves=8))
def test_canonical_text_distinguishes_constants(value: object) -> None:
    tree = ast.parse(f"x = {value!r}").body[0]
    again = ast.parse(f"x = (\n{value!r}\n) # why").body[0]
    assert template(tree) == template(again)
    assert template(tree) != template(ast.parse(f"x = [{value!r}, 0]").body[0])


AUTOTUNED = """
import triton
import triton.language as tl

if True:
    CONFIGS = [triton.Config({"BLOCK": 64}, pre_hook=zero)]
    SCALE = 2.0

    def even(args):
        return args["n"] % 2 == 0

    @triton.jit
    def double(x):
        return SCALE * x

    def zero(arguments):
        arguments["x"].zero_()

    @triton.autotune(configs=CONFIGS, key=["n"], reset_to_zero=["x"])
    @triton.heuristics({"EVEN": even})
    @triton.jit
    def _kernel(x, n, BLOCK: tl.constexpr, EVEN: tl.constexpr):
        tl.store(x, double(tl.load(x)))

    @triton.jit
    def _other(x):
        pass
"""


@pytest.mark.parametrize(
    ("before", "after", "is_timed"),
    [
        ('{"BLOCK": 64}', '{"BLOCK": 128}', False),
        ("configs=CONFIGS", "configs=CONFIGS[:1]", False),
        ("        pass", "        tl.store(x, 1)", False),
        ("SCALE = 2.0", "SCALE = 3.0", True),
        ('args["n"] % 2', 'args["n"] % 4', True),
        ("double(tl.load(x))", "tl.load(x)", True),
        ("zero_()", "fill_(1)", True),
        ('reset_to_zero=["x"]', "reset_to_zero=[]", True),
        ('[triton.Config({"BLOCK": 64}, pre_hook=zero)]', "make(64, pre_hook=zero) * 2", False),
    ],
)
def test_the_hash_of_a_kernel_without_a_spec(before: str, after: str, is_timed: bool) -> None:
    hashes = [hash_of({"mine.py": text}, "mine:_kernel") for text in (AUTOTUNED, AUTOTUNED.replace(before, after))]
    assert (hashes[0] != hashes[1]) == is_timed
