"""ASGD of torch, with averages."""

# expect: exact

from toy import *

fit(optimizer=lambda model: torch.optim.ASGD(model.parameters(), lr=0.01, t0=3))
