"""The steps of ``action.yml`` on a simulated GPU: comment, summary and exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from forked import ended, program
from places import ROOT


class Comments(BaseHTTPRequestHandler):
    """GitHub's comments of one pull request, and who asks for them."""

    comments: list[dict[str, object]]

    def do_GET(self) -> None:
        self.answer(self.comments)

    def do_POST(self) -> None:
        self.comments.append({"id": len(self.comments), **self.read_body()})
        self.answer({})

    def do_PATCH(self) -> None:
        self.comments[int(self.path.rpartition("/")[2])].update(self.read_body())
        self.answer({})

    def read_body(self) -> dict[str, object]:
        return dict(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def answer(self, content: object) -> None:
        self.send_response(200 if self.headers["Authorization"] == "Bearer secret" else 403)
        self.end_headers()
        self.wfile.write(json.dumps(content).encode())

    def log_message(self, *arguments: object) -> None: ...


@pytest.fixture
def comments() -> Iterator[tuple[str, list[dict[str, object]]]]:
    handler = type("Comments", (Comments,), {"comments": [{"id": 0, "body": "Looks good."}]})
    with HTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", handler.comments
        server.shutdown()


@pytest.fixture(autouse=True)
def _program(tmp_path: Path) -> Iterator[None]:
    with program(tmp_path):
        yield


def job() -> tuple[dict[str, str], dict[str, Any]]:
    """CI's job that uses the Action: the inputs, and the step that looks at the outputs."""
    steps = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]["action"]["steps"]
    place = next(place for place, step in enumerate(steps) if step.get("uses") == "./")
    return steps[place]["with"], steps[place + 1]


def check(folder: Path, url: str, *, TOKEN: str = "secret", **inputs: str) -> tuple[int, str]:
    """Run the Action's step as the runner does; return its exit code and the job's summary."""
    action = yaml.safe_load((ROOT / "action.yml").read_text())
    (step,) = action["runs"]["steps"]
    defaults = {name: str(item["default"]) for name, item in action["inputs"].items()}
    assert inputs.keys() <= defaults.keys()
    values = {**defaults, **inputs, "token": TOKEN}
    event, summary = folder / "event.json", folder / "summary.md"
    event.write_text('{"pull_request": {"number": 7}}')
    environment = {
        **os.environ,
        "GITHUB_ACTION_PATH": str(ROOT),
        "GITHUB_STEP_SUMMARY": str(summary),
        "GITHUB_OUTPUT": str(folder / "output"),
        "GITHUB_EVENT_PATH": str(event),
        "GITHUB_API_URL": url,
        "GITHUB_REPOSITORY": "fp8tune/fp8tune",
        "RUNNER_TEMP": str(folder),
        **{name: values[value.removeprefix("${{ inputs.").removesuffix(" }}")] for name, value in step["env"].items()},
    }
    shell = ["bash", "-e", "-o", "pipefail", "-c", step["run"]]
    done = subprocess.run(shell, cwd=folder, env=environment, capture_output=True, text=True)
    return done.returncode, summary.read_text() if summary.exists() else done.stderr


def test_a_comparison_is_posted_once_and_updated(comments: tuple[str, list[dict[str, object]]], tmp_path: Path) -> None:
    url, posted = comments
    subprocess.run([sys.executable, str(ROOT / "docs" / "examples" / "pull_request.py")], cwd=tmp_path, check=True)
    inputs, look = job()
    code, summary = check(tmp_path, url, **inputs | {"comment": "true"})
    assert code == 1
    assert [item["body"] for item in posted] == ["Looks good.", f"<!-- fp8tune compare -->\n{summary}"]
    outputs = dict(line.split("=", 1) for line in (tmp_path / "output").read_text().splitlines())
    assert Path(outputs["table"]).read_text() == summary
    variables = {
        name: outputs[value.removeprefix("${{ steps.check.outputs.").removesuffix(" }}")]
        for name, value in look["env"].items()
    }
    assert subprocess.run(["bash", "-c", look["run"]], env=os.environ | variables).returncode == 0

    code, _ = check(tmp_path, url, **inputs | {"comment": "true", "head": "main"})
    assert code == 3  # a simulated clock checks no output
    assert len(posted) == 2
    assert "REGRESSION" not in str(posted[1])


def test_a_recheck_has_the_commands_exit_code_where_no_comment_can_be_written(
    comments: tuple[str, list[dict[str, object]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, posted = comments
    monkeypatch.chdir(tmp_path)
    subprocess.run([sys.executable, str(ROOT / "docs" / "examples" / "pull_request.py")], check=True)
    monkeypatch.setenv("FP8TUNE_TIMER", "simulated:1")
    kernel = "--kernel project/kernel.py:SPEC"
    before = (*kernel.split(), "--shapes", "project/shapes.toml", "--timer", "simulated:1", "--db", "fp8tune.db")
    assert ended("sweep", *before).returncode == 0
    code, summary = check(tmp_path, url, TOKEN="of a fork", command="recheck", arguments=kernel)
    assert code == 0
    assert "still best" in summary
    assert len(posted) == 1
    assert check(tmp_path, url, command="sweep")[0] == 2
