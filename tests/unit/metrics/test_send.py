"""What is sent arrives; what does not is told once and harms nobody; no text of an error has an address in it."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from dtctl.launch.records.events import AlertChanged
from dtctl.metrics import messages, send
from dtctl.metrics.messages import AlertMessage
from dtctl.metrics.send import DeliveryFailed, MessageSender
from tests.unit.metrics.receivers import certificate, http_receiver

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
FIRING = AlertChanged(time=1_800_000_060.25, alert="no-step", state="firing", text="a <b> & c\x1b")
RESOLVED = AlertChanged(time=1_800_000_090.0, alert="no-step", state="resolved")
MESSAGE, OVER = (
    AlertMessage(run="gpt-1", job="gpt", change=change, began=1_800_000_000.5) for change in (FIRING, RESOLVED)
)


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")


def test_a_webhook_is_alertmanagers() -> None:
    body = messages.build_webhook_body(MESSAGE)
    assert (body["version"], body["status"]) == ("4", "firing")
    (alert,) = body["alerts"]
    assert alert["labels"] == {"alertname": "no-step", "run": "gpt-1", "job": "gpt", "severity": "critical"}
    assert (alert["startsAt"], alert["endsAt"]) == ("2027-01-15T08:00:00.500Z", "0001-01-01T00:00:00Z")
    over = messages.build_webhook_body(OVER)["alerts"][0]
    assert (over["status"], over["startsAt"], over["endsAt"]) == (
        "resolved", "2027-01-15T08:00:00.500Z", "2027-01-15T08:01:30.000Z",
    )  # fmt: skip
    assert over["fingerprint"] == alert["fingerprint"]


def test_a_webhook_has_the_text_that_chats_show() -> None:
    assert messages.build_webhook_body(MESSAGE)["text"] == "firing: no-step in run gpt-1: a <b> & c\\x1b"


@pytest.mark.parametrize(
    ("codes", "final", "told"),
    [((204,), None, ""), ((500,), False, "500"), ((404,), True, "404"), ((302,), True, "302")],
)
def test_how_a_receiver_answers(codes: tuple[int, ...], final: bool | None, told: str) -> None:
    with http_receiver(*codes) as receiver:
        if final is None:
            send.post_json(f"{receiver.url}/secret", {"a": 1})
            (request,) = receiver.requests
            assert request.json == {"a": 1}
            return
        with pytest.raises(DeliveryFailed, match=told) as caught:
            send.post_json(f"{receiver.url}/secret", {})
    assert caught.value.final is final
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "sesame", "file:///etc/sesame", "http://[sesame", "http://127.0.0.1:sesame/", "http://sesame.invalid/",
        "http://127.0.0.1:9/sesame", "http://127.0.0.1/ses ame\n", "http:///sesame",
    ],
)  # fmt: skip
def test_an_error_does_not_repeat_the_address(url: str) -> None:
    with pytest.raises(DeliveryFailed) as caught:
        send.post_json(url, {})
    assert "ame" not in str(caught.value).replace("its name", "").replace("AddressFamily", "")


def test_a_certificate_that_nobody_vouches_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = certificate(tmp_path)
    with http_receiver(tls=made.server) as receiver:
        with pytest.raises(DeliveryFailed, match="TLS: self-signed certificate"):
            send.post_json(receiver.url, {})
        monkeypatch.setenv("SSL_CERT_FILE", str(made.path))
        send.post_json(receiver.url, {})
        assert len(receiver.requests) == 1


class Told(list[str]):
    """What an outlet has told."""


def outlet(deliver: Any, told: Told) -> MessageSender:
    return MessageSender("metrics.alerts.webhook", deliver, told.append)


def test_a_receiver_that_comes_back_gets_everything_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(send, "RETRY_S", (0.01,))
    told = Told()
    with http_receiver(500, 503, 200) as receiver:
        sent = outlet(lambda body: send.post_json(receiver.url, body), told)
        for number in range(5):
            sent.put({"number": number})
        assert sent.flush(time.monotonic() + 120)
        taken = [request.json["number"] for request in receiver.requests[2:]]
    assert taken == [0, 1, 2, 3, 4]
    assert len(told) == 1, "told once"
    assert told[0].startswith("metrics.alerts.webhook: ")
    assert sent.failures == 2


def test_what_is_refused_for_good_is_not_sent_again() -> None:
    told = Told()
    with http_receiver(404, 200) as receiver:
        sent = outlet(lambda body: send.post_json(receiver.url, body), told)
        sent.put({"number": 0})
        sent.put({"number": 1})
        assert sent.flush(time.monotonic() + 120)
        assert [request.json["number"] for request in receiver.requests] == [0, 1]


def test_a_slow_receiver_delays_nobody() -> None:
    told, held = Told(), threading.Event()
    with http_receiver(delay=held) as slow, http_receiver() as quick:
        waits, goes = (outlet(lambda body, to=to: send.post_json(to.url, body), told) for to in (slow, quick))
        begun = time.monotonic()
        for number in range(3):
            waits.put({"number": number})
            goes.put({"number": number})
        assert goes.flush(begun + 120)
        assert len(quick.requests) == 3
        assert not waits.flush(time.monotonic() + 0.05)
        assert slow.requests == []
    assert len(waits._waiting) <= send.WAITING
