"""Search for the members that make a group fail, by tests of parts of the group. Pure.

`works` is called with groups of two or more; a group of one always works. A bad member makes every group fail that has
it, a bad pair only groups that have both members.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Works = Callable[[Sequence[str]], bool]


def find_smallest_failing(members: Sequence[str], works: Works) -> list[str]:
    """Return a minimal part of `members` that fails: every smaller part of it works.

    Halves are removed first, then quarters, and so on: for one bad member among N, about 2 log2 N groups are tested.
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


def find_bad_members(members: Sequence[str], works: Works) -> list[str]:
    """Return the bad members: if a pair fails, the one that also fails with a third member, or else both.

    Args:
        members: a group that does not work.
        works: function that returns whether a group of at least two members works.
    """
    failing = find_smallest_failing(members, works)
    others = [member for member in members if member not in failing]
    if len(failing) != 2 or not others:
        return failing
    bad = [member for member in failing if not works([others[0], member])]
    if len(bad) == 2 and len(others) > 1 and all(not works([others[1], member]) for member in bad):
        return bad  # each of the two also fails with two other members
    if len(bad) == 2:  # the third member itself is bad
        return [others[0]]
    return bad or failing
