"""Python processes that dtctl starts for itself.

`python -m MODULE` puts the working folder before the standard library, and would run an `argparse.py` that lies in a
folder which was only to be looked at. `python -P` does not, and is there from 3.11 on; this does the same for any.
"""

from __future__ import annotations

from typing import Final

_FIRST: Final = "import sys; sys.path[:] = [path for path in sys.path if path]{last}; sys.argv = sys.argv[1:]; "
_THEN: Final = "import runpy; runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"


def module(python: str, name: str, *arguments: str, last: str | None = None) -> list[str]:
    """Return the argv that runs a module of dtctl.

    Args:
        python: program name or path.
        name: of the module.
        arguments: its own.
        last: a folder that modules may come from as well, after all others: that of a job's own code. An empty text is
            the working folder.
    """
    first = _FIRST.format(last="" if last is None else f" + [{last!r}]")
    return [python, "-c", first + _THEN, name, *arguments]
