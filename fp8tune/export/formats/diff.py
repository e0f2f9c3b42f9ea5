"""A unified diff of the kernel's own file: ``configs=[...]`` becomes the fewest configs that suffice.

The file is parsed, not imported. Only the value of ``configs`` changes. Paths begin below the folder of the outermost
package, so that ``patch -p1`` and ``git apply`` in that folder apply it.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path, PurePosixPath

from fp8tune.choose.covering import Covering, coverings
from fp8tune.errors import UsageError
from fp8tune.export.given import Given, Tuned
from fp8tune.records import NamedInts, Problem, Status
from fp8tune.replay.recording import Config, Kernel, Value
from fp8tune.revisions import source

BOUNDS = (0.0, 0.01, 0.02, 0.05, 0.1)
"""Other bounds on the loss, for the reader of a pull request."""

_DTYPE = re.compile(r"(tl|torch)\.([a-z][a-z0-9_]{1,30})")


@dataclass(frozen=True)
class Shrunk:
    """A smaller list of configs, and why it suffices."""

    given: Given
    tuned: tuple[Tuned, ...]
    """What was measured, in the order of the covering's problems."""
    covering: Covering
    others: tuple[Covering, ...]
    """For :data:`BOUNDS`."""
    wrong: Mapping[NamedInts, tuple[Problem, ...]]
    """Configs whose output was wrong -> where. They are in no list."""
    before: int
    """Configs that the kernel declares."""
    diff: str
    """Empty where nothing changes."""
    path: PurePosixPath
    """The file that changes, below the folder of the outermost package."""
    notes: tuple[str, ...]
    """One line each: what a maintainer has to know of the change."""

    @property
    def headline(self) -> str:
        """``36 configs -> 3, worst loss 1.2 %``."""
        return f"{self.before} configs -> {len(self.covering.configs)}, worst loss {100 * self.covering.worst:.1f} %"


def shrink(given: Given, within: float) -> Shrunk:
    """The smallest list within a share of the best time (0.02: 2 %) on every problem of the recording.

    Raises UsageError for a kernel that has no ``configs`` to replace, where its source cannot be read or found, and
    where no config is right on every problem that it would be tried on.
    """
    kernel = given.recorded
    if kernel is None or not kernel.is_autotuned:
        raise UsageError(f"{given.kernel} was not recorded as an autotuned kernel: there is no configs=[...] to shrink")
    if kernel.pruner_configs:
        raise UsageError(
            f"{given.kernel} launches configs that its early_config_prune makes, not those of its list: export it "
            "--for python, and use fp8tune.pin"
        )
    tuned = tuple(one for one in given.tuned if not one.is_published)
    wrong = _wrong(tuned)
    # run-time tuning times every config of the list on every key, and would take a wrong one where it is the fastest
    right = [{config: loss for config, loss in one.slowdowns.items() if config not in wrong} for one in tuned]
    for one, found in zip(tuned, right, strict=True):
        if not found:
            raise UsageError(f"every config that is right on {one.problem.shape} is wrong elsewhere: no list is right")
    if not tuned:
        raise UsageError(f"nothing of {given.kernel} was measured: run fp8tune sweep")
    covering, *others = coverings(
        right, [within, *BOUNDS], failed=[{*one.failures, *wrong} for one in tuned], axes=given.axes
    )
    path, below = source_file(kernel)
    text = _text(path)
    new, notes = replaced(text, kernel, [given.configs[config] for config in covering.configs], str(below))
    notes += _changed(kernel, path, below)
    if not covering.is_smallest:
        notes.append("the smallest set was not found in time: the list is a greedy one, and a smaller one may do")
    shrunk = Shrunk(given, tuned, covering, tuple(others), wrong, len(kernel.configs), "", below, tuple(notes))
    diff = unified(text, new, below)
    head = f"{given.kernel} on {given.device.name or given.device.arch}: {shrunk.headline}\n" if diff else ""
    return Shrunk(**(vars(shrunk) | {"diff": head + diff}))


def _wrong(tuned: Sequence[Tuned]) -> dict[NamedInts, tuple[Problem, ...]]:
    found: dict[NamedInts, list[Problem]] = {}
    for one in tuned:
        for config, (status, _) in one.failures.items():
            if status == Status.WRONG:
                found.setdefault(config, []).append(one.problem)
    return {config: tuple(problems) for config, problems in found.items()}


def source_file(kernel: Kernel) -> tuple[Path, PurePosixPath]:
    """The file that defines a kernel, and its path below the folder of the outermost package. Imports no package but
    asks for the outermost one's place. Raises UsageError where there is none."""
    module = kernel.name.partition(":")[0]
    parts = module.split(".")
    if not all(map(str.isidentifier, parts)):
        raise UsageError(f"{kernel.name} cannot be imported: there is no source to change")
    for recorded in (Path(kernel.file),) if kernel.file else ():
        for below in (PurePosixPath(*parts).with_suffix(".py"), PurePosixPath(*parts, "__init__.py")):
            if recorded.parts[-len(below.parts) :] == below.parts and recorded.is_file():
                return recorded, below
    places: Sequence[str] | None = None
    spec = None
    for number in range(len(parts)):
        name = ".".join(parts[: number + 1])
        if number:
            spec = PathFinder.find_spec(name, places)
        else:
            spec = importlib.util.find_spec(name) or PathFinder.find_spec(name, [str(Path.cwd())])
        if spec is None:
            break
        places = spec.submodule_search_locations
        if places is None and number + 1 < len(parts):
            spec = None
            break
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        raise UsageError(f"the source of {module} is not here: install it, or run this where it can be imported")
    last = "__init__.py" if places is not None else f"{parts[-1]}.py"
    return Path(spec.origin), PurePosixPath(*(parts if places is not None else parts[:-1]), last)


def _changed(kernel: Kernel, path: Path, below: PurePosixPath) -> list[str]:
    """What to say where the code in the file is not what was measured; configs and keys do not count."""
    root = path.parents[len(below.parts) - 1]
    here = source.source_hash(kernel.name, source.in_folder(root)) if kernel.source_hash else ""
    if here == kernel.source_hash:
        return []
    return [f"{below} has other code ({here}) than was recorded ({kernel.source_hash}): record and sweep it again"]


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not UTF-8: write the configs by hand, --for python lists them") from None


def unified(before: str, after: str, path: PurePosixPath) -> str:
    """The unified diff of a file; empty where nothing changed."""
    lines = []
    for line in difflib.unified_diff(_lines(before), _lines(after), f"a/{path}", f"b/{path}"):
        lines.append(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n")
    return "".join(lines)


def _lines(text: str) -> list[str]:
    """With their ends; as Python's parser and ``patch`` count them, not at form feeds."""
    return re.findall(r"[^\n]*\n|[^\n]+", text)


def replaced(text: str, kernel: Kernel, wanted: Sequence[Config], name: str) -> tuple[str, list[str]]:
    """The source with other configs at the decorator, and what to say of it. Raises UsageError with the reason where
    the list cannot be found or written."""
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise UsageError(f"{name}:{error.lineno} does not parse: {error.msg}") from None
    names = _imported(tree)
    call, value = _configs(tree, names, kernel.name.rpartition(":")[2], name)
    lines = _lines(text)
    new = _literal_list(value, lines, wanted, tree, names, f"{name}:{value.lineno}")
    start, end = _offset(lines, value.lineno, value.col_offset), _offset(lines, value.end_lineno, value.end_col_offset)
    new = new.replace("\n", "\r\n") if lines[value.lineno - 1].endswith("\r\n") else new
    changed = text[:start] + new + text[end:]
    try:
        compile(changed, name, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        raise UsageError(f"{name}:{value.lineno}: the list cannot be replaced ({error}): do it by hand") from None
    if ast.dump(tree) == ast.dump(ast.parse(changed)):  # the same list in another style
        return text, ["the file has exactly these configs already"]
    return changed, list(_notes(tree, call, value, ast.parse(new.strip()), kernel, name))


def _offset(lines: Sequence[str], line: int | None, column: int | None) -> int:
    """Of a place in the whole text; the parser counts columns in bytes of UTF-8."""
    assert line is not None
    assert column is not None
    return sum(map(len, lines[: line - 1])) + len(lines[line - 1].encode()[:column].decode())


def _imported(tree: ast.Module) -> dict[str, str]:
    """Name -> what it stands for: ``tl`` -> ``triton.language``. At module level, also under ``if`` and ``try``."""
    names: dict[str, str] = {}
    for node in _module_level(tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                top = each.name.partition(".")[0]
                names[each.asname or top] = each.name if each.asname else top
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
    return names


def _module_level(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            yield from _module_level(child)


def _full_name(node: ast.AST, names: Mapping[str, str]) -> str:
    """``triton.Config`` for whatever the file calls it; empty for what is no name."""
    if isinstance(node, ast.Name):
        return names.get(node.id, "")
    if isinstance(node, ast.Attribute):
        base = _full_name(node.value, names)
        return f"{base}.{node.attr}" if base else ""
    return ""


def _is_triton(node: ast.AST, names: Mapping[str, str], attribute: str) -> bool:
    top, _, rest = _full_name(node, names).partition(".")
    return top == "triton" and rest.rpartition(".")[2] == attribute


def _configs(tree: ast.Module, names: Mapping[str, str], attribute: str, file: str) -> tuple[ast.Call, ast.expr]:
    """The decorator of a function, or the call in ``name = triton.autotune(...)(function)``; the value of its
    ``configs``."""
    found = []
    for path, node in _named(tree):
        if path == attribute:
            calls = node.decorator_list if isinstance(node, ast.FunctionDef) else [node]
            found += [call for call in calls if isinstance(call, ast.Call) and _is_autotune(call, names)]
    if not found:
        raise UsageError(f"{file} has no @triton.autotune on {attribute}: its configs are declared elsewhere")
    if len(found) > 1:
        lines = " and ".join(str(call.lineno) for call in found)
        raise UsageError(f"{file} defines {attribute} with @triton.autotune in lines {lines}: which ran is not known")
    (call,) = found
    values = [keyword.value for keyword in call.keywords if keyword.arg == "configs"] or call.args[:1]
    if not values or isinstance(values[0], ast.Starred):
        raise UsageError(f"{file}:{call.lineno}: @triton.autotune of {attribute} does not name its configs: see its **")
    return call, values[0]


def _is_autotune(call: ast.Call, names: Mapping[str, str]) -> bool:
    """Triton's, or a decorator of that kind that somebody derived from it, such as flash-linear-attention's."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    has_configs = any(keyword.arg == "configs" for keyword in call.keywords)
    return _is_triton(call.func, names, "autotune") or ("autotune" in name and has_configs)


def _named(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Functions by their qualified name; and what is called to make the value of a name."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef):
            yield prefix + child.name, child
        elif isinstance(child, ast.ClassDef):
            yield from _named(child, f"{prefix}{child.name}.")
        elif isinstance(child, ast.Assign) and isinstance(child.value, ast.Call):
            for target in child.targets:
                if isinstance(target, ast.Name):
                    yield prefix + target.id, child.value.func
        else:
            yield from _named(child, prefix)


def _literal_list(
    value: ast.expr,
    lines: Sequence[str],
    wanted: Sequence[Config],
    tree: ast.Module,
    names: Mapping[str, str],
    where: str,
) -> str:
    """``[triton.Config({...}, num_warps=4, num_stages=3), ...]``, one config a line."""
    used = (
        node.func for node in ast.walk(tree) if isinstance(node, ast.Call) and _is_triton(node.func, names, "Config")
    )
    spellings = [ast.unparse(each) for each in used]
    spellings += [f"{name}.Config" for name, full in names.items() if full == "triton"]
    spellings += [name for name, full in names.items() if re.fullmatch(r"triton(\.\w+)*\.Config", full)]
    if not spellings:
        raise UsageError(f"{where}: the file has no name for triton.Config: import triton there")
    hook = ""
    if any(config.has_pre_hook for config in wanted):
        hook = _pre_hook(value, tree, names, where)
    line = lines[value.lineno - 1]
    indent = line[: len(line) - len(line.lstrip(" \t"))]
    rows = [f"{indent}    {_config(spellings[0], config, hook, names, where)},\n" for config in wanted]
    return "".join(["[\n", *rows, f"{indent}]"])


def _config(spelling: str, config: Config, hook: str, names: Mapping[str, str], where: str) -> str:
    kwargs = ", ".join(
        f"{_text_literal(name)}: {_literal(value, names, where)}" for name, value in config.kwargs.items()
    )
    options = [f"{name}={int(value)}" for name, value in config.options.items()]
    options += [f"pre_hook={hook}"] if config.has_pre_hook else []
    return f"{spelling}({{{kwargs}}}, {', '.join(options)})"


def _text_literal(text: str) -> str:
    """A text in double quotes, as most formatters have it."""
    return f'"{text}"' if re.fullmatch(r"[\w .:+-]*", text, re.ASCII) else repr(text)


def _literal(value: Value, names: Mapping[str, str], where: str) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    if value is None or isinstance(value, bool | int | float):
        return repr(value)
    if isinstance(value, str):
        return _text_literal(value)
    if isinstance(value, Mapping) and len(value) == 1:
        ((kind, held),) = value.items()
        if kind == "float" and held in ("nan", "inf", "-inf"):
            return f'float("{held}")'
        if kind == "tuple":
            parts = [_literal(each, names, where) for each in held]
            return f"({', '.join(parts)}{',' if len(parts) == 1 else ''})"
        if kind == "dtype" and (dtype := _DTYPE.fullmatch(str(held))):
            called = {full: name for name, full in names.items()}
            if "triton" in called:
                called.setdefault("triton.language", f"{called['triton']}.language")
            if module := called.get({"tl": "triton.language"}.get(dtype[1], dtype[1])):
                return f"{module}.{dtype[2]}"
    raise UsageError(f"{where}: {str(value)[:60]} cannot be written as source: change the list by hand")


def _pre_hook(value: ast.expr, tree: ast.Module, names: Mapping[str, str], where: str) -> str:
    """What the configs of the list have as ``pre_hook``, where the source names one function at module level."""
    hooks = {
        ast.unparse(keyword.value): keyword.value
        for node in _reached(value, tree)
        if isinstance(node, ast.Call) and _is_triton(node.func, names, "Config")
        for keyword in node.keywords
        if keyword.arg == "pre_hook"
    }
    known = {*names, *_bound(tree)}
    for text, node in hooks.items():
        root = node
        while isinstance(root, ast.Attribute):
            root = root.value
        if len(hooks) == 1 and isinstance(root, ast.Name) and root.id in known:
            return text
    said = f"{len(hooks)} different ones" if len(hooks) > 1 else "none that has a name in the module"
    raise UsageError(f"{where}: the configs have a pre_hook, and the source says {said}: change the list by hand")


def _bound(tree: ast.Module) -> Mapping[str, ast.AST]:
    """Names that the module binds itself -> by what."""
    bound: dict[str, ast.AST] = {}
    for node in _module_level(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            bound[node.name] = node
        elif isinstance(node, ast.Assign):
            bound |= {target.id: node for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            bound[node.target.id] = node
    return bound


def _reached(value: ast.AST, tree: ast.Module) -> Iterator[ast.AST]:
    """The nodes of an expression, and of the lists and functions of this file that it names."""
    bound, seen, left = _bound(tree), set(), [value]
    while left:
        for node in ast.walk(left.pop()):
            yield node
            if isinstance(node, ast.Name) and node.id in bound and node.id not in seen:
                seen.add(node.id)
                left.append(bound[node.id])


def _notes(
    tree: ast.Module, call: ast.Call, value: ast.expr, new: ast.Module, kernel: Kernel, name: str
) -> Iterator[str]:
    elements = value.elts if isinstance(value, ast.List | ast.Tuple) else ()
    if elements and all(isinstance(each, ast.Call) for each in elements) and len(elements) != len(kernel.configs):
        yield f"{name} lists {len(elements)} configs, {len(kernel.configs)} were recorded: record it again"
    if any(keyword.arg == "prune_configs_by" for keyword in call.keywords):
        yield "`prune_configs_by` stays: see that it leaves one of these configs for each key"
    here = {id(node) for node in ast.walk(value)}
    kept = {node.id for node in ast.walk(new) if isinstance(node, ast.Name)}
    for used in dict.fromkeys(node.id for node in ast.walk(value) if isinstance(node, ast.Name)):
        if used not in _bound(tree) or used in kept:
            continue
        lines = [
            str(node.lineno)
            for node in ast.walk(tree)
            if isinstance(node, ast.Name)
            and node.id == used
            and isinstance(node.ctx, ast.Load)
            and id(node) not in here
        ]
        if lines:
            yield f"`{used}` stays: {name} uses it in line {', '.join(dict.fromkeys(lines))} too"
        else:
            yield f"`{used}` has no other use in {name}: remove it in the same change"
