"""What `ssh NODE` would do is found out from the real OpenSSH, on real configuration files."""

from __future__ import annotations

import getpass
import os
import shutil
from pathlib import Path

import pytest

from dtctl.errors import ConnectError
from dtctl.transport import sshconfig
from dtctl.transport.base import Target
from dtctl.transport.sshconfig import SshSettings, parse_jump_host, resolve_ssh_settings
from tests.facts import raises

HOME = str(Path.home())


def asked(config: Path, address: str, **more: object) -> SshSettings:
    return resolve_ssh_settings(Target(name="n", address=address, ssh_config=str(config), **more))  # type: ignore[arg-type]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "conf.d").mkdir()
    path = tmp_path / "config"
    path.write_text(
        f"Include {tmp_path}/conf.d/*.conf\n"
        "Host gpu*\n  User trainer\n  Port 2200\n  IdentityFile ~/.ssh/cluster\n"
        "Host gpu1\n  Port 9999\n  HostName 10.0.0.1\n"
        f"Match host inner exec \"test -e {tmp_path}/inside\"\n  ProxyJump none\n"
        "Host inner\n  ProxyJump bob@10.9.9.9:2222,second\n"
        "Host four\n  ProxyJump me@10.9.9.9:2222\n"
        "Host six\n  ProxyJump [fe80::1]\n"
        "Host piped\n  HostName piped.example.org\n  User eve\n  ProxyCommand nc -x '100%%' %h %p %r %n %X\n"
        "Host odd\n  IdentityFile %d/keys/%h-%r\n  IdentityFile ~/${DTCTL_TEST_KEY}\n  HostKeyAlias Farm\n"
        f"  UserKnownHostsFile ~/mine {tmp_path}/theirs\n  GlobalKnownHostsFile none\n  IdentitiesOnly yes\n"
    )  # fmt: skip
    return path


def test_user_port_and_key_of_a_host(config: Path) -> None:
    found = asked(config, "gpu1")
    assert (found.host, found.port, found.user) == ("10.0.0.1", 2200, "trainer"), (
        "the first value counts, as in OpenSSH"
    )
    assert found.identity_files == (f"{HOME}/.ssh/cluster",)
    assert not found.identities_only
    assert (found.proxy_jump, found.proxy_command, found.host_key_alias) == ((), None, None)


def test_a_host_that_the_file_does_not_name(config: Path) -> None:
    found = asked(config, "elsewhere.example.org")
    assert (found.host, found.port, found.user) == ("elsewhere.example.org", 22, getpass.getuser())
    assert f"{HOME}/.ssh/id_ed25519" in found.identity_files
    assert f"{HOME}/.ssh/known_hosts" in found.known_hosts
    assert "/etc/ssh/ssh_known_hosts" in found.known_hosts


def test_the_spec_wins_over_the_file(config: Path) -> None:
    found = asked(config, "gpu1", user="me", port=23, identity_file="~/k", known_hosts="~/known")
    assert (found.host, found.port, found.user) == ("10.0.0.1", 23, "me")
    assert found.identity_files == (f"{HOME}/k",)
    assert found.known_hosts == (f"{HOME}/known",)
    assert found.identities_only, "a named key is the only one that is offered"


def test_an_included_file_counts(config: Path, tmp_path: Path) -> None:
    (tmp_path / "conf.d" / "more.conf").write_text("Host gpu2\n  User included\n")
    assert asked(config, "gpu2").user == "included"
    assert asked(config, "gpu3").user == "trainer"


def test_match_exec_is_run(config: Path, tmp_path: Path) -> None:
    assert asked(config, "inner").proxy_jump == ("bob@10.9.9.9:2222", "second")
    (tmp_path / "inside").touch()
    assert asked(config, "inner").proxy_jump == ()


def test_a_jump_host_is_taken_apart_as_openssh_writes_it(config: Path) -> None:
    assert [parse_jump_host(text) for text in asked(config, "inner").proxy_jump] == [
        ("bob", "10.9.9.9", 2222),
        (None, "second", None),
    ]
    assert asked(config, "four").proxy_jump == ("me@[10.9.9.9]:2222",)
    assert parse_jump_host("me@[10.9.9.9]:2222") == ("me", "10.9.9.9", 2222)
    assert [parse_jump_host(text) for text in asked(config, "six").proxy_jump] == [(None, "fe80::1", None)]
    assert parse_jump_host("a@b@host:22") == ("a@b", "host", 22)
    assert parse_jump_host("fe80::1") == (None, "fe80::1", None)
    assert parse_jump_host("u@[fe80::1]:2200") == ("u", "fe80::1", 2200)


def test_the_tokens_of_a_proxy_command_are_filled_in(config: Path) -> None:
    # `ssh -G` prints them as they were written.
    assert asked(config, "piped").proxy_command == "nc -x '100%' piped.example.org 22 eve piped %X"
    assert asked(config, "piped", port=2022, user="x").proxy_command == "nc -x '100%' piped.example.org 2022 x piped %X"


def test_names_of_files_are_filled_in(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DTCTL_TEST_KEY", "k")
    found = asked(config, "odd", user="eve")
    assert found.identity_files == (f"{HOME}/keys/odd-eve", f"{HOME}/k")
    assert found.known_hosts[:2] == (f"{HOME}/mine", f"{tmp_path}/theirs")
    assert (found.host_key_alias, found.identities_only) == ("farm", True)


def test_names_of_files_may_have_blanks(tmp_path: Path) -> None:
    path = tmp_path / "config"
    path.write_text(f'Host x\n  UserKnownHostsFile "{tmp_path}/my keys" ~/other\n')
    assert asked(path, "x").known_hosts[:2] == (f"{tmp_path}/my keys", f"{HOME}/other")


def test_a_configuration_that_openssh_refuses_is_named(tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    bad.write_text("Host *\n  NoSuchKeyword yes\n")
    with raises(ConnectError, "OpenSSH") as caught:
        asked(bad, "gpu1")
    assert "gpu1" in str(caught.value.hint)
    with raises(ConnectError, "file"):
        asked(tmp_path / "missing", "gpu1")
    circle = tmp_path / "circle"
    circle.write_text("Host gpu1\n  ProxyJump gpu1\n")
    with raises(ConnectError, "loop"):
        asked(circle, "gpu1")


def test_a_name_that_looks_like_an_option_is_not_one(config: Path) -> None:
    with pytest.raises(ConnectError):
        asked(config, "-oProxyCommand=touch /tmp/no")


def test_without_openssh_the_spec_alone_counts(tmp_path: Path, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert shutil.which("ssh") is None
    found = asked(config, "gpu1")
    assert (found.host, found.port, found.user) == ("gpu1", 22, getpass.getuser())
    assert found.identity_files == tuple(os.path.expanduser(key) for key in sshconfig.DEFAULT_KEYS)  # noqa: PTH111


def test_none_means_no_configuration_at_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh" / "config").write_text("Host *\n  User somebody\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    found = resolve_ssh_settings(Target(name="n", address="gpu1", ssh_config="none"))
    assert (found.user, found.identity_files[0]) == (getpass.getuser(), f"{tmp_path}/.ssh/id_ed25519")


@pytest.mark.parametrize(
    ("text", "matters"),
    [
        ("", False),
        ("# Host gpu\n\n", False),
        ("Host *\n    SendEnv LANG LC_*\n    HashKnownHosts yes\n    GSSAPIAuthentication yes\n", False),
        ("Host *.example.org\n", True),
        ("Host gpu1\n", True),
        ("Host *\n  User x\n", True),
        ("Match all\n", True),
        ("Include more/*\n", False),
        ("Include full/*\n", True),
        ("Include empty/a full/b\n", True),
        ("include = full/b\n", True),
        ("Include full/c\n", True),
    ],
)
def test_openssh_is_asked_only_when_a_file_says_something(tmp_path: Path, text: str, matters: bool) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "b").write_text("Host *\n  Port 23\n")
    (tmp_path / "full" / "c").write_text("Include full/b\n")  # counts from the folder of the first file
    (tmp_path / "config").write_text(text)
    assert sshconfig._says_something(tmp_path / "config", tmp_path) is matters
