"""Rprop of torch."""

# expect: exact

from toy import *

fit(optimizer=lambda model: torch.optim.Rprop(model.parameters(), lr=0.01))
