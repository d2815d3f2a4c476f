import time
from pathlib import Path

import pytest

from dtctl.errors import SpecError
from dtctl.spec.load import parse_spec


def error(text: str, *overrides: str) -> SpecError:
    with pytest.raises(SpecError) as caught:
        parse_spec(text, source="dtctl.yaml", base_dir=Path("/project"), overrides=overrides)
    assert caught.value.exit_code == 3
    return caught.value


def test_an_unknown_key_names_file_line_and_near_match() -> None:
    found = error("cluster:\n  transport: ssh\n  nodse: [a]\n")
    assert found.message == "cluster.nodse: unknown key; did you mean `nodes`?"
    assert found.where == "dtctl.yaml:3"
    assert found.key == "cluster.nodse"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "slurm: {xyzzy: 1}",
            "slurm.xyzzy: unknown key; allowed here: "
            "account, array, container, cpus_per_task, exclusive, "
            "extra, gres, launcher, mem, nodelist, partition, qos, requeue, requeues, srun, time, warn_s; "
            "`extra` takes other options of sbatch",
        ),
        ("xyzzy: 1", "xyzzy: unknown key; allowed here: cluster, job, kubernetes, metrics, network, slurm, train"),
        ("nodes: 3", "nodes: unknown key; did you mean `cluster.nodes`?"),
        ("lr: 0.1", "lr: unknown key; did you mean `train.lr`?"),
        ("jobs: {}", "jobs: unknown key; did you mean `job`?"),
        ("xyzzy:", "xyzzy: unknown key; allowed here: cluster, job, kubernetes, metrics, network, slurm, train"),
        ("1: 2", "1: unknown key; allowed here: cluster, job, kubernetes, metrics, network, slurm, train"),
        ("train: {snapshot: {evry_s: 1}}", "train.snapshot.evry_s: unknown key; did you mean `every_s`?"),
        ("job: {files: {exlude: []}}", "job.files.exlude: unknown key; did you mean `exclude`?"),
        ("train: {strategy: {x: 1}}", "train.strategy.x: unknown key; allowed here: cp, dp, ep, fsdp, pp, tp"),
        ("cluster: {nodes: [{name: b, slts: 2}]}", "cluster.nodes[0].slts: unknown key; did you mean `slots`?"),
    ],
)
def test_unknown_keys_at_all_levels(text: str, message: str) -> None:
    assert error(text).message == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cluster: [1]", "cluster: expected keys with values, got a list"),
        ("cluster: ssh", "cluster: expected keys with values, got 'ssh'"),
        ("cluster: {slots: two}", "cluster.slots: expected a whole number or 'auto', got 'two'"),
        ("cluster: {slots: atuo}",
         "cluster.slots: expected a whole number or 'auto', got 'atuo'; did you mean 'auto'?"),
        ("cluster: {slots: 2.5}", "cluster.slots: expected a whole number or 'auto', got 2.5"),
        ("cluster: {slots: true}", "cluster.slots: expected a whole number or 'auto', got true"),
        ("cluster: {slots: '2'}", "cluster.slots: expected a whole number or 'auto', got '2'"),
        ("cluster: {slots: 0}", "cluster.slots: expected at least 1 or 'auto', got 0"),
        ("cluster: {port: 70000}", "cluster.port: expected at most 65535, got 70000"),
        ("cluster: {port: 22.5}", "cluster.port: expected a whole number, got 22.5"),
        ("cluster: {connect_timeout_s: 0}", "cluster.connect_timeout_s: expected more than 0, got 0"),
        ("cluster: {connect_timeout_s: .inf}", "cluster.connect_timeout_s: expected a finite number, got inf"),
        ("cluster: {link_timeout_s: 1}", "cluster.link_timeout_s: expected at least 2, got 1"),
        ("cluster: {transport: shh}",
         "cluster.transport: expected 'local', 'ssh', 'slurm' or 'sandbox', got 'shh'; did you mean 'ssh'?"),
        ("cluster: {nodes: 0}", "cluster.nodes: expected a list or at least 1, got 0"),
        ("cluster: {nodes: 70000}", "cluster.nodes: expected a list or at most 65536, got 70000"),
        ("cluster: {nodes: {a: 1}}", "cluster.nodes: expected a list or a whole number, got keys with values"),
        ("cluster: {nodes: [a, [b]]}", "cluster.nodes[1]: expected text or keys with values, got a list"),
        ("cluster: {nodes: [a, ]}", None),
        ("cluster: {nodes: [a, ~]}", "cluster.nodes[1]: expected text or keys with values, got nothing"),
        ("cluster: {nodes: [{slots: 2}]}", "cluster.nodes[0].name: is missing"),
        ("cluster: {nodes: [{name: ''}]}", "cluster.nodes[0].name: expected text that is not empty, got ''"),
        ("cluster: {nodes: [{host: ''}]}", "cluster.nodes[0].host: expected text that is not empty, got ''"),
        ("cluster: {nodes: [{host: a, name: b}]}",
         "cluster.nodes[0]: `host` is an alias of `name`, and both are set"),
        ("cluster: {hostfile: [a]}", "cluster.hostfile: expected a path, got a list"),
        ("job: {env: [A=1]}", "job.env: expected keys with values, got a list"),
        ("job: {env: {A: }}", "job.env.A: expected text, got nothing"),
        ("job: {env: {A: [1]}}", "job.env.A: expected text, got a list"),
        ("job: {env: {str: {a: 1}}}", "job.env.str: expected text, got keys with values"),
        ("job: {args: --lr 1}", "job.args: expected a list, got '--lr 1'"),
        ("job: {args: [{a: 1}]}", "job.args[0]: expected text, got keys with values"),
        ("job: {secrets: TOKEN}", "job.secrets: expected a list, got 'TOKEN'"),
        ("job: {script: ''}", "job.script: expected text that is not empty, got ''"),
        ("job: {command: []}", "job.command: expected a list that is not empty, got a list"),
        ("job: {command: ''}", "job.command: expected a list that is not empty, got a list"),
        ("job: {command: \"echo 'a\"}", "job.command: a quotation mark is not closed"),
        ("job: {files: {push: perhaps}}", "job.files.push: expected true or false, got 'perhaps'"),
        ("job: {max_restarts: -1}", "job.max_restarts: expected at least 0, got -1"),
        ("job: {script: a.py, module: b}",
         "job: only one of script, module and command may be set, and these are: script, module"),
        ("network: {interface: [a]}", "network.interface: expected text or keys with values, got a list"),
        ("network: {interface: {a: [1]}}", "network.interface.a: expected text, got a list"),
        ("network: {rendezvous_port: 0}", "network.rendezvous_port: expected at least 1 or 'auto', got 0"),
        ("train: {lr: fast}", "train.lr: expected a number, got 'fast'"),
        ("train: {lr: .nan}", "train.lr: expected a finite number, got nan"),
        ("train: {steps: 1, epochs: 1}",
         "train: steps and epochs are both set; keep one of the two (null unsets the other)"),
        ("train: {strategy: ddpp}",
         "train.strategy: expected 'auto', 'single', 'ddp', 'zero1', 'fsdp', 'hsdp', 'tp', 'pipeline' or keys with "
         "values, got 'ddpp'; did you mean 'ddp'?"),
        ("train: {strategy: {dp: 0}}", "train.strategy.dp: expected at least 1, or -1 for what is left, got 0"),
        ("train: {model: 5}", "train.model: expected keys with values, got 5"),
        ("slurm: {extra: {a: [1]}}",
         "slurm.extra.a: expected text, a whole number, a number or true or false, got a list"),
        (f"cluster: {{transport: {'x' * 500}}}",
         f"cluster.transport: expected 'local', 'ssh', 'slurm' or 'sandbox', got '{'x' * 59}..."),
    ],
)  # fmt: skip
def test_wrong_values(text: str, message: str | None) -> None:
    if message is None:
        parse_spec(text, source="dtctl.yaml", base_dir=Path())
        return
    found = error(text)
    assert found.message == message
    assert found.where == "dtctl.yaml:1"
    assert found.key == message.split(":")[0]


def test_all_problems_are_told_at_once_in_the_order_of_the_file() -> None:
    found = error(
        "job:\n  grace: 1\n  max_restarts: -1\n  script: a.py\ncluster:\n  slots: two\n",
        "job.kind=direkt",
    )
    assert found.message.splitlines() == [
        "4 problems in the spec",
        "  dtctl.yaml:2: job.grace: unknown key; did you mean `grace_s`?",
        "  dtctl.yaml:3: job.max_restarts: expected at least 0, got -1",
        "  dtctl.yaml:6: cluster.slots: expected a whole number or 'auto', got 'two'",
        "  --set job.kind=direkt: job.kind: expected 'torchrun', 'direct', 'deepspeed', 'accelerate' or 'command', "
        "got 'direkt'; did you mean 'direct'?",
    ]
    assert (found.where, found.key) == ("dtctl.yaml:2", "job.grace")


def test_what_was_retyped_does_not_hide_other_problems() -> None:
    found = error("job:\n  env: {A: 1.10, B: [1]}\n  grace_s: -1\n")
    assert found.message.splitlines() == [
        "2 problems in the spec",
        "  dtctl.yaml:2: job.env.B: expected text, got a list",
        "  dtctl.yaml:3: job.grace_s: expected at least 0, got -1",
    ]


def test_an_error_inside_of_what_an_anchor_brought() -> None:
    found = error(
        "job: {script: a.py}\ncluster:\n  nodes:\n    - &a\n      name: a\n      slts: 1\n    - {<<: *a, name: b}\n"
    )
    assert found.message.splitlines()[1:] == [
        "  dtctl.yaml:6: cluster.nodes[0].slts: unknown key; did you mean `slots`?",
        "  dtctl.yaml:6: cluster.nodes[1].slts: unknown key; did you mean `slots`?",
    ]


@pytest.mark.parametrize("section", ["", "cluster", "job", "train"])
def test_thousands_of_unknown_keys_take_no_minutes_and_are_counted(section: str) -> None:
    keys = "".join(f"{'  ' if section else ''}key{number}: 1\n" for number in range(4000))
    began = time.process_time()
    found = error(f"{section}:\n{keys}" if section else keys)
    assert time.process_time() - began < 4
    lines = found.message.splitlines()
    assert lines[0] == "4000 problems in the spec"
    assert lines[-1] == "  and 3950 more"
    assert len(lines) == 52


@pytest.mark.parametrize(
    "key",
    [
        "cluster.hostfile", "cluster.identity_file", "cluster.known_hosts", "cluster.ssh_config", "cluster.python",
        "cluster.workdir", "job.script", "job.files.root",
    ],
)  # fmt: skip
@pytest.mark.parametrize("value", ["x" * 5000, "x/" * 2499 + "x", "ä" * 200])
def test_a_path_for_which_no_file_system_has_room(key: str, value: str) -> None:
    *sections, name = key.split(".")
    text = "".join(f"{'  ' * depth}{section}:\n" for depth, section in enumerate(sections))
    found = error(f"{text}{'  ' * len(sections)}{name}: {value}\n")
    assert found.message == f"{key}: is longer than file systems take ({len(value.encode()):,} bytes)"
    assert found.where == f"dtctl.yaml:{len(sections) + 1}"
