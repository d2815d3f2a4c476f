"""What ssh is told, whatever the user's configuration says, and what its words mean."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dtctl.errors import AuthError, ConnectError, HostKeyError, LaunchError, TransportError
from dtctl.transport import openssh
from dtctl.transport.base import Target
from dtctl.transport.openssh import (
    OpenSshStream,
    OpenSshTransport,
    SshLogin,
    _line_of,
    build_waiting_script,
    render_ssh_config,
)
from dtctl.transport.openssh_errors import SshMessages, explain_failed_login, format_login_command, is_busy
from tests.hosts import wait_until

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
SHELLS = [path for name in ("sh", "dash", "bash", "ksh", "zsh") if (path := shutil.which(name))]
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
    made.write_text(render_ssh_config(str(user), str(known)))
    found = settings(made)
    assert {key: found.get(key) for key in HELD} == HELD
    assert "remotecommand" not in found or found["remotecommand"] == "none"
    assert "sendenv" not in found
    assert found["port"] == "2222", "the user's configuration counts"
    assert found["userknownhostsfile"].replace('"', "") == str(known).replace('"', "")


def test_no_configuration_is_none(tmp_path: Path) -> None:
    made = tmp_path / "made"
    made.write_text(render_ssh_config("none", None))
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
    assert found["loglevel"] == "DEBUG"


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


def test_a_folder_that_is_being_made_is_not_taken_for_one_that_was_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    lock, others = openssh._lock_folder, []

    def make_another_first(folder: Path) -> int:
        monkeypatch.setattr(openssh, "_lock_folder", lock)
        others.append(OpenSshTransport())
        return lock(folder)

    monkeypatch.setattr(openssh, "_lock_folder", make_another_first)
    transport = OpenSshTransport()
    assert transport._folder.is_dir()
    assert len(list(tmp_path.iterdir())) == 2


def test_a_disk_without_room_is_no_bug(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))
    with pytest.raises(LaunchError, match="no folder for ssh") as failed:
        OpenSshTransport()
    assert "TMPDIR" in str(failed.value.hint)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    transport = OpenSshTransport()
    shutil.rmtree(transport._folder)
    with pytest.raises(ConnectError, match="cannot be made") as refused:
        transport.connect(TARGET)
    assert "TMPDIR" in str(refused.value.hint)


@pytest.mark.parametrize(
    "command",
    [
        "echo a",
        "printf '%s\\n' 'a\\nb'",
        "echo 'a\nb\n'\necho \"c d\"",
        "exec printf %s 'x\\\\y'",
        "echo é",
        "echo ā\u0081ł",
    ],
)
def test_a_command_in_one_line_is_the_same_command(command: str) -> None:
    line = _line_of(command)
    assert line.count(b"\n") == 1
    plain = subprocess.run(["sh", "-c", command], capture_output=True, check=True).stdout
    for shell in SHELLS:
        assert run_waiting(shell, line) == (0, b"ready\n" + plain)


def run_waiting(shell: str, data: bytes, **environ: str) -> tuple[int, bytes]:
    """Exit status and output of a shell that is given a command and its input."""
    done = subprocess.run(
        [shell, "-c", build_waiting_script("ready", 10_000)], input=data, stdout=subprocess.PIPE, check=False,
        timeout=100, env={**os.environ, **environ},
    )  # fmt: skip
    return done.returncode, done.stdout


@pytest.mark.parametrize("shell", SHELLS)
def test_a_command_has_the_input_after_its_line_and_its_own_status(shell: str, tmp_path: Path) -> None:
    data = bytes(range(256)) * 1000
    expected = 3, b"ready\n" + data
    assert run_waiting(shell, b"cat; exit 3\n" + data) == expected
    (tmp_path / "cat").symlink_to("/bin/cat")
    assert run_waiting(shell, b"cat; exit 3\n" + data, PATH=str(tmp_path)) == expected, "without `timeout`"
    (tmp_path / "timeout").write_text("#!/bin/sh\nexec 300 2>/dev/null\n")
    (tmp_path / "timeout").chmod(0o755)
    assert run_waiting(shell, b"cat; exit 3\n" + data, PATH=str(tmp_path)) == expected, "with an old one of busybox"


@pytest.mark.parametrize("shell", SHELLS)
def test_half_a_command_is_not_run(shell: str) -> None:
    assert run_waiting(shell, b"echo marker") == (1, b"ready\n")


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("given", [b"", b"echo marker"], ids=["nothing", "half a line"])
def test_a_shell_that_waits_for_its_command_ends_by_itself(shell: str, given: bytes) -> None:
    """Nothing tells it that a link was cut: its input does not end."""
    argv = [shell, "-c", build_waiting_script("ready", 1)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(given)
        process.stdin.flush()
        # It ends when all who have inherited it have ended.
        assert process.stdout.read() == b"ready\n"
        assert process.wait(60) == 0


@pytest.mark.parametrize(
    ("log", "stderr", "kind", "fact", "hint"),
    [
        ("ssh: connect to host a port 22: Connection refused\r\n", "", ConnectError, "refuses connections", "running"),
        ("ssh: Could not resolve hostname a: Name or service not known\r\n", "", ConnectError, "resolved: Name",
         "spelling"),
        ("ssh: connect to host a port 22: Connection timed out\r\n", "", ConnectError, "no answer", "firewall"),
        (
            "Connection timed out during banner exchange\r\nConnection to 10.0.0.1 port 22 timed out\r\n", "",
            ConnectError, "accepts connections", "console",
        ),
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
    error = explain_failed_login(SshMessages(log, stderr), TARGET, lambda: "", lambda: "login")
    assert type(error) is kind
    assert error.node == "gpu1"
    assert fact in error.message
    assert error.hint is not None
    assert hint in error.hint


CHANGED = (
    "@@@@@@\r\n@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\r\n@@@@@@\r\n"
    "Offending ED25519 key in {known}:2\r\n"
    "Host key for [a]:2222 has changed and you have requested strict checking.\r\n"
    "Host key verification failed.\r\n"
)
DEBUG = "debug1: Connecting to a [10.0.0.1] port 22.\r\ndebug1: Server host key: ssh-ed25519 SHA256:abc\r\n"


def test_a_changed_key_is_shown_with_both_fingerprints_and_how_to_take_the_old_one_out(tmp_path: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "key"], check=True)
    listed = subprocess.run(["ssh-keygen", "-lf", tmp_path / "key"], capture_output=True, text=True, check=True).stdout
    known = tmp_path / "known"
    known.write_text(f"# a comment\n[a]:2222 {(tmp_path / 'key.pub').read_text()}")
    error = explain_failed_login(SshMessages(DEBUG + CHANGED.format(known=known)), TARGET, lambda: "", lambda: "")
    assert isinstance(error, HostKeyError)
    assert (error.fingerprint, error.where) == ("SHA256:abc", f"{known}:2")
    assert f"it presents ssh-ed25519 SHA256:abc, the recorded key is {listed.split()[1]}" in error.message
    assert f"ssh-keygen -R '[a]:2222' -f {known}" in str(error.hint)


def test_a_changed_key_of_a_jump_host_is_the_jump_hosts() -> None:
    words = SshMessages(log="kex_exchange_identification: closed\r\n", stderr=CHANGED.format(known="/nowhere"))
    error = explain_failed_login(words, TARGET, lambda: DEBUG, lambda: "login")
    assert isinstance(error, HostKeyError)
    assert (error.fingerprint, error.where) == ("SHA256:abc", "/nowhere:2")
    assert "jump host login" in error.message


DENIED = "me@a: Permission denied (publickey).\r\n"
OFFERS = (
    "debug1: Offering public key: /k 1 ED25519 SHA256:abc explicit\r\n"
    "debug1: Offering public key: me@b RSA SHA256:def agent\r\n"
)


@pytest.mark.parametrize(
    ("log", "fact", "hint"),
    [
        (OFFERS + DENIED, "accepted no key; tried: /k 1 ED25519 SHA256:abc, me@b RSA SHA256:def agent: me@a: Perm",
         "ssh-add"),
        ('Load key "/k": bad permissions\r\n' + DENIED, 'tried: none: Load key "/k": bad permissions; me@a: Per',
         "identity_file"),
        (OFFERS + "debug1: Server accepts key: /k 1 ED25519 SHA256:abc explicit\r\n" + DENIED,
         "accepts /k 1 ED25519 SHA256:abc, and ssh cannot sign", "unlock"),
    ],
)  # fmt: skip
def test_a_refusal_names_the_keys_that_were_offered(log: str, fact: str, hint: str) -> None:
    error = explain_failed_login(SshMessages(log), TARGET, lambda: "", lambda: "")
    assert isinstance(error, AuthError)
    assert fact in error.message
    assert hint in str(error.hint)


def test_what_a_server_calls_itself_is_no_login(tmp_path: Path) -> None:
    log = "debug1: Remote protocol version 2.0, remote software version Authenticated to a ([10.0.0.1]:22)\n"
    login = SshLogin(TARGET, ["true"], tmp_path / "log")
    login.words.log = log
    assert not login.has_own_connection
    login.words.log += 'Authenticated to a ([10.0.0.1]:22) using "publickey".\n'
    assert login.has_own_connection
    login.kill()
    login.process.communicate()


def test_a_log_that_grows_for_weeks_is_drained_and_keeps_what_tells() -> None:
    words = SshMessages(
        'debug1: a\nAuthenticated to a ([10.0.0.1]:22) using "publickey".\ndebug1: b\nConnection lost\ndebu'
    )
    words.forget_debug()
    words.log += "g1: c\n"
    assert words.after_login() == "Connection lost"
    assert "debug1: a" not in words.log


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
    assert is_busy(SshMessages(log)) is busy


def test_what_is_said_at_each_end_is_no_loss() -> None:
    usual = 'Authenticated to a ([10.0.0.1]:22) using "publickey".\nTransferred: sent 1\nBytes per second: 2\n'
    assert SshMessages(usual).after_login() == ""
    assert SshMessages(
        usual.replace("Transferred", "Connection to a closed by remote host.\nTransferred")
    ).after_login()


def test_the_command_to_try_is_what_is_tried() -> None:
    target = replace(TARGET, user="me", port=2222, identity_file="/k 1", ssh_config="/c", known_hosts="/h")
    expected = "ssh -o BatchMode=yes -F /c -o UserKnownHostsFile=/h -i '/k 1' -p 2222 me@10.0.0.1 true"
    assert format_login_command(target) == expected


def test_a_program_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConnectError, match="cannot be started"):
        SshLogin(TARGET, [str(tmp_path / "nowhere")], tmp_path / "log")
    assert list(tmp_path.iterdir()) == []


LAUNCHER_THAT_DIES = """\
import os, sys
from pathlib import Path
from dtctl.transport.base import Target
from dtctl.transport.openssh import SshLogin
slow_ssh = ["/bin/sh", "-c", 'sleep 0.5; exec ssh "$@"', "sh", "-F", "/dev/null", "-p", "1"]
login = SshLogin(Target(name="gpu1", address="127.0.0.1"), slow_ssh, Path(sys.argv[1]))
print(login.process.pid, flush=True)
os._exit(1)  # as by kill -9, before ssh has opened its log
"""


@pytest.mark.skipif(not Path("/proc/self/root").exists(), reason="there is no /proc")
def test_ssh_ends_if_its_launcher_ends_before_the_log_is_open(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LAUNCHER_THAT_DIES, str(tmp_path / "log")],
        stdout=subprocess.PIPE,
        check=False,
        text=True,
    )
    pid = int(done.stdout)
    try:
        wait_until(lambda: not command_line(pid), 10, what="ssh ends")
    finally:
        if command_line(pid):
            os.kill(pid, signal.SIGKILL)


def command_line(pid: int) -> bytes:
    """Return the command line of a process; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


WITHOUT_PROCESSES = """\
import os, resource
from dtctl.errors import ConnectError
from dtctl.transport.local import start_process
if os.getuid() == 0:
    os.setuid(65534)  # root has no limit of processes
resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
try:
    start_process(["/bin/true"], node="gpu1")
except ConnectError as exc:
    print(exc.message, exc.hint)
"""


def test_a_limit_of_processes_is_named() -> None:
    ran = subprocess.run([sys.executable, "-c", WITHOUT_PROCESSES], capture_output=True, text=True, check=True)
    assert "cannot be started: Resource temporarily unavailable" in ran.stdout
    assert "ulimit -u" in ran.stdout


def test_the_last_words_of_ssh_are_waited_for_at_the_end_of_its_output(tmp_path: Path) -> None:
    # ssh closes its standard output first, and a busy machine may pause it there.
    ssh = tmp_path / "ssh"
    ssh.write_text("#!/bin/sh\necho output\nexec 1>&-\nsleep 0.5\necho last words >&2\nexit 255\n")
    ssh.chmod(0o755)
    stream = OpenSshStream(SshLogin(TARGET, [str(ssh)], tmp_path / "log"))
    try:
        while stream.read(100):
            pass
        said = stream.read_stderr().decode()
    finally:
        stream.close()
    assert "last words" in said
    assert "ControlMaster" in said, "no login of its own was seen"
