"""Entry point of the command `dtctl` and of `python -m dtctl`."""

from dtctl.interrupt import leave_when_interrupted

leave_when_interrupted()

import os  # noqa: E402
import sys  # noqa: E402

# Python puts the working folder first on its path, though it may have modules of the same names; see children.py.
if sys.path and sys.path[0] == os.getcwd() != os.path.dirname(os.path.dirname(os.path.abspath(__file__))):  # noqa: PTH100, PTH109, PTH120
    del sys.path[0]


def main() -> None:
    """Run the command line and end the process."""
    if sys.getfilesystemencoding() != "utf-8":  # an old locale, in which most file names cannot be represented
        from dtctl import children

        python, *rest = children.build_module_argv(sys.executable, "dtctl", *sys.argv[1:])
        os.execv(python, [python, "-X", "utf8", *rest])
    from dtctl.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
