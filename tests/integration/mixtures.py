"""Small mixtures of experts, in the layouts that people use, for the equality of expert parallelism."""

from __future__ import annotations

import torch
from torch import nn

from dtctl.runtime import MoE

WIDTH, EXPERTS, TOKENS = 8, 4, 16


class Block(nn.Module):
    """Attention and a mixture, each added to the stream."""

    def __init__(self, mixture: nn.Module) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        # Without a bias, whose part for keys has a gradient of nothing but rounding, which AdamW would take for one.
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.mixture = mixture

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        batch, length, _ = stream.shape
        q, k, v = self.qkv(self.norm1(stream)).view(batch, length, -1, 3, WIDTH // 2).permute(3, 0, 2, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        stream = stream + self.out(mixed.transpose(1, 2).reshape(batch, length, -1))
        found: torch.Tensor = stream + self.mixture(self.norm2(stream))
        return found


class Model(nn.Module):
    """Logits of the next token."""

    def __init__(self, mixtures: list[nn.Module]) -> None:
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(map(Block, mixtures))
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        stream = self.tokens(tokens)
        for block in self.blocks:
            stream = block(stream)
        logits: torch.Tensor = self.head(stream)
        return logits


class IndexedExperts(nn.Module):
    """As `MixtralExperts` and its relatives in Transformers 5: tokens, the choices of each, and their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) / 4)
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / 4)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        result = torch.zeros_like(hidden_states)
        mask = nn.functional.one_hot(top_k_index, num_classes=self.num_experts + 1).permute(2, 1, 0)
        for expert in range(self.num_experts):
            place, token = torch.where(mask[expert])
            if not len(token):
                continue
            gate, up = nn.functional.linear(hidden_states[token], self.gate_up_proj[expert]).chunk(2, dim=-1)
            computed = nn.functional.linear(nn.functional.silu(gate) * up, self.down_proj[expert])
            result.index_add_(0, token, (computed * top_k_weights[token, place, None]).to(result.dtype))
        return result


class Indexed(nn.Module):
    """As `MixtralSparseMoeBlock`; the last expert is never chosen."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.randn(EXPERTS, WIDTH))
        self.experts = IndexedExperts()

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        flat = stream.reshape(-1, WIDTH)
        weights, chosen = nn.functional.linear(flat, self.gate)[:, :-1].softmax(-1).topk(2, dim=-1)
        found: torch.Tensor = self.experts(flat, top_k_index=chosen, top_k_weights=weights)
        return found.view_as(stream)


class GroupedExperts(nn.Module):
    """As torchtitan's: rows in the order of experts, and how many each has."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.w1 = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / 4)
        self.w2 = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / 4)

    def forward(self, x: torch.Tensor, num_tokens_per_expert: torch.Tensor) -> torch.Tensor:
        parts = torch.split(x, num_tokens_per_expert.tolist(), dim=0)
        return torch.cat(
            [
                torch.relu(part @ self.w1[expert].transpose(-2, -1)) @ self.w2[expert].transpose(-2, -1)
                for expert, part in enumerate(parts)
            ]
        )


class Grouped(nn.Module):
    """As torchtitan's `MoE`, with the weights applied before the experts; the first expert is never chosen."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = GroupedExperts()

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        flat = stream.reshape(-1, WIDTH)
        weights, chosen = self.router(flat)[:, 1:].sigmoid().topk(2, dim=-1)
        order = (chosen + 1).flatten().argsort(stable=True)
        counts = torch.bincount((chosen + 1).flatten(), minlength=EXPERTS)
        rows = flat[order // 2] * weights.flatten()[order, None]
        found = torch.zeros_like(flat).index_add(0, order // 2, self.experts(rows, counts).to(flat.dtype))
        return found.view_as(stream)


def model(kind: str, dtype: torch.dtype) -> nn.Module:
    """`own`: the layer of dtctl with all that it has; `layouts`: those of Transformers and of torchtitan."""
    torch.manual_seed(5)
    if kind == "layouts":
        return Model([Indexed(), Grouped()]).to(dtype)
    common = {"width": WIDTH, "hidden": WIDTH, "experts": EXPERTS}
    full = MoE(**common, shared=1, capacity=1.0, balance_loss=0.02, z_loss=0.01, bias_rate=0.02, scores="sigmoid")
    idle = MoE(**common, top_k=1, normalize=False, balance_loss=0.05, bias_rate=1e-9)
    assert idle.bias is not None
    idle.bias[EXPERTS // 2 :] = -10.0  # never chosen: with ep 2, a worker has no rows at all
    return Model([full, idle]).to(dtype)
