"""`python -m dtctl` is the command `dtctl`."""

import os
import sys

# Python puts the working folder first, whose modules are not ours; see children.py.
if sys.path and sys.path[0] == os.getcwd() != os.path.dirname(os.path.dirname(os.path.abspath(__file__))):  # noqa: PTH100, PTH109, PTH120
    del sys.path[0]

from dtctl.cli.main import main

main()
