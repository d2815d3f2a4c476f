"""List of everything that a spec reaches beyond its own folder, and this user's agreement to it.

A spec that was downloaded can name the user's other files to be sent, or commands to be run here. The dry run lists
them, and the first launch of a folder requests agreement, which is valid for the listed items and that folder.

A launch is the user's consent that programs of the folder run on this machine (`transport: local`); every other command
needs the same or a separate consent. A record of a run may have come with the folder, so its plan is checked like the
spec, unless this user launched that run.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from dtctl import folders, names
from dtctl.errors import LaunchError
from dtctl.spec.model import Spec
from dtctl.spec.nodes import resolve_nodes

if TYPE_CHECKING:
    from dtctl.launch.records.record import RunRecord

_HARMLESS = r"""(?ix)
    (?: match \s+ (?: (?:all|final|canonical|(?:host|originalhost|user|localuser) \s+ [\w.*?,!@:-]+) \s*)+ $
    | (?: host|hostname|user|port|identityfile|identitiesonly|userknownhostsfile|globalknownhostsfile|hostkeyalias
    | stricthostkeychecking|proxyjump|connecttimeout|connectionattempts|serveralive\w+|tcpkeepalive|compression
    | addressfamily|batchmode|ciphers|macs|kexalgorithms|hostkeyalgorithms|pubkeyaccepted\w+|loglevel|control\w+
    | forwardagent|forwardx11\w*|sendenv|setenv|hashknownhosts|visualhostkey|gssapi\w+|checkhostip|updatehostkeys
    | preferredauthentications|\w+authentication|addkeystoagent|requesttty ) [\s=] )"""
"""Lines of an SSH configuration that run no command. All other lines count as risky: OpenSSH reads keywords in many
forms (quoted, behind `=`), so a list of risky lines would be incomplete."""
CONFIG_BYTES = 4 << 20
BUILDS = "packages of job.environment without a wheel are built here, which runs their code"
"""Phrase for what `--yes` allows and nothing requires: without it, only versions that have wheels are considered."""
_launching: set[Path] = set()
"""Folders whose programs may run here because this process launches their job."""
SECRET = r"(?i)(token|secret|passw|credential|api_?key|access_?key|private_?key)|_key$"
"""Pattern of the names of variables that hold secrets."""


def list_required_agreements(spec: Spec) -> list[str]:
    """Return a phrase for each item that needs agreement: files outside the folder, and commands that run here."""
    phrases = []
    base = Path(os.path.realpath(spec.base_dir))
    root = Path(os.path.realpath(spec.base_dir / spec.job.files.root))
    if spec.pushes and root != base and base not in root.parents:
        phrases.append(f"the files of {root} are sent to the nodes (job.files.root)")
    if spec.cluster.transport != "local":
        for entry in spec.job.data:
            path = Path(os.path.realpath(spec.base_dir / Path(entry.source).expanduser()))
            if entry.is_url:
                phrases.append(f"{entry.source} is fetched with this machine's credentials (job.data)")
            elif not entry.is_on_nodes and base not in path.parents:
                phrases.append(f"the files of {path} are sent to the nodes (job.data)")
    config = spec.cluster.ssh_config
    if config is not None and str(config) != "none" and not _is_user_ssh_config(config):
        phrases += _list_command_phrases(config)
    return phrases


def _is_user_ssh_config(config: Path) -> bool:
    """Return whether an SSH configuration belongs to the user or the system, and did not come with a spec."""
    ssh_folders = (Path("~/.ssh").expanduser(), Path("/etc/ssh"))
    return any(Path(os.path.realpath(folder)) in Path(os.path.realpath(config)).parents for folder in ssh_folders)


def _list_command_phrases(config: Path) -> list[str]:
    """Return a phrase for each line of an SSH configuration that may run something."""
    try:
        text = folders.read_regular(str(config), CONFIG_BYTES).decode(errors="replace")
    except FileNotFoundError:
        return []  # ssh reports the missing file.
    except OSError as exc:
        return [f"{config} is read by ssh and could not be checked ({exc.strerror})"]
    lines = [line.strip() for line in text.split("\n")]
    risky = [line for line in lines if line and not line.startswith("#") and not re.match(_HARMLESS, line)]
    return [f"{config.name} has `{line}`, which can run commands here" for line in risky]


def list_sent_items(spec: Spec) -> list[str]:
    """Return a phrase for each further item that leaves this machine or vouches for nodes, for the dry run."""
    phrases = [
        f"variables of this machine that match {pattern} are sent (job.env_from)" for pattern in spec.job.env_from
    ]
    if spec.pushes:
        phrases.append(f"the files of {os.path.realpath(spec.base_dir / spec.job.files.root)} are sent (job.files)")
    phrases += [
        f"{name} of this machine is sent (job.secrets)"
        if name in os.environ
        else f"{name} is to be sent (job.secrets) and is not set here: a launch would refuse to start"
        for name in spec.job.secrets
    ]
    used = spec.metrics.secrets if spec.metrics is not None else {}
    phrases += [f"{secret.env} of this machine is used ({key})" for key, secret in used.items() if secret.env]
    if (
        spec.cluster.known_hosts is not None
        and Path(os.path.realpath(spec.base_dir)) in Path(os.path.realpath(spec.cluster.known_hosts)).parents
    ):
        phrases.append(
            f"{spec.cluster.known_hosts.name} of the folder defines which host keys are trusted (cluster.known_hosts)"
        )
    if (templates := spec.base_dir / "templates").is_dir():
        phrases += [f"{path.name} of the folder's own templates makes the scripts" for path in templates.glob("*.j2")]
    return phrases


def find_likely_secrets(spec: Spec, environ: dict[str, str]) -> list[str]:
    """Return the variables of `job.env_from` with names of secrets, which would appear in scripts and plans."""
    from fnmatch import fnmatchcase

    matched = [name for name in environ if any(fnmatchcase(name, pattern) for pattern in spec.job.env_from)]
    return sorted(name for name in matched if re.search(SECRET, name))


def list_local_programs(spec: Spec, record: RunRecord | None = None) -> list[str]:
    """Return a phrase for each program of the folder that would run on this machine.

    All variables are checked by their values and not by their names: any program may have a variable that names code.

    Args:
        spec: The spec, or its copy in a run.
        record: The run of the copy, whose plan may name other programs.
    """
    if spec.cluster.transport != "local":
        return []
    roots = _find_roots(spec.base_dir)
    paths, variables, lines = dict[str, str](), dict(spec.job.env), dict.fromkeys(spec.job.setup)
    for node in resolve_nodes(spec):
        variables |= node.env
        paths |= {node.python or "": "cluster.python", node.workdir: "cluster.workdir"}
    if record is not None:
        for planned in record.plan().get("nodes", []):
            paths |= {planned.get("python") or "": "cluster.python", planned.get("workdir", ""): "cluster.workdir"}
            # launch/snapshots.py runs commands with these values.
            for variable in planned.get("env", []):
                if variable["name"] == "PYTHONPATH":
                    variables["PYTHONPATH"] = variable["value"]
            lines |= dict.fromkeys(planned.get("setup", []))
        paths |= dict.fromkeys(record.read_code_folders().values(), "job.files")
    phrases = [
        f"{path} has programs that run here ({key})"
        for path, key in paths.items()
        if path and _leads_into(path, spec.base_dir, roots)
    ]
    phrases += [
        f"{name}={value} makes programs here run code of the folder (job.env)"
        for name, value in variables.items()
        if _may_name_code(value, spec.base_dir, roots)
    ]
    return phrases + [f"`{line}` is run here (job.setup)" for line in lines]


def _may_name_code(value: str, base_dir: Path, roots: set[Path]) -> bool:
    """Return whether the value of a variable leads into the folder, or has a command whose output may."""
    if "$(" in value or "`" in value:
        return True
    return any(_leads_into(part, base_dir, roots) for part in _split_path_value(value))


def _find_roots(base_dir: Path) -> set[Path]:
    """Return the folder of a spec and that of its repository, unless that is the home; both may be downloaded."""
    base = Path(os.path.realpath(base_dir))
    repository = next((above for above in (base, *base.parents) if os.path.lexists(above / ".git")), base)
    return {base, base if repository == Path.home() else repository}


def _leads_into(path: str, base_dir: Path, roots: set[Path]) -> bool:
    """Return whether a path, or a link on the way, lies in one of the roots; relative paths begin in `base_dir`."""
    if "/" not in path and not os.path.lexists(base_dir / path):
        return False  # The value is a word, or a program of PATH.
    where = Path(os.path.realpath(base_dir)) / (Path.home() / path[2:] if path.startswith("~/") else path)
    for _ in range(40):
        where = Path(os.path.realpath(where.parent)) / where.name
        if where in roots or roots & set(where.parents):
            return True
        try:
            where = where.parent / where.readlink()
        except OSError:
            return False
    return True


def _split_path_value(value: str) -> Iterator[str]:
    """Yield the parts of a variable's value that may be paths; programs separate paths by several characters."""
    yield from filter(None, {value, *re.split(r"[:;,\s=]+", value)})


def list_open(spec: Spec, record: RunRecord | None = None) -> list[str]:
    """Return the phrases that this user has not agreed to in this folder."""
    phrases = [*list_required_agreements(spec), *list_local_programs(spec, record)]
    records = {phrase: _build_agreement_path(os.path.realpath(spec.base_dir), phrase) for phrase in phrases}
    return [phrase for phrase, path in records.items() if path not in _launching and not path.is_file()]


def record_agreement(spec: Spec) -> None:
    """Record this user's agreement outside of the folder, since a downloaded folder could contain such a record.

    Raises:
        LaunchError: the record cannot be written.
    """
    for phrase in list_open(spec):
        path = _build_agreement_path(os.path.realpath(spec.base_dir), phrase)
        try:
            _create_agreement_file(path)
        except OSError as exc:
            hint = "set XDG_STATE_HOME to a folder that can be written"
            raise LaunchError(f"the answer cannot be kept: {exc.strerror}", where=str(path), hint=hint) from exc


def may_build_packages(spec: Spec) -> bool:
    """Return whether this user has agreed that packages of `job.environment` are built on this machine."""
    return _build_agreement_path(os.path.realpath(spec.base_dir), BUILDS).is_file()


def agree_to_builds(spec: Spec) -> None:
    """Record that packages of `job.environment` may be built on this machine; launches ask again if it fails."""
    if spec.job.environment is not None:
        with contextlib.suppress(OSError):
            _create_agreement_file(_build_agreement_path(os.path.realpath(spec.base_dir), BUILDS))


def agree_to_launch(spec: Spec) -> None:
    """Record that programs of the folder may run here, because launching its job is consent.

    If nothing can be written, later commands request the agreement again.
    """
    for phrase in list_local_programs(spec):
        path = _build_agreement_path(os.path.realpath(spec.base_dir), phrase)
        _launching.add(path)
        with contextlib.suppress(OSError):
            _create_agreement_file(path)


def note_launch(token: str) -> None:
    """Record that this user launched a run, which is identified by its token."""
    with contextlib.suppress(OSError):
        _create_agreement_file(_build_agreement_path("launched", token))


def require_user_agreement(spec: Spec, record: RunRecord | None = None) -> None:
    """Refuse to continue without agreement.

    Args:
        spec: The spec, or its copy in a run.
        record: The run of the copy, whose plan is trusted if this user launched it.

    Raises:
        LaunchError: the user has not agreed.
    """
    if record is not None and _build_agreement_path("launched", record.info().token).is_file():
        record = None
    if missing := list_open(spec, record):
        raise LaunchError(
            f"this folder's spec uses files outside of the folder, or runs programs in it: {'; '.join(missing)}",
            where=str(spec.base_dir / names.SPEC_FILE),
            hint="if you trust it, `--yes` of launch, doctor or bench agrees to exactly this, once for the folder",
        )


def _create_agreement_file(path: Path) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.touch(mode=0o600)


def _build_agreement_path(*parts: str) -> Path:
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    seal = "\0".join(parts)
    return Path(state).expanduser() / "dtctl" / "agreed" / hashlib.sha256(os.fsencode(seal)).hexdigest()
