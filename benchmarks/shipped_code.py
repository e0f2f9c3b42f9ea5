"""Keep the machine code of results in their database, compiled with the Triton that timed them; no GPU is needed.

    PYTHONPATH=FOLDER_WITH_TRITON_3.6.0 python -m benchmarks.shipped_code --db results.db --arch sm_90

Compiles what picks rest on: picks, today's configs, defaults and rivals of results whose kernels are unchanged since.
Compiled code stays in Triton's cache.
"""

from __future__ import annotations

import argparse
import sys
import time

from fp8tune.measure.device import software
from fp8tune.measure.programs import Wanted, compile_programs
from fp8tune.records import Kind
from fp8tune.stats.means import group_by
from fp8tune.stats.study import Study
from fp8tune.store.results import Store
from fp8tune.studies import decided, deciding_configs, installed_hash
from fp8tune.tables.current import SHIPPED


def timed_by(store: Store, arch: str, triton: str) -> list[Study]:
    """Return the decided studies of kernels as they are installed, timed with a version of Triton."""
    studies = store.studies(arch=arch, kinds=[Kind.MEASURED])
    studies = [study for study in studies if study.version and study.device.triton == triton and study.results]
    # Decided device by device: of several that timed a size, only one answers.
    groups = group_by(studies, lambda study: study.device).values()
    every = [study for group in groups for study in decided(group, SHIPPED)]
    return [study for study in every if study.source_hash == installed_hash(study.problem.kernel)]


def main() -> int:
    """Compile, keep the hashes, and print their number."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--db", default="results.db")
    parser.add_argument("--arch", default="sm_90")
    options = parser.parse_args()
    with Store.open(options.db) as store:
        studies = timed_by(store, options.arch, software().triton)
        versions = {
            Wanted(study.problem.kernel, study.problem, config): study.version
            for study in studies
            for config in deciding_configs(study)
            if study.version
        }
        started = time.monotonic()

        def progress(done: int, total: int) -> None:
            print(f"\r{done} of {total} launches, {time.monotonic() - started:.0f} s", end="", file=sys.stderr)

        compiled = compile_programs(versions, options.arch, progress=progress)
        hashes = {(versions[item], item.problem, item.config): code for item, code in compiled.hashes.items()}
        store.keep_programs(compiled.compiler, hashes)
    for item, reason in compiled.failures.items():
        print(f"{item.reference} {item.problem.shape} {item.config}: {reason}", file=sys.stderr)
    print(
        f"\n{len(studies)} studies, {len(hashes)} launches, {compiled.programs} programs, "
        f"{len(set(compiled.hashes.values()))} different machine codes, {len(compiled.failures)} failures, "
        f"{time.monotonic() - started:.0f} s with Triton {compiled.compiler.triton}, ptxas {compiled.compiler.ptxas}"
    )
    return int(bool(compiled.failures))


if __name__ == "__main__":
    sys.exit(main())
