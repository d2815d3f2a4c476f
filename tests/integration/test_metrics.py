"""Figures and alerts of real runs, read by a real Prometheus and taken by real receivers."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import threading
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import dtctl
from dtctl.launch.records.events import Event, Note
from dtctl.sandbox.layout import Sandbox
from tests.hosts import Project, wait_until
from tests.unit.metrics.receivers import certificate, closed_port, http_receiver

ROOT = Path(dtctl.__file__).parents[1]
SPEC = """\
cluster: {{transport: local, slots: 2, workdir: "{workdir}"}}
job:
  {{name: try, script: train.py, kind: direct, grace_s: 1, max_restarts: 1, preload: [], env: {{PYTHONPATH: "{root}"}}}}
metrics: {metrics}
"""
SCRIPT = """\
import json, os, pathlib, sys, time
from dtctl.runtime.telemetry.progress import ProgressFile

rank, attempt = int(os.environ["RANK"]), int(os.environ["DTCTL_ATTEMPT"])
progress = ProgressFile(rank)
progress.begin(10 * attempt)
rows = open(os.environ["DTCTL_METRICS"], "a") if rank == 0 else None
step = 10 * attempt
while not (pathlib.Path(WHERE) / "end").exists():
    step += 1
    progress.forward()
    progress.backward()
    time.sleep(0.05)
    progress.step(step)
    if rows is not None:
        row = {"step": step, "loss": 1 / step, "lr": 0.1, "grad_norm": 1.0, "step_s": 0.05, "samples_per_s": 80.0}
        rows.write(json.dumps({**row, "tokens_per_s": None, "time": time.time()}) + "\\n")
        rows.flush()
    if rank == 1 and attempt == 0 and (pathlib.Path(WHERE) / "fail").exists():
        sys.exit(3)
progress.end()
"""


class Training:
    """A project whose workers take steps until told to end, or to fail once."""

    def __init__(self, project: Project, signals: Path, metrics: str, spec: str = SPEC) -> None:
        self.project, self.signals = project, signals
        signals.mkdir(exist_ok=True)
        project.write("dtctl.yaml", spec.format(workdir=project.folder / "node", root=ROOT, metrics=metrics))
        project.write("train.py", SCRIPT.replace("WHERE", repr(str(signals))))

    def say(self, word: str) -> None:
        (self.signals / word).touch()

    @property
    def folder(self) -> Path:
        return self.project.folder / ".dtctl" / "runs" / self.project.unique

    def page(self) -> str:
        """The page of the run, wherever it is."""
        path = self.project.folder / ".dtctl" / "prometheus" / f"{self.project.unique}.json"
        wait_until(path.exists, what="the page has a place")
        ((target,),) = [entry["targets"] for entry in json.loads(path.read_text())]
        return fetch(f"http://{target}/metrics")

    def events(self, kind: str) -> list[dict[str, Any]]:
        path = self.folder / "events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [event for event in map(json.loads, lines) if event["event"] == kind]

    def notes(self) -> list[str]:
        return [event["text"] for event in self.events("note")]


@pytest.fixture
def signals(tmp_path: Path) -> Path:
    return tmp_path / "signals"


def fetch(url: str) -> str:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=60) as answer:
        return answer.read().decode()


def answers(url: str) -> bool:
    try:
        return bool(fetch(url))
    except OSError:
        return False


def has_page(training: Training, text: str) -> bool:
    try:
        return text in training.page()
    except OSError:
        return False


def needs(program: str) -> None:
    """Skip the test on machines whose archive has not the program (.ci/setup.sh installs it where it can)."""
    if shutil.which(program) is None:
        pytest.skip(f"needs {program}")


EXPORTED = "".join(
    f'{name}{{gpu="{gpu}",UUID="GPU-{gpu}",device="nvidia{gpu}",modelName="NVIDIA H200",Hostname="{host}"}} {value}\n'
    for name, value in (
        ("DCGM_FI_DEV_GPU_UTIL", 97),
        ("DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", 0.4),
        ("DCGM_FI_DEV_FB_USED", 9),
    )
    for host in ("node2", "elsewhere")
    for gpu in (0, 1)
)
"""As dcgm-exporter 4.4 writes it, of a node of the run and of one that is not."""


@contextmanager
def exporter() -> Iterator[str]:
    """A page with figures of GPUs; where it is."""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(EXPORTED.encode())

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def prometheus(folder: Path, targets: Path, *, gpus: str) -> Iterator[str]:
    """A Prometheus that scrapes the runs of a project, and a page about GPUs; its URL."""
    folder.mkdir()
    (folder / "prometheus.yml").write_text(
        "global: {scrape_interval: 1s}\n"
        "scrape_configs:\n"
        "  - job_name: dtctl\n"
        f"    file_sd_configs: [{{files: ['{targets}/*.json'], refresh_interval: 1s}}]\n"
        f"  - job_name: dcgm\n    static_configs: [{{targets: ['{gpus}']}}]\n"
    )
    log = (folder / "log").open("w")
    needs("prometheus")
    argv = ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    process = subprocess.Popen([*argv, "--web.listen-address=127.0.0.1:0"], stdout=log, stderr=log)
    try:

        def port() -> int | None:
            assert process.poll() is None, (folder / "log").read_text()
            return listening(process.pid)

        wait_until(port, what="Prometheus listens")
        url = f"http://127.0.0.1:{port()}"
        wait_until(lambda: answers(f"{url}/-/ready"), what="Prometheus has read what it stores")
        yield url
    finally:
        process.terminate()
        process.wait()
        log.close()


def listening(pid: int) -> int | None:
    """The TCP port at which a process listens."""
    inodes = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            inodes.add(str(fd.readlink()).removeprefix("socket:[").removesuffix("]"))
        except OSError:
            continue
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            columns = line.split()
            if columns[3] == "0A" and columns[9] in inodes:
                return int(columns[1].rpartition(":")[2], 16)
    return None


def query(url: str, expression: str) -> list[dict[str, Any]]:
    answer = json.loads(fetch(f"{url}/api/v1/query?query={urllib.parse.quote(expression)}"))
    assert answer["status"] == "success"
    return answer["data"]["result"]


SANDBOX_SPEC = SPEC.replace("transport: local, slots: 2", "transport: sandbox, nodes: 3, slots: 1")


def test_prometheus_scrapes_a_run_on_virtual_hosts(
    project: Project, tmp_path: Path, signals: Path, sandbox: Sandbox
) -> None:
    del sandbox
    # The hosts have a /tmp of their own.
    shared = Path(os.environ["DTCTL_SANDBOX_DIR"]) / f"signals-{project.unique}"
    training = Training(project, shared, "{port: auto}", SANDBOX_SPEC)
    try:
        process = project.start("launch", "--json", "--name", project.unique)
        scraped = project.folder / ".dtctl" / "prometheus"
        with exporter() as gpus, prometheus(tmp_path / "prometheus", scraped, gpus=gpus) as url:

            def value(expression: str) -> list[float]:
                return sorted(float(found["value"][1]) for found in query(url, expression))

            wait_until(lambda: value("dtctl_node_running") == [1, 1, 1], what="all nodes are seen to run")
            wait_until(lambda: value("dtctl_step")[:1] > [5], what="steps are seen")
            nodes = {found["metric"]["node"] for found in query(url, "dtctl_node_running")}
            assert nodes == {"node1", "node2", "node3"}
            training.say("fail")
            wait_until(lambda: value("dtctl_restarts_total") == [1], what="the restart is seen")
            failed = query(url, "dtctl_worker_failures_total == 1")
            assert [found["metric"]["node"] for found in failed] == ["node2"]
            wait_until(lambda: value("dtctl_node_running") == [1, 1, 1], what="all nodes run again")
            assert value('up{job="dtctl"}') == [1]
            wait_until(lambda: value("dtctl_step")[:1] > [15], what="steps are done after the restart")
            board = json.loads((ROOT / "examples/grafana/dtctl.json").read_text())
            silent = {
                panel["title"]
                for panel in board["panels"]
                if not any(query(url, target["expr"].replace("$run", ".*")) for target in panel["targets"])
            }
            assert silent == {"Whatever else is logged"}, "this job logs nothing else"
            (busy,) = [panel["targets"][0] for panel in board["panels"] if panel["title"] == "GPU utilization"]
            seen = [found["metric"] for found in query(url, busy["expr"].replace("$run", ".*"))]
            assert {(gpu["Hostname"], gpu["gpu"]) for gpu in seen} == {("node2", "0"), ("node2", "1")}
            assert value("sum without (status) (dtctl_run_status)") == [1]
            training.say("end")
            done = project.finish(process)
            assert done.code == 0, done.err
            assert done.done["status"] == "succeeded"
            wait_until(lambda: query(url, "dtctl_step") == [], what="it is gone with the run")
    finally:
        for path in shared.iterdir():
            path.unlink()
        shared.rmdir()
    assert list((project.folder / ".dtctl" / "prometheus").iterdir()) == []
    assert (training.folder / "metrics.log").read_text() == ""


def test_alerts_reach_the_webhook(project: Project, tmp_path: Path, signals: Path) -> None:
    made = certificate(tmp_path)
    with http_receiver(tls=made.server) as webhook:
        training = Training(project, signals, "{alerts: {webhook: {env: HOOK}}}")
        project.env = project.env | {
            "HOOK": f"{webhook.url}/sesame-hook", "SSL_CERT_FILE": str(made.path), "no_proxy": "127.0.0.1",
        }  # fmt: skip
        process = project.start("launch", "--json", "--yes", "--name", project.unique)
        wait_until((training.folder / "metrics.jsonl").exists)
        training.say("fail")
        for count in (1, 2):
            wait_until(lambda: len(webhook.requests) == count)  # noqa: B023
            told = [request.json["status"] for request in webhook.requests]
            assert told == ["firing", "resolved"][:count]
        arguments = {path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()}
        training.say("end")
        done = project.finish(process)
    assert done.code == 0, done.err
    assert webhook.requests[0].json["alerts"][0]["labels"]["alertname"] == "restart-1"
    assert "restart-1" in webhook.requests[0].json["text"]
    alerts = [event for event in done.events if event["event"] == "alert"]
    assert [(event["alert"], event["state"]) for event in alerts] == [
        ("restart-1", "firing"),
        ("restart-1", "resolved"),
    ]
    kept = b"".join(path.read_bytes() for path in training.folder.parents[1].rglob("*") if path.is_file())
    assert b"restart-1" in kept
    assert b"sesame" not in kept + (done.out + done.err).encode() + b"".join(arguments)


@pytest.mark.parametrize("kind", ["down", "silent", "refusing", "unknown"])
def test_a_receiver_that_fails_harms_nothing(project: Project, tmp_path: Path, signals: Path, kind: str) -> None:
    """Down, never answering, refusing, and with a certificate that nobody vouches for."""
    held = threading.Event()
    with ExitStack() as stack:
        receiver = stack.enter_context(
            http_receiver(
                *([500] if kind == "refusing" else []), delay=held if kind == "silent" else None,
                tls=certificate(tmp_path).server if kind == "unknown" else None,
            )
        )  # fmt: skip
        url = f"http://127.0.0.1:{stack.enter_context(closed_port())}" if kind == "down" else receiver.url
        training = Training(project, signals, "{alerts: {webhook: {env: HOOK}}}")
        project.env = project.env | {"HOOK": f"{url}/hook", "no_proxy": "127.0.0.1"}
        process = project.start("launch", "--json", "--name", project.unique)
        wait_until((training.folder / "metrics.jsonl").exists)
        training.say("fail")

        def told() -> list[str]:
            return [note for note in training.notes() if note.startswith("metrics.")]

        wait_until(lambda: len(told()) == 1)
        if kind == "refusing":
            wait_until(lambda: len(receiver.requests) >= 3, what="it is tried again")
        training.say("end")
        done = project.finish(process)
        held.set()
    assert done.code == 0, done.err
    assert (done.done["status"], done.done["left_behind"]) == ("succeeded", 0)
    assert len(told()) == 1, "told once"
    assert ("TLS" in told()[0]) == (kind == "unknown")


def processes_of(training: Training) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            argv = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"dtctl.metrics" in argv and str(training.folder).encode() in argv:
            found.append(int(path.parent.name))
    return found


def test_it_ends_with_its_launcher_and_says_so(project: Project, signals: Path) -> None:
    with http_receiver() as webhook:
        training = Training(project, signals, "{port: auto, alerts: {webhook: {env: HOOK}}}")
        project.env = project.env | {"HOOK": webhook.url, "no_proxy": "127.0.0.1"}
        process = project.start("launch", "--name", project.unique)
        wait_until(lambda: has_page(training, "dtctl_step{"))
        (pid,) = processes_of(training)
        process.send_signal(signal.SIGKILL)
        wait_until(lambda: processes_of(training) == [])
        (alert,) = webhook.requests
        assert (alert.json["alerts"][0]["labels"]["alertname"], alert.json["status"]) == ("failed", "firing")
    assert pid


def test_a_run_goes_on_without_it(project: Project, signals: Path) -> None:
    training = Training(project, signals, "{port: auto}")
    process = project.start("launch", "--name", project.unique)
    wait_until(lambda: has_page(training, "dtctl_step{"))
    (pid,) = processes_of(training)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: any("no longer sent" in note for note in training.notes()))
    training.say("end")
    assert project.finish(process).code == 0


def test_a_process_that_cannot_be_started_harms_nothing(tmp_path: Path) -> None:
    """A folder in the way stands for a disk that is full, or processes that are used up."""
    from dtctl.cli.common.followed_run import send_run_metrics
    from dtctl.spec.load import parse_spec
    from tests.unit.metrics.following import WrittenRun

    run = WrittenRun(tmp_path)
    (run.record.folder / "metrics.log").mkdir()
    spec = parse_spec("job: {script: t.py}\nmetrics: {port: auto}\n", source="dtctl.yaml", base_dir=tmp_path)
    events: list[Event] = []
    with send_run_metrics(spec, run.record, events.append):
        pass
    (note,) = events
    assert isinstance(note, Note)
    assert "not sent" in note.text


def test_a_detached_run_has_it_with_each_launcher(project: Project, signals: Path) -> None:
    with http_receiver() as webhook:
        training = Training(project, signals, "{port: auto, alerts: {webhook: {env: HOOK}}}")
        project.env = project.env | {"HOOK": webhook.url, "no_proxy": "127.0.0.1"}
        done = project.run("launch", "--detach", "--name", project.unique)
        assert done.code == 0, done.err
        wait_until(lambda: has_page(training, "dtctl_step{"))
        training.say("fail")
        wait_until(lambda: len(webhook.requests) == 2, what="the restart and its end are told")
        launcher = json.loads((training.folder / "run.json").read_text())["pid"]
        os.kill(launcher, signal.SIGKILL)
        wait_until(lambda: processes_of(training) == [])
        assert webhook.requests[2].json["alerts"][0]["labels"]["alertname"] == "failed"
        watching = project.start("watch", project.unique)
        wait_until(lambda: has_page(training, "dtctl_restarts_total"))
        wait_until(lambda: has_page(training, "dtctl_step{"))
        training.say("end")
        wait_until(lambda: training.events("done"))
        project.finish(watching)
        wait_until(lambda: processes_of(training) == [])
        told = [
            (request.json["alerts"][0]["labels"]["alertname"], request.json["status"]) for request in webhook.requests
        ]
    assert told == [("restart-1", "firing"), ("restart-1", "resolved"), ("failed", "firing")]


@pytest.mark.parametrize(
    ("secret", "fact"), [("env: NOWHERE", "NOWHERE"), ("file: word", "sent to the nodes"), ("file: OPEN", "by others")]
)
def test_a_secret_that_cannot_be_used_is_found_first(
    project: Project, tmp_path: Path, signals: Path, secret: str, fact: str
) -> None:
    (tmp_path / "open").write_text("http://127.0.0.1:9")
    (tmp_path / "open").chmod(0o644)
    project.write("word", "sesame").chmod(0o600)
    Training(project, signals, f"{{alerts: {{webhook: {{{secret.replace('OPEN', str(tmp_path / 'open'))}}}}}}}")
    done = project.run("launch", "--json")
    assert done.code == 4
    assert fact in done.err
    assert "sesame" not in done.err
    assert not (project.folder / ".dtctl" / "runs").exists()


def test_a_port_that_is_taken_is_told(project: Project, signals: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        training = Training(project, signals, f"{{port: {taken.getsockname()[1]}}}")
        process = project.start("launch", "--name", project.unique)
        wait_until(lambda: any("no page" in note for note in training.notes()))
        training.say("end")
        assert project.finish(process).code == 0


def test_nothing_is_started_unless_asked(project: Project, signals: Path) -> None:
    training = Training(project, signals, "~")
    process = project.start("launch", "--name", project.unique)
    wait_until((training.folder / "metrics.jsonl").exists)
    assert processes_of(training) == []
    training.say("end")
    assert project.finish(process).code == 0
    assert not (training.folder / "metrics.log").exists()


@pytest.mark.torch
@pytest.mark.slow
def test_a_real_loss_that_is_not_finite(project: Project, signals: Path) -> None:
    """With `on_nan: stop`, the default, no such step is ever logged."""
    code = (
        (ROOT / "tests/integration/test_not_finite.py").read_text().partition('SCRIPT = """\\\n')[2].partition('"""')[0]
    )
    with http_receiver() as webhook:
        Training(project, signals, "{alerts: {webhook: {env: HOOK}, failed: false, restarts: off}}")
        with (project.folder / "dtctl.yaml").open("a") as spec:
            spec.write("train: {strategy: ddp, data: {at: 21, ranks: [1]}}\n")
        project.write("train.py", code)
        project.env = project.env | {"HOOK": webhook.url, "no_proxy": "127.0.0.1"}
        done = project.run("launch", "--json")
    assert done.code == 8
    told = [(request.json["alerts"][0]["labels"]["alertname"], request.json["status"]) for request in webhook.requests]
    assert told == [("loss-not-finite", "firing")]
    assert "step 21 is not finite" in webhook.requests[0].json["commonAnnotations"]["description"]
