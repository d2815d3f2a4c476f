"""A spec, a template or a log that came from elsewhere: what it reaches is asked for, and nothing hangs on it."""

from __future__ import annotations

import gzip
import os
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from dtctl.doctor.explain.content import read_log_content
from dtctl.errors import LaunchError, RenderError, SpecError
from dtctl.launch import trust
from dtctl.render import limited, render_template
from dtctl.render.templates import MAX_CHARACTERS
from dtctl.spec.load import load_spec, parse_spec
from tests import command_line
from tests.facts import raises


@pytest.fixture(autouse=True)
def _no_answers_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def project(folder: Path, cluster: str, job: str = "script: t.py") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "t.py").write_text("print('it ran')\n")
    (folder / "dtctl.yaml").write_text(f"cluster: {{{cluster}}}\njob: {{{job}, kind: direct}}\n")
    return folder


def dtctl(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return command_line.dtctl(*words, cwd=folder)


@pytest.mark.parametrize("line", ['Match exec "touch {0}"', "ProxyCommand touch {0}", "Include {1}/other"])
def test_a_configuration_of_the_folder_that_runs_commands_is_not_used_unasked(tmp_path: Path, line: str) -> None:
    trace = tmp_path / "it-ran"
    folder = project(tmp_path / "p", "transport: ssh, nodes: [a], ssh_config: config, connect_timeout_s: 1")
    (folder / "config").write_text(line.format(trace, folder) + "\n  HostName 127.0.0.1\n  Port 1\n")
    (folder / "other").write_text(f'Match exec "touch {trace}"\n')
    for words in (["launch", "--no-doctor"], ["doctor", "--quick"], ["launch"]):
        done = dtctl(folder, *words)
        assert done.returncode == 7, done.stderr
        assert line.split(maxsplit=1)[0] in done.stderr
    assert not trace.exists()
    assert line.split(maxsplit=1)[0] in dtctl(folder, "launch", "--dry-run").stderr
    assert not trace.exists()
    assert dtctl(folder, "launch", "--no-doctor", "--yes").returncode == 6
    assert trace.exists(), "agreed to, and then used"
    (folder / "config").write_text((folder / "config").read_text() + "Match exec other\n")
    assert dtctl(folder, "launch", "--no-doctor").returncode == 7, "the answer was for something else"


ACTING: dict[str, list[str]] = {
    "launch": ["launch", "--no-doctor"],
    "launch, examined": ["launch", "--doctor"],
    "launch in the background": ["launch", "--no-doctor", "--detach"],
    "doctor": ["doctor"],
    "doctor, quick": ["doctor", "--quick"],
    "bench": ["bench", "--op", "broadcast", "--sizes", "8:8"],
    "nccl env": ["nccl", "env"],
    "sbatch": ["sbatch", "--submit"],
}
"""Every command that takes a spec and reaches a machine or sends something. `tests/cli` knows all commands."""
LOOKING: dict[str, list[str]] = {
    "dry run": ["launch", "--dry-run"],
    "validate": ["validate"],
    "sbatch, printed": ["sbatch"],
    "render": ["render", "--target", "kubernetes"],
    "advise": ["advise"],
    "lint": ["lint", "--spec", "dtctl.yaml", "t.py"],
}
"""Those that only look at it: they ask nothing, and nothing of it is run."""


@pytest.mark.parametrize("command", [*ACTING, *LOOKING, "login node"])
def test_no_command_acts_on_a_spec_that_reaches_beyond_its_folder(tmp_path: Path, command: str) -> None:
    trace = tmp_path / "it-ran"
    way = "transport: slurm, login: a" if command == "login node" else "transport: ssh"
    where = f"{way}, nodes: [a], ssh_config: config, connect_timeout_s: 1, slots: 1"
    folder = project(tmp_path / "p", where, "script: t.py, files: {root: ..}")
    (folder / "config").write_text(f'Match exec "touch {trace}"\n')
    done = dtctl(folder, *(ACTING | LOOKING | {"login node": ["launch"]})[command])
    if command not in LOOKING:
        assert done.returncode == 7, done.stderr
        assert "outside of the folder" in done.stderr
        assert "Match exec" in done.stderr
    assert "bug in dtctl" not in done.stderr
    assert not trace.exists()


def test_files_from_elsewhere_are_asked_for_on_this_machine_too(tmp_path: Path) -> None:
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets" / "t.py").write_text("print('it ran')\n")
    folder = project(tmp_path / "p", "transport: local", "script: t.py, files: {root: ../secrets}")
    for words in (["sbatch", "--submit"], ["launch", "--detach"]):
        done = dtctl(folder, *words)
        assert (done.returncode, "outside of the folder" in done.stderr) == (7, True), done.stderr


LINES = {
    "quoted": '"ProxyCommand" touch {0}',
    "behind a sign": "=ProxyCommand touch {0}",
    "with a sign": "proxycommand=touch {0}",
    "in quotes, within": 'Match "exec" "touch {0}"',
    "with another condition": 'Match host * exec "touch {0}"',
    "not": 'Match !exec "touch {0}"',
    "tab": '\tMATCH\tEXEC\t"touch {0}"',
    "provider": "PKCS11Provider {0}",
    "keys": "KnownHostsCommand /usr/bin/touch {0}",
}


@pytest.mark.parametrize("kind", LINES)
@pytest.mark.parametrize("place", ["in the folder", "beside it", "behind 4 MiB"])
def test_a_line_that_runs_commands_is_seen_however_it_is_written(tmp_path: Path, kind: str, place: str) -> None:
    folder = project(tmp_path / "p", "transport: ssh, nodes: [a], ssh_config: config")
    config = tmp_path / "config" if place == "beside it" else folder / "config"
    if place == "beside it":
        (folder / "dtctl.yaml").write_text("cluster: {nodes: [a], ssh_config: ../config}\njob: {script: t.py}\n")
    long = "# comment\n" * (500_000 if place == "behind 4 MiB" else 0)
    config.write_text(long + "Host a\n  User me\n" + LINES[kind].format(tmp_path / "it-ran") + "\n")
    spec = load_spec(folder / "dtctl.yaml")
    with raises(LaunchError, "outside folder"):
        trust.require_user_agreement(spec)


def test_an_ordinary_configuration_is_not_asked_about(tmp_path: Path) -> None:
    folder = project(tmp_path / "p", "transport: ssh, nodes: [a], ssh_config: config")
    (folder / "config").write_text(
        "# mine\nHost gpu*\n  User=me\n  Port 22\n  IdentityFile ~/.ssh/id\n  ProxyJump gate\n"
        "  UserKnownHostsFile ~/.ssh/known\n  ServerAliveInterval 5\n\nMatch host a,b user me\n  HostName 10.0.0.1\n"
    )
    trust.require_user_agreement(load_spec(folder / "dtctl.yaml"))


def test_files_from_elsewhere_are_sent_only_when_agreed_to(tmp_path: Path) -> None:
    (tmp_path / "secrets").mkdir()
    spec = project(tmp_path / "p", "transport: ssh, nodes: [a]", "script: t.py, files: {root: ../secrets}")
    loaded = load_spec(spec / "dtctl.yaml")
    assert [str(tmp_path / "secrets") in text for text in trust.list_required_agreements(loaded)] == [True]
    with raises(LaunchError, "outside folder"):
        trust.require_user_agreement(loaded)
    trust.record_agreement(loaded)
    trust.require_user_agreement(loaded)
    (tmp_path / "q").mkdir()
    (tmp_path / "q" / "dtctl.yaml").write_bytes((spec / "dtctl.yaml").read_bytes())
    with raises(LaunchError, "outside folder"):
        trust.require_user_agreement(load_spec(tmp_path / "q" / "dtctl.yaml"))


@pytest.mark.parametrize("pattern", ["*", "**", "?*", "*?*"])
def test_all_variables_at_once_are_refused(tmp_path: Path, pattern: str) -> None:
    with raises(SpecError, "env_from"):
        parse_spec(f"job: {{script: t.py, env_from: ['{pattern}']}}", source="x", base_dir=tmp_path)


def test_variables_that_look_like_secrets_are_told(tmp_path: Path) -> None:
    spec = parse_spec("job: {script: t.py, env_from: ['WANDB_*', 'HF_*']}", source="x", base_dir=tmp_path)
    names = ("WANDB_API_KEY", "HF_TOKEN", "HF_HOME", "OTHER_TOKEN", "WANDB_MODE")
    assert trust.find_likely_secrets(spec, dict.fromkeys(names, "x")) == ["HF_TOKEN", "WANDB_API_KEY"]


def test_a_template_that_is_a_link_to_a_file_elsewhere_is_not_sent(tmp_path: Path) -> None:
    (tmp_path / "id_rsa").write_text("PRIVATE")
    (tmp_path / "templates").mkdir()
    (tmp_path / "templates" / "node.sh.j2").symlink_to(tmp_path / "id_rsa")
    with raises(RenderError, "elsewhere"):
        render_template("node.sh.j2", {}, folders=[tmp_path / "templates"])


ENDLESS = {
    "long": "{% for i in range(90000) %}{% for j in range(90000) %}xxxxxxxxxx{% endfor %}{% endfor %}",
    "wide": "{{ 'x' * 10000000000 }}",
    "wide list": "{{ [1] * 10000000000 }}",
    "tall": "{{ 9 ** 9999999999 }}",
    "formatted": "{{ '%10000000000d' % 1 }}",
    "formatted by a filter": "{{ '%10000000000d' | format(1) }}",
    "formatted by a method": "{{ '{:>10000000000}'.format(1) }}",
    "centred": "{{ 'x' | center(10 ** 10) }}",
    "justified": "{{ 'x'.ljust(10 ** 10) }}",
    "filled": "{{ 'x'.zfill(10 ** 10) }}",
    "tabs": "{{ '\t'.expandtabs(10 ** 10) }}",
    "indented": "{{ 'x\nx' | indent(10 ** 10) }}",
    "replaced": "{{ ('x' * 99999) | replace('x', 'y' * 99999) }}",
    "joined": "{{ (range(99999) | list) | join('x' * 99999) }}",
    "doubled": "{% set n = namespace(x='x') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "doubled list": "{% set n = namespace(x=[1]) %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "words": "{{ lipsum(n=99999) }}",
    "batches": "{{ [1] | batch(10 ** 10, 1) | list | length }}",
    "slices": "{{ [1] | slice(10 ** 10) | list | length }}",
    "itself": "{% include 't.j2' %}",
    "itself, imported": "{% import 't.j2' as t %}",
    "its own heir": "{% extends 't.j2' %}",
    "a macro of itself": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "for ever": "{% for i in range(90000) %}{% for j in range(90000) %}{% set x = 1 %}{% endfor %}{% endfor %}",
}


@pytest.fixture
def _soon(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Templates have a second, in a process that is started with it."""
    monkeypatch.setattr(limited, "LIMIT_S", 1)
    limited._open_renderer().close()
    yield
    limited._open_renderer().close()


@pytest.mark.usefixtures("_soon")
@pytest.mark.parametrize("kind", ENDLESS)
def test_a_template_without_an_end_has_one(tmp_path: Path, kind: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (tmp_path / "t.j2").write_text(ENDLESS[kind])
    with pytest.raises(RenderError):
        render_template("t.j2", {}, folders=[tmp_path])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10
    (tmp_path / "good.j2").write_text("{{ x }}")
    assert render_template("good.j2", {"x": "a b"}, folders=[tmp_path]) == "'a b'", "and the next one is rendered"


def test_a_template_longer_than_scripts_are_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "big.j2").write_text("x" * (MAX_CHARACTERS + 1))
    with raises(RenderError, "larger"):
        render_template("big.j2", {}, folders=[tmp_path])


@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "huge"])
def test_a_template_that_is_no_file_is_not_waited_for(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "t.j2"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    else:
        with path.open("wb") as file:
            file.truncate(1 << 40)
    with pytest.raises(RenderError):
        render_template("t.j2", {}, folders=[tmp_path])


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    for name in ("a.log", "dtctl.yaml", "a.py"):
        os.mkfifo(tmp_path / name)
    assert "without a writer" in read_log_content(tmp_path / "a.log").trouble
    with raises(SpecError, "pipe"):
        load_spec(tmp_path / "dtctl.yaml")
    assert dtctl(tmp_path, "lint", "a.py").returncode in (0, 9)


def test_a_device_without_an_end_is_read_in_part_and_said_so() -> None:
    assert "did not end" in read_log_content(Path("/dev/zero")).trouble


def test_a_small_file_that_unpacks_to_anything_is_read_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dtctl.doctor.explain import content as module

    monkeypatch.setattr(module, "PATIENCE_S", 0.2)
    (tmp_path / "a.log.gz").write_bytes(gzip.compress(b"0123456789abcdef" * (1 << 20)) * 125)
    assert "left out" in read_log_content(tmp_path / "a.log.gz").trouble


def test_a_program_larger_than_programs_are_is_not_parsed(tmp_path: Path) -> None:
    with (tmp_path / "a.py").open("wb") as file:
        file.truncate(3 << 30)
    done = dtctl(tmp_path, "lint", "a.py")
    assert "larger than" in done.stdout + done.stderr
