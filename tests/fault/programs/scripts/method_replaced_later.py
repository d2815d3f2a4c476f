"""forward is replaced on the instance in the third step (a monkeypatch)."""

# expect: exact or not exact

from toy import *

calls = 0


def loss(model, batch):
    global calls
    calls += 1
    if calls == 3:
        before = model[0].forward
        model[0].forward = lambda x: before(x) * 1.5
    return mse(model, batch)


fit(loss)
