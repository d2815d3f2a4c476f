"""A strategic merge patch, as kubectl and kustomize apply it, for the objects of a JobSet. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from dtctl.errors import PlanError

MERGE_KEYS: Final = {
    "containers": "name",
    "dependsOn": "name",
    "env": "name",
    "ephemeralContainers": "name",
    "hostAliases": "ip",
    "imagePullSecrets": "name",
    "initContainers": "name",
    "ports": "containerPort",
    "replicatedJobs": "name",
    "resourceClaims": "name",
    "schedulingGates": "name",
    "topologySpreadConstraints": "topologyKey",
    "volumeDevices": "devicePath",
    "volumeMounts": "mountPath",
    "volumes": "name",
}
"""Lists whose entries are merged by this key; all others are replaced. Source: `patchMergeKey` in k8s.io/api and in
JobSet's types."""
DIRECTIVE: Final = "$patch"
_DIRECTIVES: Final = ("merge", "replace", "delete")


def apply_merge_patch(target: Mapping[str, Any], patch: Mapping[str, Any], *, at: str) -> dict[str, Any]:
    """Return the object with the patch applied; the arguments are not changed.

    Args:
        target: an object, or a part of one.
        patch: what to change: maps are merged, null removes a key, `$patch: replace` and `$patch: delete` are obeyed.
        at: key of the spec that holds the patch, for messages.

    Raises:
        PlanError: the patch does not fit the object.
    """
    if _read_patch_directive(patch, at) == "replace":
        return _without_directive(patch)
    merged = dict(target)
    for key, value in patch.items():
        place = f"{at}.{key}"
        if key == DIRECTIVE:
            continue
        if key.startswith("$"):
            raise PlanError(f"{key} is a directive that dtctl does not know", where=place, hint="there is `$patch`")
        if value is None:
            merged.pop(key, None)
        elif isinstance(value, Mapping):
            below = target.get(key)
            if _read_patch_directive(value, place) == "delete":
                merged.pop(key, None)
            elif below is None or isinstance(below, Mapping):
                merged[key] = apply_merge_patch(below or {}, value, at=place)
            else:
                raise PlanError(f"{key} is not a map in the JobSet, and the patch has one", where=place)
        elif isinstance(value, Sequence) and not isinstance(value, str) and key in MERGE_KEYS:
            merged[key] = _merge_list(target.get(key) or [], value, MERGE_KEYS[key], at=place)
        else:
            merged[key] = value
    return merged


def _merge_list(target: Sequence[Any], patch: Sequence[Any], key: str, *, at: str) -> list[Any]:
    entries: list[Any] = list(target)
    for item in patch:
        if not isinstance(item, Mapping):
            raise PlanError(f"an entry of this list is a map with the key {key}", where=at)
        directive = _read_patch_directive(item, at)
        if directive == "replace" and key not in item:
            return [entry for entry in patch if entry is not item]
        if key not in item:
            raise PlanError(f"entries of this list are identified by {key}, and one entry lacks it", where=at)
        index = next((index for index, entry in enumerate(entries) if entry.get(key) == item[key]), None)
        if directive == "delete":
            entries = [entry for entry in entries if entry.get(key) != item[key]]
        elif index is None:
            entries.append(apply_merge_patch({}, item, at=f"{at}[{item[key]}]"))
        else:
            entries[index] = apply_merge_patch(entries[index], item, at=f"{at}[{item[key]}]")
    return entries


def _read_patch_directive(patch: Mapping[str, Any], at: str) -> str:
    directive = patch.get(DIRECTIVE, "merge")
    if directive not in _DIRECTIVES:
        raise PlanError(
            f"{directive!r} is not a directive of a patch", where=f"{at}.{DIRECTIVE}", hint=", ".join(_DIRECTIVES)
        )
    return str(directive)


def _without_directive(patch: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in patch.items() if key != DIRECTIVE}
