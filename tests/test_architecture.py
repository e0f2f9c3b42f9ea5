"""What stays light: which commands and modules load neither torch nor Triton. Lint and types are steps of .ci/run."""

import pkgutil
import subprocess
import sys

import pytest
from places import ROOT

import fp8tune
import fp8tune_kernels
from fp8tune.plan.shapes import sweeps_dir
from fp8tune.store.importing import import_file
from fp8tune.store.results import Store
from fp8tune_kernels import catalog

HEAVY = ("torch", "triton")

TUNER = [module.name for module in pkgutil.walk_packages(fp8tune.__path__, "fp8tune.")]
KERNELS = [module.name for module in pkgutil.walk_packages(fp8tune_kernels.__path__, "fp8tune_kernels.")]
LIGHT_KERNEL_MODULES = [
    name
    for name in KERNELS
    if name.removeprefix("fp8tune_kernels.").partition(".")[0] in ("spec", "catalog", "arches", "tables")
]


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True)


LIGHT = """
import importlib, sys
for module in {modules}:
    importlib.import_module(module)
    loaded = {{*{heavy}}} & {{*sys.modules}}
    assert not loaded, f"importing {{module}} loads {{loaded}}"
"""


def test_no_module_loads_torch_or_triton_by_being_imported():
    done = run("-c", LIGHT.format(modules=["fp8tune_kernels", *LIGHT_KERNEL_MODULES, *TUNER], heavy=HEAVY))
    assert done.returncode == 0, done.stderr


def test_the_command_line_starts_light():
    heavy = (*HEAVY, "pandas", "scipy", "numpy", "sqlalchemy")
    done = run("-c", LIGHT.format(modules=["fp8tune.cli"], heavy=heavy))
    assert done.returncode == 0, done.stderr


COMMAND = """
import sys
from fp8tune.cli import main
sys.argv[0] = "fp8tune"
try:
    main()
finally:
    loaded = {{*{heavy}}} & {{*sys.modules}}
    assert not loaded, f"{{sys.argv}} loads {{loaded}}"
"""


@pytest.fixture(scope="module")
def database(tmp_path_factory):
    """A database holding the published rows."""
    path = str(tmp_path_factory.mktemp("results") / "published.db")
    with Store.open(path, create=True) as store:
        import_file(store, sweeps_dir() / "published" / "kernels.csv", lookup_key=lambda problem: None)
    return path


READERS = ["--help", "show", "show --op grouped-mm", "export --arch gfx942 --check", "doctor"]


@pytest.mark.parametrize("command", READERS)
def test_results_are_read_without_torch(database, command):
    arguments = command.split() if command == "--help" else [*command.split(), "--db", database]
    done = run("-c", COMMAND.format(heavy=HEAVY), *arguments)
    assert "AssertionError" not in done.stderr
    assert done.returncode in (0, 1), done.stderr  # 1: a finding, such as a table that is stale for these rows


def test_every_kernel_is_a_module_of_its_own_and_of_the_family():
    for kernel in catalog.KERNELS:
        assert catalog.load(kernel).name == kernel
