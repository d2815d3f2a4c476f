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
from dtctl.metrics.send import DeliveryFailed, Outlet
from dtctl.spec.model import Mail, Secret
from tests.unit.metrics.receivers import certificate, closed_port, eventually, http_receiver, mail_receiver

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
    body = messages.webhook(MESSAGE)
    assert (body["version"], body["status"]) == ("4", "firing")
    (alert,) = body["alerts"]
    assert alert["labels"] == {"alertname": "no-step", "run": "gpt-1", "job": "gpt", "severity": "critical"}
    assert (alert["startsAt"], alert["endsAt"]) == ("2027-01-15T08:00:00.500Z", "0001-01-01T00:00:00Z")
    over = messages.webhook(OVER)["alerts"][0]
    assert (over["status"], over["startsAt"], over["endsAt"]) == (
        "resolved", "2027-01-15T08:00:00.500Z", "2027-01-15T08:01:30.000Z",
    )  # fmt: skip
    assert over["fingerprint"] == alert["fingerprint"]


def test_slack_takes_no_markup_from_a_run() -> None:
    body = messages.slack(MESSAGE)
    assert "a &lt;b&gt; &amp; c" in body["attachments"][0]["blocks"][0]["text"]["text"]
    assert "\x1b" not in str(body)


def test_mails_of_one_alert_belong_together() -> None:
    settings = Mail(to=("a@b.c", "d@e.f"), sender="dtctl@b.c", host="mail")
    first, second = messages.mail(MESSAGE, settings), messages.mail(OVER, settings)
    assert first["To"] == "a@b.c, d@e.f"
    assert second["In-Reply-To"] == first["Message-ID"] != second["Message-ID"]


@pytest.mark.parametrize(
    ("codes", "final", "told"),
    [((204,), None, ""), ((500,), False, "500"), ((404,), True, "404"), ((302,), True, "302")],
)
def test_how_a_receiver_answers(codes: tuple[int, ...], final: bool | None, told: str) -> None:
    with http_receiver(*codes) as receiver:
        if final is None:
            send.to_json(f"{receiver.url}/secret", {"a": 1}, {"X-Key": "k"})
            (request,) = receiver.requests
            assert (request.json, request.headers["X-Key"]) == ({"a": 1}, "k")
            return
        with pytest.raises(DeliveryFailed, match=told) as caught:
            send.to_json(f"{receiver.url}/secret", {})
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
        send.to_json(url, {})
    assert "ame" not in str(caught.value).replace("its name", "").replace("AddressFamily", "")


def test_a_certificate_that_nobody_vouches_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = certificate(tmp_path)
    with http_receiver(tls=made.server) as receiver:
        with pytest.raises(DeliveryFailed, match="TLS: self-signed certificate"):
            send.to_json(receiver.url, {})
        monkeypatch.setenv("SSL_CERT_FILE", str(made.path))
        send.to_json(receiver.url, {})
        assert len(receiver.requests) == 1


def test_headers_are_those_of_opentelemetry() -> None:
    assert send.parse_headers(" Authorization=Basic%20abc%3D ,X-Scope=a=b\n") == {
        "Authorization": "Basic abc=", "X-Scope": "a=b",
    }  # fmt: skip


class Told(list[str]):
    """What an outlet has told."""


def outlet(deliver: Any, told: Told, keep: Any = "all") -> Outlet:
    return Outlet("metrics.alerts.webhook", deliver, told.append, keep=keep)


def test_a_receiver_that_comes_back_gets_everything_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(send, "RETRY_S", (0.01,))
    told = Told()
    with http_receiver(500, 503, 200) as receiver:
        sent = outlet(lambda body: send.to_json(receiver.url, body), told)
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
        sent = outlet(lambda body: send.to_json(receiver.url, body), told)
        sent.put({"number": 0})
        sent.put({"number": 1})
        assert sent.flush(time.monotonic() + 120)
        assert [request.json["number"] for request in receiver.requests] == [0, 1]


def test_a_slow_receiver_delays_nobody() -> None:
    told, held = Told(), threading.Event()
    with http_receiver(delay=held) as slow, http_receiver() as quick:
        waits, goes = (outlet(lambda body, to=to: send.to_json(to.url, body), told) for to in (slow, quick))
        begun = time.monotonic()
        for number in range(3):
            waits.put({"number": number})
            goes.put({"number": number})
        assert goes.flush(begun + 120)
        assert len(quick.requests) == 3
        assert not waits.flush(time.monotonic() + 0.05)
        assert slow.requests == []
    assert len(waits._waiting) <= send.WAITING


def test_of_figures_only_the_newest_waits() -> None:
    held, seen = threading.Event(), list[int]()

    def deliver(number: int) -> None:
        seen.append(number)
        held.wait()

    sent = outlet(deliver, Told(), keep="newest")
    sent.put(0)
    eventually(lambda: seen == [0])
    for number in range(1, 1000):
        sent.put(number)
    held.set()
    assert sent.flush(time.monotonic() + 120)
    assert seen == [0, 999]


@pytest.mark.parametrize("security", ["none", "starttls", "tls"])
def test_mail_arrives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, security: Any) -> None:
    made = certificate(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(made.path))
    password = None if security == "none" else "sesame"
    contexts = {"starttls": {"starttls": made.server}, "tls": {"tls": made.server}}.get(security, {})
    with mail_receiver(**contexts, password=password if security == "starttls" else None) as (port, mails):
        named = {"user": "u", "password": Secret(env="P")} if security == "starttls" else {}
        settings = Mail(to=("a@b.c",), sender="d@e.f", host="127.0.0.1", port=port, security=security, **named)
        send.send_mail(settings, password if named else None, messages.mail(MESSAGE, settings))
        (mail,) = mails
        assert "no-step" in mail["Subject"]
        assert "a <b> & c" in mail.get_content()
        if named:
            with pytest.raises(DeliveryFailed) as caught:
                send.send_mail(settings, "wrong", messages.mail(MESSAGE, settings))
            assert caught.value.final


def test_no_password_goes_over_the_wire_in_the_clear() -> None:
    with mail_receiver() as (port, mails):
        settings = Mail(to=("a@b.c",), sender="d@e.f", host="127.0.0.1", port=port, user="u", password=Secret(env="P"))
        with pytest.raises(DeliveryFailed, match="no encryption"):
            send.send_mail(settings, "sesame", messages.mail(MESSAGE, settings))
        assert mails == []


def test_a_mail_server_that_is_down() -> None:
    with closed_port() as port:
        settings = Mail(to=("a@b.c",), sender="d@e.f", host="127.0.0.1", port=port)
        with pytest.raises(DeliveryFailed, match="refused") as caught:
            send.send_mail(settings, None, messages.mail(MESSAGE, settings))
    assert not caught.value.final
