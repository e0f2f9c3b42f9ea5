"""Specs of anybody's are found by module and by path; whatever their files do wrong becomes one line."""

import subprocess
import sys

import pytest
from command_line import environment
from places import PLANTED

from fp8tune import names
from fp8tune.errors import UsageError
from fp8tune.records import NamedInts, Problem
from fp8tune.replay.loading import load_spec
from fp8tune.revisions import first_import
from fp8tune.text import KERNEL_NAME

SPEC = """
from fp8tune_kernels.spec import KernelSpec, NamedInts, Span, Tolerance

def outside(*_):
    raise NotImplementedError

def spec(**changed):
    fields = dict(
        name="doubling",
        axes={"BLOCK_SIZE": (32, 64)},
        default=NamedInts(BLOCK_SIZE=32),
        key=("M",),
        problems=lambda row: iter([NamedInts(M=row["M"])]),
        inputs=outside, outputs=outside, launch=outside, reference=outside, bytes_moved=outside, scaled_down=outside,
    )
    return KernelSpec(**fields | changed)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, holding somebody's ``doubling_spec.py``; the module search path is put back afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "doubling_spec.py").write_text(SPEC + "DOUBLING = spec()\n")
    yield tmp_path
    load_spec.cache_clear()
    sys.modules.pop("doubling_spec", None)


def refused(reference, complaint):
    with pytest.raises(UsageError, match=complaint) as caught:
        load_spec(reference)
    assert len(str(caught.value).splitlines()) == 1


def test_a_spec_is_found_by_module_and_by_path_and_loaded_once(folder):
    by_path = load_spec("doubling_spec.py:DOUBLING")
    assert by_path.name == load_spec("doubling_spec:DOUBLING").name == "doubling"
    assert load_spec("doubling_spec.py:DOUBLING") is by_path
    assert load_spec(f"{folder}/doubling_spec.py:DOUBLING").default == by_path.default
    checked = load_spec("doubling_spec.py:DOUBLING?check=tolerance&relative=0.1")  # instead of its own check
    assert checked.check_text == "tolerance 1e-01 relative of float64"


def test_a_kernel_file_may_import_its_neighbours_and_hides_no_module(folder):
    (folder / "kernels").mkdir()
    (folder / "kernels" / "neighbour_of_it.py").write_text("BLOCK_SIZES = (16, 128)\n")
    text = "from neighbour_of_it import BLOCK_SIZES\nSPEC = spec(name='2d-cast', axes={'BLOCK_SIZE': BLOCK_SIZES})\n"
    (folder / "kernels" / "triton.py").write_text(SPEC + text)
    before = sys.modules.get("triton")
    loaded = load_spec("kernels/triton.py:SPEC")
    assert loaded.axes == {"BLOCK_SIZE": (16, 128)}
    assert sys.modules.get("triton") is before
    assert KERNEL_NAME.fullmatch(loaded.name)  # a name that loads can be stored
    assert names.declared_name("kernels/triton.py:SPEC") == "2d-cast"


@pytest.mark.parametrize(
    ("reference", "complaint"),
    [
        ("colwse", "unknown kernel 'colwse': did you mean colwise"),
        ("", "unknown kernel ''"),
        ("nowhere.py:SPEC", "cannot import kernel file 'nowhere.py': no such file"),
        ("no_such_package.kernels:SPEC", "cannot import 'no_such_package.kernels': ModuleNotFoundError"),
        (".:SPEC", "cannot import '.'"),
        ("doubling_spec:DOUBLE", "unknown kernel spec in doubling_spec 'DOUBLE': did you mean DOUBLING"),
        ("doubling_spec.py:", "unknown kernel spec in doubling_spec.py ''"),
        ("doubling_spec.py:spec", "is of type function: name an fp8tune_kernels.spec.KernelSpec"),
    ],
)
@pytest.mark.usefixtures("folder")
def test_a_reference_that_names_no_spec_is_one_line(reference, complaint):
    refused(reference, complaint)


HANGS = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"


@pytest.mark.parametrize(
    ("code", "complaint"),
    [
        ("def broken(:", "cannot import '.*bad.py': SyntaxError"),
        ("raise RuntimeError('first\\nsecond')", "RuntimeError: first second"),
        ("import sys; sys.exit('bye')", "SystemExit: bye"),
        ("import os; os._exit(0)", "exited with code 0"),
        ("import ctypes; ctypes.string_at(0)", "was killed by SIGSEGV"),
        (HANGS, "was still importing after 1 s"),
        # fields that the rest of fp8tune cannot rely on
        ("name='../../etc/x'", "kernel '../../etc/x': its name is refused"),
        ("name=7", "kernel 7: its name is refused"),
        ("name='\\x1b[31m'", r"kernel '\\x1b\[31m': its name is refused"),
        ("name='colwise'", "kernel 'colwise': its name is registered for"),
        ("axes={'lambda': (1,)}, default=NamedInts({'lambda': 1})", "axis 'lambda' is refused"),
        ("axes={'BLOCK_SIZE': (True,)}", "BLOCK_SIZE has the value True"),
        ("axes=None", "has a field that cannot be used"),
        ("default=NamedInts(BLOCK_SIZE=-1)", "BLOCK_SIZE has the value -1"),
        ("default=NamedInts(BLOCK=32)", "has the axes BLOCK_SIZE, but its default names BLOCK"),
        ("key=('a b',)", "key 'a b' is refused"),
        ("scale_modes=('a b',)", "scale_modes .* is refused"),
        ("input_layouts=()", "input_layouts .* is refused"),
        ("in_dtypes=('float12',)", "in_dtypes .* is refused: name at least one of bfloat16"),
        ("span=Span('BLOCK', 'M')", "name an axis, and a size that its key has exactly"),
        ("span=Span('BLOCK_SIZE', 'K')", "name an axis, and a size that its key has exactly"),
        ("check='roughly'", "check 'roughly' is refused: use one of exact, exact-inputs, tolerance"),
        ("check='tolerance'", "check 'tolerance' with tolerance=None is refused"),
        ("tolerance=Tolerance(1e-3)", r"check 'exact' with tolerance=Tolerance\(relative=0.001"),
        ("check='tolerance', tolerance=Tolerance(0.0)", "is refused: use numbers from 0, and one of them above"),
        ("check='tolerance', tolerance=Tolerance(float('nan'))", "use numbers from 0"),
        ("check='tolerance', tolerance=Tolerance('1e-3')", "has a field that cannot be used"),
        ("prepare=3", "prepare 3 is refused"),
    ],
)
def test_a_file_that_fails_or_declares_what_cannot_be_used_is_one_line(folder, monkeypatch, code, complaint):
    """It would end this process, or hold it up, if this process were the first to import it."""
    monkeypatch.setattr(first_import, "IMPORT_TIMEOUT_S", 1.0 if code == HANGS else 60.0)
    is_field = "=" in code.split("(")[0]
    (folder / "bad.py").write_text(f"{SPEC}SPEC = spec({code})\n" if is_field else f"{code}\nSPEC = 3\n")
    refused("bad.py:SPEC", complaint)
    assert "bad" not in sys.modules


def test_a_module_that_forks_goes_on_once(folder):
    """The copy of this process that it makes ends with the import, here and in the child that imports it first."""
    (folder / "forking.py").write_text(SPEC + "import os\nos.fork()\nSPEC = spec()\n")
    untouched = f"{PLANTED / 'untouched.py'}:SPEC"
    code = (
        "from fp8tune.replay.loading import load_spec; print(load_spec('forking.py:SPEC').name, flush=True);"
        f"print(load_spec({untouched!r}).problems.__module__)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment(), cwd=folder, check=True
    )
    module = load_spec(untouched).problems.__module__  # a file's, which is the same in every process
    assert ran.stdout == f"doubling\n{module}\n"


def test_a_file_is_tried_once_for_its_content(folder):
    """Importing a file runs it twice: in the child process, and here. A second spec costs none."""
    log = folder / "log"
    code = f"open({str(log)!r}, 'a').write('imported ')\nFIRST, SECOND = spec(), spec(name='tripling')\n"
    (folder / "twice.py").write_text(SPEC + code)
    for name, imports in (("FIRST", 2), ("SECOND", 3)):  # it is executed for each reference
        load_spec(f"twice.py:{name}")
        assert log.read_text().split() == ["imported"] * imports
    (folder / "twice.py").write_text("import os\nos._exit(0)\n")
    load_spec.cache_clear()
    refused("twice.py:FIRST", "exited with code 0")


@pytest.mark.parametrize(
    ("function", "size", "complaint"),
    [
        ("bytes_moved", "M", r"mine.py:\d+: bytes_moved of doubling raised NotImplementedError"),
        ("lookup_key", "K", "key of kernel 'doubling' names 'M'"),
        ("edges", "M", r"mine.py:\d+: edges of doubling raised OSError: gone"),
    ],
)
def test_what_a_spec_raises_while_it_is_planned_is_one_line(folder, function, size, complaint):
    edges = "def edges(problem):\n    yield problem\n    raise OSError('gone')\n"
    (folder / "mine.py").write_text(f"{SPEC}{edges}SPEC = spec(edges=edges)\n")
    with pytest.raises(UsageError, match=complaint) as caught:
        getattr(load_spec("mine.py:SPEC"), function)(Problem("doubling", NamedInts({size: 1})))
    assert len(str(caught.value).splitlines()) == 1
