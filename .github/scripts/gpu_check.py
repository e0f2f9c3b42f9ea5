"""Run one check of fp8tune on a GPU, and post its Markdown table: the step of ``action.yml``, which sets the variables.

COMMAND     compare (BASE...HEAD) or recheck
BASE, HEAD  revisions
ARGUMENTS   further options of the command, as in a shell
COMMENT     true: write a comment on the pull request, or update the one that is there

The table goes into the job's summary and into a file too. The exit code is the command's: 0 clear, 1 a finding, 2 a
usage or setup error, 3 not decided.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

MARKER = "<!-- fp8tune {command} -->"
"""First line of a comment, by which a later run finds it."""


def main() -> int:
    """Run the command and return its exit code."""
    command = os.environ["COMMAND"]
    if command not in ("compare", "recheck"):
        print(f"command: '{command}' is neither compare nor recheck", file=sys.stderr)
        return 2
    revisions = [f"{os.environ['BASE']}...{os.environ['HEAD']}"] if command == "compare" else []
    options = shlex.split(os.environ.get("ARGUMENTS", ""))
    done = subprocess.run(
        ["fp8tune", command, *revisions, *options, "--format", "markdown"], stdout=subprocess.PIPE, text=True
    )
    print(done.stdout)
    append("GITHUB_STEP_SUMMARY", done.stdout)
    table = Path(os.environ.get("RUNNER_TEMP", "."), f"fp8tune-{command}.md")
    table.write_text(done.stdout, encoding="utf-8")
    append("GITHUB_OUTPUT", f"exit-code={done.returncode}\ntable={table}\n")
    if os.environ.get("COMMENT") == "true" and done.stdout.strip():
        try:
            comment(MARKER.format(command=command), done.stdout)
        except urllib.error.HTTPError as error:  # a fork's token may not write
            print(f"::warning::no comment was written: {error}")
    return done.returncode


def append(variable: str, text: str) -> None:
    """Append to the file that a variable of the runner names, if there is one."""
    if path := os.environ.get(variable):
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(text)


def comment(marker: str, text: str) -> None:
    """Write a comment on the event's pull request, in place of an earlier one with this marker."""
    number = json.loads(Path(os.environ["GITHUB_EVENT_PATH"]).read_text()).get("pull_request", {}).get("number")
    if number is None:
        return
    issues = f"{os.environ['GITHUB_API_URL']}/repos/{os.environ['GITHUB_REPOSITORY']}/issues"
    comments = request("GET", f"{issues}/{number}/comments?per_page=100")
    earlier = [item["id"] for item in comments if item["body"].startswith(marker)]
    body = {"body": f"{marker}\n{text}"}
    if earlier:
        request("PATCH", f"{issues}/comments/{earlier[0]}", body)
    else:
        request("POST", f"{issues}/{number}/comments", body)


def request(method: str, url: str, body: dict[str, str] | None = None) -> Any:
    """Call GitHub's API and return its answer."""
    headers = {"Authorization": f"Bearer {os.environ['TOKEN']}", "Accept": "application/vnd.github+json"}
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data, headers, method=method), timeout=60) as answer:
        return json.load(answer)


if __name__ == "__main__":
    sys.exit(main())
