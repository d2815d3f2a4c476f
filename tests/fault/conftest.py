"""The sandbox of the integration tests, for faults."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

_path = Path(__file__).parent.parent / "integration" / "conftest.py"
_spec = importlib.util.spec_from_file_location("integration_conftest", _path)
assert _spec is not None
assert _spec.loader is not None
_shared = importlib.util.module_from_spec(_spec)
sys.modules["integration_conftest"] = _shared
_spec.loader.exec_module(_shared)

sandbox_env = _shared.sandbox_env
session_sandbox = _shared.session_sandbox
sandbox = _shared.sandbox
project = _shared.project
