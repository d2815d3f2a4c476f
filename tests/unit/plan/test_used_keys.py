"""Each key of a spec changes what a launch sends or does, on each back end, or is named as one without effect."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from types import UnionType
from typing import Any, Final, Union, get_args, get_origin, get_type_hints

import pytest
import yaml

from dtctl.errors import DtctlError
from dtctl.launch.cluster import build_first_plan, resolve_cluster
from dtctl.launch.files.data import find_data
from dtctl.launch.files.environment import describe_environment
from dtctl.launch.files.tree import scan_push_tree
from dtctl.launch.job_builder import collect_job_settings
from dtctl.plan.warnings import find_unused_keys
from dtctl.render import render_node_scripts
from dtctl.slurm import batch
from dtctl.slurm.launcher_files import make_job_file
from dtctl.slurm.submit import locate_folder
from dtctl.spec.load import parse_spec
from dtctl.spec.model import NodeEntry, Spec
from dtctl.spec.nodes import resolve_nodes, resolve_spares
from dtctl.spec.section import Section

SLURM: Final = {"transport": "slurm", "login": "login1", "nodes": [{"name": "a"}, {"name": "b"}], "slots": 2}
BACK_ENDS: Final[Mapping[str, Mapping[str, Any]]] = {
    "local": {"cluster": {"nodes": [{"name": "a"}], "slots": 2}},
    "ssh": {"cluster": {"transport": "ssh", "nodes": [{"name": "a"}, {"name": "b"}], "slots": 2}},
    "slurm": {"cluster": SLURM, "slurm": {"partition": "main"}},
    "slurm, no login": {"cluster": {**SLURM, "login": None}, "slurm": {"partition": "main"}},
    "slurm, plain": {"cluster": SLURM, "slurm": {"launcher": "none"}},
}
JOB: Final = {"script": "train.py", "kind": "direct"}
VALUES: Final[Mapping[str, Any]] = {
    "cluster.transport": None,
    "cluster.nodes": ["c", "d", "e"],  # refused on this machine
    "cluster.hostfile": None,
    "cluster.slots": 3,
    "cluster.user": "someone",
    "cluster.port": 2222,
    "cluster.identity_file": "key",
    "cluster.known_hosts": "hosts",
    "cluster.ssh_config": "config",
    "cluster.ssh": "paramiko",
    "cluster.python": "/opt/python",
    "cluster.workdir": "/data/dtctl",
    "cluster.connect_timeout_s": 3.0,
    "cluster.link_timeout_s": 7.0,
    "cluster.login": "login2",
    "cluster.spares": ["s"],
    "cluster.min_nodes": 1,
    "cluster.return_s": 5.0,
    "cluster.nodes.name": "z",
    "cluster.nodes.address": "z.example.org",
    "cluster.nodes.slots": 4,
    "cluster.nodes.env": {"HERE": "1"},
    "cluster.nodes.python": "/opt/other",
    "cluster.nodes.port": 2223,
    "cluster.nodes.user": "other",
    "cluster.nodes.workdir": "/data/other",
    "cluster.nodes.rack": "r1",
    "cluster.nodes.gres": "gpu:2",
    "job.name": "other",
    "job.script": "other.py",
    "job.module": {"script": None, "module": "package"},
    "job.command": {"script": None, "kind": None, "command": "echo one"},
    "job.shell": {"script": None, "kind": None, "command": "echo", "shell": True},
    "job.args": ["--lr"],
    "job.add_args": ["local_rank"],
    "job.deepspeed": {"kind": "deepspeed", "deepspeed": {"steps_per_print": 7}},
    "job.env": {"A": "1"},
    "job.env_from": ["FROM_*"],
    "job.secrets": ["KEY"],
    "job.files.push": False,
    "job.files.root": "folder",
    "job.files.include": [".env"],
    "job.files.exclude": ["other.py"],
    "job.data": [{"from": "node:/mnt/x", "to": "data"}],
    "job.environment": {"requirements": "requirements.txt"},
    "job.shared": ["checkpoints/"],
    "job.progress": None,
    "job.outputs": ["out/"],
    "job.log_mib": 5,
    "job.max_restarts": 2,
    "job.setup": ["true"],
    "job.kind": "torchrun",
    "job.preload": ["json"],
    "job.hang_s": 9,
    "job.hang_start_s": 99,
    "job.hang_output_s": 99,
    "job.recovery": {"recovery": "restart", "max_restarts": 2},
    "job.heal_s": 9,
    "job.time_s": 60,
    "job.grace_s": 3.0,
    "network.interface": "eth9",
    "network.profile": "efa",
    "network.rendezvous_port": 12345,
    "network.rendezvous_address": "10.9.8.7",
    "slurm.partition": "other",
    "slurm.account": "lab",
    "slurm.time": "1:00:00",
    "slurm.qos": "high",
    "slurm.gres": "gpu:2",
    "slurm.cpus_per_task": 3,
    "slurm.mem": "3G",
    "slurm.exclusive": True,
    "slurm.nodelist": "a,b",
    "slurm.container": {"image": "image"},
    "slurm.array": "0-3",
    "slurm.launcher": None,
    "slurm.requeue": False,
    "slurm.requeues": 3,
    "slurm.warn_s": 33,
    "slurm.srun": ["--exact"],
    "slurm.extra": {"constraint": "h100"},
}
"""Key -> another value; a mapping for a key of `job` that needs others beside it. None: shown by what a back end is."""
CONTAINER: Final = {"image": "i2", "runtime": "apptainer", "mounts": ["/a:/a"], "python": "p", "options": ["--nv"]}
ELSEWHERE: Final[Mapping[str, str]] = {
    "train": "all of it is a file of the run, which the workers read; the keys are those of dtctl.train.config",
    "metrics": "read by the process beside the launcher that follows the run (tests/integration/test_metrics*.py)",
    "network.profile": "read by `dtctl nccl env` and the doctor, which say what to put into `job.env`",
    "job.progress": "read by status, watch and the launch's own line, on this machine",
    "cluster.transport": "what a back end is",
    "slurm.launcher": "what a back end is",
    "cluster.hostfile": "the names of nodes, as `nodes`",
}
"""Sections and keys that no launch sends, and why that is right."""


def walk(section: type[Section], above: str = "") -> Iterator[str]:
    """Every key below a section, with those above it; a section that is closed counts as one."""
    hints = get_type_hints(section)
    for name in section.model_fields:
        key = f"{above}{name}"
        inner = None if key in CLOSED else section_in(hints[name])
        if inner is None or inner is NodeEntry:
            yield key
        if inner is not None:
            yield from walk(inner, f"{key}.")


def section_in(hint: Any) -> type[Section] | None:
    """The section among the types of a key."""
    if isinstance(hint, type) and get_origin(hint) is None and issubclass(hint, Section):
        return hint
    if get_origin(hint) in (Union, UnionType, tuple) or hasattr(hint, "__metadata__"):
        return next((found for each in get_args(hint) if (found := section_in(each)) is not None), None)
    return None


CLOSED: Final = ("train", "metrics", "kubernetes", "slurm.container", "job.data", "job.shared", "job.environment")
KEYS: Final = [key for key in walk(Spec) if key != "base_dir"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "requirements.txt").write_text("torch\n")
    for name in ("train.py", "other.py", "package/__init__.py", "package/__main__.py", ".env", "folder/train.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("import dtctl.runtime\n")
    monkeypatch.setenv("FROM_HERE", "1")
    monkeypatch.setenv("KEY", "1")
    return tmp_path


def changed(back_end: str, key: str) -> dict[str, Any]:
    """The document of a spec with another value for a key."""
    document = json.loads(json.dumps(BACK_ENDS[back_end])) | {"job": {**JOB}}
    *above, name = key.split(".")
    value: Any = VALUES[key]
    if key.startswith("cluster.nodes."):
        document["cluster"]["nodes"][-1][name] = value
        return document
    section = document
    for part in above:
        section = section.setdefault(part, {})
    section.update(value if key.startswith("job.") and isinstance(value, dict) and name in value else {name: value})
    document["job"] = {name: value for name, value in document["job"].items() if value is not None}
    return document


def spec_of(document: Mapping[str, Any], folder: Path) -> Spec:
    return parse_spec(yaml.safe_dump({**document}), source="dtctl.yaml", base_dir=folder)


def sent(spec: Spec) -> dict[str, Any]:
    """All that a launch sends, or acts by: what a dry run shows, and settings of the launcher."""
    cluster = resolve_cluster(spec, start=False)
    plan = replace(build_first_plan(spec, cluster, run="run-1"), notes=())
    files = spec.job.files
    tree = (
        scan_push_tree(spec.base_dir / files.root, include=files.include, exclude=files.exclude) if files.push else None
    )
    made: dict[str, Any] = {
        "environment": describe_environment(spec),
        "outputs": spec.job.outputs,
        "data": [asdict(item) for item in find_data(spec)],
        "files": None if tree is None else [str(entry.path) for entry in tree.files],
    }
    is_local = spec.cluster.transport == "local"
    reached = [cluster.targets[node.name] for node in (*resolve_nodes(spec), *resolve_spares(spec))]
    if spec.cluster.transport == "slurm":
        made["login"] = [getattr(spec.cluster, name) for name in LOGIN if spec.cluster.login is not None]
        run = locate_folder(spec, "run-1")
        text_of = batch.render_batch_file(
            spec, plan, chdir=run / "work", output=run / "job.log", folder=run, followed=True
        )
        made["batch"] = [line for line in text_of.splitlines() if not line.startswith("# ")]
        if not spec.is_plain:
            file = make_job_file(spec, "run-1", code="", snapshots="", is_followed=True)
            of_nodes = [replace(node, name="", address="", workdir="") for node in file.template.nodes]
            template = replace(file.template, nodes=tuple(of_nodes), notes=(), spec_digest="")
            made["job"] = asdict(replace(file, started=0.0, template=template))
    else:
        made["plan"] = asdict(replace(plan, nodes=tuple(replace(node, gres=None) for node in plan.nodes)))
        made["scripts"] = render_node_scripts(plan, base_dir=spec.base_dir)
        settings = collect_job_settings(spec, nodes=len(plan.nodes), has_spares=bool(cluster.spares))
        made["settings"] = {key: value for key, value in settings.items() if not (is_local and key in OF_LOST_NODES)}
    if spec.cluster.transport == "ssh":
        made["reached"] = [*map(str, reached), spec.cluster.ssh]
    # Digests of the spec and of its plan, and the mark that is made of one, are others with every key.
    text = re.sub(r"\b(spec |TASK_|spec_digest\": \")[0-9a-f]{12,}", r"\1DIGEST", json.dumps(made, default=str))
    return json.loads(text)  # type: ignore[no-any-return]


OF_LOST_NODES: Final = ("return_s", "min_nodes")
"""Settings that nothing reads where there is one node."""
LOGIN: Final = ("login", "user", "port", "identity_file", "known_hosts", "ssh_config", "ssh", "connect_timeout_s")


def test_every_key_has_another_value_here() -> None:
    assert {key for key in KEYS if not any(key == each or key.startswith(f"{each}.") for each in ELSEWHERE)} == {
        key for key in VALUES if key not in ELSEWHERE
    } | {"kubernetes"}


@pytest.mark.parametrize("back_end", BACK_ENDS)
def test_each_key_is_obeyed_or_named(folder: Path, back_end: str) -> None:
    base = spec_of({**BACK_ENDS[back_end], "job": JOB}, folder)
    before, wrong = sent(base), {}
    assert sent(spec_of({**BACK_ENDS[back_end], "job": {**JOB, "hang_s": "auto"}}, folder)) == before, (
        "another digest alone"
    )
    for key in VALUES:
        if key in ELSEWHERE:
            continue
        try:
            spec = spec_of(changed(back_end, key), folder)
            after = sent(spec)
        except DtctlError:
            continue  # it is refused, with the key's name or with what is to be changed
        named = [each for each in find_unused_keys(spec) if each not in find_unused_keys(base)]
        named += (
            ["the note that Slurm chooses the nodes"] if key == "cluster.nodes.name" and "slurm" in back_end else []
        )
        is_obeyed, is_named = after != before, bool(named)
        if is_obeyed is is_named:
            wrong[key] = "obeyed and named" if is_obeyed else "neither obeyed nor named"
    assert json.dumps(wrong, indent=1) == "{}"
