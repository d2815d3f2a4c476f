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
