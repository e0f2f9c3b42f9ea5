import subprocess
import sys
import textwrap

import pytest

from fp8tune.code.loading import load_spec
from fp8tune.errors import UsageError

SPEC = """
from fp8tune_kernels.spec import KernelSpec, NamedInts, Span

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


def refused(folder, code, attribute="SPEC", match=""):
    (folder / "bad.py").write_text(textwrap.dedent(code))
    with pytest.raises(UsageError, match=match) as caught:
        load_spec(f"bad.py:{attribute}")
    assert len(str(caught.value).splitlines()) == 1


def test_a_spec_is_found_by_module_and_by_path_and_loaded_once(folder):
    by_path = load_spec("doubling_spec.py:DOUBLING")
    assert by_path.name == load_spec("doubling_spec:DOUBLING").name == "doubling"
    assert load_spec("doubling_spec.py:DOUBLING") is by_path
    assert load_spec(f"{folder}/doubling_spec.py:DOUBLING").default == by_path.default


def test_a_kernel_file_may_import_its_neighbours(folder):
    (folder / "kernels").mkdir()
    (folder / "kernels" / "neighbour_of_it.py").write_text("BLOCK_SIZES = (16, 128)\n")
    text = "from neighbour_of_it import BLOCK_SIZES\nSPEC = spec(axes={'BLOCK_SIZE': BLOCK_SIZES})\n"
    (folder / "kernels" / "mine.py").write_text(SPEC + text)
    assert load_spec("kernels/mine.py:SPEC").axes == {"BLOCK_SIZE": (16, 128)}


def test_a_file_called_like_an_installed_module_hides_nothing(folder):
    (folder / "triton.py").write_text(SPEC + "SPEC = spec()\n")
    before = sys.modules.get("triton")
    assert load_spec("triton.py:SPEC").name == "doubling"
    assert sys.modules.get("triton") is before


@pytest.mark.parametrize(
    ("reference", "complaint"),
    [
        ("colwse", "unknown kernel 'colwse': did you mean colwise"),
        ("", "unknown kernel ''"),
        ("nowhere.py:SPEC", "cannot import kernel file 'nowhere.py': no such file"),
        ("no_such_package.kernels:SPEC", "cannot import 'no_such_package.kernels': ModuleNotFoundError"),
        (":SPEC", "cannot import ''"),
        (".:SPEC", "cannot import '.'"),
        ("doubling_spec:DOUBLE", "unknown kernel spec in doubling_spec 'DOUBLE': did you mean DOUBLING"),
        ("doubling_spec.py:", "unknown kernel spec in doubling_spec.py ''"),
        ("doubling_spec.py:spec", "is of type function: name an fp8tune_kernels.spec.KernelSpec"),
    ],
)
def test_a_reference_that_names_no_spec_is_one_line(folder, reference, complaint):
    with pytest.raises(UsageError, match=complaint) as caught:
        load_spec(reference)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("code", "complaint"),
    [
        ("def broken(:", "cannot import '.*bad.py': SyntaxError"),
        ("import no_such_module_anywhere", "ModuleNotFoundError: No module named 'no_such_module_anywhere'"),
        ("raise RuntimeError('first\\nsecond')", "RuntimeError: first second"),
        ("import sys; sys.exit('bye')", "SystemExit: bye"),
    ],
)
def test_a_file_that_fails_while_imported_is_one_line(folder, code, complaint):
    refused(folder, code, match=complaint)


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ("name='../../etc/x'", "kernel name '../../etc/x' is refused"),
        ("name='two\\nlines'", "is refused"),
        ("name='colwise'", "kernel name 'colwise' is fp8tune's own"),
        ("default=NamedInts(BLOCK=32)", "has the axes BLOCK_SIZE, but its default names BLOCK"),
        ("span=Span('BLOCK', 'M')", "name an axis, and a size that its key has exactly"),
        ("span=Span('BLOCK_SIZE', 'K')", "name an axis, and a size that its key has exactly"),
    ],
)
def test_a_spec_the_rest_cannot_rely_on_is_refused(folder, changed, complaint):
    refused(folder, SPEC + f"SPEC = spec({changed})", match=complaint)


def test_a_file_gives_the_same_module_name_in_every_process(folder):
    code = (
        "from fp8tune.code.loading import load_spec; print(load_spec('doubling_spec.py:DOUBLING').problems.__module__)"
    )
    names = {subprocess.check_output([sys.executable, "-c", code], text=True) for _ in range(2)}
    assert len(names) == 1
