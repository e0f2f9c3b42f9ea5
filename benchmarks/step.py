"""One step of the race in a process of its own: a contestant's search, the oracle's timing, or what the machine is.

The race calls :func:`run_step`; the process is this module, which leaves its answer in a file: the tuners' own output
goes to a log, and may be anything.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
MACHINE = "machine"
ORACLE = "oracle"


@dataclass(frozen=True)
class Step:
    """What a process is to do."""

    name: str
    """A contestant, :data:`MACHINE` or :data:`ORACLE`."""
    number: int = 0
    configs: int | None = None
    """Only the first so many configs; None for all."""
    rounds: int = 0
    """Of the oracle."""
    dry: bool = False
    """Import and build, and search nothing."""


Answer = dict[str, Any]
"""What a process found; ``failure`` holds the reason where it found nothing."""


def run_step(step: Step, cache: Path, scratch: Path, timeout_s: float) -> tuple[Answer, float]:
    """The step's answer and the seconds its process lived. Triton's cache is in ``cache``, temporary files in
    ``scratch``, both made where they are missing. A step that does not end in time is killed with all it started.
    """
    for folder in (cache, scratch):
        folder.mkdir(parents=True, exist_ok=True)
    answer = scratch / "answer.json"
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache), "TMPDIR": str(scratch)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "benchmarks.step", json.dumps(asdict(step)), str(answer)]
    begun = time.monotonic()
    with (scratch / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=log, stderr=log, process_group=0)
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return {"failure": f"stopped after {timeout_s:g} s"}, time.monotonic() - begun
        finally:
            _end_group(process)
    seconds = time.monotonic() - begun
    if code == 0 and answer.exists():
        return json.loads(answer.read_text()), seconds
    return {"failure": f"exited with code {code}: {_last_line(scratch / 'log')}"}, seconds


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Kill what the step started and left: nothing of it may share the GPU or the cores with the next step."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1][:300] if lines else "it printed nothing"


def main() -> None:
    """``python -m benchmarks.step STEP ANSWER``: do the step (a JSON object), write the answer there."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("step", type=lambda text: Step(**json.loads(text)))
    parser.add_argument("answer", type=Path)
    arguments = parser.parse_args()
    arguments.answer.write_text(json.dumps(answer_of(arguments.step)))


def answer_of(step: Step) -> Answer:
    """Do a step in this process."""
    from benchmarks.course import Course

    course = Course.here(step.configs)
    if step.name == MACHINE:
        return _machine(course)
    if step.name == ORACLE:
        from benchmarks.oracle import interleaved_times_us

        return {"rounds_us": [[dict(c), us] for c, us in interleaved_times_us(course, step.rounds).items()]}
    return _searched(step, course)


def _machine(course: Any) -> Answer:
    from fp8tune.measure import device

    found = device.probe()
    return {
        "device": asdict(found) if found is not None and course.torch_device == "cuda" else None,
        "cores": os.cpu_count(),
        "configs": len(course.configs),
        "axes": list(course.spec.axes),
        "problem": f"{course.problem.kernel} {course.problem.shape} {course.problem.routing}",
    }


def _searched(step: Step, course: Any) -> Answer:
    from benchmarks.contestants import CONTESTANTS
    from fp8tune.measure.compiling import one_line

    try:
        search = CONTESTANTS[step.name](course)
    except Exception as error:  # whatever keeps a tuner from being used here is its line in the table
        return {"failure": f"cannot be used here: {one_line(error)}"}
    if step.dry:
        return {"failure": "ready"}
    begun = time.perf_counter()
    try:
        found = search()
    except Exception as error:  # likewise whatever it dies of
        return {"failure": f"failed: {one_line(error)}"}
    return {"search_s": time.perf_counter() - begun, "pick": dict(found.pick), "timed": found.timed}


if __name__ == "__main__":
    main()
