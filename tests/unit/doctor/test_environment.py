"""Variables of NCCL, and of RCCL where the GPUs are AMD's."""

from __future__ import annotations

import pytest

from dtctl.doctor.checks.environment import check_environment_variables
from dtctl.doctor.findings import Finding
from dtctl.doctor.node_report import NodeReport


def found(vendor: str, *, conf: str = "", **env: dict[str, str]) -> list[Finding]:
    """What is said of nodes a and b, by the variables of their logins."""
    seen = [
        NodeReport(name=name, facts={"vendor": vendor, "conf": {"/etc/rccl.conf": conf}, "env": env.get(name, {})})
        for name in ("a", "b")
    ]
    return list(check_environment_variables(seen, {}))


def test_what_rccl_reads_has_to_be_alike() -> None:
    (one,) = found("amd", a={"RCCL_MSCCL_ENABLE": "0"}, b={})
    assert (one.check, one.status) == ("env-differs", "fail")
    assert found("amd", a={"RCCL_MSCCL_ENABLE": "0"}, b={"RCCL_MSCCL_ENABLE": "0"}) == []
    assert found("amd", conf="RCCL_TREES=(0(1))") == []


@pytest.mark.parametrize(("vendor", "checks"), [("amd", []), ("nvidia", ["env-dead"]), ("", ["env-dead"])])
def test_what_nccl_reads_no_more_and_rccl_does(vendor: str, checks: list[str]) -> None:
    both = {"NCCL_MIN_NCHANNELS": "32"}
    assert [one.check for one in found(vendor, a=both, b=both)] == checks


def test_a_name_of_nccl_that_somebody_has_spelt_with_an_r() -> None:
    both = {"RCCL_DEBUG": "INFO"}
    (one,) = found("amd", a=both, b=both)
    assert one.check == "env-unknown"
    assert "NCCL_DEBUG" in one.fix
