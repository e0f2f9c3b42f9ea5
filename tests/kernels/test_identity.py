"""Identity of a kernel's code: each kind of place that a helper may live in, and each kind of edit."""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8tune_kernels import agreement, identity
from fp8tune_kernels.identity import cache
from fp8tune_kernels.identity.walk import LARGEST

Files = Mapping[str, str]

KERNEL = """
import triton
import triton.language as tl
{imports}

@triton.autotune(configs=[triton.Config({{"BLOCK": 64}})], key=["n"])
@triton.jit
def kernel(x, n, BLOCK: tl.constexpr):
    tl.store(x, {call}(tl.load(x)))
"""
HELPER = '''
{imports}
SCALE = 2
SPARE = 1

def helper{n}(x):
    """Docstring."""
    return {call}(x * SCALE)
'''


@dataclass(frozen=True)
class Place:
    """Way to reach ``helper{n}``; ``{helper}`` in a file is the text of its module."""

    imports: str
    call: str
    files: Files
    is_plain: bool = True  # names and places are not seen in the hash


PLACES = {
    "sibling at the top level": Place("from side{n} import helper{n}", "helper{n}", {"work/side{n}.py": "{helper}"}),
    "any folder on sys.path": Place("import far{n}", "far{n}.helper{n}", {"lib/far{n}.py": "{helper}"}),
    "module with an alias": Place(
        "import pack{n}.inner as alias",
        "alias.helper{n}",
        {"lib/pack{n}/__init__.py": "", "lib/pack{n}/inner.py": "{helper}"},
    ),
    "dotted import": Place(
        "import deep{n}.inner.most",
        "deep{n}.inner.most.helper{n}",
        {"lib/deep{n}/__init__.py": "", "lib/deep{n}/inner/__init__.py": "", "lib/deep{n}/inner/most.py": "{helper}"},
    ),
    "relative import, renamed": Place(
        "from rel{n} import other as mine",
        "mine",
        {"work/rel{n}/__init__.py": "from .inner import helper{n} as other", "work/rel{n}/inner.py": "{helper}"},
    ),
    "parent's relative import": Place(
        "from up{n}.low import leaf",
        "leaf.helper{n}",
        {
            "work/up{n}/__init__.py": "",
            "work/up{n}/low/__init__.py": "from .. import leaf",
            "work/up{n}/leaf.py": "{helper}",
        },
    ),
    "installed package, star": Place(
        "from inst{n} import helper{n}",
        "helper{n}",
        {
            "site-packages/inst{n}/__init__.py": "from .inner import *",
            "site-packages/inst{n}/inner.py": "{helper}",
            "site-packages/inst{n}-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: inst{n}\nVersion: 1.0\n",
        },
    ),
    "namespace package": Place(
        "from space{n} import part",
        "part.helper{n}",
        {"lib/space{n}/other.py": "", "site-packages/space{n}/part.py": "{helper}"},
    ),
    "editable install": Place("import edit{n}", "edit{n}.helper{n}", {"editable/edit{n}/__init__.py": "{helper}"}),
    "package that imports its module": Place(
        "from own{n}.inner import helper{n}",
        "helper{n}",
        {"lib/own{n}/__init__.py": "from . import inner", "lib/own{n}/inner.py": "{helper}"},
    ),
    "circular import": Place(
        "from ring{n} import helper{n}",
        "helper{n}",
        {
            "lib/ring{n}.py": "from back{n} import again\n{helper}",
            "lib/back{n}.py": "from ring{n} import helper{n}\ndef again(x):\n    return helper{n}(x)\n",
        },
    ),
    "name of a standard module": Place("import {shadow}", "{shadow}.helper{n}", {"work/{shadow}.py": "{helper}"}),
    "try, first branch": Place(
        "try:\n    from fast{n} import helper{n}\nexcept ImportError:\n    from slow{n} import helper{n}",
        "helper{n}",
        {"lib/fast{n}.py": "{helper}", "lib/slow{n}.py": "def helper{n}(x):\n    return x\n"},
        is_plain=False,
    ),
    "except, second branch": Place(
        "try:\n    from fast{n} import helper{n}\nexcept ImportError:\n    from slow{n} import helper{n}",
        "helper{n}",
        {"lib/slow{n}.py": "{helper}"},
        is_plain=False,
    ),
    "conditional import": Place(
        "import sys\nif sys.platform:\n    from when{n} import helper{n}\nelse:\n    from never{n} import helper{n}",
        "helper{n}",
        {"lib/when{n}.py": "{helper}", "lib/never{n}.py": "def helper{n}(x):\n    return x\n"},
        is_plain=False,
    ),
    "lazy attribute": Place(
        "import lazy{n}",
        "lazy{n}.helper{n}",
        {
            "lib/lazy{n}/__init__.py": "def __getattr__(_):\n    from . import inner\n    return inner.helper{n}\n",
            "lib/lazy{n}/inner.py": "{helper}",
        },
        is_plain=False,
    ),
    "import in a function": Place(
        "def late{n}(x):\n    from within{n} import helper{n}\n    return helper{n}(x)",
        "late{n}",
        {"lib/within{n}.py": "{helper}"},
        is_plain=False,
    ),
    "module passed around": Place(
        "import whole{n}", "getattr(whole{n}, 'helper{n}')", {"lib/whole{n}.py": "{helper}"}, is_plain=False
    ),
    "value in a table": Place(
        "from rows{n} import helper{n}\nTABLE{n} = {{}}\nTABLE{n}['f'] = helper{n}",
        "TABLE{n}['f']",
        {"lib/rows{n}.py": "{helper}"},
        is_plain=False,
    ),
}
PLAIN = [name for name, place in PLACES.items() if place.is_plain]
SHADOWS = ("colorsys", "filecmp", "netrc")  # standard modules that nothing here has imported

CHANGES: dict[str, Callable[[str], str]] = {
    "body": lambda text: text.replace("x * SCALE", "x + SCALE"),
    "constant": lambda text: text.replace("SCALE = 2", "SCALE = 2.0"),
    "constant changed later": lambda text: text + "\nSCALE += 1\n",
    "other definition": lambda text: text + "\nif SPARE:\n    def SCALE(): return 3\n",
}
NO_CHANGES: dict[str, Callable[[str], str]] = {
    "nothing": lambda text: text,
    "comment": lambda text: text.replace("SCALE = 2", "SCALE = 2  # why"),
    "docstring": lambda text: text.replace("Docstring.", "Another."),
    "layout": lambda text: text.replace("x * SCALE", "x \\\n        * SCALE"),
    "annotation": lambda text: text.replace("(x):", "(x: int) -> int:"),
}


def program(names: Sequence[str], edit: Callable[[str], str] = str, level: int = 0) -> dict[str, str]:
    """Return the files of a kernel whose helper is in the first place, that one's helper in the second, and so on."""
    imports, call, files = "", "abs", dict[str, str]()
    for n in reversed(range(len(names))):
        helper = HELPER.format(n=n, imports=imports, call=call)
        helper, place = edit(helper) if n == level else helper, PLACES[names[n]]
        words = {"n": n, "shadow": SHADOWS[n], "helper": helper}
        files |= {path.format(**words): text.format(**words) for path, text in place.files.items()}
        imports, call = place.imports.format(**words), place.call.format(**words)
    return files | {"work/ops.py": KERNEL.format(imports=imports, call=call)}


@contextlib.contextmanager
def written(files: Files) -> Iterator[Path]:
    """Yield a folder with the files: ``lib`` and ``site-packages`` are on ``sys.path``, ``editable`` has a finder."""
    with TemporaryDirectory() as folder:
        root = Path(folder)
        for path, text in files.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text, encoding="utf-8")

        class Editable:
            @staticmethod
            def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
                return PathFinder.find_spec(name, [str(root / "editable")])

        before = sys.path[:]
        sys.path += [str(root / "lib"), str(root / "site-packages")]
        sys.meta_path.append(Editable)  # type: ignore[arg-type]
        try:
            yield root
        finally:
            sys.path[:] = before
            sys.meta_path.remove(Editable)  # type: ignore[arg-type]


def hash_of(files: Files, kernel: str = "work/ops.py:kernel") -> str:
    with written(files) as root:
        return identity.code_hash(f"{root}/{kernel}")


@pytest.mark.parametrize("name", PLACES)
def test_edits_of_a_helper_count_wherever_it_lives(name: str) -> None:
    before = hash_of(program([name]))
    assert [edit for edit, change in CHANGES.items() if hash_of(program([name], change)) == before] == []
    same = [edit for edit, change in NO_CHANGES.items() if hash_of(program([name], change)) != before]
    assert same == []


def test_names_and_places_of_helpers_do_not_count() -> None:
    assert len({hash_of(program([name])) for name in PLAIN}) == 1


@given(st.lists(st.sampled_from([*PLACES]), min_size=2, max_size=3), st.data())
def test_helpers_of_helpers_count(names: list[str], data: st.DataObject) -> None:
    level = data.draw(st.integers(0, len(names) - 1))
    change, edit = data.draw(st.sampled_from([*CHANGES.values()])), data.draw(st.sampled_from([*NO_CHANGES.values()]))
    before = hash_of(program(names))
    assert hash_of(program(names, change, level)) != before
    assert hash_of(program(names, edit, level)) == before
    if names[level] in PLAIN:  # moved
        names[level] = data.draw(st.sampled_from(PLAIN))
        assert hash_of(program(names, edit, level)) == before


STAND_INS = {
    "C extension": {"site-packages/native.abi3.so": "\x7fELF"},
    "compiled only": {"site-packages/native.pyc": "cookie"},
    "not Python": {"site-packages/native.py": "def add("},
    "zero byte": {"site-packages/native.py": "def add(x): return x\0"},
    "unknown encoding": {"site-packages/native.py": "# coding: none-such\ndef add(x): return x\n"},
    "nested too deeply": {"site-packages/native.py": f"def add(x): return x{' + 1' * 20_000}\n"},
}
DISTRIBUTION = "site-packages/Native_Things-{0}.dist-info"
METADATA = "Metadata-Version: 2.1\nName: Native-Things\nVersion: {0}\n"


@pytest.mark.parametrize("name", STAND_INS)
@pytest.mark.parametrize("has_distribution", [True, False])
def test_a_distribution_stands_in_where_there_is_no_source(name: str, has_distribution: bool) -> None:
    (path,) = STAND_INS[name]

    def stood_in(version: str, text: str) -> str:
        folder = DISTRIBUTION.format(version)
        distribution = {f"{folder}/METADATA": METADATA.format(version), f"{folder}/RECORD": f"{Path(path).name},,\n"}
        kernel = KERNEL.format(imports="import native", call="native.add")
        files = {"work/ops.py": kernel, path: STAND_INS[name][path] + text}
        return hash_of(files | (distribution if has_distribution else {}))

    before = stood_in("1.0", "")
    assert (stood_in("1.1", "") != before) == has_distribution
    assert (stood_in("1.0", "\n#") != before) != has_distribution


def test_a_zip_stands_in_for_its_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ops.py").write_text(KERNEL.format(imports="import zipped", call="zipped.add"))
    hashes = set()
    for value in (1, 2):
        file = tmp_path / f"{value}.zip"
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("zipped.py", f"def add(x): return x + {value}\n")
        with monkeypatch.context() as context:
            context.syspath_prepend(str(file))
            hashes.add(identity.code_hash(f"{tmp_path}/ops.py:kernel"))
    assert len(hashes) == 2


@pytest.mark.parametrize("name", ["not Python", "zero byte", "unknown encoding", "nested too deeply"])
def test_a_kernels_own_file_has_to_be_python(name: str) -> None:
    (text,) = STAND_INS[name].values()
    with pytest.raises(identity.InvalidCodeError, match=r"ops\.py is not Python") as raised:
        hash_of({"work/ops.py": text}, "work/ops.py:add")
    assert "\n" not in str(raised.value)
    with pytest.raises(identity.InvalidCodeError, match="is not Python"):
        hash_of(
            {"work/pack/__init__.py": "", "work/pack/a.py": "from .b import add", "work/pack/b.py": text},
            "work/pack/a.py:add",
        )


def test_encodings_and_line_ends_do_not_count(tmp_path: Path) -> None:
    text = "PRICE = '\u00e4'\ndef kernel(x):\n    return x + PRICE\n"
    contents = (
        text.encode(),
        b"\xef\xbb\xbf" + text.encode(),
        b"# coding: latin-1\n" + text.encode("latin-1"),
        text.replace("\n", "\r\n").encode(),
        text.replace("\n", "\r").encode(),
    )
    hashes = set()
    for number, content in enumerate(contents):
        file = tmp_path / f"ops{number}.py"
        file.write_bytes(content)
        hashes.add(identity.code_hash(f"{file}:kernel"))
    assert len(hashes) == 1


def test_a_huge_package_is_followed_up_to_a_limit() -> None:
    def large(folder: str, version: str, size: int, spare: str = "") -> str:
        files = {
            "work/ops.py": KERNEL.format(imports="from huge import helper", call="helper"),
            f"{folder}/huge/__init__.py": "from .inner import helper",
            f"{folder}/huge/inner.py": f"def helper(x): return x\n{'#' * size}\n",
            f"{folder}/huge/spare.py": spare,
            f"{folder}/huge-{version}.dist-info/METADATA": METADATA.format(version),
        }
        return hash_of(files)

    assert large("site-packages", "1", 9) == large("site-packages", "2", 9)
    assert large("site-packages", "1", LARGEST) != large("site-packages", "2", LARGEST)
    assert large("site-packages", "1", LARGEST) == large("site-packages", "1", LARGEST, "edited")
    assert large("lib", "1", LARGEST) == large("lib", "2", LARGEST)
    assert large("lib", "1", LARGEST) != large("lib", "1", LARGEST, "edited")


# Where the value in {value} may stand. The kernel is in ops.py, what else it reaches in h.py or a package.
FORMS: dict[str, Files] = {
    "star with __all__": {"ops.py": "from h import *", "h.py": "__all__ = ['f']\n{function}"},
    "second star": {"ops.py": "from g import *\nfrom h import *", "g.py": "def f(x): pass", "h.py": "{function}"},
    "star that may fail": {"ops.py": "try:\n    from h import *\nexcept ImportError:\n    pass", "h.py": "{function}"},
    "class": {"ops.py": "import h\ndef f(x): return h.C.A", "h.py": "class C:\n    A = {value}"},
    "instance": {"ops.py": "import h\ndef f(x): return h.c.A", "h.py": "class C:\n    A = {value}\nc = C()"},
    "base class": {"ops.py": "import h\nclass D(h.C): pass\ndef f(x): return D.A", "h.py": "class C:\n    A = {value}"},
    "part of a tuple": {"ops.py": "from h import B\ndef f(x): return B", "h.py": "A, (B, C) = 1, (2, {value})"},
    "alias": {"ops.py": "import h\nf = h.f", "h.py": "{function}"},
    "default": {"ops.py": "import h\ndef f(x, y=h.A): return x", "h.py": "A = {value}"},
    "decorator": {"ops.py": "import h\n@h.d\ndef f(x): return x", "h.py": "def d(f): return {value}"},
    "list filled by a loop": {
        "ops.py": "import h\nf = h.A[0]",
        "h.py": "A = []\nfor i in range(2):\n    A.append({value})",
    },
    "changed table": {"ops.py": "import h\nf = h.A[0]", "h.py": "A = dict()\nA.update(x={value})"},
    "attribute set later": {"ops.py": "import h\nf = h.C.a", "h.py": "class C: pass\nC.a = {value}"},
    "attribute set from outside": {"ops.py": "import h\nh.A = {value}\nf = h.f", "h.py": "A = 1\ndef f(x): return A"},
    "match": {"ops.py": "import h\nf = h.A", "h.py": "match 1:\n    case 1:\n        A = {value}"},
    "global": {
        "ops.py": "from h import f",
        "h.py": "A = 0\ndef s():\n    global A\n    A = {value}\ndef f(x): return A",
    },
    "condition": {
        "ops.py": "from h import f",
        "h.py": "if {value}:\n    def f(x): return 1\nelse:\n    def f(x): return 2",
    },
    "what may fail": {
        "ops.py": "from h import f",
        "h.py": "try:\n    1 / {value}\n    def f(x): return 1\nexcept ValueError:\n    def f(x): return 2",
    },
    "function named as its module": {
        "ops.py": "from p import f",
        "p/__init__.py": "from .f import f",
        "p/f.py": "{function}",
    },
    "module named as its function": {
        "ops.py": "import p.f as m\nf = m.g",
        "p/__init__.py": "from .f import f",
        "p/f.py": "{function}def g(x): return f(x)",
    },
    "folder without __init__.py": {"ops.py": "from p.q.h import f", "p/__init__.py": "", "p/q/h.py": "{function}"},
    "neighbour of a loose file": {"ops.py": "from . import h\nf = h.f", "h.py": "{function}"},
    "import in an inner function": {
        "ops.py": "def f(x):\n    def g():\n        import p.h as m\n        return m.f(x)\n    return g()",
        "p/__init__.py": "",
        "p/h.py": "{function}",
    },
}


@pytest.mark.parametrize("name", FORMS)
def test_values_count_in_every_form(name: str) -> None:
    hashes = set()
    for value in ("2", "3"):
        words = {"value": value, "function": f"def f(x): return {value}\n"}
        files = {f"work/{path}": text.format(**words) for path, text in FORMS[name].items()}
        kernel = files["work/ops.py"] + "\ndef kernel(x): return f(x)\n"
        hashes |= {hash_of({**files, "work/ops.py": kernel}) for _ in range(2)}
    assert len(hashes) == 2


def test_a_file_in_a_namespace_package_finds_its_neighbours() -> None:
    files = {"lib/space/ops.py": "from .low import f as kernel", "lib/space/low.py": "def f(x): return x\n"}
    changed = {**files, "lib/space/low.py": "def f(x): return 0\n"}
    hashes = {hash_of(item, "lib/space/ops.py:kernel") for item in (files, changed)}
    for item in (files, changed):
        with written(item):
            hashes.add(identity.code_hash("space.ops:kernel"))
    assert len(hashes) == 2


def test_ranks_agree_on_all_that_a_kernel_reaches() -> None:
    def differs(text: str) -> bool:
        kernel = "def make():\n    from beside import f\n    def kernel(x): return f(x)\n    return kernel\n"
        hashes = []
        for helper in ("def f(x): return x\n", text):
            with written({"work/main.py": kernel, "work/beside.py": helper}) as root:
                hashes.append(agreement.code_hash("__main__:make.<locals>.kernel", root / "work/main.py"))
        assert all(hashes)
        return hashes[0] != hashes[1]

    assert differs("def f(x): return 0\n")
    assert not differs("def f(x): return x  # the same\n")
    assert agreement.code_hash("nowhere:kernel") == ""


def test_a_module_with_a_made_up_name_is_known_by_its_file() -> None:
    """A hub's cache has such modules."""
    files = {"work/cached/__init__.py": "from ._ops import kernel", "work/cached/_ops.py": "def kernel(x): return x\n"}
    with written(files) as root:
        by_path = identity.code_hash(f"{root}/work/cached/_ops.py:kernel")
        assert identity.code_hash("cached_0a1b2c:kernel", root / "work/cached/__init__.py") == by_path
        assert identity.code_hash("__main__:kernel", root / "work/cached/_ops.py") == by_path
    with pytest.raises(identity.UnknownCodeError, match="no file of its own"):
        identity.code_hash("__main__:kernel")
    with pytest.raises(identity.UnknownCodeError, match="there is no file"):
        identity.code_hash("__main__:kernel", root / "work/cached/_ops.py")


def test_a_checkout_wins_over_what_is_installed() -> None:
    files = {
        "checkout/src/pack/__init__.py": "",
        "checkout/src/pack/ops.py": KERNEL.format(imports="from .low import f\nfrom beside import g", call="g(f)"),
        "checkout/src/pack/low.py": "def f(x): return x\n",
        "lib/pack/__init__.py": "",
        "lib/pack/low.py": "def f(x): return 0\n",
        "lib/pack/gone.py": "def kernel(x): return 0\n",
        "lib/beside.py": "def g(x): return x\n",
    }

    def in_checkout(files: Files) -> str:
        with written(files) as root:
            return identity.code_hash("pack.ops:kernel", roots=[root / "checkout/src"])

    before = in_checkout(files)
    assert in_checkout({**files, "lib/pack/low.py": "def f(x): return 1\n"}) == before
    assert in_checkout({**files, "lib/beside.py": "def g(x): return 1\n"}) != before
    assert in_checkout({**files, "checkout/src/beside.py": "def g(x): return 2\n"}) != before
    with written(files) as root, pytest.raises(identity.UnknownCodeError):
        identity.code_hash("pack.gone:kernel", roots=[root / "checkout/src"])


def test_nothing_is_imported(tmp_path: Path) -> None:
    """Each module that is followed would end the process."""
    for path, text in program(["installed package, star", "namespace package"]).items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text + "\nraise SystemExit(3)\n")
    script = (
        "import sys; from fp8tune_kernels import identity;"
        f"identity.code_hash('{tmp_path}/work/ops.py:kernel');"
        "sys.exit(bool({'torch', 'triton', 'fp8tune', 'ops', 'inst0', 'space1'} & {*sys.modules}))"
    )
    path = os.pathsep.join(str(tmp_path / name) for name in ("lib", "site-packages"))
    assert (
        subprocess.run([sys.executable, "-c", script], env=os.environ | {"PYTHONPATH": path}, check=False).returncode
        == 0
    )


@pytest.fixture
def settled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Kernel whose files count as settled, with a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "SETTLED_S", -10.0)
    monkeypatch.syspath_prepend(str(tmp_path / "lib"))
    for path, text in program(["any folder on sys.path"]).items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    return tmp_path


def test_a_hash_is_read_again_only_as_long_as_no_file_changes(settled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, helper = f"{settled}/work/ops.py:kernel", settled / "lib/far0.py"
    before = identity.code_hash(kernel)
    with monkeypatch.context() as context:
        context.setattr(identity, "fields_hash_at", None)  # not called
        assert identity.code_hash(kernel) == before
    times = helper.stat().st_atime_ns, helper.stat().st_mtime_ns
    helper.write_text(helper.read_text().replace("SCALE = 2", "SCALE = 3"))
    os.utime(helper, ns=times)  # size and time of change are as before
    changed = identity.code_hash(kernel)
    assert changed != before
    (settled / "work/far0.py").write_text(helper.read_text().replace("SCALE = 3", "SCALE = 4"))  # hides the other
    importlib.invalidate_caches()
    assert identity.code_hash(kernel) not in (before, changed)


@pytest.mark.parametrize("damage", ["", "[1", '["0123456789abcdef", 3]', '["00", {}]', "\0", "{}", "null"])
def test_a_damaged_cache_is_harmless(settled: Path, damage: str) -> None:
    kernel = f"{settled}/work/ops.py:kernel"
    before = identity.code_hash(kernel)
    (entry,) = (settled / "cache/fp8tune/code").iterdir()
    entry.write_text(damage)
    assert identity.code_hash(kernel) == before
    shutil.rmtree(settled / "cache")
    (settled / "cache").write_text("")  # nothing can be written here
    assert identity.code_hash(kernel) == before


def test_a_file_changed_just_now_is_not_cached(settled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "SETTLED_S", 2.0)
    identity.code_hash(f"{settled}/work/ops.py:kernel")
    assert not (settled / "cache").exists()
