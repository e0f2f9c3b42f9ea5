"""Commands and modules that load neither torch nor Triton."""

import ast
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

from database_rows import import_file
from places import PUBLISHED, ROOT

import fp8tune
import fp8tune_kernels
from fp8tune.store.results import Store
from fp8tune_kernels import catalog

HEAVY = ("torch", "triton")

HEAVY_MODULES = ("fp8tune.measure.forked", "fp8tune.measure.gate", "fp8tune.interpreter.quick", "fp8tune.replay.ttir")
"""Modules that only processes import that launch kernels."""

LIGHT_KERNEL_MODULES = tuple(f"fp8tune_kernels.{name}" for name in ("spec", "catalog", "arches", "tables"))


def modules(package: ModuleType) -> list[str]:
    """All names below a package, none imported."""
    (root,) = map(Path, package.__path__)
    paths = sorted(path for path in root.rglob("*.py") if (path.parent / "__init__.py").exists())
    names = [".".join(path.relative_to(root.parent).with_suffix("").parts) for path in paths]
    return [name.removesuffix(".__init__") for name in names]


WATCHED = """
import importlib, json, sys
from fp8tune import cli

def loads(step, heavy):
    loaded = {*heavy} & {*sys.modules}
    assert not loaded, f"{step} loads {loaded}"

start, commands, modules, heavy = json.load(sys.stdin)
loads("starting", start)
for command, is_without in commands:
    sys.argv = ["fp8tune", *command]
    try:
        cli.main()
    except SystemExit as ended:
        assert ended.code in (0, 1), f"{command} ends with {ended.code}"
    loads(command, is_without)
for module in modules:
    importlib.import_module(module)
    loads(f"importing {module}", heavy)
"""
"""Steps of one process, the lightest first: what none of them loads, each alone does not."""


def test_commands_that_read_and_all_modules_load_neither_torch_nor_triton(tmp_path: Path) -> None:
    path = str(tmp_path / "published.db")
    with Store.open(path, create=True) as store:
        import_file(store, PUBLISHED, lookup_key=lambda problem: None)
    light = [
        ["--help"],
        ["show", "--help"],
        ["export", "--help"],
    ]
    readers = ["show", "show colwise", "export --arch gfx942 --check", "doctor"]
    commands = [
        *((command, [*HEAVY, "pandas", "scipy"]) for command in light),
        *(([*command.split(), "--db", path], HEAVY) for command in readers),
    ]
    start = (*HEAVY, "pandas", "scipy", "numpy", "sqlalchemy")
    light_modules = [name for name in modules(fp8tune_kernels) if name.startswith(LIGHT_KERNEL_MODULES)]
    ours = [name for name in modules(fp8tune) if name not in HEAVY_MODULES]
    steps = json.dumps([start, commands, ["fp8tune_kernels", *light_modules, *ours], HEAVY])
    done = subprocess.run([sys.executable, "-c", WATCHED], input=steps, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_kernel_is_a_module_of_its_own_and_of_the_family():
    for kernel in catalog.KERNELS:
        assert catalog.load(kernel).name == kernel


LAZY = ("torch", "triton", "numpy", "pandas", "scipy", "altair", "vl_convert", "ray", "psycopg")
"""Packages that are optional, or that only commands load which need them: functions may import them."""

LOCAL_IMPORTS = {
    "measure/timing.py": "gate loads torch and Triton, and planning imports timing",
    "measure/backends/simulated.py": "loads NumPy, and choosing a back end imports it",
    "names.py": "loading a kernel takes longer than all of show",
    "replay/watch/site/sitecustomize.py": "runs in the user's program, which may load no Triton",
    "studies.py": "deciding loads NumPy, and reading kept picks does not decide",
    "tables/formats/__init__.py": "by_size imports this package",
}
"""Modules below fp8tune/ that import our own modules in functions, and why."""

LONG_SIGNATURES = {"store/write.py:begin_sweep"}


def test_functions_import_nothing_of_ours_and_have_at_most_eight_parameters() -> None:
    imports, signatures = [], []
    for path in sorted((ROOT / "fp8tune").rglob("*.py")):
        name = path.relative_to(ROOT / "fp8tune").as_posix()
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        for function in (node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)):
            for node in ast.walk(function):
                modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                if not name.startswith("cli/") and name not in LOCAL_IMPORTS:
                    imports += [f"{name}: {module}" for module in modules if module.split(".")[0] not in LAZY]
            parameters = [argument.arg for argument in (*function.args.args, *function.args.kwonlyargs)]
            count = len(parameters) - (parameters[:1] in (["self"], ["cls"]))
            if count > 8 and not function.name.startswith("_"):
                signatures.append(f"{name}:{function.name}")
    assert imports == []
    assert set(signatures) <= LONG_SIGNATURES
