"""What stands in for modules of the standard library does what they do, and does not load them."""

from __future__ import annotations

import json
import signal as public_signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtctl.supervisor import lean

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(json_values)
def test_values_are_written_as_json_writes_them(value: object) -> None:
    assert lean.dumps(value).decode() == json.dumps(value, separators=(",", ":"))
    assert lean.loads(lean.dumps(value)) == value


@given(json_values, st.sampled_from([None, 1]))
def test_what_others_have_written_is_read(value: object, indent: int | None) -> None:
    assert lean.loads(json.dumps(value, indent=indent, ensure_ascii=False).encode()) == value


@pytest.mark.parametrize("text", [b"", b"{", b"{} x", b"[1,]", b"nul", b"\xff", b'{"a" 1}', b'"\x01"', b"[" * 5000])
def test_what_is_no_json_is_a_value_error(text: bytes) -> None:
    with pytest.raises((ValueError, RecursionError)):
        lean.loads(text)


def test_what_has_no_form_is_refused() -> None:
    with pytest.raises(TypeError, match="set has no form in JSON"):
        lean.dumps({"a": {1}})


def test_signals_have_their_numbers() -> None:
    assert lean.signal.SIGTERM == public_signal.SIGTERM
    assert lean.signal.SIGKILL == public_signal.SIGKILL


def alone(code: str) -> str:
    """Standard output of a Python that has loaded nothing but what the code loads, as on a node."""
    program = f"import sys; sys.path.insert(0, {str(Path.cwd())!r})\n{textwrap.dedent(code)}"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_broken_json_is_a_value_error_where_json_is_not_loaded() -> None:
    said = alone("""
        from dtctl.supervisor import lean
        for text in (b"", b"{", b"{} x", b"[1,]", b'{"a" 1}'):
            try:
                print("read", lean.loads(text))
            except ValueError:
                print("refused")
    """)
    assert said.split() == ["refused"] * 5


def test_a_node_loads_none_of_the_slow_modules() -> None:
    said = alone("""
        import dtctl.supervisor.main
        print(*(name for name in ("re", "enum", "json", "signal", "ctypes", "typing", "socket") if name in sys.modules))
    """)
    assert said.strip() == ""


def test_an_attribute_of_a_process_can_be_changed() -> None:
    said = alone("""
        import os
        from dtctl.supervisor import lean, processes
        print(processes.become_subreaper())
        print(lean.prctl(-1, 0))
        read_end, write_end = os.pipe()
        if os.fork() == 0:
            if os.fork() == 0:  # becomes an orphan once its parent has ended
                os.read(read_end, 1)
                os._exit(7)
            os._exit(0)
        os.wait()
        os.write(write_end, b"x")
        print(os.WEXITSTATUS(os.wait()[1]))
    """)
    assert said.split() == ["True", "False", "7"]
