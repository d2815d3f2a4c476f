"""Reading of a spec: a checked `Spec` from a file and `--set` values. The texts of errors are in problems.py."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from dtctl.errors import SpecError, suggest_name
from dtctl.names import SPEC_FILE
from dtctl.spec import positions
from dtctl.spec.model import Cluster, Spec
from dtctl.spec.places import KeyLocations, format_dotted_key
from dtctl.spec.places import Path as Key

MAX_BYTES = 4 * 1024 * 1024
"""Size of the largest spec that is read, in bytes; a larger file is not a spec (/dev/zero, for example, is endless)."""
STDIN = "<standard input>"
_INIT = "`dtctl init DIR` makes a project with one"


def load_spec(path: Path, overrides: Sequence[str] = ()) -> Spec:
    """Return the spec in the file at `path`, or in `dtctl.yaml` of the folder at `path`, with `--set` values applied.

    `-` is the standard input; relative paths then refer to the working folder.

    Raises:
        SpecError: the file cannot be read, or has keys or values that are not allowed; one error lists all problems.
    """
    if path == Path("-"):
        text = _decode_spec_text(sys.stdin.buffer.read(MAX_BYTES + 1), STDIN)
        return parse_spec(text, source=STDIN, base_dir=Path.cwd(), overrides=overrides)
    if path.is_dir():
        path = path / SPEC_FILE
    if path.suffix in (".py", ".sh"):
        raise SpecError(
            f"{path} is a script, and a spec is expected",
            where=str(path),
            hint=f"name it as `job.script` in a {SPEC_FILE}, or without a spec: "
            f"`dtctl launch --nodes localhost -- {path}`; arguments of the spec's script come after `--`",
        )
    try:
        if path.is_fifo():  # opening a pipe waits until another process writes to it
            raise SpecError("the spec is a pipe", where=str(path), hint="`-` reads standard input")
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise SpecError(f"there is no spec {path}", where=str(path), hint=_suggest_spec(path)) from None
    except OSError as exc:
        raise SpecError(f"the spec cannot be read: {exc.strerror}", where=str(path)) from exc
    return parse_spec(
        _decode_spec_text(raw, str(path)), source=str(path), base_dir=path.resolve().parent, overrides=overrides
    )


def _suggest_spec(path: Path) -> str:
    """Return the hint for a missing spec: a file with a similar name, or else the command that creates a spec."""
    try:
        found = [each.name for each in path.parent.iterdir() if each.suffix in (".yaml", ".yml") and each.is_file()]
    except OSError:
        found = []
    return suggest_name(path.name, found, _INIT)


def _decode_spec_text(raw: bytes, source: str) -> str:
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
        text: the spec as YAML.
        source: name of the text, for messages.
        base_dir: folder to which relative paths refer.
        overrides: `KEY=VALUE`, applied in order; a value is YAML.
        is_of_run: whether the text is the copy of a run's spec, which may be older than this version; keys that were
            removed since then are dropped.

    Raises:
        SpecError: see `load_spec`.
    """
    document = positions.parse_yaml_document(text, source=source)
    if document.data is None:
        raise SpecError("the spec is empty", where=source, hint=_INIT)
    if not isinstance(document.data, dict):
        raise SpecError(
            "a spec has sections (cluster, job, ...), and this file has none", where=document.places.locate_key(())
        )
    return build_spec_from_document(document, base_dir=base_dir, overrides=overrides, is_of_run=is_of_run)


def build_spec_from_document(
    document: positions.YamlDocument, *, base_dir: Path, overrides: Sequence[str], is_of_run: bool = False
) -> Spec:
    """Return the spec in the data of a document, with `--set` values applied; the data is changed.

    Raises:
        SpecError: a key or a value is wrong; one error lists all problems.
    """
    data, texts = document.data, document.texts
    applied = []
    if overrides:
        from dtctl.spec.overrides import apply_override

        applied = [(apply_override(data, texts, override), override) for override in overrides]
    places = KeyLocations(document.places.source, document.places.lines, applied)
    if "base_dir" in data:
        from dtctl.spec import problems

        raise SpecError(
            f"base_dir: {problems.describe_unknown_key(('base_dir',))}",
            where=places.locate_key(("base_dir",)),
            key="base_dir",
        )
    try:
        spec = _validate_spec_data(data, texts, is_of_run=is_of_run)
    except ValidationError as exc:
        from dtctl.spec import problems

        raise problems.build_spec_error(exc.errors(include_url=False), data, places) from None
    spec = spec.model_copy(update={"base_dir": base_dir, **_resolve_cluster_paths(spec.cluster, base_dir, places)})
    spec._places = places
    return spec


def dump_spec(spec: Spec) -> str:
    """Return the spec as YAML that `parse_spec` reads as the same spec."""
    return positions.format_yaml_document(
        spec.model_dump(mode="json", exclude_none=True, exclude_unset=True, by_alias=True)
    )


def _validate_spec_data(data: dict[str, Any], texts: Mapping[Key, str], *, is_of_run: bool) -> Spec:
    if not Spec.__pydantic_complete__:
        with _without_plugins():
            Spec.model_rebuild()
    try:
        return Spec.model_validate(data)
    except ValidationError as exc:
        is_changed = _restore_typed_text(exc, data, texts)
        if not ((is_of_run and _leave_out_removed(exc, data)) or is_changed):
            raise
    return Spec.model_validate(data)


@contextmanager
def _without_plugins() -> Iterator[None]:
    """Prevent pydantic from searching all installed packages for plugins, which takes 10 ms or more."""
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


def _restore_typed_text(error: ValidationError, data: dict[str, Any], texts: Mapping[Key, str]) -> bool:
    """Restore the user's text where text is required and YAML has read a number or a truth value.

    `env: {CUDA: 12.10}` means 12.10 and not 12.1. The result is True if a value was changed.
    """
    from dtctl.spec import problems

    changed = False
    for problem in error.errors(include_url=False, include_context=False):
        path = problems.find_key_path(problem["loc"], data)
        if problem["type"] == "string_type" and path in texts:
            place: Any = data
            for step in path[:-1]:
                place = place[step]
            place[path[-1]] = texts[path]
            changed = True
    return changed


def _leave_out_removed(error: ValidationError, data: dict[str, Any]) -> bool:
    """Drop keys and values that an older version accepted and this one refuses; return whether there were any."""
    from dtctl.spec import problems

    changed = False
    for problem in error.errors(include_url=False, include_context=False):
        path = problems.find_key_path(problem["loc"], data)
        if format_dotted_key(path) in {*problems.REMOVED, *problems.REFUSED_SINCE}:
            place: Any = data
            for step in path[:-1]:
                place = place[step]
            changed = place.pop(path[-1], None) is not None or changed
    return changed


def _resolve_cluster_paths(cluster: Cluster, base_dir: Path, places: KeyLocations) -> dict[str, Cluster]:
    """Return the cluster section with its paths made absolute; empty if it has no path."""
    update = {}
    for name in ("hostfile", "identity_file", "known_hosts", "ssh_config"):
        path = getattr(cluster, name)
        if path is None or (name, str(path)) == ("ssh_config", "none"):
            continue
        try:
            update[name] = base_dir / path.expanduser()
        except RuntimeError as exc:
            key = f"cluster.{name}"
            where = places.locate_key(("cluster", name))
            raise SpecError(
                f"{key}: the home folder in {path} is unknown on this machine", where=where, key=key
            ) from exc
    return {"cluster": cluster.model_copy(update=update)} if update else {}
