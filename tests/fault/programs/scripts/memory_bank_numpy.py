"""A memory bank, a row per sample, in NumPy; the sample brings its number."""

# expect: exact

from toy import *

bank = np.zeros((64, 1), dtype=np.float32)


def numbered():
    inputs, targets = points()
    return TensorData(inputs, targets, torch.arange(64))


def loss(model, batch):
    inputs, targets, numbers = batch
    out = model(inputs)
    old = torch.from_numpy(bank[numbers.numpy()])
    bank[numbers.numpy()] = 0.5 * bank[numbers.numpy()] + 0.5 * out.detach().numpy()
    return F.mse_loss(out, targets) + 0.3 * F.mse_loss(out, old)


fit(loss, samples=numbered)
