"""Changes that the world makes between two attempts of a run, each with the piece of a program that it can meet.

In all texts `A1` and `A2` stand for two numbers, `N1` and `N2` for two whole ones, and `D1` for a digit, which are
drawn.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[3]


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A change, and what a program has for it."""

    kind: str
    change: str = ""
    """As in judged.py: `edit A => B`, `arg`, `env` or `python`; empty for nothing but the resume."""
    is_idle: bool = False
    """Whether it changes no bit for certain, so that nothing may be refused."""
    tops: str = ""
    """Lines before all functions."""
    net: str = ""
    """A line behind the making of the network, which is called `made`."""
    layer: str = ""
    before: str = ""
    """Lines of the loss function before the network is called."""
    after: str = ""
    """Lines behind that; the loss is called `value`."""
    points: str = "points()"
    samples: str = "TensorData(inputs, targets)"
    more: Mapping[str, str] = field(default_factory=dict)
    """Arguments of the trainer."""
    environ: Mapping[str, str] = field(default_factory=dict)
    """Of all attempts."""
    workers: int | None = None
    """None: drawn."""


def _module(path: str, text: str) -> str:
    """Lines that write a module unless it is there, and make it known."""
    return (
        f'import sys\nonce("{path}", lambda file: file.write({text.encode()!r}))\nsys.path.insert(0, "site-packages")'
    )


def _rewrite(path: str, text: str) -> str:
    return f"python open({path!r}, 'w').write({text!r})"


def _counter(made: str, step: str, use: str, **more: object) -> Variant:
    return Variant(kind="hidden counter", tops=made, before=step, after=use, **more)  # type: ignore[arg-type]


BACKWARD = """\
class Scale(torch.autograd.Function):
    @staticmethod
    def forward(context, value):
        return value * 1.0

    @staticmethod
    def backward(context, gradient):
        return gradient * A1"""
GADGET, GIZMO = "gadget.py", "site-packages/gizmo.py"
ROWS = """\
class Rows(torch.utils.data.Dataset):
    def __init__(self, inputs, targets):
        once("rows.npy", lambda file: np.save(file, torch.cat((inputs, targets), 1).numpy()))
        self.rows = np.load("rows.npy", mmap_mode="r")

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, at):
        row = torch.from_numpy(self.rows[at].copy())
        return row[:6], row[6:]"""
NOISY = """\
class Noisy(torch.utils.data.Dataset):
    def __init__(self, inputs, targets):
        self.inputs, self.targets = inputs, targets

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, at):
        noise = torch.randn(6, generator=torch.Generator().manual_seed(at + N1))
        return self.inputs[at] + A1 * noise, self.targets[at]"""
SGD = "lambda model: torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.5)"
ADAM = "lambda model: torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-08)"
HASHED = {"BOOT_EXEC": "1", "PYTHONHASHSEED": "0"}
NAMES = 'NAMES = {"alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta"}'
WEIGHTS = "WEIGHTS = dict(zip(sorted(NAMES), [A1, A2, 1.1, 0.7, 0.3, 0.9, 1.7, 0.1]))"
WIDE = "wide = inputs.repeat(1, 9000).sin()"
SET_THREADS = 'torch.set_num_threads(int(os.environ.get("TOY_THREADS", "1")))'
FLIP = f"python import sys; sys.path.insert(0, {str(ROOT)!r}); from tests.fault.programs.flip import flip; flip"
ROUNDING = """\
class Rounding(nn.Sequential):
    def load_state_dict(self, state, *args, **named):
        super().load_state_dict({name: value * FACTOR for name, value in state.items()}, *args, **named)"""

VARIANTS: tuple[Variant, ...] = (
    Variant(kind="nothing", is_idle=True),
    # Code of the program.
    Variant(kind="code", after="value = value * A1", change="edit value * A1 => value * A2"),
    Variant(kind="code", layer="nn.Tanh()", change="edit nn.Tanh() => nn.SiLU()"),
    Variant(kind="code", tops=BACKWARD, after="value = Scale.apply(value)", change="edit ient * A1 => ient * A2"),
    Variant(kind="code", net="made[0].weight.register_hook(lambda grad: grad * A1)", change="edit * A1 => * A2"),
    Variant(kind="code", more={"optimizer": SGD}, change="edit momentum=0.5 => momentum=0.D1"),
    Variant(kind="code", more={"optimizer": ADAM}, change="edit eps=1e-08 => eps=1e-05"),
    Variant(kind="code", more={"rate": "lambda step: 1.0 if step < 8 else A1"}, change="edit else A1 => else A2"),
    Variant(kind="code", before="inputs = inputs * A1 * A2", change="edit inputs * A1 * A2 => inputs * (A1 * A2)"),
    Variant(kind="code", after="value = value * 1.0", change="edit value * 1.0 => value / 1.0", is_idle=True),
    Variant(kind="code", tops="# a note on A1", change="edit # a note on A1 => # a note on A2", is_idle=True),
    Variant(kind="code", tops="UNUSED = N1", change="edit UNUSED = N1 => UNUSED = N2", is_idle=True),
    # Modules in the program's folder, and of a package.
    Variant(kind="package", tops=_module(GADGET, "FACTOR = A1\n") + "\nimport gadget",
            after="value = value * gadget.FACTOR", change=_rewrite(GADGET, "FACTOR = A2  # later\n")),
    Variant(kind="package", tops=_module(GADGET, "def scale(x):\n    return x * A1\n") + "\nimport gadget",
            before="inputs = gadget.scale(inputs)",
            change=_rewrite(GADGET, "def scale(x):\n    return A2 * x  # now\n")),
    Variant(kind="package", tops=_module(GIZMO, "FACTOR = A1\n") + "\nimport gizmo",
            after="value = value * gizmo.FACTOR", change=_rewrite(GIZMO, "FACTOR = A2  # later\n")),
    Variant(kind="package", tops=_module(GIZMO, "def scale(x):\n    return x * A1\n") + "\nimport gizmo",
            net="made[0].weight.register_hook(gizmo.scale)",
            change=_rewrite(GIZMO, "def scale(x):\n    return A2 * x  # now\n")),
    Variant(kind="package", tops=_module(GADGET, "FACTOR = A1\n") + "\nimport gadget", is_idle=True,
            after="value = value * gadget.FACTOR", change=_rewrite(GADGET, "FACTOR = A1\nOTHER = A2\n")),
    Variant(kind="package", tops=_module(GIZMO, "FACTOR = A1\n"), is_idle=True,
            change=_rewrite(GIZMO, "FACTOR = A2  # later\n")),
    # Files that the program reads.
    Variant(kind="file", tops=ROWS, samples="Rows(inputs, targets)",
            change="python import numpy as np; a = np.load('rows.npy'); a[N1 % 64] += A1; np.save('rows.npy', a)"),
    Variant(kind="file", tops=ROWS, samples="Rows(inputs, targets)",
            change="python import numpy as np; np.save('rows.npy', np.load('rows.npy') * A1)"),
    Variant(kind="file", tops=ROWS, samples="Rows(inputs, targets)", is_idle=True,
            change="python import numpy as np; np.save('rows.npy', np.load('rows.npy'))"),
    Variant(kind="file", tops='import json\nGAIN = json.load(open("set.json")) if os.path.exists("set.json") else A1',
            after="value = value * GAIN", change="python open('set.json', 'w').write('A2')"),
    Variant(kind="file", before='gain = float(open("gain").read()) if os.path.exists("gain") else A1',
            after="value = value * gain", change="python open('gain', 'w').write('A2')"),
    Variant(kind="file", net='made.append(nn.Dropout(float(open("p").read()) if os.path.exists("p") else 0.1))',
            change="python open('p', 'w').write('0.3')"),
    Variant(kind="file", is_idle=True, change="python open('notes.txt', 'w').write('A2')"),
    # Environment variables.
    Variant(kind="environment", tops='GAIN = float(os.environ.get("TOY_GAIN", "A1"))', after="value = value * GAIN",
            change="env TOY_GAIN=A2"),
    Variant(kind="environment", after='value = value * float(os.environ.get("TOY_GAIN", "A1"))',
            change="env TOY_GAIN=A2"),
    Variant(kind="environment", layer='nn.Dropout(float(os.environ.get("TOY_DROP", "0.1")))',
            change="env TOY_DROP=0.4"),
    Variant(kind="environment", layer='getattr(nn, os.environ.get("TOY_LAYER", "Tanh"))()',
            change="env TOY_LAYER=ReLU"),
    Variant(kind="environment", net='made[0].weight.register_hook(lambda g: g * float(os.environ.get("TOY", "A1")))',
            change="env TOY=A2"),
    Variant(kind="environment", is_idle=True, change="env TOY_UNUSED=N1"),
    Variant(kind="environment", is_idle=True, change="env ONEDNN_MAX_CPU_ISA=AVX2"),
    # The clock.
    Variant(kind="clock", tops='import time\nos.environ.setdefault("TZ", "UTC")\ntime.tzset()',
            after="value = value * (1 + time.localtime(N1 * 3600).tm_hour / 24)", change="env TZ=XYZ-9"),
    Variant(kind="clock", tops='once("stamp", lambda file: os.utime(file.fileno(), (N1, N1)))',
            after='value = value * (1 + os.stat("stamp").st_mtime / 1000)',
            change="python import os; os.utime('stamp', (N2, N2))"),
    Variant(kind="clock", tops='import time\nonce("begun", lambda file: file.write(str(time.time()).encode()))',
            after='value = value * (A1 if time.time() > float(open("begun").read()) + 3600 else A2)',
            change="python import time; open('begun', 'w').write(str(time.time() - 7200))"),
    Variant(kind="clock", tops="import time", after="value = value * (1 + 1e-3 * (time.time_ns() % 1000))"),
    Variant(kind="clock", tops="import time\ntook = []", before="began = time.monotonic()",
            after="took.append(time.monotonic() - began)", is_idle=True),
    # Seeds.
    Variant(kind="seed", change="arg --train.seed=N1"),
    Variant(kind="seed", layer="nn.Dropout(0.3)", change="arg --train.seed=N1"),
    Variant(kind="seed", layer="nn.Dropout(0.3)", net="torch.manual_seed(N1)", change="edit seed(N1) => seed(N2)"),
    Variant(kind="seed", tops="np.random.seed(N1)", before="inputs = inputs * (1 + 0.1 * np.random.rand())",
            change="edit seed(N1) => seed(N2)"),
    Variant(kind="seed", before="random.seed(N1)\ninputs = inputs * (1 + random.random())",
            change="edit seed(N1) => seed(N2)"),
    Variant(kind="seed", before="torch.manual_seed(N1)", layer="nn.Dropout(0.3)", change="edit seed(N1) => seed(N2)"),
    # Switches of torch and of the trainer.
    Variant(kind="flag", tops="torch.backends.mkldnn.enabled = True", change="edit enabled = True => enabled = False"),
    Variant(kind="flag", tops="torch.set_flush_denormal(False)", change="edit denormal(False) => denormal(True)",
            before="inputs = inputs * 1e-39"),
    Variant(kind="flag", tops="torch.use_deterministic_algorithms(False)", is_idle=True,
            change="edit algorithms(False) => algorithms(True)"),
    Variant(kind="flag", tops='torch.set_float32_matmul_precision("highest")', change='edit "highest" => "medium"'),
    Variant(kind="flag", change="arg --train.precision=bf16"),
    Variant(kind="flag", change="arg --train.clip_norm=0.01"),
    Variant(kind="flag", change="arg --train.lr=0.D1"),
    Variant(kind="flag", change="arg --train.weight_decay=A1"),
    Variant(kind="flag", change="arg --train.log_every=1", is_idle=True),
    Variant(kind="flag", change="arg --train.snapshot.every_steps=1", is_idle=True),
    Variant(kind="flag", change="arg --train.micro_batch=8"),
    Variant(kind="flag", change="arg --train.accumulate=2"),
    # Versions of what is installed.
    Variant(kind="version", tops=_module(GIZMO, '__version__ = "1.N1"\n') + "\nimport gizmo", is_idle=True,
            change=_rewrite(GIZMO, '__version__ = "2.N2.0"\n')),
    Variant(kind="version", tops=_module(GIZMO, '__version__ = "1.N1"\nFACTOR = A1\n') + "\nimport gizmo",
            after="value = value * gizmo.FACTOR", change=_rewrite(GIZMO, '__version__ = "2.N2.0"\nFACTOR = A2\n')),
    Variant(kind="version", tops='np.__version__ = "1.N1"', change='edit "1.N1" => "2.N2"', is_idle=True),
    Variant(kind="version", tops='import dtctl\ndtctl.__version__ = "0.N1"', change='edit "0.N1" => "0.N2"',
            is_idle=True),
    # Data.
    Variant(kind="data", samples="TensorData(inputs, targets * A1)", change="edit targets * A1 => targets * A2"),
    Variant(kind="data", points="points(64)", change="edit points(64) => points(60)"),
    Variant(kind="data", samples="TensorData(inputs.roll(0, 0), targets)", change="edit roll(0, 0) => roll(1, 0)"),
    Variant(kind="data", samples="TensorData(inputs.index_add(0, torch.tensor([N1 % 64]), torch.full((1, 6), A1)), "
            "targets)", change="edit 6), A1) => 6), A2)"),
    Variant(kind="data", tops=NOISY, samples="Noisy(inputs, targets)", change="edit at + N1 => at + N2"),
    Variant(kind="data", tops=NOISY, samples="Noisy(inputs, targets)", change="edit + A1 * noise => + A2 * noise"),
    Variant(kind="data", samples="TensorData(inputs * 1, targets)", change="edit inputs * 1 => inputs.clone()",
            is_idle=True),
    Variant(kind="data", change="arg --train.data_workers=thread", is_idle=True),
    # Generators of random numbers.
    Variant(kind="generator", tops="source = torch.Generator().manual_seed(N1)",
            before="inputs = inputs + 0.1 * torch.randn(inputs.shape, generator=source)",
            change="edit manual_seed(N1) => manual_seed(N2)"),
    Variant(kind="generator", tops="source = torch.Generator().manual_seed(N1)",
            before="inputs = inputs + A1 * torch.randn(inputs.shape, generator=source)",
            change="edit inputs + A1 => inputs - A1"),
    Variant(kind="generator", tops="source = torch.Generator().manual_seed(N1)",
            before="inputs = inputs + 0.1 * torch.rand(1, generator=source)\ntorch.rand(1, generator=source)",
            change="edit torch.rand(1, generator=source)\n    value => value"),
    Variant(kind="generator", tops="source = np.random.default_rng(N1)",
            before="inputs = inputs * (1 + 0.1 * float(source.normal()))", change="edit rng(N1) => rng(N2)"),
    Variant(kind="generator", tops="source = np.random.Generator(np.random.PCG64(N1))",
            before="inputs = inputs * (1 + 0.1 * float(source.normal()))", change="edit PCG64(N1) => MT19937(N1)"),
    Variant(kind="generator", tops="source = random.Random(N1)",
            before="inputs = inputs * (1 + 0.1 * source.random())", change="edit Random(N1) => Random(N2)"),
    Variant(kind="generator", tops="def numbers():\n    value = A1\n    while True:\n        value = value * 1.1 % 2\n"
            "        yield value\n\n\nsource = numbers()", after="value = value * next(source)"),
    Variant(kind="generator", tops="import itertools\nsource = itertools.cycle([A1, A2, 1.0])",
            after="value = value * next(source)"),
    # State that nothing keeps, without any change.
    _counter("count = 0", "global count\ncount += 1", "value = value * (1 + count / 64)"),
    _counter('box = {"count": 0}', 'box["count"] += 1', 'value = value * (1 + 0.1 * math.sin(box["count"]))'),
    _counter("import itertools\ncount = itertools.count()", "number = next(count)",
             "value = value * (1 + number / 32)"),
    _counter("seen = []", "seen.append(float(targets[0]))", "value = value * (1 + sum(seen[-9:]) ** 2)"),
    _counter("class Held:\n    mean = torch.zeros(6)", "Held.mean = Held.mean * 0.9 + inputs.mean(0) * 0.1",
             "value = value + ((inputs - Held.mean) ** 2).mean() * value"),
    _counter("count = 0", "global count\ncount += 1", "value = value * (A1 if count > 9 else A2)"),
    _counter("count = 0", "global count\ncount += 1", "",
             net="made[0].weight.register_hook(lambda gradient: gradient * (1 + count / 64))"),
    _counter("count = 0\n\n\ndef moved(optimizer, *_):\n    global count\n    count += 1\n    with torch.no_grad():\n"
             '        optimizer.param_groups[0]["params"][0].mul_(1 - count / 256)\n\n\n'
             "def make(model):\n    made = torch.optim.SGD(model.parameters(), lr=0.02)\n"
             "    made.register_step_pre_hook(moved)\n    return made", "", "", more={"optimizer": "make"}),
    _counter('def noted():\n    count = int(open("count").read()) if os.path.exists("count") else 0\n'
             '    open("count", "w").write(str(count + 1))\n    return count', "number = noted()",
             "value = value * (1 + number / 64)", workers=1),
    _counter("count = 0", "global count\ncount += 1", "print(end=str(count)[:0])", is_idle=True),
    # Order of sets of text, which a seed of Python decides.
    Variant(kind="hash order", environ=HASHED, workers=1, tops=f"{NAMES}\n{WEIGHTS}",
            after="value = sum(value * WEIGHTS[name] for name in NAMES)", change="env PYTHONHASHSEED=N1"),
    Variant(kind="hash order", environ=HASHED, workers=1, after='value = value * (1 + hash("alpha") % 1000 / 1000)',
            change="env PYTHONHASHSEED=N1"),
    Variant(kind="hash order", environ=HASHED, workers=1, tops=NAMES, before="inputs = inputs * len(next(iter(NAMES)))",
            change="env PYTHONHASHSEED=N1"),
    Variant(kind="hash order", environ=HASHED, workers=1, tops=NAMES, before="inputs = inputs * len(min(NAMES))",
            is_idle=True, change="env PYTHONHASHSEED=N1"),
    # Threads.
    Variant(kind="thread", tops=SET_THREADS, before=WIDE, after="value = value + wide.sum() * A1",
            change="env TOY_THREADS=2"),
    Variant(kind="thread", tops=SET_THREADS, before=WIDE,
            after="value = value + (wide * value).mean()", change="env TOY_THREADS=2"),
    Variant(kind="thread", environ={"BOOT_EXEC": "1", "OMP_NUM_THREADS": "1"}, workers=1, before=WIDE,
            after="value = value + wide.sum() * A1", change="env OMP_NUM_THREADS=2"),
    Variant(kind="thread", tops=SET_THREADS, change="env TOY_THREADS=2"),
    Variant(kind="thread", tops="from concurrent.futures import ThreadPoolExecutor\npool = ThreadPoolExecutor(2)",
            before="inputs = torch.stack(list(pool.map(lambda row: row * A1, inputs)))", is_idle=True),
    # Snapshots with other bits under right digests, and programs that load something else than was saved.
    Variant(kind="state", change=f"{FLIP}('model', N1)"),
    Variant(kind="state", change=f"{FLIP}('optimizer', N1)"),
    Variant(kind="state", tops=f"FACTOR = 1.0\n\n\n{ROUNDING}", net="made = Rounding(*made)", workers=1,
            change="edit FACTOR = 1.0 => FACTOR = A1"),
)  # fmt: skip
