"""What ssh is told, whatever the user's configuration says, and what its words mean."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from dtctl.errors import AuthError, ConnectError, HostKeyError, TransportError
from dtctl.transport.base import Target
from dtctl.transport.openssh import Login, OpenSshTransport, _line_of, config_text
from dtctl.transport.openssh_errors import Words, explain_login, is_busy, login_command

pytestmark = pytest.mark.skipif(shutil.which("ssh") is None, reason="there is no ssh")
TARGET = Target(name="gpu1", address="10.0.0.1")
OPPOSITE = """\
Host *
  BatchMode no
  StrictHostKeyChecking no
  UpdateHostKeys yes
  ForwardAgent yes
  ForwardX11 yes
  PermitLocalCommand yes
  LocalCommand touch /nowhere
  RemoteCommand cat
  RequestTTY force
  ControlMaster auto
  ControlPersist yes
  SendEnv LANG WANDB_*
"""
HELD = {
    "batchmode": "yes", "stricthostkeychecking": "true", "updatehostkeys": "false", "forwardagent": "no",
    "forwardx11": "no", "permitlocalcommand": "no", "requesttty": "false", "controlmaster": "false",
    "clearallforwardings": "yes",
}  # fmt: skip


def settings(config: Path, *options: str) -> dict[str, str]:
    """What ssh makes of a configuration."""
    done = subprocess.run(
        ["ssh", "-G", "-F", str(config), *options, "10.0.0.1"], capture_output=True, text=True, check=True
    )
    return dict(line.partition(" ")[::2] for line in done.stdout.splitlines())


@pytest.mark.parametrize("name", ["config", "a b", "100%h", 'q"uote', "[x]*?", "back\\slash", "é"])
def test_what_must_hold_does_whatever_the_users_configuration_says(tmp_path: Path, name: str) -> None:
    user, known, made = tmp_path / name, tmp_path / f"known {name}", tmp_path / "made"
    user.write_text(f"{OPPOSITE}  Port 2222\n")
    made.write_text(config_text(str(user), str(known)))
    found = settings(made)
    assert {key: found.get(key) for key in HELD} == HELD
    assert "remotecommand" not in found or found["remotecommand"] == "none"
    assert "sendenv" not in found
    assert found["port"] == "2222", "the user's configuration counts"
    assert found["userknownhostsfile"].replace('"', "") == str(known).replace('"', "")


def test_no_configuration_is_none(tmp_path: Path) -> None:
    made = tmp_path / "made"
    made.write_text(config_text("none", None))
    assert "Include" not in made.read_text()
    assert settings(made)["batchmode"] == "yes"


def test_what_the_spec_says_comes_before_the_configuration(tmp_path: Path) -> None:
    transport = OpenSshTransport()
    target = replace(TARGET, user="me", port=22022, identity_file=str(tmp_path / "100%"), connect_timeout_s=2.5)
    argv = transport.argv(target)
    done = subprocess.run([*argv, "-G", "--", target.address], capture_output=True, text=True, check=True)
    found = dict(line.partition(" ")[::2] for line in done.stdout.splitlines())
    assert (found["user"], found["port"], found["connecttimeout"]) == ("me", "22022", "3")
    assert found["identitiesonly"] == "yes"
    assert found["loglevel"] == "VERBOSE"


def test_the_folder_of_a_transport_goes_with_it_and_one_that_was_left_goes_with_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    left = tmp_path / "dtctl-ssh-killed"
    left.mkdir()
    first = OpenSshTransport()
    assert not left.exists()
    second = OpenSshTransport()
    assert len(list(tmp_path.iterdir())) == 2, "that of a living process stays"
    del first, second
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "command", ["echo a", "printf '%s\\n' 'a\\nb'", "echo 'a\nb\n'\necho \"c d\"", "exec printf %s 'x\\\\y'", "echo é"]
)
def test_a_command_in_one_line_is_the_same_command(command: str) -> None:
    line = _line_of(command)
    assert line.count(b"\n") == 1
    plain = subprocess.run(["sh", "-c", command], capture_output=True, check=True).stdout
    waiting = 'IFS= read -r dtctl && eval "$dtctl"'
    assert subprocess.run(["sh", "-c", waiting], input=line, capture_output=True, check=True).stdout == plain


@pytest.mark.parametrize(
    ("log", "stderr", "kind", "fact", "hint"),
    [
        ("ssh: connect to host a port 22: Connection refused\r\n", "", ConnectError, "refuses connections", "running"),
        ("ssh: Could not resolve hostname a: Name or service not known\r\n", "", ConnectError, "resolved: Name",
         "spelling"),
        ("ssh: connect to host a port 22: Connection timed out\r\n", "", ConnectError, "no answer", "firewall"),
        ("ssh: connect to host a port 22: No route to host\r\n", "", ConnectError, "No route to host", "ssh -o"),
        ("me@a: Permission denied (publickey).\r\n", "", AuthError, "Permission denied", "ssh-add"),
        ("me@a: Permission denied (publickey,password).\r\n", "", AuthError, "denied", "ssh-copy-id"),
        ("Received disconnect from a port 22:2: Too many authentication failures\r\n", "", AuthError, "Too many",
         "identity_file"),
        ('Authenticated using "publickey" with partial success.\r\nme@a: Permission denied (password).\r\n', "",
         AuthError, "denied", "second factor"),
        ("kex_exchange_identification: Connection closed by remote host\r\n",
         "me@jump: Permission denied (publickey).\r\n", AuthError, "jump host login accepted no key", "ssh-add"),
        ("No ED25519 host key is known for a and you have requested strict checking.\nHost key verification failed.\n",
         "", HostKeyError, "is unknown", "administrator"),
        ("/x/config: line 1: Bad configuration option: foo\r\n/x/config: terminating, 1 bad configuration options\r\n",
         "", ConnectError, "refuses its configuration", "ssh -o"),
        ("", "", ConnectError, "said nothing", "ssh -o"),
    ],
)  # fmt: skip
def test_words_of_ssh(log: str, stderr: str, kind: type[TransportError], fact: str, hint: str) -> None:
    error = explain_login(Words(log, stderr), TARGET, lambda: "", lambda: "login")
    assert type(error) is kind
    assert error.node == "gpu1"
    assert fact in error.message
    assert error.hint is not None
    assert hint in error.hint


def test_a_changed_key_is_shown_with_its_fingerprint_and_the_line_to_remove() -> None:
    log = (
        "@@@@@@\r\n@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\r\n@@@@@@\r\n"
        "Offending ED25519 key in /home/me/.ssh/known_hosts:7\r\nHost key verification failed.\r\n"
    )
    debug = "debug1: Connecting to a [10.0.0.1] port 22.\r\ndebug1: Server host key: ssh-ed25519 SHA256:abc\r\n"
    error = explain_login(Words(log), TARGET, lambda: debug, lambda: "")
    assert isinstance(error, HostKeyError)
    assert (error.fingerprint, error.where) == ("SHA256:abc", "/home/me/.ssh/known_hosts:7")


@pytest.mark.parametrize(
    ("log", "busy"),
    [
        ("kex_exchange_identification: Connection closed by remote host\n", True),
        ("kex_exchange_identification: read: Connection reset by peer\nConnection reset by 10.0.0.1 port 22\n", True),
        ("me@a: Permission denied (publickey).\n", False),
        ("ssh: connect to host a port 22: Connection refused\n", False),
        ("Host key verification failed.\nConnection closed by 10.0.0.1\n", False),
    ],
)
def test_only_a_server_with_too_many_logins_is_called_again(log: str, busy: bool) -> None:
    assert is_busy(Words(log)) is busy


def test_what_is_said_at_each_end_is_no_loss() -> None:
    usual = 'Authenticated to a ([10.0.0.1]:22) using "publickey".\nTransferred: sent 1\nBytes per second: 2\n'
    assert Words(usual).after_login() == ""
    assert Words(usual.replace("Transferred", "Connection to a closed by remote host.\nTransferred")).after_login()


def test_the_command_to_try_is_what_is_tried() -> None:
    target = replace(TARGET, user="me", port=2222, identity_file="/k 1", ssh_config="/c", known_hosts="/h")
    expected = "ssh -o BatchMode=yes -F /c -o UserKnownHostsFile=/h -i '/k 1' -p 2222 me@10.0.0.1 true"
    assert login_command(target) == expected


def test_a_program_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConnectError, match="cannot be started"):
        Login(TARGET, [str(tmp_path / "nowhere")], tmp_path / "log")
    assert list(tmp_path.iterdir()) == []
