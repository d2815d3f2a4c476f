"""The spec of a run that was launched before, from its copy in the run's folder."""

from __future__ import annotations

from dtctl import folders, names
from dtctl.errors import SpecError
from dtctl.launch.records.record import SPEC_BYTES, RunRecord
from dtctl.spec.load import parse_spec
from dtctl.spec.model import Spec


def load_run_spec(record: RunRecord) -> Spec:
    """Return the spec that a run was launched with.

    Raises:
        SpecError: the copy in the run's folder is gone or broken.
    """
    path = record.folder / names.RUN_SPEC_FILE
    try:
        text = folders.read_regular(str(path), SPEC_BYTES).decode(errors="replace")
    except OSError as exc:
        raise SpecError(f"the run's copy of its spec cannot be read: {exc.strerror}", where=str(path)) from exc
    return parse_spec(text, source=str(path), base_dir=record.base_dir, is_of_run=True)
