"""What `dtctl clean` finds on a node, and removes there."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from dtctl import folders
from dtctl.supervisor import clean


def test_what_a_killed_run_has_left_in_memory_is_shown_and_goes_with_it(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "left"
    run.mkdir(parents=True)
    (run / "supervisor.json").write_text("{}")
    (without,) = clean.list_stored_items(str(tmp_path))
    assert without.has == []
    memory = Path(folders.choose_memory_folder(str(run)))
    try:
        (memory / "snapshots").mkdir(parents=True)
        (memory / "snapshots" / "model").write_bytes(os.urandom(1 << 20))
        (found,) = clean.list_stored_items(str(tmp_path))
        assert found.has == ["memory"]
        assert found.bytes >= without.bytes + (1 << 20)
        assert clean.remove_stored_items(str(tmp_path), [("run", "left")]) == []
        assert not memory.exists()
        assert not run.exists()
    finally:
        shutil.rmtree(memory, ignore_errors=True)
