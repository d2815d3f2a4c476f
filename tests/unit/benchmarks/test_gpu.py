"""`make gpu` without a GPU: what is kept of a run that is cut short, and the table; checks are tried in integration."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu

ROOT = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.torch


def test_the_programme_is_in_order_and_short() -> None:
    assert [check.number for check in gpu.PROGRAMME] == list(range(1, 17))
    assert gpu.BUDGET_S <= 15 * 60
    assert all(callable(gpu.named(check.where)) for check in gpu.PROGRAMME)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu"])
    assert gpu.main() == 2
    assert "benchmarks.gpu --cpu" in capsys.readouterr().err


def test_a_number_that_no_check_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu", "--only", "99"])
    with pytest.raises(SystemExit) as ended:
        gpu.main()
    assert ended.value.code == 2


def test_what_is_found_is_kept_after_each_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[dict[str, Any]] = []
    out = tmp_path / "kept.json"

    def one(check: gpu.Listed, **_: Any) -> dict[str, Any]:
        if check.number == 3:
            raise KeyboardInterrupt
        point = {"what": "sum", "expected": "1", "found": "1", "verdict": "ok" if check.number == 1 else "failed"}
        return {
            "number": check.number, "name": check.name, "expected": check.expected, "took_s": 1.0, "ended": "",
            "verdict": gpu.verdict_of([point], ""), "points": [point],
        }  # fmt: skip

    real = gpu.keep

    def noted(found: dict[str, Any], path: Path) -> None:
        real(found, path)
        kept.append(json.loads(path.read_text()))

    monkeypatch.setattr(gpu, "run_one", one)
    monkeypatch.setattr(gpu, "keep", noted)
    with pytest.raises(KeyboardInterrupt):
        gpu.programme([1, 2, 3], out, cpu=True, budget_s=100.0)
    assert [len(found["checks"]) for found in kept] == [1, 2]
    assert [row["verdict"] for row in json.loads(out.read_text())["checks"]] == ["ok", "failed"]
    assert list(tmp_path.iterdir()) == [out], "no draft is left"
    text = gpu.table(json.loads(out.read_text()))
    assert "| 1 | tools |" in text
    assert "- warm start: sum: expected 1, found 1" in text


def test_time_that_has_run_out_is_no_success(tmp_path: Path) -> None:
    out = tmp_path / "kept.json"
    assert gpu.programme([12], out, cpu=True, budget_s=0.0) == 1
    (row,) = json.loads(out.read_text())["checks"]
    assert (row["verdict"], row["ended"]) == ("skipped", "not reached within 0 s")
    assert "not reached within 0 s" in gpu.table(json.loads(out.read_text()))


def test_a_check_that_does_not_end_is_ended() -> None:
    row = gpu.run_one(gpu.PROGRAMME[10], cpu=True, limit_s=0.3)
    assert (row["verdict"], row["ended"]) == ("failed", "it has not come to its end after 0 s")


@pytest.mark.parametrize(
    ("verdicts", "ended", "expected"),
    [
        (["ok", "skipped"], "", "ok"),
        (["ok", "failed"], "", "failed"),
        (["skipped"], "", "skipped"),
        (["ok"], "exit code 1", "failed"),
        ([], "", "skipped"),
    ],
)
def test_the_verdict_of_a_check(verdicts: list[str], ended: str, expected: str) -> None:
    assert gpu.verdict_of([{"verdict": verdict} for verdict in verdicts], ended) == expected


def test_the_documentation_shows_the_newest_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    checks = [
        {
            "number": 4, "name": "groups", "expected": "as a single worker", "verdict": "failed", "took_s": 31.0,
            "ended": "",
            "points": [{"what": "fsdp", "expected": "within 1e-06", "found": "0.5 | 3 steps", "verdict": "failed"}],
        }
    ]  # fmt: skip
    for date, device in (("20261201-0900", "an old GPU"), ("20261202-0900", "NVIDIA H200")):
        kept = {"date": date, "device": device, "versions": {"torch": "2.13.0"}, "took_s": 31.0, "checks": checks}
        (results / f"gpu-{date}.json").write_text(json.dumps(kept))
    pytest.importorskip("mkdocs")
    page = runpy.run_path(str(ROOT / "docs" / "generate.py"))
    assert "## make gpu" in page["gpu_checks"]()  # of an H100
    monkeypatch.setitem(page["gpu_checks"].__globals__, "ROOT", tmp_path)
    text = page["gpu_checks"]()
    assert "## make gpu\n\nNVIDIA H200, 20261202-0900, torch 2.13.0; 31 s in all." in text
    assert "| 4 | groups | as a single worker | failed | 31 |" in text
    assert "- groups: fsdp: expected within 1e-06, found 0.5 | 3 steps" in text
    assert "an old GPU" not in text
