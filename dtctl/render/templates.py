"""Jinja with settings that prevent accidental harm: strict, sandboxed, and quoting by default.

Every `{{ value }}` becomes one shell word that means exactly that value. A template that needs something else uses a
filter, each of which is safe in its place:

    | argv        a sequence as a command, one option a line
    | program     the path of a program or its folder, in which `~/` is the home folder there
    | comment     text for a comment: made one line
    | ranks       a range of ranks: `0-3`
    | yaml        one value of a YAML file
    | verbatim    shell text as the user wrote it (setup lines), or a name that was checked before
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from jinja2 import (
    BaseLoader,
    Environment,
    StrictUndefined,
    Template,
    TemplateError,
    TemplateNotFound,
    TemplateSyntaxError,
    Undefined,
)
from jinja2.loaders import split_template_path
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dtctl import folders as files
from dtctl import shell
from dtctl.errors import RenderError

MAX_CHARACTERS = 4 << 20
"""Most bytes of a template, and most characters of its result."""
_YAML_WORDS = frozenset({"null", "true", "false", "yes", "no", "on", "off", "y", "n"})


class _ContainedLoader(BaseLoader):
    """Loader of templates from several folders, in order; it refuses links that lead out of a folder."""

    def __init__(self, places: Sequence[str]) -> None:
        self._places = places

    def get_source(self, environment: Environment, template: str) -> tuple[str, str, Callable[[], bool]]:  # noqa: ARG002
        """See BaseLoader."""
        for folder in self._places:
            path = Path(folder, *split_template_path(template))
            try:
                if not path.is_symlink() and not path.exists():
                    continue
                if Path(folder).resolve() not in path.resolve().parents:
                    raise RenderError(
                        "the template is a link to a file elsewhere, which would be sent", where=str(path)
                    )
                mtime = path.stat().st_mtime_ns
                text = files.read_regular(str(path), MAX_CHARACTERS).decode("utf-8")
            except (OSError, UnicodeDecodeError) as exc:
                raise RenderError(f"the template cannot be read: {exc}", where=str(path)) from exc
            return text, str(path), functools.partial(_is_still, path, mtime)
        raise TemplateNotFound(template)


def _is_still(path: Path, mtime: int) -> bool:
    try:
        return path.stat().st_mtime_ns == mtime
    except OSError:
        return False


def _render_limited_text(template: Template, values: Mapping[str, object]) -> str:
    """Return a template's text, of limited length."""
    chunks, size = [], 0
    for piece in template.generate(values):
        chunks.append(piece)
        size += len(piece)
        if size > MAX_CHARACTERS:
            raise RenderError(f"a script has more than {MAX_CHARACTERS:,} characters", where=template.filename)
    return "".join(chunks)


class VerbatimText(str):
    """Text that a script contains unchanged."""

    __slots__ = ()


def _quote_printed_value(value: object) -> str:
    if isinstance(value, VerbatimText):
        return value
    if isinstance(value, str):
        return shell.quote_word(value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return shell.quote_word(str(value))
    if isinstance(value, Undefined):
        str(value)  # raises the error that names the undefined variable
    raise RenderError(
        f"a template printed {value!r}, which is neither text nor a number",
        hint="print one of its fields, or a sequence with `| argv`",
    )


def _format_comment(value: object) -> VerbatimText:
    return VerbatimText(" ".join(str(value).split()))


def _format_argv(words: Sequence[str]) -> VerbatimText:
    if not words:
        raise RenderError("a template printed an empty command")
    return VerbatimText(" \\\n  ".join(shell.quote_words(words)))


def _format_program(path: str) -> VerbatimText:
    return VerbatimText(shell.quote_program(path))


def _format_yaml_word(value: str) -> VerbatimText:
    plain = re.fullmatch(r"[A-Za-z][\w-]*", value, re.ASCII) and value.lower() not in _YAML_WORDS
    return VerbatimText(value if plain else json.dumps(value, ensure_ascii=False))


def _format_rank_range(ranks: range) -> VerbatimText:
    return VerbatimText(str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}")


@functools.lru_cache(maxsize=4)
def _build_jinja_environment(folders: tuple[str, ...]) -> ImmutableSandboxedEnvironment:
    """Return Jinja's environment for these folders; cached, since compiling takes ten times as long as rendering."""
    environment = ImmutableSandboxedEnvironment(
        loader=_ContainedLoader(folders),
        undefined=StrictUndefined,
        finalize=_quote_printed_value,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # the templates are shell scripts and not HTML; `_quote_printed_value` quotes
    )
    environment.filters.update(
        argv=_format_argv,
        program=_format_program,
        comment=_format_comment,
        ranks=_format_rank_range,
        verbatim=VerbatimText,
        yaml=_format_yaml_word,
    )
    return environment


def render_in_process(name: str, values: Mapping[str, object], *, folders: Sequence[Path]) -> str:
    """Render as `dtctl.render.render_template` does, but in this process, without limits of memory and time."""
    try:
        return _render_limited_text(_build_jinja_environment(tuple(map(str, folders))).get_template(name), values)
    except TemplateNotFound as exc:
        listed = ", ".join(str(folder) for folder in folders)
        raise RenderError(f"there is no template {exc.name}", where=listed) from exc
    except TemplateSyntaxError as exc:
        raise RenderError(str(exc.message), where=f"{exc.filename or name}:{exc.lineno}") from exc
    except TemplateError as exc:
        raise RenderError(str(exc.message), where=_find_error_place(exc, name)) from exc
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as exc:
        raise RenderError(f"{type(exc).__name__}: {exc}", where=_find_error_place(exc, name)) from exc


def _find_error_place(error: BaseException, name: str) -> str:
    """Return file and line of the template in which an error was raised, from its traceback."""
    place = name
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename.endswith(".j2"):
            place = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
        trace = trace.tb_next
    return place
