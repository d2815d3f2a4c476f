"""known_hosts is read as OpenSSH reads it: compared with `ssh-keygen -F` and `ssh-keygen -lf`."""

from __future__ import annotations

import base64
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from dtctl.errors import HostKeyError
from dtctl.transport.hostkeys import KnownKey, check_host_key, compute_key_fingerprint, list_known_keys, lookup_name
from tests.facts import raises


@dataclass(frozen=True)
class Key:
    kind: str
    text: str
    """Base64, as in known_hosts."""
    printed: str
    """Fingerprint, as `ssh-keygen -l` prints it."""

    @property
    def blob(self) -> bytes:
        return base64.b64decode(self.text)

    @property
    def line(self) -> str:
        return f"{self.kind} {self.text}"


def make_key(folder: Path, kind: str, name: str) -> Key:
    path = folder / name
    subprocess.run(["ssh-keygen", "-q", "-t", kind, "-N", "", "-f", path], check=True)
    listed = subprocess.run(["ssh-keygen", "-lf", path], capture_output=True, text=True, check=True).stdout
    words = path.with_suffix(".pub").read_text().split()
    return Key(words[0], words[1], listed.split()[1])


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Key]:
    folder = tmp_path_factory.mktemp("keys")
    made = {kind: make_key(folder, kind, kind) for kind in ("ed25519", "ecdsa", "rsa")}
    return {**made, "other": make_key(folder, "ed25519", "other")}


@pytest.fixture
def known(tmp_path: Path) -> Path:
    return tmp_path / "known_hosts"


def shown(key: Key, host: str, file: Path, port: int = 22, alias: str | None = None) -> None:
    """What happens when `host` shows `key` and `file` is on record."""
    name = lookup_name(host, port, alias)
    found = list_known_keys(name, [str(file)])
    check_host_key(name, key.kind, key.blob, found, node="gpu1", files=[str(file)])


def refused(key: Key, host: str, file: Path, port: int = 22, alias: str | None = None) -> HostKeyError:
    with pytest.raises(HostKeyError) as caught:
        shown(key, host, file, port, alias)
    assert caught.value.node == "gpu1"
    assert caught.value.fingerprint == key.printed
    assert "gpu1: it" in caught.value.message, "the place is a file, so the message names the node"
    assert caught.value.hint
    return caught.value


def test_fingerprints_are_those_of_ssh_keygen(keys: dict[str, Key]) -> None:
    for key in keys.values():
        assert compute_key_fingerprint(key.blob) == key.printed


@pytest.mark.parametrize("kind", ["ed25519", "ecdsa", "rsa"])
def test_a_key_on_record_is_accepted(keys: dict[str, Key], known: Path, kind: str) -> None:
    known.write_text("# a comment\n\n" + "".join(f"gpu1,10.0.0.1 {key.line} note\n" for key in keys.values()))
    shown(keys[kind], "gpu1", known)
    shown(keys[kind], "10.0.0.1", known)


def test_a_key_without_a_record_is_unknown(keys: dict[str, Key], known: Path) -> None:
    known.write_text(f"gpu2 {keys['ed25519'].line}\n")
    error = refused(keys["ed25519"], "gpu1", known)
    assert "is unknown" in error.message
    assert error.where == str(known)
    assert f"ssh-keyscan gpu1 >> {known}" in str(error.hint)
    assert "ssh-keyscan -p 2222 gpu1 >>" in str(refused(keys["ed25519"], "gpu1", known, 2222).hint)


def test_without_any_file_a_key_is_unknown(keys: dict[str, Key], tmp_path: Path) -> None:
    assert "is unknown" in refused(keys["ed25519"], "gpu1", tmp_path / "missing").message


def test_another_key_than_the_one_on_record_has_changed(keys: dict[str, Key], known: Path) -> None:
    known.write_text(f"# old\ngpu1 {keys['ecdsa'].line}\ngpu1 {keys['ed25519'].line}\n")
    error = refused(keys["other"], "gpu1", known)
    assert "has changed" in error.message
    assert keys["other"].printed in error.message
    assert keys["ed25519"].printed in error.message, "of the same type, if there is one"
    assert error.where == f"{known}:3"
    assert f"ssh-keygen -R gpu1 -f {known}" in str(error.hint)
    # A key of a type that is not on record is not taken for a first meeting.
    assert "has changed" in refused(keys["rsa"], "gpu1", known).message


def test_the_names_of_files_and_lines_are_those_of_the_second_file(keys: dict[str, Key], tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_text("")
    two.write_text(f"gpu1 {keys['rsa'].line}\n")
    (found,) = list_known_keys("gpu1", [str(one), str(two)])
    assert (found.place, found.key_type, found.revoked) == (f"{two}:1", "ssh-rsa", False)


def test_a_revoked_key_is_refused_though_it_is_on_record_too(keys: dict[str, Key], known: Path) -> None:
    key = keys["ed25519"]
    known.write_text(f"gpu1 {key.line}\n@revoked * {key.line}\n")
    error = refused(key, "gpu1", known)
    assert "marked as revoked" in error.message
    assert error.where == f"{known}:2"
    shown_other = keys["ecdsa"]
    known_text = f"gpu1 {shown_other.line}\n@revoked gpu1 {key.line}\n"
    other = known.with_name("other")
    other.write_text(known_text)
    shown(shown_other, "gpu1", other)


def test_a_revoked_key_alone_makes_no_other_key_a_changed_one(keys: dict[str, Key], known: Path) -> None:
    known.write_text(f"@revoked gpu1 {keys['ed25519'].line}\n")
    assert "is unknown" in refused(keys["rsa"], "gpu1", known).message


def test_the_key_of_an_authority_is_not_a_host_key(keys: dict[str, Key], known: Path) -> None:
    known.write_text(f"@cert-authority * {keys['ed25519'].line}\n")
    assert "is unknown" in refused(keys["ed25519"], "gpu1", known).message


def test_hashed_names_are_found(keys: dict[str, Key], known: Path) -> None:
    known.write_text(f"GPU1 {keys['ed25519'].line}\n[gpu1]:2222 {keys['rsa'].line}\n10.0.0.7 {keys['ecdsa'].line}\n")
    subprocess.run(["ssh-keygen", "-q", "-H", "-f", known], check=True, capture_output=True)
    assert "gpu1" not in known.read_text().lower()
    shown(keys["ed25519"], "gpu1", known)
    shown(keys["ed25519"], "GPU1", known)
    shown(keys["rsa"], "gpu1", known, 2222)
    shown(keys["ecdsa"], "10.0.0.7", known)
    assert "has changed" in refused(keys["other"], "gpu1", known).message


def test_a_port_has_a_record_of_its_own(keys: dict[str, Key], known: Path) -> None:
    known.write_text(f"gpu1 {keys['ed25519'].line}\n[gpu1]:2222,[10.0.0.1]:2222 {keys['rsa'].line}\n")
    shown(keys["rsa"], "gpu1", known, 2222)
    shown(keys["rsa"], "10.0.0.1", known, 2222)
    assert "has changed" in refused(keys["ed25519"], "gpu1", known, 2222).message
    assert "has changed" in refused(keys["rsa"], "gpu1", known).message


def test_at_another_port_the_plain_record_confirms_and_does_not_refuse(keys: dict[str, Key], known: Path) -> None:
    known.write_text(f"gpu1 {keys['ed25519'].line}\n")
    shown(keys["ed25519"], "gpu1", known, 2222)
    assert "is unknown" in refused(keys["other"], "gpu1", known, 2222).message
    known.with_name("revoked").write_text(f"@revoked gpu1 {keys['other'].line}\n")
    assert "revoked" in refused(keys["other"], "gpu1", known.with_name("revoked"), 2222).message


def test_an_alias_stands_for_the_name_and_has_no_port(keys: dict[str, Key], known: Path) -> None:
    known.write_text(f"farm {keys['ed25519'].line}\n")
    shown(keys["ed25519"], "gpu1", known, 2222, alias="Farm")
    assert "is unknown" in refused(keys["ed25519"], "gpu1", known, 2222).message


PATTERNS = [
    "gpu1", "GPU1", "gpu*", "gpu?", "*,!gpu1", "!gpu1,*", "!gpu2,gpu*", "*.example.org", "[gpu1]:2222", "[gpu*]:2222",
    "[gpu?]:22*", "[GPU1]:2222", "[10.0.0.1]:2222", "10.0.0.*", "g[p]u1", "gpu1,", "fe80::1", "*:*", "!*", "gpu", "",
]  # fmt: skip
NAMES = ["gpu1", "GPU1", "gpu2", "gpu10", "a.example.org", "[gpu1]:2222", "[gpu1]:22", "10.0.0.1", "fe80::1", "gpu"]


@pytest.mark.parametrize("name", NAMES)
def test_patterns_match_what_ssh_keygen_finds(keys: dict[str, Key], known: Path, name: str) -> None:
    known.write_text("".join(f"{pattern} {keys['ed25519'].line}\n" for pattern in PATTERNS))
    done = subprocess.run(["ssh-keygen", "-F", name, "-f", known], capture_output=True, text=True, check=False)
    theirs = [line.split("line ")[1].split()[0] for line in done.stdout.splitlines() if line.startswith("#")]
    ours = [key.place.rpartition(":")[2] for key in list_known_keys(name, [str(known)]) if not key.confirms_only]
    assert ours == theirs, [PATTERNS[int(number) - 1] for number in {*ours} ^ {*theirs}]


def test_damaged_lines_are_passed_over(keys: dict[str, Key], known: Path) -> None:
    good = f"gpu1 {keys['rsa'].line}\n"
    known.write_bytes(
        b"gpu1\ngpu1 ssh-ed25519\ngpu1 ssh-ed25519 not*base64\n|1|short ssh-rsa AAAA\n|1|a*|b* ssh-rsa AAAA\n@revoked\n"
        b"\xff\xfe binary\n" + good.encode() + b"gpu1 ssh-rsa"
    )
    found = list_known_keys("gpu1", [str(known)])
    assert [(key.blob, key.place) for key in found] == [(keys["rsa"].blob, f"{known}:8")]
    shown(keys["rsa"], "gpu1", known)


def test_a_key_is_compared_whole(keys: dict[str, Key]) -> None:
    key = keys["ed25519"]
    cut = KnownKey(key_type=key.kind, blob=key.blob[:-1], revoked=False, place="f:1")
    with raises(HostKeyError, "changed"):
        check_host_key("gpu1", key.kind, key.blob, [cut], node="gpu1", files=["f"])
