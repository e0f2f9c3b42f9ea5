"""List kernels that launch the same machine code as at another revision, though their source hash differs.

    python -m benchmarks.same_code OLD_REV [KERNEL ...] [--arch sm_90 gfx942] [--samples 8]

Compiles samples of each changed kernel's grid on both sides, without a GPU: every block size and lead, the default, and
``--samples`` configs more, each on a problem drawn from round and odd sizes, dtypes, scale modes and layouts. Prints
``{kernel: [old hash, new hash]}`` as JSON, of the kernels whose samples are all the same: rows that were measured at
the old hash are of the new one, too. Exit code 1 if a kernel launches other code.
Compiled code stays in Triton's cache.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fp8tune.comparing.checkout import launched_code
from fp8tune.measure.trees import Tree, within
from fp8tune.measure.worker import RemoteError, Worker
from fp8tune.records import NamedInts, Problem
from fp8tune.replay.loading import load_spec
from fp8tune.revisions import git, source
from fp8tune_kernels import catalog
from fp8tune_kernels.arches import ARCHES
from fp8tune_kernels.spec import KernelSpec

Sample = tuple[str, Problem, NamedInts, str]
"""Kernel, problem, config, arch."""

ROWS = (
    {"M": 16384, "K": 2048, "N": 4096, "E": 8},
    {"M": 1021, "K": 1001, "N": 523, "E": 3},
    {"M": 1021, "K": 1, "N": 523, "E": 3},
    {"M": 1024, "K": 80, "N": 272, "E": 1},
)
"""Of shape sets: Triton specializes code on multiples of 16 and on sizes of 1."""


def samples(spec: KernelSpec, arch: str, count: int) -> Iterator[Sample]:
    """Yield the launches of a kernel that are compiled; the same ones for the same arguments."""
    draw = random.Random(f"{spec.name} {arch}")
    shapes = [shape for row in ROWS for shape in itertools.islice(spec.problems(row), 1)]
    configs = spec.configs or [
        NamedInts(dict(zip(spec.axes, values, strict=True))) for values in itertools.product(*spec.axes.values())
    ]
    dtypes = ("bfloat16", "bfloat16", "float16", "float32") if spec.in_dtypes == ("bfloat16",) else spec.in_dtypes
    valid = [config for config in configs if spec.invalid(config, shapes[0], ARCHES[arch].limits()) is None]
    chosen = [spec.default, *draw.sample(valid, min(count, len(valid)))]
    for name in (name for name in spec.axes if "BLOCK" in name or name == "LEAD"):
        of_value = [[config for config in valid if config[name] == value] for value in spec.axes[name]]
        chosen += [draw.choice(configs) for configs in of_value if configs]
    for config in dict.fromkeys(chosen):
        problem = Problem(
            spec.name,
            shape=draw.choice(shapes),
            routing="balanced" if spec.routed else "none",
            input_layout=draw.choice(spec.input_layouts),
            in_dtype=draw.choice(dtypes),
            fp8_dtype=draw.choice((ARCHES[arch].fp8_dtype, "float8_e5m2")),
            scale_mode=draw.choice(spec.scale_modes or ("",)),
        )
        yield spec.name, problem, config, arch


def launched(subject: Tree, expected: Sequence[Sample]) -> list[str]:
    """Return the hash of what each sample launches on one side, or what its compiler says."""
    worker, results = Worker(), []
    for kernel, problem, config, arch in expected:
        try:
            results.append(worker.call(600, within, subject, launched_code, kernel, problem, config, arch))
        except RemoteError as error:
            results.append(str(error).strip().splitlines()[-1])
    worker.close()
    return results


def main() -> int:
    """Print the hashes and what differs; return 1 if anything does."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision")
    parser.add_argument("kernels", nargs="*", default=sorted(catalog.QUANTIZERS))
    parser.add_argument("--arch", nargs="+", default=["sm_90", "gfx942"])
    parser.add_argument("--samples", type=int, default=8)
    options = parser.parse_args()
    cache = Path(os.environ.get("TRITON_CACHE_DIR", Path.home() / ".triton" / "cache"))
    repository, same, code = git.toplevel(Path.cwd()), {}, 0
    with git.checkouts(repository, (git.resolve(repository, options.revision), None)) as folders:
        sides = [Tree(str(folder), folder, cache, source.SOURCE_ROOTS) for folder in folders]
        for kernel in options.kernels:
            hashes = [source.source_hash(kernel, source.source_roots(item)) for item in folders]
            if hashes[0] == hashes[1]:
                continue
            expected = [item for arch in options.arch for item in samples(load_spec(kernel), arch, options.samples)]
            with ThreadPoolExecutor() as threads:
                codes = list(zip(expected, *threads.map(launched, sides, (expected, expected)), strict=True))
            wrong = [item for item in codes if item[1] != item[2]]
            for (_, problem, config, arch), old, new in wrong:
                print(f"{kernel} on {arch}, {problem}, {config}: {old} / {new}", file=sys.stderr)
            print(f"{kernel}: {len(codes) - len(wrong)} of {len(codes)} the same", file=sys.stderr)
            if wrong:
                code = 1
            else:
                same[kernel] = hashes
    print(json.dumps(same, indent=2))
    return code


if __name__ == "__main__":
    sys.exit(main())
