"""What a function takes from outside of the program while it runs: the clock, chance of the system, the environment.

Of a value by the clock it matters where it goes. A time that is printed or given to a meter leaves the training alone;
one that is returned, that decides a branch, or that seeds a generator makes it another one each time.
"""

from __future__ import annotations

import ast
import re
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from dtctl.runtime.program.idle_names import leaves_nothing, syntax_tree

CLOCKS: Final = frozenset(("time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns"))
DATES: Final = frozenset(("now", "utcnow", "today"))
CHANCE: Final = frozenset(
    ("urandom", "getrandom", "uuid1", "uuid4", "token_bytes", "token_hex", "randbits", "SystemRandom")
)
"""Of the operating system, which nobody can repeat."""
READING: Final = frozenset(("read_text", "read_bytes", "read", "readline", "readlines", "open"))
"""Of files."""
SEEDING: Final = frozenset(("manual_seed", "seed", "default_rng", "Random", "RandomState", "PCG64", "SeedSequence"))
_VARIABLE: Final = re.compile(r"[A-Z][A-Z0-9_]+")
_OF_A_LAUNCH: Final = re.compile(
    r"(DTCTL|SLURM|TORCHELASTIC|OMPI|PMI|XDG|SSH|KUBERNETES|CUDA_VISIBLE)_?.*|(LOCAL_|GROUP_|ROLE_|NODE_)?(RANK|WORLD_SIZE)"
    r"|MASTER_(ADDR|PORT)|HOST(NAME)?|HOME|PATH|PWD|OLDPWD|USER|LOGNAME|TMPDIR|TEMP|TERM|LANG|SHELL|DISPLAY"
)
"""Variables that may be others on each node and in each attempt."""


def variables(names: Iterable[str]) -> list[str]:
    """Environment variables that code reads, by the names and texts in it; none if it does not look there."""
    names_read = set(names)
    if names_read.isdisjoint(("environ", "getenv")):
        return []
    return sorted(name for name in names_read if _VARIABLE.fullmatch(name) and not _OF_A_LAUNCH.fullmatch(name))


def unrepeatable(function: types.FunctionType, *, files: bool) -> str | None:
    """What from outside has a say in what a function does: `time.time(), which is another each time`. None: nothing.

    Args:
        function: one that takes part in a training.
        files: whether those that it reads are of interest; not of a data set, which does little else.
    """
    named = set(function.__code__.co_names)
    if named.isdisjoint(CLOCKS | DATES | CHANCE | READING):
        return None
    node = syntax_tree(function)
    if node is None:
        return None
    body: list[ast.AST] = list(node.body) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else [node.body]
    for calls, words in ((_is_by_chance, "is another each time"), (_reads, "nobody compares"))[: 2 if files else 1]:
        tainted = _tainted(body, calls)
        for part in body:
            for place in _places_that_count(part) if isinstance(part, ast.stmt) else [part]:
                source = _source(place, tainted, calls)
                if source:
                    return f"{source}, which {words}"
    return None


def _places_that_count(part: ast.stmt) -> Iterator[ast.AST]:
    """Expressions whose value is a result, chooses a way, or seeds."""
    for node in ast.walk(part):
        if isinstance(node, ast.Return | ast.Yield) and node.value is not None:
            yield node.value
        elif (isinstance(node, ast.If | ast.While) and not leaves_nothing(node)) or isinstance(node, ast.IfExp):
            yield node.test
        elif isinstance(node, ast.Call) and _last_name(node.func) in SEEDING:
            yield from node.args


def _tainted(body: list[ast.AST], calls: Callable[[ast.expr], bool]) -> dict[str, str]:
    """Local variables that hold something which such calls return -> what."""
    found: dict[str, str] = {}
    assigned = [node for part in body for node in ast.walk(part) if isinstance(node, ast.Assign | ast.AugAssign)]
    for _ in range(3):  # through some variables, in any order
        for node in assigned:
            source = _source(node.value, found, calls)
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets if source else ():
                names = target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
                found |= {name.id: source for name in names if isinstance(name, ast.Name) and source}
    return found


def _source(part: ast.AST, tainted: dict[str, str], calls: Callable[[ast.expr], bool]) -> str | None:
    for node in ast.walk(part):
        if isinstance(node, ast.Name) and node.id in tainted:
            return tainted[node.id]
        if isinstance(node, ast.Call) and calls(node.func):
            return f"{ast.unparse(node.func)}()"
    return None


def _reads(called: ast.expr) -> bool:
    return _last_name(called) in READING


def _is_by_chance(called: ast.expr) -> bool:
    name, owner = _last_name(called), _last_name(called.value) if isinstance(called, ast.Attribute) else None
    if name in DATES:
        return owner in ("datetime", "date")
    if name in CLOCKS:
        return owner in ("time", None) and (owner is not None or name != "time")
    return name in CHANCE


def _last_name(part: ast.expr) -> str | None:
    if isinstance(part, ast.Attribute):
        return part.attr
    return part.id if isinstance(part, ast.Name) else None
