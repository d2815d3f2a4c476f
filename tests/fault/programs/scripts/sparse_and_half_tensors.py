"""Counts in a sparse tensor, means in bfloat16 and in complex."""

# expect: exact

from toy import *

state = {"sparse": torch.zeros(4).to_sparse(), "half": torch.zeros(6).bfloat16(), "complex": torch.ones(1) * (1 + 0j)}


def loss(model, batch):
    state["sparse"] = (state["sparse"] + torch.tensor([0.0, 1.0, 0.0, 2.0]).to_sparse()).coalesce()
    state["half"] = (0.9 * state["half"] + 0.1 * batch[0].mean(0)).bfloat16()
    state["complex"] = state["complex"] * torch.exp(torch.tensor(0.3j))
    gain = 1 + 0.1 * state["sparse"].to_dense().sum() + 0.2 * state["complex"].real
    return F.mse_loss(model(batch[0] - state["half"].float()), batch[1]) * gain.sum()


fit(loss)
