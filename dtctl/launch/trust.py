"""List of everything that a spec reaches beyond its own folder, and this user's agreement to it.

A spec that was downloaded can name the user's other files to be sent, or commands to be run here. The dry run lists
them, and the first launch of a folder asks for agreement. The answer holds for the listed things, and for that folder.

Programs of the folder itself that run on this machine (`transport: local`) belong to it: a launch is the user's consent
that they run; every other command needs that consent or another. A record of a run may have come with the folder, so
its plan is checked like the spec, unless this user launched that run.
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

_HARMLESS = re.compile(
    r"""(?ix) (?: match \s+ (?: (?:all|final|canonical|(?:host|originalhost|user|localuser) \s+ [\w.*?,!@:-]+) \s*)+ $
    | (?: host|hostname|user|port|identityfile|identitiesonly|userknownhostsfile|globalknownhostsfile|hostkeyalias
    | stricthostkeychecking|proxyjump|connecttimeout|connectionattempts|serveralive\w+|tcpkeepalive|compression
    | addressfamily|batchmode|ciphers|macs|kexalgorithms|hostkeyalgorithms|pubkeyaccepted\w+|loglevel|control\w+
    | forwardagent|forwardx11\w*|sendenv|setenv|hashknownhosts|visualhostkey|gssapi\w+|checkhostip|updatehostkeys
    | preferredauthentications|\w+authentication|addkeystoagent|requesttty ) [\s=] )"""
)
"""Lines of an SSH configuration that run nothing. All others count, since OpenSSH reads keywords in more forms (quoted,
behind `=`) than a list of the dangerous ones would cover."""
CONFIG_BYTES = 4 << 20
_launching: set[Path] = set()
"""Consent that was given to this process, which is a launch."""
SECRET = re.compile(r"(?i)(token|secret|passw|credential|api_?key|access_?key|private_?key)|_key$")
"""Pattern of the names of variables that hold secrets."""


def reach(spec: Spec) -> list[str]:
    """Return everything that has to be agreed to, a phrase each: foreign files, and commands that run here."""
    phrases = []
    base = Path(os.path.realpath(spec.base_dir))
    root = Path(os.path.realpath(spec.base_dir / spec.job.files.root))
    if spec.pushes and root != base and base not in root.parents:
        phrases.append(f"the files of {root} are sent to the nodes (job.files.root)")
    if spec.cluster.transport != "local":
        for entry in spec.job.data:
            path = Path(os.path.realpath(spec.base_dir / Path(entry.source).expanduser()))
            if entry.is_url:
                phrases.append(f"{entry.source} is fetched with what this machine knows to log in there (job.data)")
            elif not entry.is_on_nodes and base not in path.parents:
                phrases.append(f"the files of {path} are sent to the nodes (job.data)")
    config = spec.cluster.ssh_config
    if config is not None and str(config) != "none" and not _is_own(config):
        phrases += _commands(config)
    return phrases


def _is_own(config: Path) -> bool:
    """Return whether an SSH configuration is one that `ssh` itself would read, and no file that came with a spec."""
    ssh_folders = (Path("~/.ssh").expanduser(), Path("/etc/ssh"))
    return any(Path(os.path.realpath(folder)) in Path(os.path.realpath(config)).parents for folder in ssh_folders)


def _commands(config: Path) -> list[str]:
    """Return a phrase for each line of an SSH configuration that may run something."""
    try:
        text = folders.read_regular(str(config), CONFIG_BYTES).decode(errors="replace")
    except FileNotFoundError:
        return []  # ssh reports it
    except OSError as exc:
        return [f"{config} is read by ssh and could not be looked through ({exc.strerror})"]
    lines = [line.strip() for line in text.split("\n")]
    risky = [line for line in lines if line and not line.startswith("#") and not _HARMLESS.match(line)]
    return [f"{config.name} has `{line}`, which can run commands here" for line in risky]


def sent_items(spec: Spec) -> list[str]:
    """Return what else leaves this machine, for the dry run: variables by pattern, and what secrets they may be."""
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
        phrases.append(f"{spec.cluster.known_hosts.name} of the folder vouches for the nodes (cluster.known_hosts)")
    if (templates := spec.base_dir / "templates").is_dir():
        phrases += [f"{path.name} of the folder's own templates makes the scripts" for path in templates.glob("*.j2")]
    return phrases


def likely_secrets(spec: Spec, environ: dict[str, str]) -> list[str]:
    """Variables that `job.env_from` matches and that are called like secrets: they would stand in scripts and plans."""
    from fnmatch import fnmatchcase

    matched = [name for name in environ if any(fnmatchcase(name, pattern) for pattern in spec.job.env_from)]
    return sorted(name for name in matched if SECRET.search(name))


def list_local_programs(spec: Spec, record: RunRecord | None = None) -> list[str]:
    """Return a phrase for each program of the folder that would run on this machine.

    The target of a value decides, not the name of a variable: any program may have a variable that names code.

    Args:
        spec: The spec, or the copy of it in a run.
        record: That run, whose plan may name others.
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
            # Snapshots of a run are looked at with these; see launch/snapshots.py.
            variables |= {
                each["name"]: each["value"] for each in planned.get("env", []) if each["name"] == "PYTHONPATH"
            }
            lines |= dict.fromkeys(planned.get("setup", []))
        paths |= dict.fromkeys(record.code_folders().values(), "job.files")
    phrases = [
        f"{path} has programs that run here ({key})"
        for path, key in paths.items()
        if path and _leads_into(path, spec.base_dir, roots)
    ]
    phrases += [
        f"{name}={value} makes programs here run code of the folder (job.env)"
        for name, value in variables.items()
        if "$(" in value or "`" in value or any(_leads_into(part, spec.base_dir, roots) for part in _split(value))
    ]
    return phrases + [f"`{line}` is run here (job.setup)" for line in lines]


def _find_roots(base_dir: Path) -> set[Path]:
    """Return the folder of a spec, and that of the repository it is in, unless that is the home: both came along."""
    base = Path(os.path.realpath(base_dir))
    repository = next((above for above in (base, *base.parents) if os.path.lexists(above / ".git")), base)
    return {base, base if repository == Path.home() else repository}


def _leads_into(path: str, base_dir: Path, roots: set[Path]) -> bool:
    """Return whether a path, or a link on its way, lies in one of the folders; relative ones begin in the spec's."""
    if "/" not in path and not os.path.lexists(base_dir / path):
        return False  # a word, or a program of PATH
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


def _split(value: str) -> Iterator[str]:
    """Yield what may be a path in the value of a variable; programs separate them by several characters."""
    yield from filter(None, {value, *re.split(r"[:;,\s=]+", value)})


def list_open(spec: Spec, record: RunRecord | None = None) -> list[str]:
    """Return the phrases that this user has not agreed to in this folder."""
    phrases = [*reach(spec), *list_local_programs(spec, record)]
    records = {phrase: _record(os.path.realpath(spec.base_dir), phrase) for phrase in phrases}
    return [phrase for phrase, path in records.items() if path not in _launching and not path.is_file()]


def agree(spec: Spec) -> None:
    """Write down that this user agrees. It is not kept in the folder, which could have brought the answer along.

    Raises:
        LaunchError: it cannot be written.
    """
    for phrase in list_open(spec):
        path = _record(os.path.realpath(spec.base_dir), phrase)
        try:
            _write(path)
        except OSError as exc:
            hint = "set XDG_STATE_HOME to a folder that can be written"
            raise LaunchError(f"the answer cannot be kept: {exc.strerror}", where=str(path), hint=hint) from exc


def agree_to_launch(spec: Spec) -> None:
    """Write down that programs of the folder may run here: launching its job is consent.

    Where nothing can be written, later commands ask again.
    """
    for phrase in list_local_programs(spec):
        path = _record(os.path.realpath(spec.base_dir), phrase)
        _launching.add(path)
        with contextlib.suppress(OSError):
            _write(path)


def note_launch(token: str) -> None:
    """Record that this user launched a run, which is identified by its token."""
    with contextlib.suppress(OSError):
        _write(_record("launched", token))


def check(spec: Spec, record: RunRecord | None = None) -> None:
    """Refuse to continue without agreement.

    Args:
        spec: The spec, or the copy of it in a run.
        record: That run. The plan of one that this user launched is trusted.

    Raises:
        LaunchError: there is none.
    """
    if record is not None and _record("launched", record.info().token).is_file():
        record = None
    if missing := list_open(spec, record):
        raise LaunchError(
            f"this folder's spec reaches beyond the folder, or runs programs of it: {'; '.join(missing)}",
            where=str(spec.base_dir / names.SPEC_FILE),
            hint="if you trust it, `--yes` of launch, doctor or bench agrees to exactly this, once for the folder",
        )


def _write(path: Path) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.touch(mode=0o600)


def _record(*parts: str) -> Path:
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    seal = "\0".join(parts)
    return Path(state).expanduser() / "dtctl" / "agreed" / hashlib.sha256(os.fsencode(seal)).hexdigest()
