"""What ``fp8tune doctor`` prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console

from fp8tune.redaction import redacted
from fp8tune.render import contracts
from fp8tune.render.terminal import print_json
from fp8tune.text import visible

if TYPE_CHECKING:
    from fp8tune.check.doctor import Finding

STYLES = {"ok": "green", "warning": "yellow", "error": "red"}


def print_findings(findings: Sequence[Finding], output_format: str) -> None:
    """Findings with what to do about each."""
    if output_format == "json":
        print_json([contracts.finding(finding) for finding in findings])
        return
    console = Console(highlight=False)
    for finding in findings:
        console.print(f"{finding.level:<8}", style=STYLES[str(finding.level)], end="")
        console.print(visible(redacted(finding.what)), markup=False, soft_wrap=True)
        if finding.fix:
            console.print(f"        -> {visible(redacted(finding.fix))}", markup=False, soft_wrap=True)
