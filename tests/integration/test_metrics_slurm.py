"""Figures and alerts of a job of Slurm, collected while it is followed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import dtctl
from tests.hosts import Project, wait_until
from tests.integration.slurm_hosts import cluster, shared
from tests.integration.test_metrics import SCRIPT, Training, has_page, processes_of
from tests.unit.metrics.receivers import http_receiver

__all__ = ["cluster", "shared"]

SPEC = """\
cluster: {{{{transport: slurm, nodes: 2, slots: 1, python: {python}}}}}
job: {{{{name: try, script: train.py, kind: direct, max_restarts: 1, env: {{{{PYTHONPATH: "{root}"}}}}}}}}
metrics: {{metrics}}
"""


def test_a_job_has_its_page_while_it_is_followed(shared: Project) -> None:
    spec = SPEC.format(python=json.dumps(sys.executable), root=Path(dtctl.__file__).parents[1])
    assert "progress.begin" in SCRIPT
    with http_receiver() as webhook:
        training = Training(shared, shared.folder / "signals", "{port: auto, alerts: {webhook: {env: HOOK}}}", spec)
        shared.env = shared.env | {"HOOK": webhook.url, "no_proxy": "127.0.0.1"}
        process = shared.start("launch", "--json", "--name", shared.unique)
        wait_until(lambda: has_page(training, "dtctl_step{"), 120)
        assert 'slurm_job="' in training.page()
        training.say("fail")
        wait_until(lambda: len(webhook.requests) == 2, 120, what="the restart and its end are told")
        wait_until(lambda: has_page(training, "dtctl_restarts_total{"))
        training.say("end")
        done = shared.finish(process)
        assert done.code == 0, done.err
        told = [
            (request.json["alerts"][0]["labels"]["alertname"], request.json["status"]) for request in webhook.requests
        ]
    assert told == [("restart-1", "firing"), ("restart-1", "resolved")]
    assert processes_of(training) == []


def test_a_job_that_nobody_follows_has_none_until_it_is_watched(shared: Project) -> None:
    spec = SPEC.format(python=json.dumps(sys.executable), root=Path(dtctl.__file__).parents[1])
    training = Training(shared, shared.folder / "signals", "{port: auto}", spec)
    done = shared.run("launch", "--detach", "--name", shared.unique)
    assert done.code == 0, done.err
    assert "dtctl watch" in done.err
    assert processes_of(training) == []
    watching = shared.start("watch", shared.unique)
    wait_until(lambda: has_page(training, "dtctl_step{"), 120)
    training.say("end")
    wait_until(lambda: training.events("done"))
    shared.finish(watching)
    wait_until(lambda: processes_of(training) == [])
