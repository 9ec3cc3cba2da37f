"""House rules, checked on the syntax tree: who imports whom, how long things are, what never appears."""

from __future__ import annotations

import ast
import importlib.util
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINKED_ROOMS = ("kernels", "adapters", "configs")

MAX_PRODUCT_LINES, MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_KERNEL_LINES, MAX_PARAMETERS = 18_500, 400, 60, 120, 6
# Apart from those: one file an operation, each used through one function, so they are not read as one text.
MAX_KERNEL_ROOM_LINES = 3_000

# Longer or wider than the rule, and why that is better than a split. "path" or "path:function" -> reason.
LENGTH_EXCEPTIONS: dict[str, str] = {"messages.py": "every wire type in one list"}
PARAMETER_EXCEPTIONS: dict[str, str] = {}

# What a room may import from the product; files in fineinfer/ itself are rooms of their own. One way only, no cycles.
_PLAIN = {"request", "messages", "config", "ipc", "hashing", "parent_death"}
ALLOWED_IMPORTS: dict[str, set[str]] = {
    "kernels": set(),
    "adapters": {"kernels", "messages", "hashing"},
    "memory": {"kernels"},
    "model": {"kernels", "memory"},
    "runner": {"kernels", "adapters", "memory", "model", "scheduler", "request", "messages"},
    "training": {"kernels", "adapters", "memory", "model", "messages", "hashing"},
    "scheduler": {"request", "messages", "memory"},
    "engine": {"kernels", "adapters", "memory", "model", "runner", "training", "scheduler", *_PLAIN},
    "text": {"request", "messages"},
    "data": {"messages", "text", "hashing"},
    "store": {"messages"},
    "server": {"text", "data", "store", *_PLAIN},
    "cli": {"server", "config", "parse", "data", "text", "request"},
    "request": set(),
    "messages": {"request"},
    "ipc": {"messages", "request"},
    "config": {"parse", "memory_config"},
    "memory_config": {"parse"},
    "parse": set(),
    "hashing": set(),
    "parent_death": set(),
    "llm": {"kernels", "adapters", "memory", "model", "runner", "training", "scheduler", "engine", "text", *_PLAIN},
}
# A file that needs one room more than its own may, and why. "path" -> {room: reason}
_RESOLVE = "finding the model's folder, for its tokenizer, loads no weights and no torch"
IMPORT_EXCEPTIONS: dict[str, dict[str, str]] = {
    "cli/models.py": {
        "engine": "an export works offline, in this process; imported when it runs",
        "store": "an export finds adapters without a server",
    },
    "server/api_process.py": {"model": _RESOLVE},
    "server/job_validation.py": {"model": _RESOLVE},
    "server/supervisor.py": {"engine": "EngineSettings is what the engine process is started with; plain data"},
}

NO_TORCH = (
    "server",
    "text",
    "data",
    "cli",
    "store",
    "scheduler",
    "messages",
    "request",
    "ipc",
    "config",
    "memory_config",
    "parse",
    "hashing",
    "parent_death",
)
# Of the rooms that hold tensors, the parts that scheduling imports: they must load without torch too.
NO_TORCH_FILES = ("memory/slot_allocator.py", "memory/request_table.py", "memory/governor.py")

BANNED_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}
BANNED_CALLS = {"eval", "exec", "torch.load", "os.system", "os.popen"}
BANNED_KEYWORDS = {"trust_remote_code", "allow_pickle", "shell"}


@cache
def _sources() -> dict[str, tuple[str, ast.Module]]:
    """Every product file once: path below fineinfer/ (through the links) -> (text, tree)."""
    files = {}
    for folder in (ROOT / "fineinfer", ROOT / "kernels", ROOT / "adapters"):
        base = ROOT / "fineinfer" if folder.name == "fineinfer" else ROOT
        for path in sorted(folder.rglob("*.py")):
            relative = path.relative_to(base).as_posix()
            if path.is_symlink() or (base.name == "fineinfer" and relative.split("/")[0] in LINKED_ROOMS):
                continue
            text = path.read_text(encoding="utf-8")
            files[relative] = (text, ast.parse(text, filename=relative))
    return files


def _room(relative: str) -> str:
    return relative.split("/")[0].removesuffix(".py")


def _imports(tree: ast.Module, *, at_run_time: bool = False) -> Iterator[str]:
    """Dotted names that a file imports; ``at_run_time`` leaves out ``if TYPE_CHECKING`` blocks."""
    skipped: set[ast.AST] = set()
    for node in ast.walk(tree):
        if at_run_time and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            skipped.update(inner for statement in node.body for inner in ast.walk(statement))
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                yield "." * node.level + (node.module or "")
            else:
                yield node.module or ""
                yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def _num_code_lines(text: str, tree: ast.Module) -> int:
    """Lines that hold code, as tinygrad counts: blanks, comments and docstrings are free."""
    silent = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in silent:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def _report(problems: list[str]) -> None:
    if problems:
        pytest.fail("\n" + "\n".join(problems), pytrace=False)


def test_the_search_finds_the_product() -> None:
    rooms = {_room(relative) for relative in _sources()}
    assert {"config", "messages", "cli", "server", "engine", "kernels", "adapters"} <= rooms


Sources = dict[str, tuple[str, ast.Module]]


def _import_problems(sources: Sources) -> list[str]:
    problems = []
    for relative, (_, tree) in sources.items():
        room = _room(relative)
        if room == "__init__":
            continue
        allowed = ALLOWED_IMPORTS.get(room)
        if allowed is None:
            problems.append(f"{relative}: room '{room}' has no rule in ALLOWED_IMPORTS")
            continue
        for name in _imports(tree):
            if name.startswith("."):
                problems.append(f"{relative}: relative import {name}")
            parts = name.split(".")
            target = parts[1] if parts[0] == "fineinfer" and len(parts) > 1 else room
            if target in ALLOWED_IMPORTS and target not in allowed | {room} | set(IMPORT_EXCEPTIONS.get(relative, {})):
                problems.append(f"{relative}: {room} must not import {name}")
    return problems


def test_imports_go_one_way() -> None:
    _report(_import_problems(_sources()))


def test_the_import_rules_have_no_cycle() -> None:
    done: set[str] = set()
    waiting = dict(ALLOWED_IMPORTS)
    while waiting:
        ready = [room for room, needs in waiting.items() if needs <= done]
        assert ready, f"cycle among {sorted(waiting)}"
        for room in ready:
            done.add(room)
            del waiting[room]


def test_no_bare_kernels_or_adapters() -> None:
    # Both names belong to packages on PyPI; a second module object would mean a second registry.
    everything = [*_sources().items()]
    for folder in ("tests", "benchmarks"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            everything.append((path.relative_to(ROOT).as_posix(), (text, ast.parse(text))))
    _report(
        [
            f"{relative}: import fineinfer.{name}, not {name}"
            for relative, (_, tree) in everything
            for name in _imports(tree)
            if name.split(".")[0] in ("kernels", "adapters")
        ]
    )


def test_top_level_folders_stay_out_of_the_way() -> None:
    for name in ("kernels", "adapters"):
        assert not (ROOT / name / "__init__.py").exists(), f"{name}/__init__.py would shadow the package of that name"
        spec = importlib.util.find_spec(name)
        ours = spec is not None and any(Path(place) == ROOT / name for place in spec.submodule_search_locations or ())
        assert not ours, "the repository root is on sys.path: run pytest, or export PYTHONSAFEPATH=1"


def test_rooms_are_linked_into_the_package() -> None:
    for name in LINKED_ROOMS:
        link = ROOT / "fineinfer" / name
        assert link.is_symlink() and link.readlink() == Path("..") / name, f"fineinfer/{name} must link to ../{name}"


def test_rooms_without_torch_do_not_import_it() -> None:
    _report(
        [
            f"{relative}: imports {name}"
            for relative, (_, tree) in _sources().items()
            if _room(relative) in NO_TORCH or relative in NO_TORCH_FILES
            for name in _imports(tree, at_run_time=True)
            if name.split(".")[0] in ("torch", "triton", "peft", "accelerate")
        ]
    )


def test_importing_the_light_rooms_leaves_torch_unloaded() -> None:
    modules = [
        "fineinfer." + relative.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        for relative in _sources()
        if _room(relative) in ("cli", "store", "scheduler", "messages", "request", "ipc", "config")
        and not relative.endswith("__main__.py")
    ]
    # __import__ one by one so that the message names the culprit
    code = (
        "import importlib, sys\n"
        f"for name in {modules!r}:\n"
        "    importlib.import_module(name)\n"
        "    assert 'torch' not in sys.modules, name\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_line_budget() -> None:
    lengths = {relative: text.count("\n") for relative, (text, _) in _sources().items()}
    code = {relative: _num_code_lines(text, tree) for relative, (text, tree) in _sources().items()}
    kernels = sum(lines for relative, lines in code.items() if _room(relative) == "kernels")
    total = sum(code.values()) - kernels
    print(f"product: {total} lines of code of {MAX_PRODUCT_LINES}, kernels {kernels} of {MAX_KERNEL_ROOM_LINES};")
    print(f"with blanks, comments and docstrings {sum(lengths.values())} lines in {len(lengths)} files")
    problems = [f"product has {total} lines of code, at most {MAX_PRODUCT_LINES}"] if total > MAX_PRODUCT_LINES else []
    if kernels > MAX_KERNEL_ROOM_LINES:
        problems.append(f"kernels have {kernels} lines of code, at most {MAX_KERNEL_ROOM_LINES}")
    for relative, length in lengths.items():
        if length > MAX_FILE_LINES:
            problems += _unless_excepted(LENGTH_EXCEPTIONS, relative, f"{length} lines, at most {MAX_FILE_LINES}")
    for relative, (_, tree) in _sources().items():
        limit = MAX_KERNEL_LINES if _room(relative) == "kernels" else MAX_FUNCTION_LINES
        for function in _functions(tree):
            length = (function.end_lineno or function.lineno) - function.lineno + 1
            if length > limit:
                where = f"{relative}:{function.name}"
                problems += _unless_excepted(LENGTH_EXCEPTIONS, where, f"{length} lines, at most {limit}")
    _report(problems)


def test_parameter_budget() -> None:
    problems = []
    for relative, (_, tree) in _sources().items():
        if _room(relative) == "kernels":
            continue  # a kernel's operands are its operands
        for function in _functions(tree):
            parts = function.args
            arguments = [*parts.posonlyargs, *parts.args, *parts.kwonlyargs]
            # A command's or route's parameters are what the user may send, declared one by one as Annotated.
            counted = [
                item
                for item in arguments
                if item.arg not in ("self", "cls")
                and not (item.annotation and re.match(r"Annotated\[|\w+(Option|Id)$", ast.unparse(item.annotation)))
            ]
            if len(counted) > MAX_PARAMETERS:
                where = f"{relative}:{function.name}"
                problems += _unless_excepted(PARAMETER_EXCEPTIONS, where, f"{len(counted)} parameters")
    _report(problems)


def _unless_excepted(exceptions: dict[str, str], where: str, problem: str) -> list[str]:
    if where in exceptions:
        print(f"exception: {where}: {problem} ({exceptions[where]})")
        return []
    return [f"{where}: {problem}"]


def test_every_exception_is_still_needed() -> None:
    known = {relative for relative in _sources()} | {
        f"{relative}:{function.name}" for relative, (_, tree) in _sources().items() for function in _functions(tree)
    }
    stale = [where for where in [*LENGTH_EXCEPTIONS, *PARAMETER_EXCEPTIONS, *IMPORT_EXCEPTIONS] if where not in known]
    assert not stale, f"exceptions for things that are gone: {stale}"


def _banned_problems(sources: Sources) -> list[str]:
    problems = []
    for relative, (_, tree) in sources.items():
        for name in _imports(tree):
            if name.split(".")[0] in BANNED_MODULES:
                problems.append(f"{relative}: imports {name}")
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func) if isinstance(node.func, ast.Name | ast.Attribute) else ""
                if called in BANNED_CALLS:
                    problems.append(f"{relative}:{node.lineno}: {called}()")
                for keyword in node.keywords:
                    value = keyword.value
                    off = isinstance(value, ast.Constant) and value.value is False
                    if keyword.arg in BANNED_KEYWORDS and not off:
                        problems.append(f"{relative}:{node.lineno}: {keyword.arg}={ast.unparse(value)}")
            elif isinstance(node, ast.Assert):
                problems.append(f"{relative}:{node.lineno}: assert is gone under -O; raise")
            elif isinstance(node, ast.Global):
                problems.append(f"{relative}:{node.lineno}: global state")
    return problems


def test_banned_primitives() -> None:
    _report(_banned_problems(_sources()))


def test_no_file_called_utils() -> None:
    _report([relative for relative in _sources() if re.search(r"(^|/)(utils?|helpers?|misc|common)(\.py|/)", relative)])


@pytest.mark.parametrize(
    "source",
    ["import pickle", "eval('1')", "torch.load('x')", "subprocess.run('x', shell=True)", "assert x"],
)
def test_the_banned_check_can_fail(source: str) -> None:
    assert _banned_problems({"cli/example.py": (source, ast.parse(source))})


@pytest.mark.parametrize(
    "source", ["import fineinfer.engine.loop", "from fineinfer import model", "from . import chat"]
)
def test_the_import_check_can_fail(source: str) -> None:
    assert _import_problems({"cli/example.py": (source, ast.parse(source))})
