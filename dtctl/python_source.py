"""Syntax trees of programs by other authors.

For a program that is nested too deeply, Python's parser raises an error other than SyntaxError, or ends the process
(3.10, which does not count levels). Here every program that cannot be parsed is a SyntaxError.
"""

from __future__ import annotations

import ast
import sys
import threading
import warnings
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")
_DEEP = 60_000
"""Limit of frames for a deeply nested program, such as an elif chain with thousands of branches."""
_STACK = 512 << 20
"""Bytes of stack for a deeply nested program; only the used part takes memory."""
_SHORT = 100_000
"""Number of characters below which a program cannot be too deep for an ordinary stack."""


class NestingTooDeepError(SyntaxError):
    """Error: a program has more levels than Python's parser or its stack allows."""


def parse_python(text: str) -> ast.Module:
    """Return the syntax tree of a program.

    Raises:
        SyntaxError: the program is nested too deeply (NestingTooDeepError), or this version of Python cannot parse it.
    """
    if sys.version_info < (3, 11) and len(text) > _SHORT:
        return run_on_large_stack(lambda: _parse_source_text(text))
    try:
        return _parse_source_text(text)
    except RecursionError:
        return run_on_large_stack(lambda: _parse_source_text(text))


def _parse_source_text(text: str) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            return ast.parse(text)
        except MemoryError:
            raise NestingTooDeepError("is nested deeper than Python's parser allows") from None
        except ValueError as exc:  # the text has null bytes or surrogates
            raise SyntaxError(str(exc)) from exc


def run_on_large_stack(work: Callable[[], Result]) -> Result:
    """Return the result of a function that needs a large stack; it runs in a thread with such a stack.

    Raises:
        NestingTooDeepError: even the large stack is too small, or there is no memory for it.
    """
    results: list[Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as exc:  # noqa: BLE001  # raised again by the thread that waits
            errors.append(exc)

    before, stack = sys.getrecursionlimit(), threading.stack_size(_STACK)
    sys.setrecursionlimit(max(before, _DEEP))
    try:
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    except RuntimeError as exc:
        raise NestingTooDeepError("is nested too deeply for the memory of this machine") from exc
    finally:
        sys.setrecursionlimit(before)
        threading.stack_size(stack)
    if not errors:
        return results[0]
    if isinstance(errors[0], RecursionError | MemoryError):
        raise NestingTooDeepError("is nested too deeply to be analyzed") from None
    raise errors[0]
