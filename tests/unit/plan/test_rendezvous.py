import pytest

from dtctl.errors import PlanError
from dtctl.node_facts import AVOIDED_PORTS
from dtctl.plan.rendezvous import check_reachable, list_rendezvous_ports, resolve_numeric_address
from tests.facts import raises


def test_candidates_are_distinct_and_avoid_the_usual_ports() -> None:
    ports = list_rendezvous_ports("run", 0, None)
    assert len(set(ports)) == len(ports) == 16
    assert not {*AVOIDED_PORTS} & set(ports)


def test_a_fixed_port_is_the_only_one() -> None:
    assert list_rendezvous_ports("run", 3, 29500) == (29500,)


@pytest.mark.parametrize("name", ["no-such-node.invalid", "a..b", "x" * 64, "ä..b", "ä" * 64, "10.1.2.3"])
def test_a_name_that_cannot_be_looked_up_stays(name: str) -> None:
    assert resolve_numeric_address(name) == name


def test_a_loopback_address_is_no_meeting_point_for_several_nodes() -> None:
    check_reachable("127.0.0.1", node="a", nodes=1)
    check_reachable("10.0.0.1", node="a", nodes=2)
    with raises(PlanError, "127.0.1.1"):
        check_reachable("127.0.1.1", node="a", nodes=2)
