"""Python processes that dtctl starts for itself.

`python -m MODULE` puts the working folder before the standard library, and would run an `argparse.py` from a folder
that dtctl only reads. `python -P` does not, but exists only from 3.11 on; this module does the same for every version.
"""

from __future__ import annotations

from typing import Final

_FIRST: Final = "import sys; sys.path[:] = [path for path in sys.path if path]{last}; sys.argv = sys.argv[1:]; "
_THEN: Final = "import runpy; runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"


def build_module_argv(python: str, name: str, *arguments: str, last: str | None = None) -> list[str]:
    """Return the argv that runs a module of dtctl.

    Args:
        python: program name or path.
        name: name of the module.
        arguments: arguments of the module.
        last: folder of a job's own code, which becomes the last entry of the import path; None: no such entry. An empty
            text is the working folder.
    """
    first = _FIRST.format(last="" if last is None else f" + [{last!r}]")
    return [python, "-c", first + _THEN, name, *arguments]
