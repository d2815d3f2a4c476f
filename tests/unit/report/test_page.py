"""What the page says; how it looks is tested in a browser (tests/integration/test_report.py)."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import re
import stat
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dtctl.render import find_builtin_templates
from dtctl.report.charts import build_charts, compute_goodput_curve
from dtctl.report.history import build_run_history
from dtctl.report.metrics import read_metrics_table
from dtctl.report.page import (
    PHASE_NAMES,
    build_figure_tiles,
    describe_run_outcome,
    format_time_span,
    render_report_page,
)
from dtctl.report.run import collect_run_facts
from tests.command_line import dtctl
from tests.unit.report.runs import BEGAN, events, make_run, parsed, row

ROOT = Path(__file__).resolve().parents[3]


def text_of(html: str) -> str:
    return " ".join(re.sub(r"<[^>]*>", " ", html.partition("<main>")[2].partition("</main>")[0]).split())


def report(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return dtctl("report", *arguments, cwd=cwd)


def test_the_course_of_a_run() -> None:
    history = build_run_history(parsed(events()), began=BEGAN, length_s=60.0)
    spans = [(span.doing, span.begin_s, span.end_s) for span in history.spans if span.node == "b"]
    assert spans == [("prepare", 0, 5), ("start", 5, 10), ("run", 10, 31), ("run", 33, 59)]
    assert [(mark.kind, mark.node) for mark in history.list_marks_of("failure", "exit")] == [
        ("failure", "b"),
        ("exit", "a"),
    ]
    assert [mark.text for mark in history.list_marks_of("snapshot")] == ["snapshot of step 10"]
    assert history.failures == {"b": 1}


def test_an_attempt_that_never_began_is_no_start(tmp_path: Path) -> None:
    told = [event for event in events() if event["event"] != "start" or event["attempt"] == 0]
    told[-1] |= {"status": "failed", "exit_code": 6}
    text = text_of(render_report_page([collect_run_facts(make_run(tmp_path, happened=told))], now=BEGAN))
    assert "Started again" not in text
    assert "It was to start once more because rank 1 on b was ended by signal 9 (SIGKILL), and did not." in text


def test_the_page_says_first_what_became_of_the_run(tmp_path: Path) -> None:
    text = text_of(render_report_page([collect_run_facts(make_run(tmp_path))], now=BEGAN))
    assert "Succeeded after 1:00. Started again once because rank 1 on b was ended by signal 9 (SIGKILL)." in text
    assert "goodput 75.0% 3 steps repeated" in text
    assert "steps 40 of 40" in text
    assert "steps that count 75.0" in text


def test_a_failed_run_says_why(tmp_path: Path) -> None:
    failure = {"node": "b", "rank": 1, "exit_code": 1, "signal": None, "log": "l", "summary": "ValueError: no <data>"}
    done = {"event": "done", "time": BEGAN + 60, "status": "failed", "exit_code": 8, "first_failure": failure}
    html = render_report_page([collect_run_facts(make_run(tmp_path, happened=[*events()[:-1], done]))], now=BEGAN)
    assert "Failed after 1:00: rank 1 on b ended with exit code 1: ValueError: no &lt;data&gt;." in html


def test_secrets_are_on_no_page(tmp_path: Path) -> None:
    html = render_report_page([collect_run_facts(make_run(tmp_path))], now=BEGAN)
    assert "sesame" not in html
    assert {"WANDB_API_KEY", "HF_TOKEN", "&lt;fast&gt;", "(not shown)"} <= set(
        re.findall(r"[\w&;]+|\(not shown\)", html)
    )


def test_nothing_in_the_page_asks_for_anything_else(tmp_path: Path) -> None:
    html = render_report_page([collect_run_facts(make_run(tmp_path))], now=BEGAN)
    assert re.findall(r"""(?:src|href)\s*=\s*["']?(?!#|data:,)[^"'\s>]+""", html.partition("<script")[0]) == []
    assert "default-src 'none'" in html


def test_names_cannot_end_the_script(tmp_path: Path) -> None:
    rows = [row(step, **{"val_</script>": 1.0}) for step in (1, 2)]
    html = render_report_page([collect_run_facts(make_run(tmp_path, rows=rows))], now=BEGAN)
    data = html.partition('id="data">')[2].partition("</script>")[0]
    assert json.loads(data)["charts"][-1]["title"] == "val_</script>"


def test_the_plots_of_one_run_and_of_two(tmp_path: Path) -> None:
    runs = [collect_run_facts(make_run(tmp_path, name, lr=lr)) for name, lr in (("r1", "0.001"), ("r2", "0.01"))]

    def labels(found: list[dict[str, Any]]) -> dict[str, list[str]]:
        return {chart["name"]: [one["label"] for one in chart["series"]] for chart in found}

    one = labels(build_charts(runs[:1]))
    assert next(iter(one)) == "loss"
    assert one["step"] == ["median", "95th percentile", "longest"]
    assert "tokens" not in one
    assert labels(build_charts(runs))["loss"] == ["r1 training", "r2 training"]
    assert "train.lr 0.001 0.01" in text_of(render_report_page(runs, now=BEGAN))


def test_every_figure_of_the_runtime_has_a_plot_with_a_title(tmp_path: Path) -> None:
    """A plot that has but the key for a title is of somebody else's figure; the runtime's own are in docs/files.md."""
    table = (
        (ROOT / "docs" / "files.md").read_text(encoding="utf-8").partition("## metrics.jsonl")[2].partition("\n## ")[0]
    )
    names = {name for line in table.splitlines() if line.startswith("| `") for name in re.findall(r"`(\w+)`", line)}
    rows = [
        row(step, **dict.fromkeys(names - {"step", "time", "val_NAME", "lr_NAME", "grad_norm_NAME"}, 0.5))
        for step in (1, 2)
    ]
    shown = build_charts([collect_run_facts(make_run(tmp_path, rows=rows))])
    assert [chart["title"] for chart in shown if chart["name"].startswith("more-")] == []


def test_what_experts_got_is_shown_where_a_model_has_any(tmp_path: Path) -> None:
    counted = {"expert_load": 1.5, "expert_tokens": 64.0, "expert_tokens_max": 96.0}
    rows = [row(step, **counted, experts_idle=0.25, tokens_dropped=0.1) for step in (1, 2)]
    shown = {chart["title"]: chart for chart in build_charts([collect_run_facts(make_run(tmp_path, rows=rows))])}
    assert [series["y"] for series in shown["The busiest expert"]["series"]] == [[1.5, 1.5]]
    assert [series["y"] for series in shown["Tokens of an expert"]["series"]] == [[96.0, 96.0], [64.0, 64.0]]
    assert [series["y"] for series in shown["Experts left out"]["series"]] == [[25.0, 25.0], [10.0, 10.0]]
    assert "The busiest expert" not in {
        chart["title"] for chart in build_charts([collect_run_facts(make_run(tmp_path, "dense"))])
    }


def test_restarts_are_marked_at_the_step_they_fell_on(tmp_path: Path) -> None:
    found = build_charts([collect_run_facts(make_run(tmp_path))])
    marks = {chart["name"]: chart["marks"] for chart in found}
    assert marks["loss"] == [22.0]  # logged 32 s after the beginning
    assert marks["goodput"] == [32]


def test_goodput_is_the_share_of_steps_that_count(tmp_path: Path) -> None:
    record = make_run(tmp_path)
    metrics = read_metrics_table(record.folder / "metrics.jsonl")
    assert metrics is not None
    curve = compute_goodput_curve(metrics, BEGAN)
    assert curve is not None
    assert (curve.steps[-1], curve.values[-1]) == (50.0, pytest.approx(80.0))


def test_goodput_of_a_run_that_continues_another_counts_its_own_steps(tmp_path: Path) -> None:
    earlier = [{**row(n), "time": BEGAN - 1000 + n} for n in range(1, 31)]
    own = [{**row(n), "time": BEGAN + 2.0 * (n - 30)} for n in range(31, 41)]
    metrics = read_metrics_table(make_run(tmp_path, rows=[*earlier, *own]).folder / "metrics.jsonl")
    assert metrics is not None
    curve = compute_goodput_curve(metrics, BEGAN)
    assert curve is not None
    assert curve.values == (pytest.approx(50.0),) * 10, "one of two seconds each"


def test_the_tiles_say_what_the_plots_show(tmp_path: Path) -> None:
    run = collect_run_facts(make_run(tmp_path))
    shown = {name: (value, beside) for name, value, beside in build_figure_tiles(run)}
    plots = {chart["name"]: chart for chart in build_charts([run])}
    assert plots["goodput"]["series"][0]["y"][-1] == 75.0
    assert shown["goodput"][0] == "75.0%"
    assert plots["step"]["series"][0]["y"][-1] == 900.0
    assert shown["step"] == ("900 ms", "median; 95% within 1,200 ms")


def test_a_run_that_continues_another_says_so(tmp_path: Path) -> None:
    record = make_run(tmp_path)
    for command in (["dtctl", "launch", "--resume", "r0"], ["dtctl", "launch", "--resume=r0", "--", "--resume", "x"]):
        record.write_info(replace(record.info(), command=command))
        assert "Continues run r0" in describe_run_outcome(collect_run_facts(record))
    record.write_info(replace(record.info(), command=["dtctl", "launch", "--", "--resume", "x"]))
    assert "Continues" not in describe_run_outcome(collect_run_facts(record))


def _colours(scheme: int) -> dict[str, tuple[float, ...]]:
    """Phase -> its colour of the light (0) or dark (1) scheme, as red, green and blue from 0 to 255."""
    css = (find_builtin_templates() / "report" / "page.css").read_text()
    found = re.findall(r"\.phase\.(\w+) { background: light-dark\(#(\w{6}), #(\w{6})\)", css)
    return {name: tuple(bytes.fromhex(colours[scheme])) for name, *colours in found}


@pytest.mark.parametrize("scheme", [0, 1])
def test_every_phase_has_a_colour_of_its_own(scheme: int) -> None:
    colours = _colours(scheme)
    assert colours.keys() == PHASE_NAMES.keys()
    for one, other in itertools.combinations(colours, 2):
        # Green counts most to the eye, blue least: the usual quick measure of how far apart colours look.
        red, green, blue = (a - b for a, b in zip(colours[one], colours[other], strict=True))
        assert (2 * red**2 + 4 * green**2 + 3 * blue**2) ** 0.5 > 80, (one, other)


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


def test_a_loss_that_was_read_from_the_output_is_plotted_and_marked(tmp_path: Path) -> None:
    record = make_run(tmp_path, rows=[])
    log = record.log_path("a", 0)
    log.parent.mkdir(parents=True, exist_ok=True)
    bars = [f"epoch {epoch}: {n}/40 [00:03<00:03, 10.0it/s, loss={4 / (40 * epoch + n):.4f}]"
            for epoch in (0, 1) for n in range(1, 41)]  # fmt: skip
    log.write_text("\r" + "\r".join(bars) + "\n")
    done = report("-o", "-", cwd=tmp_path)
    assert (done.returncode, "nothing to plot" in done.stderr) == (0, False), done.stderr
    run = collect_run_facts(record)
    assert run.metrics is not None
    assert run.metrics.is_printed
    (chart,) = [chart for chart in build_charts([run]) if chart["name"] == "loss"]
    assert chart["note"] == "read from the output"
    assert chart["series"][0]["x"] == list(range(1, 81)), "the second bar goes on where the first has ended"
    assert chart["series"][0]["y"][-1] == 0.05
    assert "Read from the output of the first rank" in text_of(done.stdout)
    assert "read from the output" in text_of(done.stdout)


def test_damaged_lines_are_counted(tmp_path: Path) -> None:
    record = make_run(tmp_path)
    with (record.folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 41, "lo')
    done = report("-o", "-", cwd=tmp_path)
    assert "1 damaged line of metrics is left out" in done.stderr
    assert "1 damaged line left out" in text_of(done.stdout)


@pytest.mark.parametrize(("seconds", "text"), [(0.04, "0.0 s"), (59.9, "59.9 s"), (61, "1:01"), (3661, "1:01:01")])
def test_time_spans(seconds: float, text: str) -> None:
    assert format_time_span(seconds) == text


def test_a_loss_that_is_lost_is_told_with_its_first_step(tmp_path: Path) -> None:
    record = make_run(tmp_path, rows=[row(1), row(2), row(3, loss=None), row(4, loss=None)])
    text = render_report_page([collect_run_facts(record)], now=0.0)
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
    assert ("sesame" in render_report_page([collect_run_facts(record)], now=0.0).replace("sesame-", "")) is shown


def test_a_login_within_a_list_of_the_spec_is_not_passed_on(tmp_path: Path) -> None:
    record = make_run(tmp_path)
    spec = record.folder / "spec.yaml"
    spec.write_text(spec.read_text().replace("script: train.py", "script: train.py\n  args: [--db, 'pg://u:sesame@h']"))
    text = render_report_page([collect_run_facts(record)], now=0.0)
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
