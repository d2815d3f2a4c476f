"""Figures in what programs print, in the forms of well-known trainers."""

from __future__ import annotations

import math
import re
import time
from pathlib import Path

import pytest

from dtctl.launch.records.printed_figures import find_figures, list_figures, read_figures

LINES = [
    ("iter 120: loss 3.4217, time 123.45ms, mfu 12.30%", {"step": 120, "loss": 3.4217, "step_s": 0.12345}),  # nanoGPT
    ("step 250: train loss 3.1001, val loss 3.2002", {"step": 250, "loss": 3.1001}),
    ("{'loss': 2.5518, 'grad_norm': 1.2, 'learning_rate': 4.9e-05, 'epoch': 0.13}", {"loss": 2.5518}),  # Hugging Face
    (" 12%|#2        | 120/1000 [00:10<01:13, 12.00it/s]", {"step": 120, "steps": 1000, "step_s": 1 / 12}),
    ("Epoch 1:  12%|#  | 120/1000 [00:10<01:13, 2.00s/it, v_num=0, train_loss=0.693]",
     {"step": 120, "steps": 1000, "step_s": 2.0, "loss": 0.693}),  # Lightning
    ("[titan] 2026-01-01 - INFO - step: 10  loss: 10.2571  grad_norm:  0.5  memory: 4.1GiB  tps: 12,345  mfu: 30.1%",
     {"step": 10, "loss": 10.2571, "tokens_per_s": 12345}),
    (" iteration      100/    1000 | samples:  25600 | elapsed time per iteration (ms): 312.4 | lm loss: 3.2E+00 |",
     {"step": 100, "steps": 1000, "loss": 3.2, "step_s": 0.3124}),  # Megatron-LM
    ("Train: 0 [  50/1251 (  4%)]  Loss: 6.95 (6.97)  Time: 0.312s", {"step": 50, "steps": 1251, "loss": 6.95}),  # timm
    ("eta: 0:01:02  iter: 19  total_loss: 1.203  loss_cls: 0.9  time: 0.31", {"step": 19, "loss": 1.203}),  # detectron2
    ("Epoch(train) [1][ 50/1000]  lr: 1e-02  eta: 0:10  time: 0.31  loss: 1.2345",
     {"step": 50, "steps": 1000, "loss": 1.2345}),
    ("Train Epoch: 1 [640/60000 (1%)]\tLoss: 2.302585", {"step": 640, "steps": 60000, "loss": 2.302585}),
    ("step=20, loss=tensor(0.5000, device='cuda:0')", {"step": 20, "loss": 0.5}),
    ("| epoch   1 |   200/ 2983 batches | lr 20.00 | ms/batch  8.21 | loss  7.63 | ppl  2061.91",
     {"step": 200, "steps": 2983, "loss": 7.63}),
    ("step 7 loss nan", {"step": 7, "loss": math.nan}),
    ("{'loss': '4.5', 'grad_norm': '1.2', 'learning_rate': '1e-3', 'epoch': '0.1'}", {"loss": 4.5}),  # Hugging Face 5
    ('{"step": "20", "loss": "2.25"}', {"step": 20, "loss": 2.25}),
    ("\x1b[31mstep: 10  \x1b[32mloss: 10.2571  \x1b[38;2;1;2;3mmemory:  4.1GiB(5%)  \x1b[34mtps: 12,345  \x1b[39m",
     {"step": 10, "loss": 10.2571, "tokens_per_s": 12345}),  # torchtitan, which colors also what is no terminal
    ("step 00120/21400 (0.56%) | loss: 3.421 | lrm: 1.00 | dt: 123.45ms | tok/sec: 1,234,567 | mfu: 45.00",
     {"step": 120, "steps": 21400, "loss": 3.421, "tokens_per_s": 1234567}),  # nanochat
    ("Steps:  10%|#  | 100/1000 [00:10<01:30, 10.0it/s, lr=1e-5, step_loss=0.0123]",
     {"step": 100, "steps": 1000, "step_s": 0.1, "loss": 0.0123}),  # diffusers
    ("Epoch 0:  50%|#  | 500/1000 [00:10<00:10, 50.0it/s, v_num=3, train_loss_step=0.693, train_loss_epoch=0.75]",
     {"step": 500, "steps": 1000, "step_s": 0.02, "loss": 0.693}),  # Lightning, logged by step and by epoch
    ("Epoch 0/9  ----------- 120/1000 0:00:10 • 0:01:13 12.50it/s v_num: 3.000 train_loss: 0.693",
     {"step": 120, "steps": 1000, "step_s": 0.08, "loss": 0.693}),  # Lightning with rich
    ("120/1000 ━━━━━━━━━━━━━━ 10s 12ms/step - accuracy: 0.9 - loss: 0.3217 - val_loss: 0.4",
     {"step": 120, "steps": 1000, "step_s": 0.012, "loss": 0.3217}),  # Keras 3
    ("120/1000 [==>...........] - ETA: 10s - loss: 0.3217 - accuracy: 0.9",
     {"step": 120, "steps": 1000, "loss": 0.3217}),  # Keras 2
    ("01/07 12:00:00 - mmengine - INFO - Epoch(train)  [1][  50/1000]  lr: 1e-02  loss: 1.2345  loss_cls: 1",
     {"step": 50, "steps": 1000, "loss": 1.2345}),
    ("2026/01/07 12:00:00 - mmengine - INFO - Iter(train) [  50/1000]  lr: 1e-02  loss: 1.2345",
     {"step": 50, "steps": 1000, "loss": 1.2345}),
    ("[01/07 12:00:00 d2.utils.events]:  eta: 0:01:02  iter: 19  total_loss: 1.203  loss_cls: 0.9  time: 0.31",
     {"step": 19, "loss": 1.203}),  # detectron2
    ("Epoch: [0][  10/5005]\tTime  0.312 ( 0.5)\tLoss 6.95e+00 (6.97e+00)\tAcc@1   0.00",
     {"step": 10, "steps": 5005, "loss": 6.95}),  # the example of PyTorch
    ("1|10|Loss: 1.25:   1%|#  | 10/1000 [00:10<16:30, 1.00s/it]",
     {"step": 10, "steps": 1000, "step_s": 1.0, "loss": 1.25}),  # torchtune
    ("Epoch 1 | iter 10 step 2 | loss train: 3.421, val: n/a | iter time: 123.45 ms (step)",
     {"step": 10, "loss": 3.421, "step_s": 0.12345}),  # litgpt
    ("Training epoch 0, iteration 9/99 | lr: 1e-05 | global_step: 9 | reduced_train_loss: 10.1",
     {"step": 9, "steps": 99, "loss": 10.1}),  # NeMo
    ("epoch 001:    100 / 1000 loss=8.1, nll_loss=7.2, ppl=140, wps=12000, num_updates=100, lr=1e-4",
     {"step": 100, "loss": 8.1}),  # fairseq
    ("epoch 3:  40%|####  | 40/100 [00:04<00:06, 10.0it/s, loss=0.51, lr=1e-4]",
     {"step": 40, "steps": 100, "step_s": 0.1, "loss": 0.51}),
    ("2026-01-01,12:00:00 | INFO | Train Epoch: 0 [  4096/100000 (4%)] Batch (t): 0.5 Contrastive_loss: 5.5 (5.6)",
     {"step": 4096, "steps": 100000, "loss": 5.5}),  # OpenCLIP
]  # fmt: skip


@pytest.mark.parametrize(("line", "expected"), LINES)
def test_figures_are_read_in_the_forms_of_well_known_trainers(line: str, expected: dict[str, float]) -> None:
    assert find_figures(line) == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize(
    "line",
    [
        "val_loss: 2.1",
        "eval loss 3.0, best so far",
        "lossless compression 3",
        "the gradient was lost 3 times",
        "loss function: CrossEntropyLoss()",
        "Test: [  10/48]  Time: 0.1 (0.1)  Loss: 0.7 (0.8)  Acc@1: 80.0",  # timm
        "Evaluating: 100%|###| 10/10 [00:01<00:00, 9.9it/s, loss=2.1]",
        "01/07 12:00:00 - mmengine - INFO - Epoch(val) [1][10/10]  loss: 0.7",
        "{'eval_loss': '2.1', 'eval_runtime': '3.2', 'epoch': '1'}",
        "{'train_runtime': '12.3', 'train_samples_per_second': '80', 'train_loss': '2.3', 'epoch': '1'}",  # a mean
        "loss scale: 1024",
    ],
)
def test_other_words_are_no_loss(line: str) -> None:
    assert "loss" not in find_figures(line)


@pytest.mark.parametrize(
    "line",
    ["a" * 200_000, "step" + " " * 200_000, "loss" + "\t" * 200_000 + "x", "1/" * 100_000],
    ids=lambda line: line[:4],
)
def test_a_line_that_is_made_to_take_long_does_not(line: str) -> None:
    began = time.process_time()
    find_figures(line)
    assert time.process_time() - began < 1.0


def test_bars_count_beside_losses_alone() -> None:
    download = "model.safetensors:  12%|#  | 120/1000 [00:10<01:13, 12.00MB/s]"
    assert list_figures([download, "3/10 [00:10<01:13, 1it/s]"]) == []
    bars = [f" {step}%|  | {step}/100 [00:01<01:13, 1.0it/s]" for step in (1, 2)]
    rows = list_figures([bars[0], "{'loss': 2.5, 'epoch': 0.1}", "{'loss': 2.25}", bars[1]])
    assert rows == [
        {"step": 1, "steps": 100, "step_s": 1.0, "loss": 2.5},
        {"step": 2, "steps": 100, "step_s": 1.0, "loss": 2.25},
    ]


OTHER_BARS = [
    "Loading weights: 100%|###| 148/148 [00:00<00:00, 1234.5it/s, Materializing param=lm_head.weight]",
    "Loading checkpoint shards: 100%|###| 2/2 [00:01<00:00, 1.5it/s]",
    "Map: 100%|###| 1000/1000 [00:00<00:00, 12345.67 examples/s]",
    "Tokenizing train dataset: 100%|###| 1000/1000 [00:01<00:00, 950.1 examples/s]",
    "model.safetensors:  99%|###| 543/548 [00:10<00:00, 54.0MB/s]",  # and never more of it
    "Writing model shards: 100%|###| 1/1 [00:00<00:00, 5.1it/s]",
    "100%|###| 1/1 [00:00<00:00, 5.1it/s]",
    "100%|###| 10/10 [00:01<00:00, 9.1it/s]",  # an evaluation of Hugging Face
    " 90%|###| 9/10 [00:01<00:00, 9.1it/s]",
    "01/07 12:00:00 INFO saved",
]


@pytest.mark.parametrize("other", OTHER_BARS)
@pytest.mark.parametrize("quote", ["", "'"])
def test_other_bars_do_not_count_steps(other: str, quote: str) -> None:
    lines = [other]
    for step in range(1, 4):
        lines += [f" {step}%|#  | {step}/100 [00:0{step}<01:13, 1.0it/s]", f"{{'loss': {quote}{step}.5{quote}}}", other]
    rows = list_figures(lines)
    assert rows == [{"step": step, "steps": 100, "step_s": 1.0, "loss": step + 0.5} for step in (1, 2, 3)]


def test_a_short_run_has_its_own_bar() -> None:
    """The only loss is printed when the bar of the training is full."""
    lines = [*OTHER_BARS[:4], "  0%|  | 0/8 [00:00<?, ?it/s]", "100%|##| 8/8 [00:04<00:00, 2.0it/s]", "{'loss': '2.5'}"]
    assert list_figures([*lines, *OTHER_BARS[5:7]]) == [{"step": 8, "steps": 8, "step_s": 0.5, "loss": 2.5}]


def test_a_bar_of_each_epoch_is_one_bar() -> None:
    lines = []
    for epoch in range(3):
        lines += [f"Epoch {epoch}: 100%|##| 50/50 [00:04<00:00, 2.0it/s]", f"loss {3 - epoch}", OTHER_BARS[6]]
    assert [(row["step"], row["steps"], row["loss"]) for row in list_figures(lines)] == [
        (50, 50, 3),
        (50, 50, 2),
        (50, 50, 1),
    ]


@pytest.mark.parametrize("place", ["rank 0/2 host node1 starts", "[GPU0/8] ready", "shard 3/128 ", "Loading 1/4 files"])
def test_a_pair_of_numbers_that_stays_counts_no_steps(place: str) -> None:
    losses = [f"epoch {epoch} loss {2.5 - epoch / 10}" for epoch in range(3)]
    assert list_figures([place, *losses]) == []
    assert list_figures([f"{place} {loss}" for loss in losses]) == []
    counted = [f"{place} step {step} loss 1.5" for step in (1, 2)]
    assert [row["step"] for row in list_figures(counted)] == [1, 2]


def test_a_pattern_of_the_user_is_taken_in_place_of_the_usual_forms() -> None:
    pattern = re.compile(r"done (?P<step>\d+), error (?P<loss>[\d.]+)")
    assert list_figures(["loss 4 step 2", "done 7, error 0.25"], pattern) == [{"step": 7, "loss": 0.25}]
    assert list_figures(["loss 4 step 2"], pattern) == []


def test_the_first_rank_that_prints_figures_counts(tmp_path: Path) -> None:
    folder = tmp_path / "node1"
    folder.mkdir()
    (folder / "rank-0.log").write_text("starting\n")
    (folder / "rank-10.log").write_text("step 9 loss 9\n")
    (folder / "rank-2.log").write_text("x\rstep 1 loss 2.5\rstep 2 loss 2.25\r")
    assert read_figures(tmp_path) == [{"step": 1, "loss": 2.5}, {"step": 2, "loss": 2.25}]
    assert read_figures(tmp_path / "node1") == []
