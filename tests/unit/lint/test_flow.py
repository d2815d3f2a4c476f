"""Facts that flow through a program: ranks, wrapped models, collectives and writes, over functions and files."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from snippets import PRELUDE, found, problems

from dtctl.lint.engine import lint_paths
from dtctl.lint.model import ClusterFacts

START = 'dist.init_process_group("nccl")\n'


def said(tmp_path: Path, **files: str) -> set[tuple[str, str]]:
    """(file, rule) of all findings in a project; `tools_of_ranks` is ranks.py in the package tools."""
    for name, text in files.items():
        path = tmp_path / (name.replace("_of_", "/") + ".py")
        path.parent.mkdir(exist_ok=True)
        path.write_text(PRELUDE + text)
    problems = lint_paths([tmp_path], cluster=ClusterFacts())
    return {(Path(problem.path).stem, problem.rule) for problem in problems}


RANKS = {
    "returned": "def which():\n    return dist.get_rank()\nif which() == 0:\n    dist.barrier()\n",
    "returned where nothing is distributed, too": (
        "def which():\n    if not dist.is_initialized():\n        return 0\n    return dist.get_rank()\n"
        "if which() == 0:\n    dist.barrier()\n"
    ),
    "one of two results": (
        "def place():\n    return dist.get_rank(), dist.get_world_size()\nme, n = place()\n"
        "if me == 0:\n    dist.barrier()\n"
    ),
    "an argument": "def log(me):\n    if me == 0:\n        dist.barrier()\nlog(dist.get_rank())\n",
    "an argument by name": (
        "def log(*, me):\n    if me == 0:\n        dist.barrier()\nlog(me=int(os.environ['RANK']))\n"
    ),
    "a question": "def first():\n    return dist.get_rank() == 0\nif first():\n    dist.barrier()\n",
    "a question, negated": "def others():\n    return not dist.get_rank() == 0\nif others():\n    dist.barrier()\n",
    "an attribute": (
        "class Place:\n    def __init__(self):\n        self.me = dist.get_rank()\nplace = Place()\n"
        "if place.me == 0:\n    dist.barrier()\n"
    ),
    "a property": (
        "class Place:\n    @property\n    def first(self):\n        return dist.get_rank() == 0\nplace = Place()\n"
        "if place.first:\n    dist.barrier()\n"
    ),
    "inherited": (
        "class Base:\n    def __init__(self):\n        self.me = dist.get_rank()\nclass Trainer(Base):\n"
        "    def run(self):\n        if self.me == 0:\n            dist.barrier()\n"
    ),
    "settings": (
        "def setup(args):\n    args.me = dist.get_rank()\ndef main(args):\n    if args.me == 0:\n"
        "        dist.barrier()\n"
    ),
    "a process that spawn starts": "def main(me):\n    if me == 0:\n        dist.barrier()\nmp.spawn(main, nprocs=2)\n",
}
NO_RANKS = {
    "a number of something else": (
        "def log(rank):\n    if rank == 4:\n        dist.barrier()\nlog(rank=4)\nlog(rank=8)\n"
    ),
    "the rank in a group": (
        "def which(group):\n    return dist.get_rank(group)\nif which(g) == 0:\n    dist.barrier()\n"
    ),
    "a constant question": "def first():\n    return True\nif first():\n    dist.barrier()\n",
    "the number of ranks": "def size():\n    return dist.get_world_size()\nif size() == 2:\n    dist.barrier()\n",
    "the other of two results": (
        "def place():\n    return dist.get_rank(), dist.get_world_size()\nme, n = place()\n"
        "if n == 2:\n    dist.barrier()\n"
    ),
    "a flag of the settings": "if cfg.mode.gpu:\n    dist.barrier()\n",
    "a flag that callers set": (
        "def load(rank0=False):\n    if rank0:\n        dist.barrier()\nload(rank0=True)\nload()\n"
    ),
    "a function that its caller keeps from it": (
        "def now(share):\n    if not share:\n        return 0\n    dist.broadcast(x, 0)\n"
        "if dist.get_rank() == 0:\n    now(False)\n"
    ),
    "where nothing is distributed": (
        "if not dist.is_initialized():\n    if dist.get_rank() == 0:\n        dist.barrier()\n"
    ),
}


@pytest.mark.parametrize("code", RANKS.values(), ids=RANKS)
def test_the_rank_is_known_wherever_it_comes_from(code: str) -> None:
    assert "DT011" in found(START + code)


@pytest.mark.parametrize("code", NO_RANKS.values(), ids=NO_RANKS)
def test_what_is_no_rank_is_not_taken_for_one(code: str) -> None:
    assert "DT011" not in found(START + code)


def test_facts_go_over_files_of_a_package(tmp_path: Path) -> None:
    helpers = "def first():\n    return dist.get_rank() == 0\ndef mean(x):\n    dist.all_reduce(x)\n    return x\n"
    main = "from tools.ranks import first\nfrom tools import ranks\n" + START
    got = said(
        tmp_path,
        tools_of___init__="",
        tools_of_ranks=helpers,
        wrong=main + "if first():\n    ranks.mean(x)\n",
        right=main + "y = ranks.mean(x)\nif first():\n    print(y)\n",
    )
    assert ("wrong", "DT011") in got
    assert ("right", "DT011") not in got


def test_a_function_that_all_callers_guard_is_guarded(tmp_path: Path) -> None:
    saving = "def keep(state):\n    torch.save(state, 'last.pt')\n"
    head = "from saving import keep\n" + START
    got = said(tmp_path, saving=saving, right=head + "if dist.get_rank() == 0:\n    keep(1)\n")
    assert not {one for one in got if one[1] == "DT014"}
    got = said(tmp_path, saving=saving, wrong=head + "keep(1)\n")
    assert {one for one in got if one[1] == "DT014"}


def test_a_model_that_a_helper_wraps_is_wrapped(tmp_path: Path) -> None:
    build = "def build(net):\n    net = FSDP(net)\n    return net, 3\n"
    main = "from build import build\nmodel, n = build(net)\n"
    got = said(
        tmp_path,
        build=build,
        wrong=main + "if dist.get_rank() == 0:\n    torch.save(model.state_dict(), 'a.pt')\n",
        right=main + "state = model.state_dict()\nif dist.get_rank() == 0:\n    torch.save(state, 'a.pt')\n",
    )
    assert ("wrong", "DT012") in got
    assert ("right", "DT012") not in got


FORWARD = {
    "itself": "model = FSDP(net)\nif dist.get_rank() == 0:\n    y = model(x)\n",
    "in a function that gets it": (
        "def evaluate(m):\n    return m(x)\nmodel = DDP(net)\nif dist.get_rank() == 0:\n    evaluate(model)\n"
    ),
    "in one that knows it": (
        "model = DDP(net)\ndef evaluate():\n    return model(x)\nif dist.get_rank() == 0:\n    evaluate()\n"
    ),
}
NO_FORWARD = {
    "the bare model": (
        "def evaluate(m):\n    return m(x)\nmodel = DDP(net)\nif dist.get_rank() == 0:\n    evaluate(model.module)\n"
    ),
    "all ranks": (
        "def evaluate(m):\n    return m(x)\nmodel = DDP(net)\ny = evaluate(model)\n"
        "if dist.get_rank() == 0:\n    print(y)\n"
    ),
    "another model": "model = DDP(net)\nif dist.get_rank() == 0:\n    y = teacher(x)\n",
}


@pytest.mark.parametrize("code", FORWARD.values(), ids=FORWARD)
def test_a_forward_pass_of_a_wrapped_model_is_a_collective(code: str) -> None:
    assert "DT011" in found(code)


@pytest.mark.parametrize("code", NO_FORWARD.values(), ids=NO_FORWARD)
def test_a_forward_pass_of_another_model_is_none(code: str) -> None:
    assert "DT011" not in found(code)


WRITES = {
    "open": "with open('log.txt', 'w') as f:\n    f.write('a')\n",
    "append": "f = open(os.path.join('out', 'log.csv'), mode='a')\n",
    "json": "import json\nwith open('a.json', 'w') as f:\n    json.dump({}, f)\n",
    "yaml": "import yaml\nyaml.dump({}, open('a.yaml', 'w'))\n",
    "pickle": "import pickle\nwith open('a.pkl', 'wb') as f:\n    pickle.dump({}, f)\n",
    "numpy": "import numpy as np\nnp.save('a.npy', x)\n",
    "pathlib": "from pathlib import Path\nPath('a.txt').write_text('a')\n",
    "pandas": "frame.to_csv('a.csv')\n",
    "transformers": "model.save_pretrained('out')\n",
    "an image": "import torchvision\ntorchvision.utils.save_image(x, 'a.png')\n",
    "a plot": "import matplotlib.pyplot as plt\nplt.savefig('a.png')\n",
    "a default": "def keep(state, path='last.pt'):\n    torch.save(state, path)\nkeep(1)\n",
    "settings": "def keep(args, state):\n    torch.save(state, os.path.join(args.out, 'a.pt'))\nkeep(args, 1)\n",
}
NO_WRITES = {
    "read": "with open('log.txt') as f:\n    f.read()\n",
    "read, by name": "f = open('a', mode='rb')\n",
    "each its own": "with open(f'log-{dist.get_rank()}.txt', 'w') as f:\n    f.write('a')\n",
    "rank 0": "if dist.get_rank() == 0:\n    with open('log.txt', 'w') as f:\n        f.write('a')\n",
    "rank 0 calls": (
        "def keep(state, path='last.pt'):\n    torch.save(state, path)\nif dist.get_rank() == 0:\n    keep(1)\n"
    ),
    "a path that callers choose": "def keep(state, path):\n    torch.save(state, path)\n",
    "paths of each rank": "def keep(state, path):\n    torch.save(state, path)\nkeep(1, f'{dist.get_rank()}.pt')\n",
    "one process": "if not dist.is_initialized():\n    torch.save(1, 'a.pt')\n",
    "the rank is added": "name = 'a.txt'\nname += f'-{dist.get_rank()}'\nf = open(name, 'w')\n",
}


@pytest.mark.parametrize("code", WRITES.values(), ids=WRITES)
def test_every_way_of_writing_a_file_counts(code: str) -> None:
    assert "DT014" in found(START + code)


@pytest.mark.parametrize("code", NO_WRITES.values(), ids=NO_WRITES)
def test_what_is_not_written_by_all_is_not_reported(code: str) -> None:
    assert "DT014" not in found(START + code)


LEFT = {
    "patience": (
        "model = DDP(net)\nfor epoch in range(9):\n    for x in loader:\n        model(x).backward()\n"
        "    if patience_left == 0:\n        break\n"
    ),
    "memory, in a function": (
        "model = DDP(net)\ndef attempt(x):\n    try:\n        model(x).backward()\n"
        "    except torch.cuda.OutOfMemoryError:\n"
        "        return None\n"
    ),
    "the training is in a function": (
        "model = DDP(net)\ndef train_epoch():\n    for x in loader:\n        model(x).backward()\n"
        "for epoch in range(9):\n    train_epoch()\n    if rank == 0 and stop():\n        break\n"
    ),
}
STAYED = {
    "patience, agreed on": (
        "model = DDP(net)\nfor epoch in range(9):\n    for x in loader:\n        model(x).backward()\n"
        "    dist.broadcast(patience_left, 0)\n    if patience_left == 0:\n        break\n"
    ),
    "memory, raised again": (
        "model = DDP(net)\ndef attempt(x):\n    try:\n        model(x).backward()\n"
        "    except torch.cuda.OutOfMemoryError:\n"
        "        raise\n"
    ),
    "one process": (
        "for epoch in range(9):\n    for x in loader:\n        net(x).backward()\n"
        "    if patience_left == 0:\n        break\n"
    ),
}


@pytest.mark.parametrize("code", LEFT.values(), ids=LEFT)
def test_a_loop_that_each_rank_leaves_by_itself_is_found(code: str) -> None:
    assert "DT013" in found(code)


@pytest.mark.parametrize("code", STAYED.values(), ids=STAYED)
def test_a_loop_that_all_leave_together_is_not(code: str) -> None:
    assert "DT013" not in found(code)


def test_one_cause_on_one_line_is_one_finding_and_an_obsolete_name_is_said_once() -> None:
    from snippets import problems

    code = "import torch.utils.checkpoint\nfrom apex import amp\n" + "amp.initialize(net)\n" * 3
    names = [problem for problem in problems(code) if problem.rule == "DT025"]
    assert len(names) == 1
    assert names[0].severity == "info"
    code = START + "if dist.get_rank() == 0:\n    dist.all_reduce(x); dist.barrier()\n"
    assert [problem.rule for problem in problems(code) if problem.severity == "error"] == ["DT011"]


TRAINING = START + "model = DDP(Net().cuda(), device_ids=[local_rank])\nrank = dist.get_rank()\n"


@pytest.mark.parametrize(
    ("code", "severity"),
    [
        ("loss = F.mse_loss(model(x), y)\nif rank == 0:\n    loss.backward()\n", "error"),
        ("out = model(x)\nloss = out.sum()\nif rank == 0:\n    (loss / 2).backward()\n", "error"),
        ("out = model(x)\nout.sum().backward()\nif rank == 0:\n    print(out)\n", None),
        ("head = Net()\nif rank == 0:\n    head(x).sum().backward()\n", None),  # its own model, of one rank
        ("loss = model(x).sum()\nif rank == 0:\n    loss.backward()\nelse:\n    loss.backward()\n", None),
    ],
)
def test_a_backward_pass_of_some_ranks(code: str, severity: str | None) -> None:
    said = [one.severity for one in problems(TRAINING + code) if "backward pass" in one.message]
    assert said == ([severity] if severity else [])


LOOP = (
    TRAINING
    + "for step, batch in enumerate(loader):\n    x, y = batch\n"
    + "    if {test}:\n        continue\n    model(x).sum().backward()\n"
)


@pytest.mark.parametrize("test", ["len(x) == 0", "y.max() < 1", "batch is None", "x.shape[1] > 512"])
def test_a_rank_that_skips_its_own_batch(test: str) -> None:
    assert "DT013" in found(LOOP.format(test=test))


@pytest.mark.parametrize("test", ["step < start", "len(x) < batch_size", "not torch.distributed.is_initialized()"])
def test_what_all_ranks_skip_alike(test: str) -> None:
    assert "DT013" not in found(LOOP.format(test=test))


def test_a_loop_over_other_things_skips_what_it_likes() -> None:
    code = "for name in names:\n    if name in ignored:\n        continue\n    model(inputs[name]).sum().backward()\n"
    assert "DT013" not in found(TRAINING + code)


def test_a_collective_that_its_caller_wants_is_not_always_called() -> None:
    helper = "def log(loss, reduce=True):\n    if reduce:\n        dist.all_reduce(loss)\n    print(loss)\n"
    assert "DT011" not in found(TRAINING + helper + "if rank == 0:\n    log(loss, reduce=False)\n")


def test_figures_of_one_rank_that_a_helper_prints() -> None:
    helper = "def print_once(text):\n    if dist.get_rank() == 0:\n        print(text)\n"
    code = (
        "def evaluate():\n    loss = 0\n    for x, y in loader:\n        loss += model(x).sum().item()\n"
        "    torch.cuda.synchronize()\n    loss /= len(loader)\n    print_once(f'{loss}')\n"
    )
    assert "DT018" in found(TRAINING + "model(x).sum().backward()\n" + helper + code)


def test_the_state_of_a_wrapper_that_is_saved_by_another_name() -> None:
    code = (
        "model(x).sum().backward()\nif rank == 0:\n    state = model.state_dict()\n    torch.save(state, 'model.pth')\n"
    )
    assert "DT022" in found(TRAINING + code)


def test_a_policy_without_its_setting() -> None:
    code = "from torch.distributed.fsdp.wrap import {0}\nmodel = FSDP(Net(), auto_wrap_policy={0})\n"
    assert "DT048" in found(code.format("transformer_auto_wrap_policy"))
    assert "DT048" not in found(code.format("size_based_auto_wrap_policy"))  # its setting has a default


def test_a_loop_that_another_file_runs_under_ddp_accumulates(tmp_path: Path) -> None:
    loop = (
        "def train(args, model, loader, optimizer):\n    for i, batch in enumerate(loader):\n"
        "        model(batch).backward()\n        if (i + 1) % args.accumulate == 0:\n            optimizer.step()\n"
    )
    program = "from loop import train\n" + START + "train(args, DDP(net), loader, optimizer)\n"
    assert ("loop", "DT009") in said(tmp_path, loop=loop, program=program)


def test_a_loop_that_one_process_runs_does_not_accumulate_too_often(tmp_path: Path) -> None:
    loop = (
        "def train(args, model, loader, optimizer):\n    for i, batch in enumerate(loader):\n"
        "        model(batch).backward()\n        if (i + 1) % args.accumulate == 0:\n            optimizer.step()\n"
    )
    assert not said(tmp_path, loop=loop, program="from loop import train\ntrain(args, net, loader, optimizer)\n")


def test_a_batch_that_another_file_skips_leaves_the_other_ranks_waiting(tmp_path: Path) -> None:
    loop = (
        "def train(model, loader):\n    for images, targets in loader:\n        if any(len(t) < 1 for t in targets):\n"
        "            continue\n        model(images, targets).backward()\n"
    )
    program = "from loop import train\n" + START + "train(DDP(net), loader)\n"
    assert ("loop", "DT013") in said(tmp_path, loop=loop, program=program)


def test_a_helper_of_another_file_that_asks_the_hub_is_reported_at_its_call(tmp_path: Path) -> None:
    build = "from transformers import AutoModel\ndef build_model(name):\n    return AutoModel.from_pretrained(name)\n"
    (tmp_path / "build.py").write_text(build)
    call = "model = build_model('gpt2')\n"
    begin = "from build import build_model\n" + START
    assert ("all", "DT040") in said(tmp_path, all=begin + call)
    (tmp_path / "all.py").unlink()
    assert ("first", "DT040") not in said(tmp_path, first=f"{begin}with main_process_first():\n    {call}")
