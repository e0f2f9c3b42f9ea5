"""Build both distributions and check them as a release needs it. CI and people run the same commands:

python .github/scripts/packages.py build dist      sdists, wheels from them, and their contents; needs build and twine
python .github/scripts/packages.py install dist    the wheels in a new environment, used in an empty folder;
    with constraints/torch-2.11.txt behind it: with these versions instead of those of constraints.txt
python .github/scripts/packages.py notes 0.3.0     the CHANGELOG's section, as release notes
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LARGEST_WHEEL = 5_000_000
"""Bytes."""

ONLY_THESE = {"fp8tune": {"fp8tune"}, "fp8tune_kernels": {"fp8tune_kernels", "fp8tune_kernels.pth"}}
"""Distribution -> names beside other packages. Not ``kernels``: that is a package of Hugging Face."""

SMOKE = """
import torch, fp8tune, fp8tune_kernels
out = fp8tune_kernels.fp8_grouped_mm(
    torch.ones(32, 64, dtype=torch.bfloat16),
    torch.ones(2, 64, 16, dtype=torch.bfloat16),
    offs=torch.tensor([16, 32], dtype=torch.int32),
)
assert out.eq(64).all(), out
assert len(fp8tune.open().picks()) > 100
"""

COMMANDS = (
    "--version",
    "show",
    "doctor",
    "sweep --kernel colwise --shapes tiny --timer simulated:1 --quick --db try.db",
    "show colwise --db try.db",
    "export --arch simulated --allow-quick --db try.db -o table.py",
)


def build(folder: Path) -> None:
    """Build both distributions into an empty folder and check them. Raises SystemExit naming what is wrong."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    for source in (ROOT, ROOT / "kernels"):
        run(sys.executable, "-m", "build", "--outdir", str(folder), str(source))
    packages = sorted(folder.iterdir())
    expected = {f"{name}-{version}{end}" for name in ONLY_THESE for end in (".tar.gz", "-py3-none-any.whl")}
    require({path.name for path in packages} == expected, f"{folder} has not just {sorted(expected)}")
    run(sys.executable, "-m", "twine", "check", "--strict", *map(str, packages))
    for path in packages:
        print(f"{path.stat().st_size:>10,} bytes  {path.name}")
        (check_wheel if path.suffix == ".whl" else check_sdist)(path)


def check_wheel(path: Path) -> None:
    """Check the size, the names and the index page of a wheel."""
    require(path.stat().st_size <= LARGEST_WHEEL, f"{path.name} has over {LARGEST_WHEEL:,} bytes")
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        (metadata,) = (archive.read(name).decode() for name in names if name.endswith(".dist-info/METADATA"))
    top = {name.partition("/")[0] for name in names if ".dist-info/" not in name}
    require(top == ONLY_THESE[path.name.partition("-")[0]], f"{path.name} installs {sorted(top)}")
    stray = [name for name in names if re.search(r"\.db|__pycache__|(^|/)tests/", name)]
    require(stray in ([], ["fp8tune/_results.db"]), f"{path.name} has {stray}")
    page = metadata.partition("\n\n")[2]
    links = re.findall(r'(?:\]\(|(?:src|srcset|href)=")([^)"]+)', page)
    relative = [link for link in links if not link.startswith(("https://", "#"))]
    require(bool(links) and not relative, f"{path.name}: links of the index page: {relative}")
    require("git clone" not in page and "pytest" not in page, f"{path.name}: the index page has lines for contributors")


def check_sdist(path: Path) -> None:
    """Check that an sdist has no database of somebody at work and no build output."""
    with tarfile.open(path) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
    stray = [name for name in names if re.search(r"\.db|^(build|dist|\.venv|\.ci)/", name) and name != "results.db"]
    require(not stray, f"{path.name} has {stray}")


def install(folder: Path, constraints: Path = ROOT / "constraints.txt") -> None:
    """Install the wheels into a new environment of this Python, and use them in an empty folder."""
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        venv.create(scratch / "venv", with_pip=True)
        programs = scratch / "venv" / "bin"
        (scratch / "empty").mkdir()
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("FP8TUNE", "PYTHON"))}
        environment |= {"HOME": name, "XDG_DATA_HOME": f"{name}/data"}
        wheels = [str(path.resolve()) for path in sorted(folder.glob("*.whl"))]
        pins = str(constraints.resolve())
        run(str(programs / "pip"), "install", "-q", "-c", pins, *wheels, env=environment, cwd=scratch)
        run(str(programs / "pip"), "check", env=environment, cwd=scratch)
        for command in COMMANDS:
            run(str(programs / "fp8tune"), *command.split(), env=environment, cwd=scratch / "empty")
        run(str(programs / "python"), "-c", SMOKE, env=environment, cwd=scratch / "empty")


def notes(version: str) -> None:
    """Print the CHANGELOG's section of a version."""
    text = (ROOT / "CHANGELOG.md").read_text()
    section = re.search(rf"^## {re.escape(version)}\b.*?\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    if section is None or not section[1].strip():
        raise SystemExit(f"CHANGELOG.md has no section {version}")
    print(section[1].strip())


def run(*command: str, env: dict[str, str] | None = None, cwd: Path = ROOT) -> None:
    """Run a command. Raises SystemExit if it fails."""
    print(f"$ {' '.join(command)}", flush=True)
    if subprocess.run(command, env=env, cwd=cwd).returncode:
        raise SystemExit(f"failed: {' '.join(command)}")


def require(is_so: bool, message: str) -> None:
    """Raise SystemExit with a message unless a condition holds."""
    if not is_so:
        raise SystemExit(message)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["build", folder]:
            build(Path(folder))
        case ["install", folder, *constraints] if len(constraints) <= 1:
            install(Path(folder), *map(Path, constraints))
        case ["notes", version]:
            notes(version)
        case _:
            raise SystemExit(__doc__)
