"""Values that a spec only names, from variables and files of this machine."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

from dtctl import folders, shell
from dtctl.errors import PlanError
from dtctl.spec.model import Secret, Spec

SECRET_BYTES: Final = 64 << 10


def read_metrics_secrets(spec: Spec) -> dict[str, str]:
    """Return key -> value of all secrets that the section `metrics` names.

    Raises:
        PlanError: one of them is not set, cannot be read, can be read by others, or would be pushed to the nodes.
    """
    return {
        key: read_secret_value(spec, key, secret)
        for key, secret in (spec.metrics.secrets if spec.metrics else {}).items()
    }


def read_secret_value(spec: Spec, key: str, secret: Secret) -> str:
    """Return the value of one secret, without white space at its ends.

    Raises:
        PlanError: as `read_metrics_secrets`.
    """
    if secret.env is not None:
        value = os.environ.get(secret.env, "").strip()
        if not value:
            hint = f"export {secret.env}=... in the shell that runs dtctl"
            raise PlanError(f"{key} needs {secret.env}, which is not set here", where=key, hint=hint)
        return value
    path = spec.base_dir / Path(secret.file or "").expanduser()
    if spec.pushes:
        root = Path(os.path.realpath(spec.base_dir / spec.job.files.root))
        if root in Path(os.path.realpath(path)).parents:
            hint = "move it elsewhere, such as ~/.config/dtctl"
            raise PlanError(f"{path} is in the folder that is sent to the nodes", where=key, hint=hint)
    try:
        if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise PlanError(f"{path} can be read by others", where=key, hint=f"chmod 600 {shell.quote_word(str(path))}")
        value = folders.read_regular(str(path), SECRET_BYTES).decode(errors="replace").strip()
    except OSError as exc:
        raise PlanError(f"{path} cannot be read: {exc.strerror}", where=key) from exc
    if not value:
        raise PlanError(f"{path} is empty", where=key)
    return value
