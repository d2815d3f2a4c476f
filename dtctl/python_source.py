"""Syntax trees of programs by other authors.

Python's parser refuses a program that is nested too deeply with an error that is no SyntaxError, or ends the process
(3.10, which counts no levels). Here every program that cannot be read is a SyntaxError.
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
"""Frames allowed for a program that is nested deeper than usual: an elif chain of thousands is one."""
_STACK = 512 << 20
"""Bytes of stack for it; only what is used is taken."""
_SHORT = 100_000
"""Characters that cannot be nested deeper than an ordinary stack allows."""


class NestedTooDeeply(SyntaxError):
    """A program has more levels than Python's parser or its stack takes."""


def parse_python(text: str) -> ast.Module:
    """Return the syntax tree of a program.

    Raises:
        SyntaxError: the program is nested too deeply (NestedTooDeeply), or is not one of this version of Python.
    """
    if sys.version_info < (3, 11) and len(text) > _SHORT:
        return run_on_large_stack(lambda: _parse(text))
    try:
        return _parse(text)
    except RecursionError:
        return run_on_large_stack(lambda: _parse(text))


def _parse(text: str) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            return ast.parse(text)
        except MemoryError:
            raise NestedTooDeeply("is nested deeper than Python's parser allows") from None
        except ValueError as exc:  # null bytes, surrogates
            raise SyntaxError(str(exc)) from exc


def run_on_large_stack(work: Callable[[], Result]) -> Result:
    """Return the result of a function that needs more stack than usual: it runs in a thread that has it.

    Raises:
        NestedTooDeeply: even that stack is too small, or there is no memory for it.
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
        raise NestedTooDeeply("is nested too deeply for the memory of this machine") from exc
    finally:
        sys.setrecursionlimit(before)
        threading.stack_size(stack)
    if not errors:
        return results[0]
    if isinstance(errors[0], RecursionError | MemoryError):
        raise NestedTooDeeply("is nested too deeply to be analyzed") from None
    raise errors[0]
