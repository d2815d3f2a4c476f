"""An array that shares memory with a tensor."""

# expect: exact

from toy import *

array = np.zeros(6, np.float32)
tensor = torch.from_numpy(array)


def loss(model, batch):
    array[:] = 0.8 * array + 0.2 * batch[0].mean(0).numpy()
    return F.mse_loss(model(batch[0] - tensor), batch[1])


fit(loss)
