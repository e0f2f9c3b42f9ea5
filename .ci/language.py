"""Report odd sentences of docstrings, names that are pronouns or participles, and commit subjects of another form.

``python .ci/language.py FILE...`` exits with 1 if it reports anything; ``--count`` prints numbers per folder instead,
``--commits RANGE`` looks at the subjects of commits and ``--message FILE`` at that of a commit that is being written.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

OPENING = re.compile(r"(What|Whether|Of|How|Where|Why|Those|As|The same|None|Whoever|Whatever|Which)\b")
NAMES = frozenset(["asked", "each", "found", "given", "kept", "of", "one", "other", "said", "told", "wanted"])

CODE = re.compile(r"``.*?``|:\w+:`.*?`|`[^`\n]*`", re.DOTALL)
PREPOSITION = re.compile(r"\b(of|from|for|with|at|into|than|beside|by)(?=[.;)])")
LINKS = "and|or|that|which|in|on|by|for|to|from|with|as|all|each|most|any|some|none|number|kind|one|power"
TWO_OF = re.compile(
    rf"\bof (an?|the|all|each|every|its|this|no) (?:(?!(?:{LINKS})\b)[A-Za-z'-]+ ){{1,2}}of\b(?! which)"
)
"""Of the phrases with two "of" those that begin with an article, which are no numbers, names or lists."""

AREA = re.compile(r"[\w./-]+(, [\w./-]+)*: ")
LONGEST_SUBJECT = 72
OTHER_MOOD = re.compile(r"(?!bring|embed|feed|need|seed|shed|speed|string)\w+(ed|ing)$|\w+[^su]s$", re.IGNORECASE)
GENERATED = ("Merge ", "Revert ", "fixup! ", "squash! ")


def subject_problems(subject: str) -> Iterator[str]:
    """Problems of a commit subject, such as ``area: add a thing``."""
    if subject.startswith(GENERATED):
        return
    if len(subject) > LONGEST_SUBJECT:
        yield f"has {len(subject)} characters: at most {LONGEST_SUBJECT}"
    if subject.endswith("."):
        yield "ends with a full stop"
    first, *_ = AREA.sub("", subject).split() or [""]
    if not first or OTHER_MOOD.match(first):
        yield f"{first!r} is not imperative, as in `area: add a thing`"


def subjects(arguments: list[str]) -> list[str]:
    """Subjects in a range of commits, or in the file with a commit's message."""
    if arguments[0] == "--message":
        return Path(arguments[1]).read_text(encoding="utf-8").splitlines()[:1]
    command = ["git", "log", "--no-merges", "--format=%s", arguments[1]]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


def docstring_problems(text: str) -> Iterator[str]:
    """Problems of a docstring. Indented paragraphs are tables and formulas, not prose."""
    if opening := OPENING.match(text):
        yield f"starts with {opening[0]!r}"
    for paragraph in re.split(r"\n\s*\n", text):
        if any(line.startswith("    ") for line in paragraph.splitlines()):
            continue
        prose = " ".join(CODE.sub("X", paragraph).split())
        yield from (f"has a clause that ends in {match[1]!r}" for match in PREPOSITION.finditer(prose))
        yield from (f"has two 'of' in a phrase: {match[0]!r}" for match in TWO_OF.finditer(prose))


def findings(path: Path) -> Iterator[tuple[int, str]]:
    """Line and problem of each docstring and each name bound in a file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            for problem in docstring_problems(text or ""):
                yield getattr(node, "lineno", 1), f"docstring {problem}"
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in NAMES:
            yield node.lineno, f"name {node.id!r}"
        elif isinstance(node, ast.arg) and node.arg in NAMES:
            yield node.lineno, f"name {node.arg!r}"
        elif isinstance(node, ast.ExceptHandler) and node.name in NAMES:
            yield node.lineno, f"name {node.name!r}"
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name in NAMES:
            yield node.lineno, f"name {node.name!r}"


def main(arguments: list[str]) -> int:
    """Print findings, or their number per folder; return the exit code."""
    if arguments[:1] in (["--commits"], ["--message"]):
        problems = [
            f"{subject!r}: {problem}" for subject in subjects(arguments) for problem in subject_problems(subject)
        ]
        print("\n".join(problems), end="\n" if problems else "")
        return 1 if problems else 0
    is_count = "--count" in arguments
    paths = [Path(argument) for argument in arguments if argument != "--count"]
    counts: Counter[tuple[str, str]] = Counter()
    for path in paths:
        for line, problem in findings(path):
            counts["/".join(path.parts[:2] if len(path.parts) > 2 else path.parts[:1]), problem.split()[0]] += 1
            if not is_count:
                print(f"{path}:{line}: {problem}")
    if is_count:
        for folder in sorted({folder for folder, _ in counts}):
            print(f"{folder:32}{counts[folder, 'docstring']:5} docstrings{counts[folder, 'name']:6} names")
        return 0
    return 1 if counts else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
