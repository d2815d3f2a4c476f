"""`python -m dtctl` is the command `dtctl`."""

from dtctl.cli.main import main

main()
