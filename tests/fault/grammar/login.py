"""The way into a node: start-up files of a shell, sshd, keys, a dead or frozen server."""

from __future__ import annotations

from tests.fault.grammar.fault import Collection


def add(made: Collection) -> None:
    start = r"\.bashrc|start-up|interactive"
    for word, text, checks, fatal in (
        ("prints", "echo Welcome to the cluster", "shell-output", True),
        ("exits with 1", "exit 1", "shell-output start-up python", True),
        ("exits with 0", "exit 0", "shell-output start-up python", True),
        ("sleeps for a minute", "sleep 60", "reach start-up slow-login", True),
        ("sleeps for 5 s", "sleep 5", "slow-login", False),
        ("becomes a shell that is not there", "exec /usr/bin/fish-nowhere", "shell-output start-up python", True),
        ("waits for an answer", "read -r answer; [ $answer = yes ] || exit", "start-up reach shell-output", True),
        ("exports PYTHONHOME", "export PYTHONHOME=/nowhere", "python-environment", True),
        ("exports NCCL_P2P_DISABLE", "export NCCL_P2P_DISABLE=1", "env-differs", True),
        ("exports GLOO_SOCKET_IFNAME=lo", "export GLOO_SOCKET_IFNAME=lo", "env-differs interface", True),
        ("limits open files", "ulimit -n 100", "nofile", True),
        ("prints at the end", "trap 'echo Goodbye' EXIT", "shell-output", False),
    ):
        node = made.host()
        fix = {"python-environment": "PYTHONHOME", "nofile": "ulimit -n|nofile"}.get(
            checks, start if "env" not in checks else r"unset|GLOO|NCCL|alike"
        )
        made.add(
            f"start-up file: {word}",
            "way in",
            checks,
            [node],
            fix,
            (node, f'rc "{text}"' if "'" in text else f"rc '{text}'"),
            fatal=fatal,
        )
    for word, line, checks, fix in (
        (
            "a forced command",
            "ForceCommand echo this account is restricted",
            "login shell-output start-up",
            r"ForceCommand|command=|forced",
        ),
        ("a forced shell script", "ForceCommand sleep 100", "login reach start-up", r"."),
        ("sessions are not allowed", "MaxSessions 0", "login reach", r"MaxSessions|sshd"),
        ("no keys are read", "AuthorizedKeysFile none", "login", r"key|authorized"),
        ("the user is not among those allowed", "AllowUsers nobody", "login", r"AllowUsers|login|sshd|authorized"),
        (
            "an old key exchange alone",
            "KexAlgorithms diffie-hellman-group1-sha1",
            "reach login",
            r"[Kk]ex|key exchange|algorithm|sshd",
        ),
        ("root may not log in", "PermitRootLogin no", "login", r"login|PermitRootLogin|key|user"),
    ):
        node = made.host()
        made.add(f"sshd: {word}", "way in", checks, [node], fix, (node, f"conf '{line}'"))
    for shell, checks in (
        ("/usr/sbin/nologin", "login shell-output start-up"),
        ("/bin/false", "login python start-up"),
        ("/nowhere/zsh", "login"),
    ):
        node = made.host()
        made.add(
            f"sshd: the shell is {shell}",
            "way in",
            checks,
            [node],
            r"shell|chsh|usermod|nologin",
            (node, f"shell_of {shell}"),
        )
    node = made.host()
    made.add("sshd: dead", "way in", "reach", [node], r"ssh", (node, "kill $(pgrep -x sshd)"))
    node = made.host()
    made.add("sshd: frozen", "way in", "reach", [node], r".", (node, "kill -STOP $(pgrep -x sshd)"))
    for verdict in ("DROP", "REJECT --reject-with tcp-reset"):
        node = made.host()
        made.add(
            f"sshd: port 22 {verdict.split()[0]}",
            "way in",
            "reach",
            [node],
            r".",
            (node, f"iptables -A INPUT -p tcp --dport 22 -j {verdict}"),
        )
    node = made.host()
    made.add("sshd: another host key", "way in", "host-key", [node], r"known_hosts|ssh-keygen|ssh-keyscan",
         (node, "ssh-keygen -q -t ed25519 -N '' -f /tmp/key; conf 'HostKey /tmp/key'"))  # fmt: skip
