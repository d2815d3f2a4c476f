"""Recognition of the modules in a model of any library that are experts.

A module holds experts if it has an attribute `num_experts`, parameters that all have that many entries in their first
dim, one of them a matrix for each expert (a router has a vector for each), and a forward pass of one of two forms:

    forward(rows, counts)             rows sorted by expert, [rows, width], and their numbers; torchtitan's layers,
                                      and those of layer.py
    forward(tokens, chosen, weights)  tokens [tokens, width], the experts chosen and their weights [tokens, choices];
                                      Transformers from 5 on (Mixtral, Qwen-MoE, DeepSeek, OLMoE, GPT-OSS ...)
"""

from __future__ import annotations

import inspect
from typing import Final

from torch import nn

GROUPED: Final = 2
INDEXED: Final = 3
"""Numbers of arguments of the forward pass in the two forms."""


def find_expert_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of a model that hold experts, by name, each once."""
    return {name: module for name, module in model.named_modules() if find_expert_form(module)}


def find_expert_form(module: nn.Module) -> int:
    """Return the number of arguments of a module's forward pass if it holds experts, else 0."""
    count = getattr(module, "num_experts", None)
    parameters = list(module.parameters())
    if not isinstance(count, int) or count < 2 or not parameters:
        return 0
    if any(parameter.dim() < 2 or len(parameter) != count for parameter in parameters):
        return 0
    if all(parameter.dim() == 2 for parameter in parameters):
        return 0
    required = [
        value
        for value in inspect.signature(module.forward).parameters.values()
        if value.kind is value.POSITIONAL_OR_KEYWORD
    ]
    return len(required) if len(required) in (GROUPED, INDEXED) else 0
