"""Unified diff of a kernel's source file that replaces ``configs=[...]`` with a few configs that suffice.

The source file is parsed, not imported. Paths in the diff are relative to the folder that contains the outermost
package; run ``git apply`` or ``patch -p1`` there.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
import re
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path, PurePosixPath

from fp8tune.errors import UsageError
from fp8tune.records import Kind, Status
from fp8tune.replay.recording import Config, Kernel
from fp8tune.revisions import source
from fp8tune.stats.shared import Cover, cover
from fp8tune.tables.files import File, read
from fp8tune.tables.formats import Format, Options
from fp8tune.tables.literals import literal
from fp8tune.tables.picks import KernelPicks


def write(kernels: Sequence[KernelPicks], options: Options) -> list[File]:
    """Return the diff for the device with the most picks. It is empty if nothing changes."""
    kernel = kernels[0]
    if len(kernels) > 1:
        options.notice(f"the diff is for {kernel.device.name}, which has the most sizes of {len(kernels)} GPUs")
    chosen = fewest(kernel, options.within)
    assert kernel.recorded is not None
    path, name = source_file(kernel.recorded)
    text = source_text(path)
    new, notes = changed(kernel, chosen, text, name)
    for note in (*notes, *filter(None, [difference(kernel)])):
        options.notice(note)
    place, count = kernel.device.name or kernel.device.arch, len(kernel.recorded.configs)
    counts = f"{count} configs -> {len(chosen.configs)}, worst loss {100 * chosen.worst:.1f} %"
    diff = unified(text, new, name)
    return [File(PurePosixPath("configs.diff"), diff and f"{kernel.kernel} on {place}: {counts}\n{diff}")]


def fewest(kernel: KernelPicks, within: float) -> Cover:
    """Choose few configs so that each problem has one at most ``within`` slower than its best; 0.02 is 2 %."""
    recorded = kernel.recorded
    if recorded is None or not recorded.is_autotuned:
        raise UsageError(f"{kernel.kernel} was not recorded with @triton.autotune: it has no configs=[...] to change")
    if recorded.pruner_configs:
        advice = "export it --for python, and use fp8tune.pin"
        raise UsageError(f"{kernel.kernel} launches configs that its early_config_prune makes: {advice}")
    picks = tuple(pick for pick in kernel.picks if pick.study.kind is not Kind.PUBLISHED)
    if not picks:
        raise UsageError(f"nothing of {kernel.kernel} was measured: run fp8tune sweep")
    failures = (item for pick in picks for item in pick.study.failures.items())
    wrong = {config for config, status in failures if status is Status.WRONG}
    # Run-time tuning times every config of the list on every key, and would take a wrong one where it is the fastest.
    right = [{c: loss for c, loss in pick.study.slowdowns.items() if c not in wrong} for pick in picks]
    for pick, slowdowns in zip(picks, right, strict=True):
        if not slowdowns:
            raise UsageError(f"every config that is right on {pick.problem.shape} is wrong elsewhere: no list is right")
    return cover(right, within, picks[0].study.axes)


def changed(kernel: KernelPicks, chosen: Cover, text: str, name: PurePosixPath) -> tuple[str, list[str]]:
    """Return the text of a kernel's source file with the chosen configs, and notes for its maintainer."""
    assert kernel.recorded is not None
    configs = [kernel.triton_config(config) for config in chosen.configs]
    return replaced(text, kernel.recorded, configs, str(name))


def difference(kernel: KernelPicks) -> str:
    """Return what the source of a kernel has otherwise than when it was recorded and swept; empty if nothing."""
    recorded = kernel.recorded
    assert recorded is not None
    try:
        path, name = source_file(recorded)
        roots = [path.parents[len(name.parts) - 1]]
        code, declaration = (
            function(kernel.kernel, roots) for function in (source.source_hash, source.declaration_hash)
        )
    except source.NoSuchKernel:
        return f"{name} has no kernel {kernel.bare_name} any more"
    except UsageError as error:
        return str(error)
    known = dict.fromkeys([recorded.source_hash, *(pick.study.source_hash for pick in kernel.picks)])
    if others := [swept for swept in known if swept not in ("", code)]:
        return f"{name} has other code of {kernel.kernel} ({code}) than was swept ({others[0]})"
    if recorded.declaration_hash not in ("", declaration):
        return f"{name} has other configs, key or hooks of {kernel.kernel} than were swept"
    return ""


def source_text(path: Path) -> str:
    """Return the text of a source file. Raises UsageError if it is not UTF-8."""
    text = read(path)
    if text is None:
        raise UsageError(f"{path} is not UTF-8: write the configs by hand, --for python lists them")
    return text


def source_file(kernel: Kernel) -> tuple[Path, PurePosixPath]:
    """Return the file that defines a kernel, and its path relative to the package's parent folder. Imports nothing."""
    module = kernel.name.partition(":")[0]
    parts = module.split(".")
    if not all(map(str.isidentifier, parts)):
        raise UsageError(f"{kernel.name} has no importable module: there is no source to change")
    for name in (names := (PurePosixPath(*parts).with_suffix(".py"), PurePosixPath(*parts, "__init__.py"))):
        if kernel.file.endswith(f"/{name}") and Path(kernel.file).is_file():
            return Path(kernel.file), name
    spec = importlib.util.find_spec(parts[0]) or PathFinder.find_spec(parts[0], [str(Path.cwd())])
    places = [] if spec is None else list(spec.submodule_search_locations or [str(spec.origin)])
    for path, name in ((Path(place).parent / name, name) for place in places for name in names):
        if path.is_file():
            return path, name
    raise UsageError(f"the source of {module} is not here: install it, or run this where it can be imported")


def unified(before: str, after: str, path: PurePosixPath) -> str:
    """Return the unified diff between two texts of a file. It is empty if they are equal."""
    lines = difflib.unified_diff(_split_lines(before), _split_lines(after), f"a/{path}", f"b/{path}")
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def replaced(text: str, kernel: Kernel, configs: Sequence[Config], name: str) -> tuple[str, list[str]]:
    """Replace the configs in the decorator of a kernel. Return the new source, and notes for the maintainer."""
    try:
        parsed = _Source(text, name)
    except SyntaxError as error:
        raise UsageError(f"{name}:{error.lineno} does not parse: {error.msg}; mend the file") from None
    call = parsed.autotune_call(kernel.name.rpartition(":")[2])
    value = next((keyword.value for keyword in call.keywords if keyword.arg == "configs"), (*call.args, None)[0])
    if value is None or isinstance(value, ast.Starred):
        raise UsageError(f"{name}:{call.lineno}: @triton.autotune does not name its configs: see its **")
    start = parsed.position(value.lineno, value.col_offset)
    end = parsed.position(value.end_lineno or 0, value.end_col_offset or 0)
    changed = text[:start] + parsed.config_list(configs, value.lineno) + text[end:]
    try:
        compile(changed, name, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        raise UsageError(f"{name}:{value.lineno}: the list cannot be replaced ({error}): do it by hand") from None
    if ast.dump(parsed.tree) == ast.dump(ast.parse(changed)):  # the same list in another style
        return text, ["the file has exactly these configs already"]
    notes = []
    elements = value.elts if isinstance(value, ast.List | ast.Tuple) else []
    if all(isinstance(item, ast.Call) for item in elements) and len(elements) not in (0, len(kernel.configs)):
        notes.append(f"{name} lists {len(elements)} configs, {len(kernel.configs)} were recorded: record it again")
    if any(keyword.arg == "prune_configs_by" for keyword in call.keywords):
        notes.append("`prune_configs_by` stays: see that it leaves one of these configs for each key")
    return changed, notes


def _split_lines(text: str) -> list[str]:
    return re.findall(r"[^\n]*\n|[^\n]+", text)  # not at form feeds, like Python's parser and patch


class _Source:
    """Parsed source file, with the full names of its imports."""

    def __init__(self, text: str, name: str) -> None:
        self.tree, self.lines, self.name = ast.parse(text), _split_lines(text), name
        self.imports: dict[str, str] = {}  # name in the file -> full name: tl -> triton.language
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    top = alias.name.partition(".")[0]
                    self.imports[alias.asname or top] = alias.name if alias.asname else top
            elif isinstance(node, ast.ImportFrom) and not node.level:
                self.imports |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}

    def position(self, line: int, column: int) -> int:
        """Return a place in characters; the parser counts columns in UTF-8 bytes."""
        return sum(map(len, self.lines[: line - 1])) + len(self.lines[line - 1].encode()[:column].decode())

    def is_triton(self, node: ast.expr, attribute: str) -> bool:
        """Return True if the expression is Triton's ``attribute``, under any name in the file."""
        root, _, rest = (ast.unparse(node) if isinstance(node, ast.Name | ast.Attribute) else "").partition(".")
        full = f"{self.imports.get(root, '')}.{rest}".rstrip(".")
        return full.startswith("triton.") and full.rpartition(".")[2] == attribute

    def autotune_call(self, attribute: str) -> ast.Call:
        """Return the only ``triton.autotune(...)`` call on a function. A custom autotune decorator counts too."""
        decorators: list[ast.expr] = []
        name = attribute.rpartition(".")[2]
        for node in ast.walk(self.tree):
            if isinstance(node, ast.FunctionDef) and node.name == name:
                decorators += node.decorator_list
            elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):  # name = triton.autotune(...)(f)
                decorators += [node.value.func] if any(ast.unparse(target) == name for target in node.targets) else []
        calls = [
            node
            for node in decorators
            if isinstance(node, ast.Call)
            if self.is_triton(node.func, "autotune")
            or ("autotune" in ast.unparse(node.func) and any(keyword.arg == "configs" for keyword in node.keywords))
        ]
        if len(calls) != 1:
            count = f"several in lines {', '.join(str(call.lineno) for call in calls)}" if calls else "none"
            advice = f"it has {count}: export it --for python, and use fp8tune.pin"
            raise UsageError(f"{self.name} must have one @triton.autotune on {attribute}, {advice}")
        return calls[0]

    def config_list(self, configs: Sequence[Config], line: int) -> str:
        """Return the source ``[triton.Config({...}, num_warps=4, num_stages=3), ...]``, with one config per line."""
        place = f"{self.name}:{line}"
        nodes = (node for node in ast.walk(self.tree) if isinstance(node, ast.Call))
        calls = [node for node in nodes if self.is_triton(node.func, "Config")]
        spellings = [ast.unparse(call.func) for call in calls]
        spellings += [f"{name}.Config" for name, full in self.imports.items() if full == "triton"]
        spellings += [name for name, full in self.imports.items() if re.fullmatch(r"triton(\.\w+)*\.Config", full)]
        if not spellings:
            raise UsageError(f"{place}: the file has no name for triton.Config: import triton there")
        hook = self._pre_hook(calls) if any(config.has_pre_hook for config in configs) else ""
        if hook is None:
            advice = "export --for python, and use fp8tune.pin, which adds it"
            raise UsageError(f"{place}: the pre_hook of the configs is not one function of the module: {advice}")
        modules = {full: name for name, full in self.imports.items()}
        if "triton" in modules:
            modules.setdefault("triton.language", f"{modules['triton']}.language")
        short = {"tl": modules.get("triton.language"), "torch": modules.get("torch")}
        dtypes = {name: module for name, module in short.items() if module is not None}
        declaration = self.lines[line - 1]
        indent = declaration[: len(declaration) - len(declaration.lstrip(" \t"))]
        newline = "\r\n" if declaration.endswith("\r\n") else "\n"
        rows = []
        for config in configs:
            kwargs = ", ".join(f"{literal(name)}: {literal(item, dtypes)}" for name, item in config.kwargs.items())
            options = [f"{name}={int(number)}" for name, number in config.options.items()]
            options += [f"pre_hook={hook}"] if config.has_pre_hook else []
            rows.append(f"{indent}    {spellings[0]}({{{kwargs}}}, {', '.join(options)}),{newline}")
        return "".join([f"[{newline}", *rows, f"{indent}]"])

    def _pre_hook(self, calls: Sequence[ast.Call]) -> str | None:
        """Return the source of the only pre_hook of the configs, or None if it does not stand for itself."""
        hooks = {ast.unparse(k.value): k.value for call in calls for k in call.keywords if k.arg == "pre_hook"}
        inside = [node for hook in hooks.values() for node in ast.walk(hook)]
        known = {node.name for node in self.tree.body if isinstance(node, ast.FunctionDef)} | set(self.imports)
        known |= {node.arg for node in inside if isinstance(node, ast.arg)}
        is_alone = len(hooks) == 1 and {node.id for node in inside if isinstance(node, ast.Name)} <= known
        return next(iter(hooks)) if is_alone else None


FORMAT = Format(
    write, "in the folder above the package: git apply FILE, or patch -p1 < FILE", ("within",), has_all_devices=True
)
