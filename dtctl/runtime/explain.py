"""Explanations of torch's errors that a key of the spec resolves."""

from __future__ import annotations

from typing import Final

from dtctl.errors import PlanError

KNOWN: Final = (
    (
        "Expected to have finished reduction in the prior iteration",
        "the loss does not depend on all parameters, and ddp waits for the gradients of all",
        "train.ddp.find_unused_parameters",
        "set `train.ddp.find_unused_parameters: true`, or freeze them with requires_grad_(False)",
    ),
    (
        "Your training graph has changed in this iteration",
        "the loss depends on other parameters than in the first step, but static_graph requires the same ones",
        "train.ddp.static_graph",
        "leave out `train.ddp.static_graph`, and set `train.ddp.find_unused_parameters: true`",
    ),
    (
        "Expected to mark a variable ready only once",
        "a parameter is used outside of the forward pass, or in several parts that are computed again one by one",
        "train.ddp.static_graph",
        "set `train.ddp.static_graph: true` if every step uses the same parameters",
    ),
    (
        "fully_shard doesn't support scalar parameters",
        "the model has a zero-dimensional parameter, which fully_shard cannot divide",
        "train.strategy",
        "make it a tensor of one element, torch.zeros(1), or use ddp or zero1",
    ),
    (
        "expects uniform original parameter dtype",
        "a block has parameters of several number formats, which fully_shard cannot combine",
        "train.strategy",
        "make them of one format and use `train.precision`, or use ddp or zero1",
    ),
    (
        "does not have a deterministic implementation",
        "the model or the loss uses an operation whose kernel gives different bits at each call and has no "
        "deterministic form",
        "train.deterministic",
        "use another operation, or `train.deterministic: false` if bits need not repeat",
    ),
    (
        "mixed torch.Tensor and DTensor",
        "the model's code combines a divided parameter with an undivided tensor",
        "train.strategy",
        "call the model as a whole; with tp, let `train.tp.plan` replicate the module that has the parameter",
    ),
)
"""Text of torch's error, its meaning, the key, and the hint."""


def explain_error(error: BaseException) -> PlanError | None:
    """Return the error in terms of the spec; None if no key is known to resolve it."""
    text = str(error)
    for said, meaning, where, hint in KNOWN:
        if said in text:
            if where == "train.deterministic":
                meaning = f"{meaning}: {text.partition(' does not have')[0].strip()}"
            return PlanError(meaning, where=where, hint=hint)
    return None
