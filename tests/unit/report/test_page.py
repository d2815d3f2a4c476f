"""What the page says; how it looks is tested in a browser (tests/integration/test_report.py)."""

from __future__ import annotations

import fcntl
import json
import os
import re
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest

from dtctl.report.charts import charts, goodput
from dtctl.report.history import history_of
from dtctl.report.metrics import read
from dtctl.report.page import clock, page
from dtctl.report.run import facts
from tests.command_line import dtctl
from tests.unit.report.runs import BEGAN, events, make_run, parsed, row


def text_of(html: str) -> str:
    return " ".join(re.sub(r"<[^>]*>", " ", html.partition("<main>")[2].partition("</main>")[0]).split())


def report(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return dtctl("report", *arguments, cwd=cwd)


def test_the_course_of_a_run() -> None:
    history = history_of(parsed(events()), began=BEGAN, length_s=60.0)
    spans = [(span.doing, span.begin_s, span.end_s) for span in history.spans if span.node == "b"]
    assert spans == [("prepare", 0, 5), ("start", 5, 10), ("run", 10, 31), ("run", 33, 59)]
    assert [(mark.kind, mark.node) for mark in history.of("failure", "exit")] == [("failure", "b"), ("exit", "a")]
    assert [mark.text for mark in history.of("snapshot")] == ["snapshot of step 10"]
    assert history.failures == {"b": 1}


def test_the_page_says_first_what_became_of_the_run(tmp_path: Path) -> None:
    text = text_of(page([facts(make_run(tmp_path))], now=BEGAN))
    assert "Succeeded after 1:00. Started again once because rank 1 on b was ended by signal 9 (SIGKILL)." in text
    assert "goodput 75.0% 3 steps done again" in text
    assert "steps 40 of 40" in text
    assert "steps that count 75.0" in text


def test_a_failed_run_says_why(tmp_path: Path) -> None:
    failure = {"node": "b", "rank": 1, "exit_code": 1, "signal": None, "log": "l", "summary": "ValueError: no <data>"}
    done = {"event": "done", "time": BEGAN + 60, "status": "failed", "exit_code": 8, "first_failure": failure}
    html = page([facts(make_run(tmp_path, happened=[*events()[:-1], done]))], now=BEGAN)
    assert "Failed after 1:00: rank 1 on b ended with exit code 1: ValueError: no &lt;data&gt;." in html


def test_secrets_are_on_no_page(tmp_path: Path) -> None:
    html = page([facts(make_run(tmp_path))], now=BEGAN)
    assert "sesame" not in html
    assert {"WANDB_API_KEY", "HF_TOKEN", "&lt;fast&gt;", "(not shown)"} <= set(
        re.findall(r"[\w&;]+|\(not shown\)", html)
    )


def test_nothing_in_the_page_asks_for_anything_else(tmp_path: Path) -> None:
    html = page([facts(make_run(tmp_path))], now=BEGAN)
    assert re.findall(r"""(?:src|href)\s*=\s*["']?(?!#|data:,)[^"'\s>]+""", html.partition("<script")[0]) == []
    assert "default-src 'none'" in html


def test_names_cannot_end_the_script(tmp_path: Path) -> None:
    rows = [row(step, **{"val_</script>": 1.0}) for step in (1, 2)]
    html = page([facts(make_run(tmp_path, rows=rows))], now=BEGAN)
    data = html.partition('id="data">')[2].partition("</script>")[0]
    assert json.loads(data)["charts"][-1]["title"] == "val_</script>"


def test_the_plots_of_one_run_and_of_two(tmp_path: Path) -> None:
    runs = [facts(make_run(tmp_path, name, lr=lr)) for name, lr in (("r1", "0.001"), ("r2", "0.01"))]

    def labels(found: list[dict[str, Any]]) -> dict[str, list[str]]:
        return {chart["name"]: [one["label"] for one in chart["series"]] for chart in found}

    one = labels(charts(runs[:1]))
    assert next(iter(one)) == "loss"
    assert one["step"] == ["median", "95th percentile", "longest"]
    assert "tokens" not in one
    assert labels(charts(runs))["loss"] == ["r1 training", "r2 training"]
    assert "train.lr 0.001 0.01" in text_of(page(runs, now=BEGAN))


def test_restarts_are_marked_at_the_step_they_fell_on(tmp_path: Path) -> None:
    found = charts([facts(make_run(tmp_path))])
    marks = {chart["name"]: chart["marks"] for chart in found}
    assert marks["loss"] == [22.0]  # logged 32 s after the beginning
    assert marks["goodput"] == [32]


def test_goodput_is_the_share_of_steps_that_count(tmp_path: Path) -> None:
    record = make_run(tmp_path)
    metrics = read(record.folder / "metrics.jsonl")
    assert metrics is not None
    curve = goodput(metrics, BEGAN)
    assert curve is not None
    assert (curve.steps[-1], curve.values[-1]) == (50.0, pytest.approx(80.0))


def test_the_command(tmp_path: Path) -> None:
    make_run(tmp_path)
    done = report(cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, f"{tmp_path}/.dtctl/runs/r1/report.html\n")
    assert report("r1", "-o", "-", cwd=tmp_path).stdout.startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (("nothing",), 7, "there is no run nothing"),
        (("-o", "."), 2, "is a folder"),
        (("-o", "none/x.html"), 2, "there is no folder none"),
        (tuple(f"r{n}" for n in range(7)), 2, "7 runs are too many for one page"),
    ],
)
def test_bad_input(tmp_path: Path, arguments: tuple[str, ...], code: int, told: str) -> None:
    make_run(tmp_path)
    done = report(*arguments, cwd=tmp_path)
    assert done.returncode == code
    assert told in done.stderr


def test_a_run_without_metrics_has_a_page_that_says_so(tmp_path: Path) -> None:
    make_run(tmp_path, rows=[])
    done = report("-o", "-", cwd=tmp_path)
    assert done.returncode == 0
    assert "has no metrics, so there is nothing to plot" in done.stderr
    assert "This run has no metrics" in text_of(done.stdout)


def test_damaged_lines_are_counted(tmp_path: Path) -> None:
    record = make_run(tmp_path)
    with (record.folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 41, "lo')
    done = report("-o", "-", cwd=tmp_path)
    assert "1 damaged lines of metrics are left out" in done.stderr
    assert "1 damaged lines left out" in text_of(done.stdout)


@pytest.mark.parametrize(("seconds", "text"), [(0.04, "0.0 s"), (59.9, "59.9 s"), (61, "1:01"), (3661, "1:01:01")])
def test_time_spans(seconds: float, text: str) -> None:
    assert clock(seconds) == text


def test_a_loss_that_is_lost_is_told_with_its_first_step(tmp_path: Path) -> None:
    record = make_run(tmp_path, rows=[row(1), row(2), row(3, loss=None), row(4, loss=None)])
    text = page([facts(record)], now=0.0)
    assert "since step 3" in text


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("DB_PASS", "sesame", False),
        ("DATABASE_URL", "postgres://u:sesame@h/x", False),
        ("DATABASE_URL", "postgres://h/sesame", True),
        ("PRIVATE", "sesame", False),
        ("COMPASS", "sesame", False),
        ("BYPASSING", "sesame", True),
    ],
)
def test_what_looks_like_a_secret_is_not_passed_on(tmp_path: Path, name: str, value: str, shown: bool) -> None:
    record = make_run(tmp_path)
    plan = record.plan()
    plan["nodes"][0]["env"].append({"name": name, "value": value, "origin": "job.env"})
    (record.folder / "plan.json").write_text(json.dumps(plan))
    spec = record.folder / "spec.yaml"
    spec.write_text(spec.read_text().replace("MODE: fast", f"{name}: '{value}'"))
    assert ("sesame" in page([facts(record)], now=0.0).replace("sesame-", "")) is shown


def test_a_login_within_a_list_of_the_spec_is_not_passed_on(tmp_path: Path) -> None:
    record = make_run(tmp_path)
    spec = record.folder / "spec.yaml"
    spec.write_text(spec.read_text().replace("script: train.py", "script: train.py\n  args: [--db, 'pg://u:sesame@h']"))
    text = page([facts(record)], now=0.0)
    assert "--db" in text
    assert "sesame@" not in text


def test_a_link_and_a_device_stay_what_they_are(tmp_path: Path) -> None:
    make_run(tmp_path)
    (tmp_path / "real.html").write_text("old")
    (tmp_path / "real.html").chmod(0o640)
    (tmp_path / "link.html").symlink_to("real.html")
    assert report("-o", "link.html", cwd=tmp_path).returncode == 0
    assert (tmp_path / "link.html").is_symlink()
    assert "<html" in (tmp_path / "real.html").read_text()
    assert (tmp_path / "real.html").stat().st_mode & 0o777 == 0o640
    os.mkfifo(tmp_path / "pipe")
    # Open for both, so that neither side waits for the other if the page is not written into it.
    pipe = os.open(tmp_path / "pipe", os.O_RDWR | os.O_NONBLOCK)
    try:
        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, 1 << 20)
        assert report("-o", "pipe", cwd=tmp_path).returncode == 0
        assert b"<html" in os.read(pipe, 1 << 20)
    finally:
        os.close(pipe)
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
