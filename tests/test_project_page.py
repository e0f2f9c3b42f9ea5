"""What is beside the code: metadata, workflows, issue forms and the pages that a newcomer to the project reads."""

from __future__ import annotations

import re
import shlex
import sqlite3
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from markdown_it import MarkdownIt
from places import ROOT

import fp8tune
import hatch_metadata
from fp8tune.cli import program

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
FORMS = sorted(path for path in (GITHUB / "ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml")
PAGES = [*WORKFLOWS, *FORMS, GITHUB / "pull_request_template.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"]
README = (ROOT / "README.md").read_text()


def loaded(path: Path) -> dict[str, Any]:
    read = yaml.safe_load(path.read_text())
    assert isinstance(read, dict)
    return {"on" if key is True else key: value for key, value in read.items()}  # YAML 1.1 takes `on` for true


def steps(path: Path) -> list[dict[str, Any]]:
    return [step for job in loaded(path)["jobs"].values() for step in job["steps"]]


def commands(path: Path) -> list[str]:
    return [line.strip() for step in steps(path) for line in step.get("run", "").splitlines()]


def readme_commands() -> list[str]:
    return [line.strip() for line in README.splitlines() if line.startswith("    pip install -c")]


def test_the_version_is_one() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text()
    newest = re.search(r"^## (\d\S+)", changelog, re.MULTILINE)  # "Unreleased" may stand above it
    assert newest is not None
    assert PROJECT["version"] == fp8tune.__version__ == newest.group(1)


def test_classifiers_are_known_and_name_the_pythons_that_ci_runs() -> None:
    from trove_classifiers import classifiers

    assert set(PROJECT["classifiers"]) <= classifiers
    named = [text.rpartition(" ")[2] for text in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", text)]
    matrix = loaded(GITHUB / "workflows" / "ci.yml")["jobs"]["readme"]["strategy"]["matrix"]
    assert named == matrix["python"]
    assert PROJECT["requires-python"] == f">={named[0]}"


def test_ci_runs_what_the_pages_say() -> None:
    ran = commands(GITHUB / "workflows" / "ci.yml")
    assert len(readme_commands()) == 2
    assert set(readme_commands()) <= set(ran)
    assert readme_commands()[1] in (ROOT / "CONTRIBUTING.md").read_text()
    local = (ROOT / ".ci" / "run").read_text()
    for tool in ("ruff check", "ruff format", "lint-imports", "mypy", "sphinx-build"):
        (line,) = [line for line in ran if line.startswith(tool)]
        own = re.findall(rf"^ *step ({tool}.*)$", local, re.MULTILINE)
        assert [re.sub(r" (--no-cache|--cache-dir=\S+|-D \S+)", "", one) for one in own] == [line]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_command_of_the_project_pages_parses(path: Path) -> None:
    program = typer.main.get_command(program.app)
    lines = re.findall(r"^\s*(?:.*&& )?fp8tune ([a-z].*)$", path.read_text(), re.MULTILINE)
    lines += re.findall(r"`fp8tune ([a-z][^`]*)`", path.read_text())
    for name, *arguments in map(shlex.split, lines):
        program.commands[name].make_context(name, arguments, help_option_names=["-h", "--help"]).close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_are_pinned_and_may_only_read(path: Path) -> None:
    workflow, text = loaded(path), path.read_text()
    assert workflow["permissions"] == {"contents": "read"}
    assert workflow["concurrency"]["group"]
    assert all(job["timeout-minutes"] <= 60 for job in workflow["jobs"].values())
    used = re.findall(r"uses: (.*)", text)
    assert used
    assert all(re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", one) for one in used)
    assert not re.search(r"run:.*\$\{\{", text)  # a title or branch name would be code


def test_a_release_is_of_the_tagged_version_with_its_notes(tmp_path: Path) -> None:
    named = {step.get("name"): step["run"] for step in steps(GITHUB / "workflows" / "release.yml") if "run" in step}
    version = PROJECT["version"]

    def ended(step: str, tag: str) -> int:
        for name in ("pyproject.toml", "CHANGELOG.md"):
            (tmp_path / name).write_text((ROOT / name).read_text())
        given = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "GITHUB_REF_NAME": tag}
        return subprocess.run(["bash", "-ec", named[step]], cwd=tmp_path, env=given, capture_output=True).returncode

    assert ended("The tag is the version", f"v{version}") == 0
    assert ended("The tag is the version", "v0.0.9") != 0
    assert ended("What changed", f"v{version}") == 0
    notes = (tmp_path / "extra" / "notes.md").read_text()
    assert "Added" in notes
    assert "## 0.1.0" not in notes.replace("###", "")
    assert ended("What changed", "v0.0.9") != 0


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.name)
def test_issue_forms_are_as_github_takes_them(path: Path) -> None:
    form = loaded(path)
    assert {"name", "description", "body"} <= set(form) <= {"name", "description", "title", "labels", "body"}
    ids = [field["id"] for field in form["body"]]
    assert len(ids) == len(set(ids))
    for field in form["body"]:
        assert set(field) <= {"type", "id", "attributes", "validations"}
        assert field["type"] in {"input", "textarea", "dropdown", "checkboxes"}
        assert field["attributes"]["label"]
        assert (field["type"] == "dropdown") == ("options" in field["attributes"])


def test_templates_ask_for_what_commands_print() -> None:
    assert "fp8tune compare main...HEAD --format markdown" in (GITHUB / "pull_request_template.md").read_text()
    assert all("fp8tune doctor" in path.read_text() for path in FORMS)
    assert set(loaded(GITHUB / "ISSUE_TEMPLATE" / "config.yml")) == {"blank_issues_enabled", "contact_links"}


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "SECURITY.md"])
def test_links_of_the_project_pages_lead_somewhere(name: str) -> None:
    text = (ROOT / name).read_text()
    links = re.findall(r"\]\(([^)#:]+)\)", text)
    assert all((ROOT / link).exists() for link in links)
    paths = re.findall(r"`((?:kernels|docs|tests|benchmarks|\.github|\.ci)/[\w./-]*)`", text)
    assert all((ROOT / path).exists() for path in paths if "my_kernel" not in path)


def test_constraints_for_gpus_are_what_the_rows_were_timed_with() -> None:
    pinned = dict(line.split("==") for line in (ROOT / "constraints-gpu.txt").read_text().splitlines() if "==" in line)
    connection = sqlite3.connect(f"file:{ROOT / 'results.db'}?mode=ro&immutable=1", uri=True)
    timed = connection.execute("SELECT DISTINCT torch, triton FROM devices WHERE torch != ''").fetchall()
    connection.close()
    assert {(torch.partition("+")[0], triton) for torch, triton in timed} == {(pinned["torch"], pinned["triton"])}


def test_the_readme_of_the_package_has_no_relative_link() -> None:
    version = PROJECT["version"]
    shown = hatch_metadata.absolute(README, version)
    tokens = MarkdownIt("commonmark").enable("table").parse(shown)
    inline = [child for token in tokens for child in token.children or ()]
    links = [str(one.attrs.get("href") or one.attrs.get("src")) for one in inline if one.type in ("link_open", "image")]
    links += re.findall(r'(?:src|srcset|href)="([^"]*)"', shown)
    assert len(links) > 10
    assert all(link.startswith(("https://", "#")) for link in links), links
    assert f"https://raw.githubusercontent.com/fp8tune/fp8tune/v{version}/docs/images/" in shown
    files = re.findall(rf"/v{re.escape(version)}/([^)\"#]+)", shown)
    assert all((ROOT / file).exists() for file in files)


def test_code_in_the_readme_stays_as_it_is() -> None:
    kept = "    [c](d.md)\n\n`[e](f.md)` [g](https://h) [i](#j)\n\n```python\nx[0](k)\n```\n"
    given = f"[a](b.md)\n\n{kept}![l](m.svg)\n"
    link = "[a](https://github.com/fp8tune/fp8tune/blob/v1/b.md)"
    image = "![l](https://raw.githubusercontent.com/fp8tune/fp8tune/v1/m.svg)"
    assert hatch_metadata.absolute(given, "1") == f"{link}\n\n{kept}{image}\n"
