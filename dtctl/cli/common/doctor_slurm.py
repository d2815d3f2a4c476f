"""`dtctl doctor` for a job of Slurm: compare the cluster's offer with the spec's request."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from dtctl.cli import output
from dtctl.cli.common.doctor_view import show_findings

if TYPE_CHECKING:
    from dtctl.doctor.findings import Finding
    from dtctl.slurm.site import CommandHost
    from dtctl.spec.model import Spec


def examine_offer(spec: Spec, *, json_lines: bool) -> int:
    """Print the reasons why the job cannot start, and Slurm's estimate of its start; return the exit code."""
    from dtctl.doctor.findings import order_findings
    from dtctl.errors import DoctorFailed
    from dtctl.slurm.partition_checks import CHECKS
    from dtctl.slurm.site import choose_slurm_host

    begun = time.monotonic()
    with closing(choose_slurm_host(spec)) as site:
        problems, estimate = _query_slurm(spec, site)
    findings = order_findings(problems, ran=CHECKS)
    ok = not any(finding.status == "fail" for finding in findings)
    took_s = round(time.monotonic() - begun, 2)
    if json_lines:
        rows = [finding.as_json() for finding in findings]
        output.emit_json({"ok": ok, "nodes": [], "took_s": took_s, "findings": rows, "slurm": estimate})
    else:
        show_findings(findings)
        if estimate:
            output.print_stdout(f"Slurm: {estimate}")
        verdict = "can be submitted" if ok else "can never start as specified"
        output.print_stdout(f"the job {verdict}; {took_s:.1f} s", "green" if ok else "red", "bold")
        if ok:
            output.print_stdout(
                "not examined: the nodes themselves; inside an allocation, `dtctl doctor` examines them", "dim"
            )
    return 0 if ok else DoctorFailed.exit_code


def _query_slurm(spec: Spec, site: CommandHost) -> tuple[list[Finding], str]:
    """Return findings about requests that the cluster does not fulfil, and Slurm's estimate of the start."""
    from dtctl.doctor.findings import Finding
    from dtctl.launch.cluster import build_first_plan, resolve_cluster
    from dtctl.slurm import batch, remote_commands
    from dtctl.slurm.answers import ClusterResources, SbatchTestResult
    from dtctl.slurm.partition_checks import check_job_offer
    from dtctl.slurm.submit import choose_site_python, format_sbatch_messages

    plan = build_first_plan(spec, resolve_cluster(spec, start=False), run="doctor")
    python = choose_site_python(spec, site)
    offer = remote_commands.send_login_request(site, python, ClusterResources)
    findings = [
        Finding(
            check=lack.check,
            status="fail" if lack.never else "warn",
            nodes=lack.nodes or (site.name,),
            summary=lack.summary,
            fix=f"{lack.key}: {lack.fix}",
            evidence=lack.evidence,
        )
        for lack in check_job_offer(batch.complete_slurm_section(spec, plan), len(plan.nodes), offer)
    ]
    if any(finding.status == "fail" for finding in findings):
        return findings, ""
    if any(finding.check == "job-nodes" for finding in findings):
        # Slurm would report that the job can never start, but accept it, since the nodes may be back later.
        return findings, "the job is queued until enough nodes work again"
    text = batch.render_batch_file(spec, plan, chdir=Path("/"), output=Path("/dev/null"), folder=Path("/"))
    answer = remote_commands.send_login_request(site, python, SbatchTestResult, text=text)
    estimate = format_sbatch_messages(answer.said)
    if answer.code:
        fix = "Slurm's message names the reason; `dtctl sbatch` prints the file"
        findings.append(Finding(check="submit", status="fail", nodes=(site.name,), summary=estimate, fix=fix))
        estimate = ""
    return findings, estimate
