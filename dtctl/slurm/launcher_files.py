"""The launcher of a job: a zip of dtctl's own modules, with a file that describes the job.

The nodes need a Python of version 3.10 or newer, but no installation of dtctl.
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import marshal
import os
import sys
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

import dtctl
from dtctl import names, node_facts, shell
from dtctl.launch.cluster import read_job_source, set_job_python
from dtctl.launch.job_builder import COMMAND_CHARACTERS, collect_job_settings, format_this_user
from dtctl.plan.bind import AttemptFacts, PlanTemplate, bind_plan
from dtctl.plan.build import PlanFacts, compute_spec_digest, make_template
from dtctl.plan.commands import replace_torchrun_options
from dtctl.plan.model import NodePlan, Rendezvous
from dtctl.render import render_node_script
from dtctl.shell import ShellExpansion
from dtctl.slurm.job_control import HEEDLESS
from dtctl.slurm.job_file import JOB_FILE, LATE_OPTIONS, JobFile, name_job_file
from dtctl.spec.model import Slurm, Spec
from dtctl.spec.nodes import resolve_nodes, resolve_spares
from dtctl.supervisor.bootstrap import load_kept_file
from dtctl.supervisor.messages.setup import EnvironmentOrder

MODULES: Final = (
    "*.py", "launch/__init__.py", "launch/orphaned_runs.py", "launch/control/*.py", "launch/records/*.py",
    "plan/__init__.py", "plan/bind.py", "plan/commands.py", "plan/environment.py", "plan/model.py",
    "plan/rendezvous.py",
    "slurm/__init__.py", "slurm/addresses.py", "slurm/batchlog.py", "slurm/job_control.py", "slurm/job_file.py",
    "slurm/job_life.py", "slurm/job_step.py",
    "spec/__init__.py", "spec/nodeset.py", "supervisor/*.py", "supervisor/messages/*.py",
    "transport/__init__.py", "transport/base.py", "transport/fanout.py", "transport/local.py", "transport/srun.py",
)  # fmt: skip
"""Patterns of the files in dtctl's package that a launcher inside a job may import."""
START: Final = """\
import sys

if sys.version_info < (3, 10):  # another start of Python that finds it out would delay each job
    import socket

    sys.exit(
        "dtctl: error: %s on %s is older than 3.10; cluster.python names another one, and slurm.launcher: none "
        "needs none" % (sys.executable, socket.gethostname())
    )
from dtctl.slurm.job_control import main

main()
"""
"""Text of the zip's main module, which every version of Python can parse."""
DATE: Final = (1980, 1, 1, 0, 0, 0)
"""Date of all files in the zip; a fixed one, so that the same modules give the same bytes."""


def make_launcher(
    spec: Spec,
    run: str,
    *,
    code: str,
    snapshots: str,
    is_followed: bool,
    environment: EnvironmentOrder | None = None,
    tasks: Mapping[int, Spec] | None = None,
) -> bytes:
    """Make the zip of a job's launcher, which a Python interpreter can run.

    Args:
        spec: the checked spec.
        run: run id.
        code: folder of the code on a disk that all nodes share; empty: a folder below that of the run.
        snapshots: folder of the snapshots; empty: a folder below that of the run.
        is_followed: whether a launcher follows the run.
        environment: the order to make the environment of `job.environment`.
        tasks: specs of the tasks of an array by their index, if the tasks differ.

    Raises:
        PlanError: the spec does not describe a job that can run.
        RenderError: the template of the nodes' script is missing or wrong.
    """
    specs = {name_job_file(index): each for index, each in tasks.items()} if tasks else {JOB_FILE: spec}
    buffer = io.BytesIO(pack_modules())
    with zipfile.ZipFile(buffer, "a", zipfile.ZIP_DEFLATED) as archive:
        for name, each in specs.items():
            file = make_job_file(
                each, run, code=code, snapshots=snapshots, is_followed=is_followed, environment=environment
            )
            archive.writestr(zipfile.ZipInfo(name, DATE), file.to_text(), zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


def make_job_file(
    spec: Spec,
    run: str,
    *,
    code: str,
    snapshots: str,
    is_followed: bool,
    environment: EnvironmentOrder | None = None,
) -> JobFile:
    """Make the file that describes the job to the launcher inside it; see `make_launcher`."""
    setup = (HEEDLESS, *spec.job.setup)
    files = spec.job.files.model_copy(update={"root": ".", "push": False})
    inside = spec.model_copy(update={"job": spec.job.model_copy(update={"setup": setup, "files": files})})
    nodes, slurm = resolve_nodes(spec), spec.slurm or Slurm()
    if environment is not None:
        nodes = set_job_python(nodes, environment.digest, environment.workdir)
    facts = PlanFacts(environ=os.environ, source=read_job_source(spec))
    template, _ = make_template(inside, nodes, run=run, facts=facts)
    return JobFile(
        template=replace(template, spec_digest=compute_spec_digest(spec)),
        scripts=_scripts_of(template, spec.base_dir),
        settings=collect_job_settings(spec, nodes=len(nodes), has_spares=bool(resolve_spares(spec))),
        requeues=slurm.requeues if slurm.requeue else 0,
        warn_s=slurm.warn_s,
        code=code,
        snapshots=snapshots,
        is_followed=is_followed,
        environment=environment.to_json() if environment is not None else {},
        launched_from=format_this_user(),
        command=shell.join_command(["dtctl", *sys.argv[1:]])[:COMMAND_CHARACTERS],
        started=node_facts.launch_time(),
    )


def _scripts_of(template: PlanTemplate, base_dir: Path) -> tuple[str, ...]:
    """Return the script of each node, with names of variables instead of the node's place and the attempt."""
    meeting = Rendezvous(run_id=f"{template.run}.0", address=ShellExpansion("$MASTER_ADDR"), port=0)
    plan = bind_plan(template, AttemptFacts(number=0, rendezvous=meeting))
    late = replace(plan, attempt=ShellExpansion(f"${names.ATTEMPT}"))  # type: ignore[arg-type]
    scripts: dict[NodePlan, str] = {}
    made = []
    for node, of_node in zip(plan.nodes, template.nodes, strict=True):
        anywhere = replace(
            node,
            name=ShellExpansion(f"${names.NODE}"),
            address="",
            node_rank=ShellExpansion(f"${names.NODE_INDEX}"),  # type: ignore[arg-type]
            first_rank=ShellExpansion("$RANK"),  # type: ignore[arg-type]
            env=of_node.env,
            argv=tuple(replace_torchrun_options(node.argv, LATE_OPTIONS)) if plan.kind == "torchrun" else node.argv,
        )
        if anywhere not in scripts:  # most nodes have the same script
            scripts[anywhere] = render_node_script(late, anywhere, base_dir=base_dir)
        made.append(scripts[anywhere])
    return tuple(made)


def pack_modules() -> bytes:
    """Return a zip of the launcher's modules, as text and compiled for this version of Python.

    Packing takes a third of a second, so the zip is kept until a module changes.
    """
    files = list(_read_module_files())
    sources = hashlib.sha256(importlib.util.MAGIC_NUMBER + Path(__file__).read_bytes())
    for name, text in files:
        sources.update(f"\0{name}\0{text}".encode())

    def make_zip() -> bytes:
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, text in files:
                archive.writestr(zipfile.ZipInfo(f"{name}.py", DATE), text, zipfile.ZIP_DEFLATED)
                archive.writestr(
                    zipfile.ZipInfo(f"{name}.pyc", DATE), _compile_to_pyc(name, text), zipfile.ZIP_DEFLATED
                )
        return buffer.getvalue()

    return load_kept_file(f"launcher.{sys.implementation.cache_tag}.zip", sources.digest(), make_zip)


def compute_launcher_digest(launcher: bytes) -> str:
    """Return the SHA-256 of a zip, in the format of `sha256sum`."""
    return hashlib.sha256(launcher).hexdigest()


def _read_module_files() -> Iterator[tuple[str, str]]:
    """Yield the name in the zip, without its suffix, and the text of each module."""
    package = Path(dtctl.__file__).parent
    for path in sorted({path for pattern in MODULES for path in package.glob(pattern)}):
        yield f"dtctl/{path.relative_to(package).with_suffix('').as_posix()}", path.read_text(encoding="utf-8")
    yield "__main__", START


def _compile_to_pyc(name: str, text: str) -> bytes:
    """Return a .pyc file that Python uses without comparing it with the text; one digest covers both."""
    code = compile(text, f"{name}.py", "exec", dont_inherit=True, optimize=2)  # docstrings are dropped
    hashed = 0b01  # PEP 552: a .pyc with a hash of the text that Python does not check
    return b"".join(
        [
            importlib.util.MAGIC_NUMBER,
            hashed.to_bytes(4, "little"),
            importlib.util.source_hash(text.encode()),
            marshal.dumps(code),
        ]
    )
