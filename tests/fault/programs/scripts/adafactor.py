"""Adafactor of torch."""

# expect: exact

from toy import *

fit(optimizer=lambda model: torch.optim.Adafactor(model.parameters(), lr=0.05))
