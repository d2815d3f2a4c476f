"""Every key of `cluster` and `job` is used on each way to launch, or named where it is not."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from dtctl.plan.build import build
from dtctl.plan.warnings import UNUSED, UNUSED_IN_PLAIN_MODE, find_unused_keys
from dtctl.spec.load import parse_spec
from dtctl.spec.model import Cluster, Job, Spec
from dtctl.spec.nodes import resolve_nodes

USED_BY_PLAIN_MODE: Final = {
    # What a plan, a node's script, the directives and the loop are made of.
    "cluster.transport", "cluster.nodes", "cluster.hostfile", "cluster.slots", "cluster.python", "cluster.workdir",
    "cluster.login", "cluster.connect_timeout_s",
    "job.name", "job.script", "job.module", "job.shell", "job.command", "job.args", "job.add_args", "job.deepspeed",
    "job.env", "job.env_from", "job.secrets", "job.files", "job.data", "job.environment", "job.progress",
    "job.outputs", "job.setup", "job.kind", "job.shared",
    # With a login node alone.
    "cluster.user", "cluster.port", "cluster.identity_file", "cluster.known_hosts", "cluster.ssh_config", "cluster.ssh",
}  # fmt: skip
IGNORED_KEYS: Final = """
cluster: {transport: slurm, nodes: 2, slots: 2, spares: [n3], min_nodes: 1, return_s: 5}
job: {script: train.py, kind: direct, max_restarts: 3, recovery: restart, log_mib: 1, time_s: 60, grace_s: 3, \
preload: [json]}
"""


def spec_of(text: str) -> Spec:
    return parse_spec(text, source="dtctl.yaml", base_dir=Path("/project"))


def test_every_key_is_known_to_be_used_or_unused_by_plain_mode() -> None:
    keys = {f"cluster.{name}" for name in Cluster.model_fields} | {f"job.{name}" for name in Job.model_fields}
    assert keys - USED_BY_PLAIN_MODE == {key for key in UNUSED_IN_PLAIN_MODE if not key.startswith("network.")}
    assert {key for unused in UNUSED.values() for key in unused} <= keys


def test_what_a_job_of_slurm_ignores_is_named() -> None:
    """Seven of these were left out without a word."""
    spec = spec_of(IGNORED_KEYS + "slurm: {srun: [--mpi=pmix]}")
    (note,) = (note for note in build(spec, resolve_nodes(spec), run="r").notes if "no effect" in note)
    assert note == (
        "cluster.min_nodes, cluster.return_s, cluster.spares, job.grace_s, job.log_mib, job.max_restarts, job.preload, "
        "job.recovery, job.time_s have no effect without dtctl's launcher in the job"
    )


def test_what_plain_mode_lacks_is_named_with_its_keys() -> None:
    text = "cluster: {transport: slurm, nodes: 2, slots: 2}\nslurm: {launcher: none}\n"
    spec = spec_of(
        text
        + "job: {script: train.py, hang_s: 60, hang_start_s: 60, hang_output_s: 60, max_restarts: 3, recovery: auto}"
    )
    plan = build(spec, resolve_nodes(spec), run="r")
    assert plan.notes[:2] == (
        "slurm.launcher is none: nothing in the job detects a hang, restarts failed workers or replaces lost ones",
        "job.hang_output_s, job.hang_s, job.hang_start_s, job.max_restarts, job.recovery have no effect without "
        "dtctl's launcher in the job",
    )
    assert plan.max_restarts == 0
    spec = spec_of(text + "job: {script: train.py}\ntrain: {strategy: ddp}")
    assert not [note for note in build(spec, resolve_nodes(spec), run="r").notes if "job.recovery" in note]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("cluster: {transport: ssh, nodes: [a, b], spares: [c], return_s: 1}", []),
        ("cluster: {transport: ssh, nodes: [a], login: b}", ["cluster.login"]),
        ("cluster: {spares: [c], user: me}", ["cluster.spares", "cluster.user"]),
        ("cluster: {transport: slurm, nodes: 2, user: me}", ["cluster.user"]),
        ("cluster: {transport: slurm, nodes: 2, user: me, login: there}", []),
        ("cluster: {transport: sandbox, port: 2222}", ["cluster.port"]),
        ("job: {script: t.py, shared: [out]}\ncluster: {transport: slurm, nodes: 2}", ["job.shared"]),
    ],
)
def test_a_key_is_named_where_it_has_no_effect(text: str, expected: list[str]) -> None:
    assert find_unused_keys(spec_of(text if text.startswith("job:") else text + "\njob: {script: t.py}")) == expected


def test_a_job_with_a_launcher_inside_uses_them() -> None:
    spec = spec_of(IGNORED_KEYS)
    assert find_unused_keys(spec) == []
    assert not [note for note in build(spec, resolve_nodes(spec), run="r").notes if "no effect" in note]


def activation_notes(cluster: str, job: str) -> list[str]:
    spec = spec_of(f"cluster: {{{cluster}}}\njob: {{{job}}}\n")
    return [note for note in build(spec, resolve_nodes(spec), run="r").notes if "job.setup" in note]


@pytest.mark.parametrize(
    "line",
    [
        ". venv/bin/activate",
        'source "$HOME/.venv/bin/activate"',
        "conda activate torch2",
        'eval "$(micromamba shell hook -s bash)" && micromamba activate x; true',
        "pyenv activate 3.12",
        ". venv/bin/activate.fish",
    ],
)
def test_an_environment_that_no_worker_uses_is_named(line: str) -> None:
    job = f"script: t.py, setup: ['ulimit -l', {line!r}]"
    (note,) = activation_notes("transport: ssh, nodes: [a, b], slots: 1, python: /opt/py/bin/python3", job)
    assert note == (
        f"`{line}` in job.setup has no effect on the Python of the workers, which is /opt/py/bin/python3, as the spec "
        "says: give the Python of that environment as cluster.python"
    )


@pytest.mark.parametrize(
    ("cluster", "job", "count"),
    [
        ("transport: sandbox, nodes: 2", "script: t.py, setup: [. venv/bin/activate]", 1),
        ("transport: ssh, nodes: [a, {name: b, python: ~/py/bin/python}]", "module: t, setup: [conda activate x]", 1),
        ("transport: ssh, nodes: [a]", "script: t.py, setup: [. venv/bin/activate]", 0),
        ("transport: ssh, nodes: [a], python: python3.12", "script: t.py, setup: [. venv/bin/activate]", 0),
        ("transport: ssh, nodes: [a], python: /py", "command: [./run], setup: [. venv/bin/activate]", 0),
        ("transport: ssh, nodes: [a], python: /py", "script: run.sh, kind: direct, setup: [conda activate x]", 0),
        ("transport: ssh, nodes: [a], python: /py", "script: t.py, setup: [module load activated, ./deactivate]", 0),
    ],
)
def test_an_environment_that_workers_use_is_not(cluster: str, job: str, count: int) -> None:
    assert len(activation_notes(cluster, job)) == count
