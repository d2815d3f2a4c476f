"""Logs that are compressed, in UTF-16, binary, empty or full of control characters."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dtctl.doctor.explain import content
from dtctl.doctor.explain.diagnose import diagnose_log_files, explain_all
from dtctl.doctor.explain.lines import render_terminal_line
from tests.command_line import dtctl

OOM = "[rank2]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\n"


@pytest.mark.parametrize(
    ("suffix", "compress"), [(".gz", gzip.compress), (".bz2", bz2.compress), (".xz", lzma.compress)]
)
def test_compressed_logs_are_read_also_in_a_folder(
    tmp_path: Path, suffix: str, compress: Callable[[bytes], bytes]
) -> None:
    (tmp_path / f"rank.log{suffix}").write_bytes(compress(OOM.encode()))
    found = explain_all([tmp_path])
    assert ((found.diagnoses[0].id, found.diagnoses[0].ranks), found.unread) == (("cuda-oom", (2,)), [])


def test_of_cut_off_data_what_is_left_is_read_and_the_damage_told(tmp_path: Path) -> None:
    text = OOM + os.urandom(100_000).hex()
    (tmp_path / "a.log.gz").write_bytes(gzip.compress(text.encode())[:-20_000])
    found = explain_all([tmp_path / "a.log.gz"])
    (unread,) = found.unread
    assert found.diagnoses[0].id == "cuda-oom"
    assert "cut off" in unread.why
    assert "what comes before was read" in unread.why


@pytest.mark.parametrize("coding", ["utf-16", "utf-16-be", "utf-8-sig"])
def test_the_byte_order_mark_says_how_a_log_is_written(tmp_path: Path, coding: str) -> None:
    mark = b"\xfe\xff" if coding == "utf-16-be" else b""
    (tmp_path / "a.log").write_bytes(mark + OOM.encode(coding))
    assert diagnose_log_files([tmp_path / "a.log"])[0].ranks == (2,)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "it is empty"),
        (bytes(range(256)) * 100, "it is not text"),
        (bytes(1000), "it is not text"),
        (b"\x28\xb5\x2f\xfd" + bytes(range(100)), "compressed with zstd"),
        (b"\x1f\x8b" + b"\xff" * 100, "damaged or cut off"),
    ],
)
def test_what_cannot_be_read_is_said_with_the_reason(tmp_path: Path, data: bytes, why: str) -> None:
    (tmp_path / "a.log").write_bytes(data)
    (tmp_path / "b.log").write_text(OOM)
    found = explain_all([tmp_path])
    (unread,) = found.unread
    assert found.diagnoses[0].id == "cuda-oom"
    assert unread.file.endswith("a.log")
    assert why in unread.why


def test_zero_bytes_that_a_rotation_has_left_do_not_hide_the_text(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_bytes(bytes(10_000) + OOM.encode())
    assert diagnose_log_files([tmp_path / "a.log"])[0].id == "cuda-oom"


def test_of_very_long_compressed_data_beginning_and_end_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HEAD_BYTES", "TAIL_BYTES"):
        monkeypatch.setattr(content, name, 1 << 20)
    middle = "step 1 loss 2.0\n" * 1_000_000
    (tmp_path / "a.log.gz").write_bytes(gzip.compress(f"first\n{middle}{OOM}".encode(), 1))
    text = content.read_log_content(tmp_path / "a.log.gz").text
    assert len(text) < 5 << 20
    assert (text.startswith("first\n"), text.endswith(OOM)) == (True, True)


EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m[rank1]: \x08KeyError: '\u202egnitteks\x1b[0m\x00'"


def test_control_characters_never_reach_the_terminal(tmp_path: Path) -> None:
    assert render_terminal_line(EVIL) == "[rank1]: KeyError: 'gnitteks'"
    (tmp_path / "a\x1b[31m.log").write_text(EVIL + "\n")
    (tmp_path / "b\x1b[31m.log").touch()
    done = dtctl("doctor", "--log", str(tmp_path), cwd=tmp_path)
    assert "KeyError: 'gnitteks'" in done.stdout
    assert "it is empty" in done.stderr
    assert all(letter.isprintable() or letter in "\n\t" for letter in done.stdout + done.stderr)
    done = dtctl("doctor", "--log", str(tmp_path), "--json", cwd=tmp_path)
    answer = json.loads(done.stdout)
    assert answer["diagnoses"][0]["ranks"] == [1]
    assert [one["why"] for one in answer["unread"]] == ["it is empty"]


def test_a_line_without_end_takes_no_time_and_neither_do_many(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text("[ Rank 1 Watchdog " * 500_000 + "\n" + OOM)
    (tmp_path / "b.log").write_text("[rank0]: step 8 loss 0.1\n" * 100_000)
    begun = time.process_time()
    assert diagnose_log_files([tmp_path])[0].id == "cuda-oom"
    assert time.process_time() - begun < 4
