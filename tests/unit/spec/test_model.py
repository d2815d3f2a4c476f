from pathlib import Path

import pytest
from pydantic import ValidationError

from dtctl.errors import SpecError
from dtctl.spec.load import dump_spec, parse_spec
from dtctl.spec.model import _OWN_DIRECTIVES, Cluster, Job, Network, Spec
from dtctl.spec.section import Section
from dtctl.spec.train_section import make_train_section
from tests.facts import missing


def parse(text: str) -> Spec:
    return parse_spec(text, source="dtctl.yaml", base_dir=Path("/project"))


def test_everything_has_a_default() -> None:
    spec = parse("{}")
    assert spec.cluster == Cluster()
    assert spec.job == Job()
    assert spec.network == Network()
    assert (spec.train, spec.slurm, spec.kubernetes) == (None, None, None)
    assert spec.pushes
    assert spec == Spec(base_dir=Path("/project"))


def test_every_key_can_be_set() -> None:
    """The keys are a contract: one that is renamed or removed breaks this."""
    spec = parse("""
cluster:
  transport: ssh
  nodes: [a, {name: b, address: b1, slots: 1, env: {A: x}, python: p, port: 1, user: u, workdir: w}, {host: c, rack: r}]
  slots: auto
  user: u
  port: 65535
  identity_file: k
  known_hosts: h
  ssh: openssh
  ssh_config: c
  python: p
  workdir: w
  connect_timeout_s: 0.5
  link_timeout_s: 2
  login: l
  spares: [s]
  return_s: 9
  min_nodes: 1
job:
  name: n
  module: m
  args: [a]
  deepspeed: {zero_allow_untested_optimizer: true}
  add_args: [local_rank, deepspeed_config]
  env: {A: x}
  env_from: ["W*"]
  secrets: [S]
  files: {push: true, root: r, include: [i], exclude: [e]}
  max_restarts: 1
  log_mib: 5
  data: [{from: ~/x, to: data/x}]
  environment: {requirements: requirements.txt, python: "3.12", platform: aarch64, index: wheels/, wheels: relay}
  progress: "at (?P<step>[0-9]+)"
  outputs: [out/, ./logs]
  shared: [checkpoints/, {path: saved, complete: DONE}]
  setup: ["true"]
  kind: accelerate
  grace_s: 0
  hang_s: 60
  hang_start_s: 900
  hang_output_s: 300
  recovery: restart
  heal_s: 30
  time_s: 3600
  preload: [torch]
network: {interface: {a: eth0}, profile: gcp-tcpxo, rendezvous_port: 1, rendezvous_address: a}
train:
  strategy: {dp: 1, fsdp: 1, tp: 1, pp: 1}
  memory_gib: 40
  blocks: a.b
  ddp: {bucket_mb: 1, static_graph: true, find_unused_parameters: true, comm_hook: bf16}
  fsdp:
    {reshard_after_forward: true, cpu_offload: true, reduce_dtype: bf16, param_dtype: fp32, exchange_every_pass: true}
  tp: {plan: {a: colwise}, sequence_parallel: true}
  pipeline: {schedule: zbv, micro_batches: 1, split: [1], stages_per_worker: 1}
  precision: bf16
  tf32: true
  cudnn_benchmark: true
  channels_last: true
  bind_cores: true
  checkpointing: full
  compile: true
  on_oom: stop
  micro_batch: 1
  shares: {a: 2}
  global_batch: 1
  accumulate: 1
  clip_norm: 1
  lr: 1
  min_lr: 0
  warmup_steps: 0
  schedule: wsd
  decay_steps: 1
  on_resize: sqrt
  optimizer: sgd
  beta1: 0
  beta2: 0.5
  eps: 1e-8
  momentum: 0
  kernel: loop
  weight_decay: 0
  ema: {decay: 0.9, every: 1, evaluate: false}
  on_nan: skip
  steps: 1e3
  data_workers: thread
  data_prefetch: 1
  seed: 0
  log_every: 1
  eval_every: 1
  best: {metric: m, mode: max}
  profile: {start: 1, steps: 1, memory: true, communication: 0}
  tensorboard: t
  wandb: w
  mlflow: m
  exact: elastic
  require_exact: true
  deterministic: true
  timeout_s: 1
  snapshot: {dir: d, every_steps: 1, every_s: 1, keep: 1, replicas: 0, when_busy: skip, max_failed_saves: 1,
  memory: {every_steps: 1, copies: 0}}
  model: {any: [thing]}
  data: {any: {thing: ~}}
kubernetes: {image: i, workdir: w, claim: c, namespace: n, gpu: g, resources: {cpu: 1}, shm: 1Gi, node_selector: {a: b},
  queue: q, secret: s, restarts: 1, image_pull_policy: Always, image_pull_secrets: [s], labels: {a: b},
  annotations: {a: b}, affinity: {nodeAffinity: {}}, tolerations: [{key: k, operator: Equal, value: v,
  effect: NoExecute, tolerationSeconds: 1}], priority_class: p, service_account: s, pod_security: restricted,
  run_as_user: 1, run_as_group: 1, fs_group: 1, capabilities: [IPC_LOCK], host_network: true, networks: [n],
  exclusive_topology: t, termination_s: 60, ttl_s: 60, runtime_class: r, env_secrets: [s], active_deadline_s: 1,
  volumes: [{mount: /d, claim: c}], extra: {spec: {suspend: true}}}
slurm: {partition: p, account: a, time: "1-12:00:00", qos: q, gres: "gpu:8", array: 0-3, requeues: 2, warn_s: 60,
  launcher: none,
  srun: [--exact], extra: {constraint: h100}, cpus_per_task: 8, mem: 200G, exclusive: true, nodelist: "n[1-2]",
  requeue: false, container: {image: i, runtime: apptainer, mounts: ["/a:/a"], python: p, options: [--nv]}}
metrics:
  {port: auto, address: a, alerts: {no_step_s: 60, loss_not_finite: false, restarts: off, throughput_drop: 0.5,
    failed: false, webhook: {env: W}}}
""")
    assert spec.metrics is not None
    assert spec.metrics.alerts is not None
    unset = {
        f"{type(section).__name__}.{name}"
        for section in (
            spec,
            spec.cluster,
            spec.job,
            spec.job.files,
            spec.network,
            spec.slurm,
            spec.kubernetes,
            spec.metrics,
            spec.metrics.alerts,
        )
        if isinstance(section, Section)
        for name in set(type(section).model_fields) - section.model_fields_set
    }
    assert spec.train is not None
    unset |= {f"Train.{name}" for name in set(make_train_section().model_fields) - set(spec.settings)}
    assert unset == {"Job.script", "Job.command", "Job.shell", "Cluster.hostfile", "Train.epochs"}
    assert spec.settings["steps"] == 1000
    assert spec.settings["data"] == {"any": {"thing": None}}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("echo 'a b' c", ("echo", "a b", "c")),
        ("[echo, 'a b', 1.10]", ("echo", "a b", "1.10")),
        ("nvidia-smi", ("nvidia-smi",)),
        ("a '' \\$HOME", ("a", "", "$HOME")),
    ],
)
def test_a_command_is_words_or_a_line_of_a_shell(text: str, words: tuple[str, ...]) -> None:
    assert parse(f"job: {{command: {text}}}").job.command == words


@pytest.mark.parametrize(
    ("job", "fact"),
    [
        ("command: cd data && python train.py", "&&"),
        ("command: python train.py | tee log", "|"),
        ("command: echo $RANK", "$RANK"),
        ("command: [cd, data, '&&', ls]", "&&"),
        ("shell: true, command: [a, b]", "one line of text"),
        ("shell: true, script: a.py", "`shell` is about `command`"),
    ],
)
def test_no_part_of_a_shell_line_becomes_an_argument(job: str, fact: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse(f"job: {{{job}}}")
    assert caught.value.message.startswith("job")
    assert fact in caught.value.message


@pytest.mark.parametrize("line", ["cd data && python train.py > log", "echo $RANK; true"])
def test_a_shell_line_stays_one_and_is_read_again_as_one(line: str) -> None:
    spec = parse(f"job: {{shell: true, command: '{line}'}}")
    assert spec.job.command == (line,)
    assert parse(dump_spec(spec)) == spec


def test_quoted_operators_survive_being_written_and_read() -> None:
    spec = parse("job: {command: \"cut -d '|' -f 1 a.csv\"}")
    assert parse(dump_spec(spec)).job.command == ("cut", "-d", "|", "-f", "1", "a.csv")


def test_settings_hold_only_what_the_spec_says() -> None:
    spec = parse("train: {lr: 1e-3, strategy: {dp: 2}, snapshot: {}, model: {}}")
    assert spec.settings == {"lr": 0.001, "strategy": {"dp": 2}, "snapshot": {}, "model": {}}


def test_a_spec_cannot_be_changed_or_share_its_defaults() -> None:
    spec = parse("job: {script: a.py}")
    with pytest.raises(ValidationError):
        spec.job.script = "b.py"  # type: ignore[misc]
    spec.job.env["A"] = "leaks"
    assert parse("job: {script: a.py}").job.env == {}
    assert Job().env == {}


@pytest.mark.parametrize("name", _OWN_DIRECTIVES)
def test_a_directive_that_dtctl_writes_itself_is_refused_by_name(name: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_spec(f"slurm: {{extra: {{{name}: 1}}}}\n", source="dtctl.yaml", base_dir=Path())
    assert caught.value.key == "slurm.extra"
    assert f"the directive {name} itself" in caught.value.message


@pytest.mark.parametrize(
    ("job", "words"),
    [
        ("shared: [/data/out]", "job.shared /data/out inside"),
        ("shared: [out/../..]", "job.shared out/../.. inside"),
        ("shared: [./]", "job.shared ./ inside"),
        ("shared: [out/, out/a]", "job.shared 'out' 'out/a'"),
        ("shared: [{path: out, complete: a/DONE}]", "job.shared 'a/DONE'"),
        ("shared: [data/x/out], data: [{from: ~/x, to: data/x}]", "`shared` data/x/out data/x"),
    ],
)
def test_a_shared_folder_that_cannot_be_one_is_refused(job: str, words: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_spec(f"job: {{script: t.py, {job}}}\n", source="dtctl.yaml", base_dir=Path())
    assert not missing(str(caught.value), words)


def test_a_shared_folder_may_be_a_path_alone() -> None:
    spec = parse_spec("job: {script: t.py, shared: [./out/, {path: a}]}\n", source="dtctl.yaml", base_dir=Path())
    assert [(entry.path, entry.complete) for entry in spec.job.shared_folders] == [("out", None), ("a", None)]
