"""Count of the tuned files in the wheels of vLLM and SGLang, by ``fp8tune doctor`` and by a second method.

    pip download --no-deps vllm==0.33.0 sglang==0.5.23
    unzip -qd wheels/vllm vllm-*.whl && unzip -qd wheels/sglang sglang-*.whl
    python -m benchmarks.tuned_files wheels/vllm wheels/sglang > docs/results/data/tuned-files.csv

The second method shares no code with ``doctor``. It takes the functions and templates that make file names out of the
wheel's own source and runs them, and it reads files with regular expressions. Exits 1 where the two methods differ.
"""

from __future__ import annotations

import argparse
import ast
import csv
import itertools
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fp8tune.check.configs import check_folder
from fp8tune.output.doctor import make_report
from fp8tune.output.documents import plain

CSV = Path(__file__).parents[1] / "docs/results/data/tuned-files.csv"
NEWEST, DEVICES = "3.8.0", 5  # Triton of both wheels; devices on the page

COLUMNS = ("consumer", "kernel", "path", "device", "dtype", "triton", "sizes", "problems")
LIMITS = {"A[18]00": 163, "H[128]00?|GH200": 227, "G?B200": 227, "L4|L20|L40S?|4090|Ada": 99, "Blackwell|5090": 99}
LIMITS |= {"MI3(00X|08X|25X?)": 64, "MI35[05]X?": 160}  # KiB of shared memory a block
BYTES = {"": (2, 2), "fp8_w8a16": (2, 1), "int8_w8a16": (2, 1), "int4_w4a16": (2, 0), "float32": (4, 4)}


def rows_of_doctor(root: Path, triton: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of the CSV for one wheel."""
    files, findings = check_folder(root, triton)
    for file in plain(make_report(findings, (), files))["files"]:
        kinds = dict.fromkeys(item["problem"] for item in file["problems"])
        path = re.sub(r".*configs/", "", file["path"])
        yield {**file, "path": path, "sizes": len(file["sizes"]), "problems": "; ".join(kinds)}


def by_second_method(root: Path, triton: str) -> Counter[tuple[str, str]]:
    """Count files by device and kind of problem, with the wheel's own source."""
    counts: Counter[tuple[str, str]] = Counter()
    same: dict[str, list[tuple[str, str, dict[str, str]]]] = defaultdict(list)
    paths = [path for path in sorted(root.rglob("*.json")) if re.search(r"device(_name)?=", path.name)]
    names = _name_makers(root)
    folders: dict[str, list[str]] = defaultdict(list)
    for path in paths:
        device = re.search(r"device(?:_name)?=(.*?)(?:_down)?(?:,(?=\w+=)|\.json)", path.name)[1]  # type: ignore[index]
        text, version = path.read_text(), re.search(r"triton_(\d+)_(\d+)_(\d+)$", str(path.parent))
        entries = dict(re.findall(r'"(\d+)"\s*:\s*(\{[^{}]*\}|null)', text))
        kinds = {"files"}
        if re.search(r'"(buckets|configs|meta)"', text):  # other layouts
            counts[device, "files"] += 1
            continue
        recorded = re.search(r'"triton_version": "(.*?)"', text)
        tuned = ".".join(version.groups()) if version else recorded[1] if recorded else ""
        kinds.add("no Triton" if not tuned else "old Triton" if _numbers(tuned) < _numbers(triton) else "")
        kinds.add("no match" if path.name not in names(path, device) else "")
        sizes = sorted({*map(int, entries), *(() if re.search("headdim|lora|flydsl", path.name) else (1, 4096))})
        kinds.add("gap" if any(high > 4 * low for low, high in itertools.pairwise(sizes)) else "")
        kinds.add("no launch" if any(_is_too_large(path.name, entry) for entry in entries.values()) else "")
        counts.update((device, kind) for kind in kinds if kind)
        shape = str(path.parent.parent if version else path.parent) + path.name.replace(device, "", 1)
        same[shape].append((device, tuned, {size: re.sub(r"\s", "", entry) for size, entry in entries.items()}))
        if version:
            folders[path.name].append(tuned)
    for group in same.values():
        for device, tuned, entries in group:
            equal = [(0.0, device)]
            for place, triton_there, peer in group:
                if (place, triton_there) != (device, tuned) and {*peer} == {*entries}:
                    equal.append((sum(entries[size] == peer[size] for size in entries) / len(entries), place))
            near = max(share for share, place in equal if share == 1 or place != device or share == 0)
            counts[device, "copy" if near == 1 else "near copy"] += near >= 0.9
    for name, versions in folders.items():
        device = re.search(r"device(?:_name)?=(.*?)(?:_down)?(?:,(?=\w+=)|\.json)", name)[1]  # type: ignore[index]
        counts[device, "hidden"] += len(versions) - 1
    return +counts


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


def _is_too_large(name: str, entry: str) -> bool:
    """Return True if even one stage less than the config asks for is more than the shared memory."""
    room = next((kib for words, kib in LIMITS.items() if re.search(rf"[=_]({words})(?=[_,.-])", name)), None)
    values = {field: int(value) for field, value in re.findall(r'"(\w+)": (\d+)', entry)}
    if room is None or "BLOCK_SIZE_K" not in values:
        return False
    dtype = re.search(r",dtype=(.*?)(?:_down)?[,.]", name)
    first, second = BYTES.get(dtype[1] if dtype else "", (1, 1))
    if block := re.search(r"block_shape=\[(\d+),(\d+)\]", name):  # vLLM alone writes no blank, and cuts the tile
        values["BLOCK_SIZE_K"] = min(values["BLOCK_SIZE_K"], int(block[1]), int(block[2]))
    rows = values["BLOCK_SIZE_M"] * first + values["BLOCK_SIZE_N"] * second
    return rows * values["BLOCK_SIZE_K"] * (values.get("num_stages", 2) - 1) > room * 1024


def _name_makers(root: Path) -> Callable[[Path, str], set[str]]:
    """Return a function that gives all names that the wheel's lookups can make with the numbers of a file's name."""
    sources = [p.read_text() for p in root.rglob("*.py") if "get_device_name" in p.read_text(errors="replace")]
    sources += [p.read_text() for p in root.rglob("*/mamba_ssm.py")]
    templates = {text for source in sources for text in re.findall(r'f"([^"]*device(?:_name)?=[^"]*\.json)"', source)}
    pieces = r'f"([^"]*device(?:_name)?=[^"]*|headdim=[^"]*)"\s*f?"([^"]*\.json)"'
    templates |= {"".join(parts) for source in sources for parts in re.findall(pieces, source)}
    templates |= {
        f"headdim={{headdim}},dstate={{dstate}},{text}" for text in templates if text.startswith("device_name")
    }
    moe = next(source for source in sources if "def get_moe_configs" in source)
    everything = "\n".join(p.read_text() for p in root.rglob("*/fused_moe/config.py")) + moe
    dtypes = {None, *re.findall(r'return "((?:fp8|int8|int4|float)\w*)"', everything)}
    (function,) = (
        n for n in ast.parse(moe).body if isinstance(n, ast.FunctionDef) and n.name == "get_config_file_name"
    )
    rocm = next(iter(root.rglob("platforms/rocm.py")), None) if root.name == "vllm" else None
    table = (
        re.search(r"_ROCM_DEVICE_ID_NAME_MAP: dict\[str, str\] = (\{.*?\n\})", rocm.read_text(), re.S) if rocm else None
    )
    amd = {*ast.literal_eval(table[1]).values()} if table else set()

    def names(path: Path, device: str) -> set[str]:
        # The driver's name of a device counts only if vLLM's map has no name for it.
        model = re.search(r"(MI\d+|\d+S)", device)
        if amd and model and device not in amd and any(model[1] in name for name in amd):
            return set()
        values: dict[str, Any] = dict(re.findall(r"(\w+)=(\d+)", path.name))
        block = [int(n) for n in re.findall(r"\d+", (re.findall(r"block_shape=\[(.*?)\]", path.name) or [""])[0])]
        scope: dict[str, Any] = {"get_device_name_as_file_name": lambda: device, "get_device_name": lambda: device}
        exec(compile(ast.Module([_without_hints(function)], []), "lookup", "exec"), scope)
        results = set()
        if {"E", "N"} <= {*values} and "configs" in str(path):
            flags = [()] if root.name == "vllm" else [*itertools.product((False, True), repeat=2)]
            for dtype, shape, flag in itertools.product(dtypes, (None, block or None), flags):
                results.add(scope["get_config_file_name"](values["E"], values["N"], dtype, shape, *flag))
        scope = {"device_name": device, "block_n": block[:1], "block_k": block[1:], "kernel": "", **values}
        scope |= {"num_experts": values.get("E"), "inter_dim": values.get("N"), "cache_dtype": ""}
        for text in templates:
            for scope["cache_dtype"], scope["kernel"] in itertools.product(
                ("float16", "float32"), ("shrink", "expand")
            ):
                try:
                    made = text.format(**{k: v[0] if isinstance(v, list) and v else v for k, v in scope.items()})
                except (KeyError, IndexError, AttributeError):
                    continue
                results.add(made)
        return results

    return names


def _without_hints(function: ast.FunctionDef) -> ast.FunctionDef:
    for argument in function.args.args:
        argument.annotation = None
    function.returns, function.decorator_list = None, []
    return function


def tables() -> str:
    """Return the tables of the page, from the committed rows."""
    with CSV.open() as file:
        rows = [*csv.DictReader(file)]
    kinds = ("no match", "no launch", "hidden", "gap", "copy", "near copy")
    by_kernel: dict[str, Counter[str]] = defaultdict(Counter)
    by_triton: dict[str, Counter[str]] = defaultdict(Counter)
    by_device: dict[str, Counter[str]] = defaultdict(Counter)
    for row in rows:
        program, triton = row["consumer"], row["triton"]
        by_kernel[f"{program} {row['kernel']}"].update(["files", *row["problems"].split("; ")])
        if row["kernel"] != "other layout":
            by_triton[triton or "not recorded"][program] += 1
            age = "not recorded" if not triton else triton if triton == NEWEST else "older"
            by_device[row["device"]].update(["files", age])
    devices = sorted(by_device.items(), key=lambda item: -item[1]["files"])[:DEVICES]
    kernels = [(name, counts) for name, counts in by_kernel.items() if any(counts[kind] for kind in kinds)]
    parts = [
        _table("kernel", ("files", *kinds), kernels),
        _table("Triton", ("vLLM", "SGLang"), sorted(by_triton.items())),
        _table(f"device ({DEVICES} of {len(by_device)})", ("files", NEWEST, "older", "not recorded"), devices),
    ]
    return "\n\n".join(parts)


def _table(title: str, heads: Sequence[str], rows: Iterable[tuple[str, Mapping[str, int]]]) -> str:
    lines = [[title, *heads], ["---", *["---:"] * len(heads)]]
    lines += [[name, *(str(counts[head] or "") for head in heads)] for name, counts in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the CSV to stdout, and what differs to stderr; without wheels the tables of the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("wheels", nargs="*", type=Path, help="folders named vllm and sglang, with an unpacked wheel")
    parser.add_argument("--triton", default=NEWEST, help="Triton version that the wheels run with")
    options = parser.parse_args(arguments)
    if not options.wheels:
        print(tables())
        return 0
    writer, is_different = csv.DictWriter(sys.stdout, COLUMNS, extrasaction="ignore", lineterminator="\n"), False
    writer.writeheader()
    for root in options.wheels:
        rows, first = [*rows_of_doctor(root, options.triton)], Counter[tuple[str, str]]()
        writer.writerows(rows)
        for row in rows:
            first.update((row["device"], kind) for kind in {"files", *row["problems"].split("; ")} if kind)
        second = by_second_method(root, options.triton)
        for key in sorted({*first, *second}):
            if first[key] != second[key]:
                is_different = True
                print(f"{root.name} {key[0]}: {key[1]} {first[key]} or {second[key]}", file=sys.stderr)
        print(f"{root.name}: {len({*first, *second})} counts compared", file=sys.stderr)
    return int(is_different)


if __name__ == "__main__":
    sys.exit(main())
