"""What --fix writes into Python: the same program but for the fault, or nothing."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from dtctl.lint.fixes import fixed_text

sys.path.insert(0, str(Path(__file__).parent))
from snippets import PRELUDE, found, problems


def mended(code: str) -> str:
    """A piece of code as --fix leaves it."""
    text, _ = fixed_text(PRELUDE + code, problems(code))
    ast.parse(text)
    return text.removeprefix(PRELUDE)


def accumulating(*lines: str, test: str = "(i + 1) % 4 == 0", before: str = "", loop: str = "") -> str:
    """A loop that steps every few micro batches; `lines` stand between the backward pass and the step."""
    between = "".join(f"    {line}\n" for line in lines)
    head = loop or "for i, x in enumerate(loader):"
    return (
        f"model = DDP(net.to(device))\n{before}{head}\n    loss = model(x) / 4\n    loss.backward()\n{between}"
        f"    if {test}:\n        optimizer.step()\n        optimizer.zero_grad()\n"
    )


@pytest.mark.parametrize(
    "code",
    [
        accumulating("step += 1", test="step % 4 == 0", before="step = 0\n"),
        accumulating("step = step + 1", test="step % 4 == 0", before="step = 0\n"),
        accumulating("self.step += 1", test="self.step % 4 == 0"),
        accumulating("self.count()", test="self.step % 4 == 0"),
        accumulating("count(state)", test="state.step % 4 == 0"),
        accumulating("last = i == len(loader) - 1", test="(i + 1) % 4 == 0 or last"),
        accumulating("if odd: i += 1"),
        accumulating("for i in range(3): pass"),
        accumulating("(i := 3)"),
        accumulating(test="next(it) % 4 == 0"),
        accumulating(test="i % 4 == 3 or loss.item() > 3"),
        accumulating(
            "count()", test="step % 4 == 0", before="step = 0\ndef count():\n    global step\n    step += 1\n"
        ),
        accumulating(before="contextlib = 3\n"),
        "model = DDP(net.to(device))\nfor i, x in enumerate(loader):\n    y = x; loss = model(y) / 4\n"
        "    loss.backward()\n    if i % 4 == 3:\n        optimizer.step()\n",
        "model = DDP(net.to(device))\nfor i, x in enumerate(loader):\n    loss = model(x) / 4\n"
        "    loss.backward(); i += 1\n    if i % 4 == 3:\n        optimizer.step()\n",
        "model = net.to(device)\nif distributed:\n    model = DDP(model)\n" + accumulating().partition("\n")[2],
    ],
)
def test_no_sync_is_left_to_people_where_the_condition_may_be_another_one_there(code: str) -> None:
    assert "DT009" in found(code)
    assert mended(code) == code


def test_no_sync_is_put_around_where_the_condition_holds_already() -> None:
    head = "    with contextlib.nullcontext() if {} else model.no_sync():\n        loss = model(x) / 4\n"
    for test in ("(i + 1) % 4 == 0", "(i + 1) % 4 == 0 or i + 1 == len(loader)", "i % args.accumulate == 0"):
        text = mended(accumulating("total += loss.detach()", "log(i)", test=test))
        assert head.format(test) in text
        assert "        loss.backward()\n    total += loss.detach()" in text


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("autocast(use_amp)", 'autocast("cuda", enabled=use_amp)'),
        ("autocast(True, torch.bfloat16)", 'autocast("cuda", enabled=True, dtype=torch.bfloat16)'),
        ("autocast(True, dtype=d)", 'autocast("cuda", enabled=True, dtype=d)'),
        ("autocast(enabled=False)", 'autocast("cuda", enabled=False)'),
        ("autocast()", 'autocast("cuda")'),
    ],
)
def test_the_first_argument_of_autocast_gets_its_name(before: str, after: str) -> None:
    assert mended(f"with torch.cuda.amp.{before}:\n    f()\n") == f"with torch.amp.{after}:\n    f()\n"
    imported = "from torch.cuda.amp import autocast\n"
    assert mended(f"{imported}with {before}:\n    f()\n") == f"from torch.amp import autocast\nwith {after}:\n    f()\n"


@pytest.mark.parametrize("use", ["with autocast(*args): pass", "context = autocast", "def f(a=autocast): pass"])
def test_an_import_stays_where_one_use_of_the_name_cannot_be_changed(use: str) -> None:
    code = f"from torch.cuda.amp import autocast, GradScaler\ns = GradScaler()\nwith autocast(): pass\n{use}\n"
    assert "DT025" in found(code)
    assert mended(code) == code


def test_the_scale_stays_the_second_argument_of_a_grad_scaler() -> None:
    assert mended("s = torch.cuda.amp.GradScaler(2.0**16)\n") == 's = torch.amp.GradScaler("cuda", 2.0**16)\n'


@pytest.mark.parametrize(
    ("made", "loop", "added"),
    [
        ("DistributedSampler(ds)", "for epoch in range(9):", "    s.set_epoch(epoch)\n"),
        ("DistributedSampler(ds)", "for epoch, lr in enumerate(rates):", "    s.set_epoch(epoch)\n"),
        ("DistributedSampler(ds)", "for epoch in tqdm(range(9)):", "    s.set_epoch(epoch)\n"),
        (
            "DistributedSampler(ds) if ddp else None", "for epoch in range(9):",
            "    if s is not None:\n        s.set_epoch(epoch)\n",
        ),
        ("DistributedSampler(ds)", 'for epoch in ("warm", "main"):', ""),
        ("DistributedSampler(ds) if ddp else other", "for epoch in range(9):", ""),
        ("DistributedSampler(ds)\nif one:\n    s = None", "for epoch in range(9):", ""),
        ("wrap(DistributedSampler(ds))", "for epoch in range(9):", ""),
    ],
)  # fmt: skip
def test_set_epoch_is_called_where_the_sampler_is_there_and_the_epoch_is_a_number(
    made: str, loop: str, added: str
) -> None:
    code = f"s = {made}\n{loop}\n"
    assert "DT004" in found(code + "    run(s)\n")
    assert mended(code + "    run(s)\n") == code + added + "    run(s)\n"


def test_tabs_stay_tabs() -> None:
    code = "s = DistributedSampler(ds)\nfor epoch in range(9):\n"
    assert mended(f"{code}\trun(s)\n") == f"{code}\ts.set_epoch(epoch)\n\trun(s)\n"


def test_an_import_is_not_put_before_what_has_to_be_first() -> None:
    code = "from __future__ import annotations\nfrom torch.nn.parallel import DistributedDataParallel as DDP\n"
    code += accumulating()
    text, _ = fixed_text(code, problems(code, bare=True))
    compile(text, "a.py", "exec")
    assert text.splitlines()[1] == "import contextlib"


def test_a_function_that_runs_without_ranks_keeps_its_device() -> None:
    code = (
        'def one():\n    device = torch.device("cuda:0")\n    run(device)\n'
        'def many():\n    dist.init_process_group("nccl")\n    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))\n'
        "if args.mode == 'one':\n    one()\nelse:\n    many()\n"
    )
    assert "DT007" not in found(code)
    assert mended(code) == code
    code = code.replace("if args.mode == 'one':\n    one()\nelse:\n    many()\n", "one()\nmany()\n")
    assert "DT007" in found(code)
    assert mended(code) == code, "LOCAL_RANK is read in another function only"


def test_the_variable_is_read_only_where_the_file_relies_on_it_already() -> None:
    code = 'dist.init_process_group("nccl")\ntorch.cuda.set_device(0)\n'
    assert "DT007" in found(code)
    assert mended(code) == code
    code = 'print(os.environ["LOCAL_RANK"])\n' + code
    assert mended(code) == code.replace("(0)", '(int(os.environ["LOCAL_RANK"]))')
