"""Reading a spec: file and `--set` in, checked `Spec` out. The texts of errors are in problems.py."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from dtctl.errors import SpecError
from dtctl.names import SPEC_FILE
from dtctl.spec import positions
from dtctl.spec.model import Cluster, Spec
from dtctl.spec.places import Path as Key
from dtctl.spec.places import Places, dotted

MAX_BYTES = 4 * 1024 * 1024
"""Largest spec that is read; more is another file, or no file at all (/dev/zero)."""
STDIN = "<standard input>"
_INIT = "`dtctl init DIR` makes a project with one"


def load_spec(path: Path, overrides: Sequence[str] = ()) -> Spec:
    """Return the spec in the file at `path`, or in `dtctl.yaml` of the folder at `path`, with `--set` values applied.

    `-` is the standard input; the working folder is then the project's.

    Raises:
        SpecError: the file cannot be read, or has keys or values that are not allowed; all problems in one error.
    """
    if path == Path("-"):
        text = _text(sys.stdin.buffer.read(MAX_BYTES + 1), STDIN)
        return parse_spec(text, source=STDIN, base_dir=Path.cwd(), overrides=overrides)
    if path.is_dir():
        path = path / SPEC_FILE
    if path.suffix in (".py", ".sh"):
        raise SpecError(
            f"{path} is a script, and a spec is expected",
            where=str(path),
            hint=f"name it as `job.script` in a {SPEC_FILE}, or without a spec: "
            f"`dtctl launch --nodes localhost -- {path}`; what is meant for the spec's script follows `--`",
        )
    try:
        if path.is_fifo():  # opening it waits until another process writes
            raise SpecError("the spec is a pipe", where=str(path), hint="`-` reads standard input")
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise SpecError(f"there is no spec {path}", where=str(path), hint=_INIT) from None
    except OSError as exc:
        raise SpecError(f"the spec cannot be read: {exc.strerror}", where=str(path)) from exc
    return parse_spec(_text(raw, str(path)), source=str(path), base_dir=path.resolve().parent, overrides=overrides)


def _text(raw: bytes, source: str) -> str:
    if len(raw) > MAX_BYTES:
        raise SpecError(f"the spec is larger than {MAX_BYTES:,} bytes", where=source, hint="is this the right file?")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        line = raw.count(b"\n", 0, exc.start) + 1
        raise SpecError("the spec is not UTF-8 text", where=f"{source}:{line}", hint="save it as UTF-8") from exc


def parse_spec(
    text: str, *, source: str, base_dir: Path, overrides: Sequence[str] = (), is_of_run: bool = False
) -> Spec:
    """Return the spec in `text`.

    Args:
        text: YAML.
        source: name of the text in messages.
        base_dir: folder that relative paths are relative to.
        overrides: `KEY=VALUE`, applied in order; a value is YAML.
        is_of_run: whether it is the copy of a run, which may be older than this version: keys that were removed since
            are left out.

    Raises:
        SpecError: as `load_spec`.
    """
    document = positions.parse(text, source=source)
    if document.data is None:
        raise SpecError("the spec is empty", where=source, hint=_INIT)
    if not isinstance(document.data, dict):
        raise SpecError(
            "a spec has sections (cluster, job, ...), and this is something else", where=document.places.of(())
        )
    return check(document, base_dir=base_dir, overrides=overrides, is_of_run=is_of_run)


def check(document: positions.Document, *, base_dir: Path, overrides: Sequence[str], is_of_run: bool = False) -> Spec:
    """Return the spec in the data of a document, with `--set` values applied; the data is changed.

    Raises:
        SpecError: a key or a value is wrong; all problems in one error.
    """
    data, texts = document.data, document.texts
    applied = []
    if overrides:
        from dtctl.spec.overrides import apply

        applied = [(apply(data, texts, override), override) for override in overrides]
    places = Places(document.places.source, document.places.lines, applied)
    if "base_dir" in data:
        from dtctl.spec import problems

        raise SpecError(f"base_dir: {problems.unknown(('base_dir',))}", where=places.of(("base_dir",)), key="base_dir")
    try:
        spec = _validated(data, texts, is_of_run=is_of_run)
    except ValidationError as exc:
        from dtctl.spec import problems

        raise problems.explain(exc.errors(include_url=False), data, places) from None
    spec = spec.model_copy(update={"base_dir": base_dir, **_absolute(spec.cluster, base_dir, places)})
    spec._places = places
    return spec


def dump_spec(spec: Spec) -> str:
    """Return the spec as YAML that `parse_spec` reads as the same spec."""
    return positions.write(spec.model_dump(mode="json", exclude_none=True, exclude_unset=True, by_alias=True))


def _validated(data: dict[str, Any], texts: Mapping[Key, str], *, is_of_run: bool) -> Spec:
    if not Spec.__pydantic_complete__:
        with _without_plugins():
            Spec.model_rebuild()
    try:
        return Spec.model_validate(data)
    except ValidationError as exc:
        is_changed = _retype(exc, data, texts)
        if not ((is_of_run and _leave_out_removed(exc, data)) or is_changed):
            raise
    return Spec.model_validate(data)


@contextmanager
def _without_plugins() -> Iterator[None]:
    """Keep pydantic from looking through all installed packages for plugins, which takes 10 ms and more."""
    name = "PYDANTIC_DISABLE_PLUGINS"
    before = os.environ.get(name)
    os.environ[name] = "__all__"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _retype(error: ValidationError, data: dict[str, Any], texts: Mapping[Key, str]) -> bool:
    """Restore the typed text where text is required and YAML has read a number or a truth value.

    `env: {CUDA: 12.10}` means 12.10 and not 12.1. Returns whether anything was changed.
    """
    from dtctl.spec import problems

    changed = False
    for problem in error.errors(include_url=False, include_context=False):
        path = problems.path_in(problem["loc"], data)
        if problem["type"] == "string_type" and path in texts:
            place: Any = data
            for step in path[:-1]:
                place = place[step]
            place[path[-1]] = texts[path]
            changed = True
    return changed


def _leave_out_removed(error: ValidationError, data: dict[str, Any]) -> bool:
    """Take keys out that were removed since some version, and values that are refused since; return whether any was."""
    from dtctl.spec import problems

    changed = False
    for problem in error.errors(include_url=False, include_context=False):
        path = problems.path_in(problem["loc"], data)
        if dotted(path) in {*problems.REMOVED, *problems.REFUSED_SINCE}:
            place: Any = data
            for step in path[:-1]:
                place = place[step]
            changed = place.pop(path[-1], None) is not None or changed
    return changed


def _absolute(cluster: Cluster, base_dir: Path, places: Places) -> dict[str, Cluster]:
    """Return the cluster section with paths that do not depend on the working folder; empty if it names none."""
    update = {}
    for name in ("hostfile", "identity_file", "known_hosts", "ssh_config"):
        path = getattr(cluster, name)
        if path is None or (name, str(path)) == ("ssh_config", "none"):
            continue
        try:
            update[name] = base_dir / path.expanduser()
        except RuntimeError as exc:
            key = f"cluster.{name}"
            where = places.of(("cluster", name))
            raise SpecError(
                f"{key}: the home folder in {path} is unknown on this machine", where=where, key=key
            ) from exc
    return {"cluster": cluster.model_copy(update=update)} if update else {}
