"""Finds the members of a group that keep it from working, by trying parts of the group. Pure.

`works` is asked of groups of two and more; a group of one always works. A bad member spoils every group that it is in,
a bad pair only those that hold both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Works = Callable[[Sequence[str]], bool]


def smallest_failing(members: Sequence[str], works: Works) -> list[str]:
    """Return a minimal failing part of `members`, which do not work together: every smaller part of it works.

    Halves are left out first, then quarters, and so on: for one bad member among N, about 2 log2 N groups are tried.
    """
    left = list(members)
    size = len(left) // 2
    while size >= 1:
        for start in range(0, len(left), size):
            rest = left[:start] + left[start + size :]
            if len(rest) > 1 and not works(rest):
                left = rest
                break
        else:
            size //= 2
            continue
        size = min(size, len(left) // 2)
    return left


def bad_ones(members: Sequence[str], works: Works) -> list[str]:
    """Return the members to act on: of two that fail together the one that fails with a third as well; else both.

    Args:
        members: a group that does not work.
        works: whether the members of a group of at least two work together.
    """
    failing = smallest_failing(members, works)
    others = [member for member in members if member not in failing]
    if len(failing) != 2 or not others:
        return failing
    bad = [member for member in failing if not works([others[0], member])]
    if len(bad) == 2 and len(others) > 1 and all(not works([others[1], member]) for member in bad):
        return bad  # both fail with all others
    if len(bad) == 2:  # the third is bad itself
        return [others[0]]
    return bad or failing
