"""A replay memory of more entries than a snapshot keeps of a list."""

# expect: not exact

from toy import *

memory = [(float(n % 7), float(n % 5)) for n in range(3000)]


def loss(model, batch):
    value = mse(model, batch)
    memory[2500 + int(value.item() * 1000) % 400] = (value.item(), 1.0)
    memory.append((value.item(), 0.0))
    picked = random.sample(memory[2400:], 32)
    return value * (1 + sum(p[0] for p in picked) / 320)


fit(loss)
