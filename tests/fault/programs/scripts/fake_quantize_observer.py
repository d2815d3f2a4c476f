"""Quantization-aware training with torch's observer."""

# expect: exact

from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver
from toy import *


class Quantized(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp()
        self.fake = FakeQuantize(observer=MovingAverageMinMaxObserver, quant_min=0, quant_max=255)

    def forward(self, x):
        return self.net(self.fake(x))


fit(model=Quantized)
