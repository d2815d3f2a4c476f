"""Patches, compared with what kubectl itself makes of them where it is there."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import Any

import pytest
import yaml

from dtctl.errors import PlanError
from dtctl.kubernetes.patch import apply_merge_patch

POD = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"name": "p", "labels": {"a": "1"}},
    "spec": {
        "restartPolicy": "Never",
        "containers": [
            {"name": "a", "image": "i", "env": [{"name": "A", "value": "1"}], "command": ["x"]},
            {"name": "b", "image": "j"},
        ],
        "volumes": [{"name": "v", "emptyDir": {}}],
        "tolerations": [{"key": "k"}],
        "imagePullSecrets": [{"name": "s"}],
    },
}
PATCHES = {
    "a map is merged, null removes": {"metadata": {"labels": {"a": None, "b": "2"}}},
    "an entry is known by its name": {
        "spec": {"containers": [{"name": "b", "env": [{"name": "B", "value": "1"}]}, {"name": "c", "image": "k"}]}
    },
    "an entry is removed": {"spec": {"containers": [{"name": "a", "$patch": "delete"}]}},
    "a list of maps without a key is replaced": {"spec": {"tolerations": [{"key": "other"}]}},
    "a list of texts is replaced": {"spec": {"containers": [{"name": "a", "command": ["y", "z"]}]}},
    "a list is replaced": {"spec": {"containers": [{"$patch": "replace"}, {"name": "z", "image": "z"}]}},
    "a map is replaced": {"metadata": {"labels": {"$patch": "replace", "z": "1"}}},
    "a variable is changed": {"spec": {"containers": [{"name": "a", "env": [{"name": "A", "value": "2"}]}]}},
}


def by_name(pod: dict[str, Any]) -> dict[str, Any]:
    """kubectl puts new entries of a list first; their order means nothing."""
    pod["spec"]["containers"].sort(key=lambda container: container["name"])
    pod["spec"].setdefault("tolerations", [])
    return pod


@pytest.mark.parametrize("name", PATCHES)
def test_it_is_what_kubectl_makes_of_it(name: str) -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("there is no kubectl")
    argv = ["kubectl", "patch", "--local", "--filename=-", "--type=strategic", "--output=json"]
    done = subprocess.run(
        [*argv, f"--patch={json.dumps(PATCHES[name])}"],
        input=json.dumps(POD),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert by_name(apply_merge_patch(POD, PATCHES[name], at="extra")) == by_name(yaml.safe_load(done.stdout))


def test_the_object_stays_as_it_is() -> None:
    before = json.dumps(POD)
    for patch in PATCHES.values():
        apply_merge_patch(POD, patch, at="extra")
    assert json.dumps(POD) == before


@pytest.mark.parametrize(
    ("patch", "where"),
    [
        ({"metadata": {"name": {"a": 1}}}, "extra.metadata.name"),
        ({"spec": {"containers": ["a"]}}, "extra.spec.containers"),
        ({"spec": {"$patch": "remove"}}, "extra.spec.$patch"),
        ({"spec": {"$retainKeys": ["a"]}}, "extra.spec.$retainKeys"),
    ],
)
def test_what_does_not_fit(patch: dict[str, Any], where: str) -> None:
    with pytest.raises(PlanError) as raised:
        apply_merge_patch(POD, patch, at="extra")
    assert raised.value.where == where
