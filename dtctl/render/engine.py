"""Jinja, set up so that a template cannot do harm by accident: strict, sandboxed, and quoting by default.

Every `{{ value }}` becomes one shell word that means exactly that value. A template that needs something else says so
with a filter, each of which is safe in its place:

    | argv        a sequence as a command, one option a line
    | comment     text for a comment: on one line, whatever it holds
    | ranks       a range of ranks: `0-3`
    | yaml        one value of a YAML file
    | verbatim    shell text as the user wrote it (setup lines), or a name that was checked before
"""

from __future__ import annotations

import ctypes
import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import (
    Environment,
    FileSystemLoader,
    StrictUndefined,
    Template,
    TemplateError,
    TemplateNotFound,
    TemplateSyntaxError,
    Undefined,
)
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dtctl import shell
from dtctl.errors import RenderError

MAX_CHARACTERS, MAX_EXPONENT, LIMIT_S = 4 << 20, 64, 10.0
"""Of a template, and of what it makes."""
_YAML_WORDS = frozenset({"null", "true", "false", "yes", "no", "on", "off", "y", "n"})


class _Inside(FileSystemLoader):
    """Templates of some folders, of which none is a link that leads out of its folder."""

    def get_source(self, environment: Environment, template: str) -> tuple[str, str, Callable[[], bool]]:
        """See FileSystemLoader."""
        found = super().get_source(environment, template)
        path = Path(found[1]).resolve()
        if not any(Path(folder).resolve() in path.parents for folder in self.searchpath):
            raise RenderError("the template is a link to a file elsewhere, which would be sent", where=found[1])
        if len(found[0]) > MAX_CHARACTERS:
            raise RenderError(f"the template has more than {MAX_CHARACTERS:,} characters", where=found[1])
        return found


class _Late(BaseException):
    """Raised in a thread whose template takes too long."""


class _Limited(ImmutableSandboxedEnvironment):
    """As its base, which limits `range`; and nothing is multiplied to more than a script can be."""

    intercepted_binops = frozenset(["*", "**", "%"])

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """See SandboxedEnvironment."""
        pair = (left, right)
        if operator == "%" and isinstance(left, str):
            raise SecurityError("texts are not formatted with % here")
        if operator != "%" and not all(isinstance(one, int | float) and abs(one) < 1 << 64 for one in pair):
            raise SecurityError(f"only numbers are combined with {operator} here")
        if operator == "**" and abs(right) > MAX_EXPONENT:
            raise SecurityError(f"exponents are {MAX_EXPONENT} at most")
        return super().call_binop(context, operator, left, right)


def _poured(template: Template, values: Mapping[str, object]) -> str:
    """A template's text, of limited length and in limited time."""
    thread, over = ctypes.c_ulong(threading.get_ident()), threading.Event()

    def end() -> None:
        if not over.is_set():
            ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(_Late))

    clock = threading.Timer(LIMIT_S, end)
    clock.daemon = True
    clock.start()
    found, size = [], 0
    try:
        for piece in template.generate(values):
            found.append(piece)
            size += len(piece)
            if size > MAX_CHARACTERS:
                raise RenderError(f"a script has more than {MAX_CHARACTERS:,} characters", where=template.filename)
    except _Late:
        raise RenderError(f"the template takes longer than {LIMIT_S:g} s", where=template.filename) from None
    finally:
        over.set()
        clock.cancel()
    return "".join(found)


class Verbatim(str):
    """Text that stands in a script as it is."""

    __slots__ = ()


def _finalize(value: object) -> str:
    if isinstance(value, Verbatim):
        return value
    if isinstance(value, str):
        return shell.quote(value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return shell.quote(str(value))
    if isinstance(value, Undefined):
        str(value)  # raises the error that names it
    raise RenderError(
        f"a template printed {value!r}, which is neither text nor a number",
        hint="print one of its fields, or a sequence with `| argv`",
    )


def _comment(value: object) -> Verbatim:
    return Verbatim(" ".join(str(value).split()))


def _argv(words: Sequence[str]) -> Verbatim:
    if not words:
        raise RenderError("a template printed an empty command")
    return Verbatim(" \\\n  ".join(shell.quote(word) for word in words))


def _yaml(value: str) -> Verbatim:
    plain = re.fullmatch(r"[A-Za-z][\w-]*", value, re.ASCII) and value.lower() not in _YAML_WORDS
    return Verbatim(value if plain else json.dumps(value, ensure_ascii=False))


def _ranks(ranks: range) -> Verbatim:
    return Verbatim(str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}")


@lru_cache(maxsize=4)
def _environment(folders: tuple[str, ...]) -> ImmutableSandboxedEnvironment:
    """Jinja over these folders; kept, because compiling a template takes ten times as long as rendering it."""
    environment = _Limited(
        loader=_Inside(list(folders)),
        undefined=StrictUndefined,
        finalize=_finalize,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # shell text, not HTML: `_finalize` quotes
    )
    environment.filters.update(argv=_argv, comment=_comment, ranks=_ranks, verbatim=Verbatim, yaml=_yaml)
    return environment


def render(name: str, values: Mapping[str, object], *, folders: Sequence[Path]) -> str:
    """The text of template `name`, taken from the first folder that has it.

    Args:
        name: file name of the template, such as `node.sh.j2`.
        values: what the template may use; a name that is not here is an error.
        folders: where to look, the user's before dtctl's.

    Raises:
        RenderError: the template is missing, is not valid, or uses a name that does not exist.
    """
    try:
        return _poured(_environment(tuple(map(str, folders))).get_template(name), values)
    except TemplateNotFound as exc:
        listed = ", ".join(str(folder) for folder in folders)
        raise RenderError(f"there is no template {exc.name}", where=listed) from exc
    except TemplateSyntaxError as exc:
        raise RenderError(str(exc.message), where=f"{exc.filename or name}:{exc.lineno}") from exc
    except TemplateError as exc:
        raise RenderError(str(exc.message), where=_place(exc, name)) from exc
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as exc:
        raise RenderError(f"{type(exc).__name__}: {exc}", where=_place(exc, name)) from exc


def _place(error: BaseException, name: str) -> str:
    """File and line of the template that an error was raised in, from its traceback."""
    place = name
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename.endswith(".j2"):
            place = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
        trace = trace.tb_next
    return place
