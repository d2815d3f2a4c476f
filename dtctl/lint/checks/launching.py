"""Rule about processes that are started without torchrun: DT066."""

from __future__ import annotations

from collections.abc import Iterator

from dtctl.lint import names
from dtctl.lint.check import CheckContext
from dtctl.lint.model import Problem


def check_death_unnoticed(check: CheckContext) -> Iterator[Problem]:
    """Check rule DT066: death of a rank is not noticed."""
    module = check.module
    starts = module.calls_of("torch.multiprocessing.Process", "multiprocessing.Process")
    if not starts or not check.project.calls(module, names.INIT) or not module.methods.get("join"):
        return
    if "exitcode" in module.text or "sentinel" in module.text or "is_alive" in module.text:
        return
    for start in starts[:1]:
        yield check.problem("DT066", start, "a rank that dies is not noticed: the others wait for it in a collective")


CHECKS = (check_death_unnoticed,)
