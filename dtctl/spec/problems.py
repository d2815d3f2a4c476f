"""Problems that pydantic found in a spec, combined into one error in dtctl's own words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, get_args, get_origin

from dtctl.errors import SpecError
from dtctl.spec.model import Spec
from dtctl.spec.places import KeyLocations, Path, format_dotted_key, has_path_step
from dtctl.spec.section import Section
from dtctl.spec.train_section import make_train_section
from dtctl.spec.training import Train

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

_KINDS = {
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "text",
    "tuple_type": "a list",
    "dict_type": "keys with values",
    "model_type": "keys with values",
    "path_type": "a path",
    "finite_number": "a finite number",
    "string_too_short": "text that is not empty",
    "too_short": "a list that is not empty",
}
_LIMITS = {
    "greater_than": ("gt", "more than {}"),
    "greater_than_equal": ("ge", "at least {}"),
    "less_than_equal": ("le", "at most {}"),
}
_TOLD = 50
"""Largest number of problems that a message lists."""
_SHOWN = 60
"""Largest number of characters of a wrong value that a message repeats."""


def find_key_path(loc: Sequence[int | str], data: Any) -> Path:
    """Return the key for a location of pydantic, without the names of union members, which the file does not have."""
    path: list[int | str] = []
    for step in loc:
        if step == "name" and has_path_step(data, "host"):
            step = "host"  # `host` is another key for a node's name
        if has_path_step(data, step):
            data = data[step]
            path.append(step)
    return tuple(path)


def build_spec_error(problems: Sequence[ErrorDetails], data: Any, places: KeyLocations) -> SpecError:
    """Return one error that lists all problems in the order of the file, with those of `--set` at the end."""
    entries = []
    for path, group in _by_path(problems, data).items():
        set_by = any(path[: len(key)] == key for key, _ in places.overrides)
        entries.append((set_by, places.line(path) or 0, path, group))
    entries.sort(key=lambda problem: problem[:2])
    told = [
        (places.locate_key(path), format_dotted_key(path), _describe_problem_group(group, path))
        for _, _, path, group in entries[:_TOLD]
    ]
    where, key, words = told[0]
    if len(entries) == 1:
        return SpecError(f"{key}: {words}", where=where, key=key)
    lines = [f"{len(entries)} problems in the spec"]
    lines.extend(f"  {where}: {key}: {words}" for where, key, words in told)
    if len(entries) > len(told):
        lines.append(f"  and {len(entries) - len(told)} more")
    return SpecError("\n".join(lines), where=where, key=key)


REMOVED: Mapping[str, str] = {
    "metrics.pushgateway": "let Prometheus read the page of `metrics.port`",
    "metrics.otlp": "let the collector's Prometheus receiver read the page of `metrics.port`",
    "metrics.headers": "it was for `pushgateway` and `otlp`",
    "metrics.interval_s": "it was for `pushgateway` and `otlp`",
    "metrics.alerts.slack": "`metrics.alerts.webhook` sends what chats read, too",
    "metrics.alerts.mail": "let Alertmanager send mails, as a receiver of `metrics.alerts.webhook`",
}
"""Keys of earlier versions, with their replacements."""
REFUSED_SINCE: Final = ("slurm.extra",)
"""Keys with values that earlier versions accepted and this one refuses; following a job does not need them."""


def describe_unknown_key(path: Path) -> str:
    """Return the message for an unknown key: the most similar key, or a list of the allowed ones."""
    import difflib

    if instead := REMOVED.get(format_dotted_key(path)):
        return f"this key was removed (CHANGELOG.md, 0.1.0): {instead}"

    legal = sorted({name for model in _models_at(path[:-1]) for name in model.list_keys()} - {"base_dir"})
    matches = difflib.get_close_matches(str(path[-1]), legal, n=1)
    if not matches and len(path) == 1:  # the user may know a key but not its section
        matches = [
            f"{section}.{path[-1]}"
            for section in legal
            for model in _models_at((section,))
            if path[-1] in model.list_keys()
        ]
    if matches:
        return f"unknown key; did you mean `{matches[0]}`?"
    others = "; `extra` takes other options of sbatch" if path[:-1] == ("slurm",) else ""
    return f"unknown key; allowed here: {', '.join(legal)}{others}"


def _by_path(problems: Sequence[ErrorDetails], data: Any) -> dict[Path, list[ErrorDetails]]:
    """Group problems by key. A value that fits no member of a union has one problem for each member.

    If the value has the shape of a member, only the problems inside of the value are kept.
    """
    groups: dict[Path, list[ErrorDetails]] = {}
    for problem in problems:
        path = find_key_path(problem["loc"], data)
        if problem["type"] == "missing":
            path = (*path, problem["loc"][-1])
        groups.setdefault(path, []).append(problem)
    around = {path[:length] for path in groups for length in range(len(path))}
    return {path: group for path, group in groups.items() if path not in around}


def _describe_problem_group(group: Sequence[ErrorDetails], path: Path) -> str:
    problem = next((error for error in group if error["type"] == "value_error"), group[0])
    kind, value = problem["type"], problem["input"]
    if kind == "extra_forbidden":
        return describe_unknown_key(path)
    if kind == "missing":
        return "is missing"
    if kind == "value_error":
        return problem["msg"].removeprefix("Value error, ")
    *most, last = dict.fromkeys(word for error in group for word in _list_expected_values(error))
    words = f"expected {', '.join(most)} or {last}" if most else f"expected {last}"
    words = f"{words}, got {_abbreviate_value(value)}"
    suggestion = _find_near_choice(value, group)
    return f"{words}; did you mean {suggestion!r}?" if suggestion else words


def _list_expected_values(problem: ErrorDetails) -> list[str]:
    kind, context = problem["type"], problem.get("ctx", {})
    if kind == "literal_error":
        return [f"{word!r}" for word in _parse_literal_choices(problem)]
    if kind in _LIMITS:
        key, words = _LIMITS[kind]
        return [words.format(f"{context[key]:g}")]
    return [_KINDS.get(kind) or problem["msg"].lower()]


def _parse_literal_choices(problem: ErrorDetails) -> list[str]:
    """Return the words of `Literal["a", "b"]`, which pydantic writes as `'a' or 'b'`."""
    return [word.strip("' ") for word in problem["ctx"]["expected"].replace("' or '", "', '").split(",")]


def _find_near_choice(value: Any, group: Sequence[ErrorDetails]) -> str | None:
    import difflib

    choices = [
        word for problem in group if problem["type"] == "literal_error" for word in _parse_literal_choices(problem)
    ]
    matches = difflib.get_close_matches(value, choices, n=1) if isinstance(value, str) else []
    return matches[0] if matches else None


def _abbreviate_value(value: Any) -> str:
    """Return a value in the notation of the file, shortened."""
    if value is None:
        return "nothing"
    if isinstance(value, Mapping):
        return "keys with values"
    if isinstance(value, list | tuple):
        return "a list"
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _models_at(path: Path) -> list[type[Section]]:
    """Return the sections allowed at `path`."""
    models: list[type[Section]] = [Spec]
    for step in path:
        if isinstance(step, str):
            fields = [model.list_keys()[step] for model in models if step in model.list_keys()]
            models = [inner for info in fields for inner in _models_in(info.annotation)]
    return models


def _models_in(annotation: Any) -> list[type[Section]]:
    """Return the section classes in an annotation."""
    if annotation is Train:
        return [make_train_section()]
    if get_origin(annotation) is None:
        return [annotation] if isinstance(annotation, type) and issubclass(annotation, Section) else []
    return [model for inner in get_args(annotation) for model in _models_in(inner)]
