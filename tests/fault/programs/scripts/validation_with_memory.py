"""Scores of the validation change a weight of the training."""

# expect: exact

from toy import *

seen = {"total": 0.0}


def score(model, batch):
    errors = (model(batch[0]) - batch[1]).square()[:, 0]
    seen["total"] = 0.5 * seen["total"] + errors.mean().item()
    return {"error": errors}


def loss(model, batch):
    return mse(model, batch) * (1 + seen["total"])


def train(config, worker):
    more = {"validation": TensorData(*points(8)), "score": score}
    return finish(Trainer(config, worker, mlp(), loss, data(), **more))


start(train, eval_every=2)
