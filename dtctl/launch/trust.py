"""What a spec reaches beyond its own folder, and whether this user has agreed to it.

A spec that was downloaded can name the user's other files to be sent, or commands to be run here. That is told by the
dry run, and asked for before the first launch of a folder; the answer holds for what was asked, and for that folder.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

from dtctl import folders, names
from dtctl.errors import LaunchError
from dtctl.spec.model import Spec

_HARMLESS = re.compile(
    r"""(?ix) (?: match \s+ (?: (?:all|final|canonical|(?:host|originalhost|user|localuser) \s+ [\w.*?,!@:-]+) \s*)+ $
    | (?: host|hostname|user|port|identityfile|identitiesonly|userknownhostsfile|globalknownhostsfile|hostkeyalias
    | stricthostkeychecking|proxyjump|connecttimeout|connectionattempts|serveralive\w+|tcpkeepalive|compression
    | addressfamily|batchmode|ciphers|macs|kexalgorithms|hostkeyalgorithms|pubkeyaccepted\w+|loglevel|control\w+
    | forwardagent|forwardx11\w*|sendenv|setenv|hashknownhosts|visualhostkey|gssapi\w+|checkhostip|updatehostkeys
    | preferredauthentications|\w+authentication|addkeystoagent|requesttty ) [\s=] )"""
)
"""Lines of an SSH configuration that run nothing. All others count, since OpenSSH reads keywords in more forms (quoted,
behind `=`) than a list of the dangerous ones would know."""
CONFIG_BYTES = 4 << 20
SECRET = re.compile(r"(?i)(token|secret|passw|credential|api_?key|access_?key|private_?key)|_key$")
"""Of names of variables."""


def reach(spec: Spec) -> list[str]:
    """What has to be agreed to, a phrase each: files from elsewhere that are sent, commands that are run here."""
    phrases = []
    base = Path(os.path.realpath(spec.base_dir))
    root = Path(os.path.realpath(spec.base_dir / spec.job.files.root))
    if spec.pushes and root != base and base not in root.parents:
        phrases.append(f"the files of {root} are sent to the nodes (job.files.root)")
    if spec.metrics is not None:
        phrases += [
            f"{secret.file} is read, and sent to a server that the spec names ({key})"
            for key, secret in spec.metrics.secrets.items()
            if secret.file is not None and key in ("metrics.headers", "metrics.alerts.mail.password")
        ]
    config = spec.cluster.ssh_config
    if config is not None and str(config) != "none" and not _is_own(config):
        phrases += _commands(config)
    return phrases


def _is_own(config: Path) -> bool:
    """Whether an SSH configuration is one that `ssh` itself would read, and no file that came with a spec."""
    ssh_folders = (Path("~/.ssh").expanduser(), Path("/etc/ssh"))
    return any(Path(os.path.realpath(folder)) in Path(os.path.realpath(config)).parents for folder in ssh_folders)


def _commands(config: Path) -> list[str]:
    """A phrase for each line of an SSH configuration that may run something."""
    try:
        text = folders.read_regular(str(config), CONFIG_BYTES).decode(errors="replace")
    except FileNotFoundError:
        return []  # ssh says it
    except OSError as exc:
        return [f"{config} is read by ssh and could not be looked through ({exc.strerror})"]
    lines = [line.strip() for line in text.split("\n")]
    risky = [line for line in lines if line and not line.startswith("#") and not _HARMLESS.match(line)]
    return [f"{config.name} has `{line}`, which can run commands here" for line in risky]


def sent_items(spec: Spec) -> list[str]:
    """What else leaves this machine, for the dry run: variables by pattern, and what secrets they may be."""
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


def is_agreed(spec: Spec) -> bool:
    """Whether this user has agreed to all of it, in this folder."""
    phrases = reach(spec)
    return not phrases or _record(spec, phrases).is_file()


def agree(spec: Spec) -> None:
    """Write down that this user agrees. It is not kept in the folder, which could have brought the answer along.

    Raises:
        LaunchError: it cannot be written.
    """
    path = _record(spec, reach(spec))
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.touch(mode=0o600)
    except OSError as exc:
        raise LaunchError(f"the answer cannot be kept: {exc.strerror}", where=str(path)) from exc


def check(spec: Spec) -> None:
    """Refuse to go on without agreement.

    Raises:
        LaunchError: there is none.
    """
    if not is_agreed(spec):
        raise LaunchError(
            f"this folder's spec reaches beyond the folder: {'; '.join(reach(spec))}",
            where=str(spec.base_dir / names.SPEC_FILE),
            hint="if you trust it, `--yes` agrees to exactly this, once for the folder",
        )


def _record(spec: Spec, phrases: list[str]) -> Path:
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    seal = "\0".join([os.path.realpath(spec.base_dir), *phrases])
    return Path(state).expanduser() / "dtctl" / "agreed" / hashlib.sha256(os.fsencode(seal)).hexdigest()
