"""CycleGAN's pool of earlier fakes, a critic and its optimizer in a closure."""

# expect: exact

from toy import *


class ImagePool:
    def __init__(self, size):
        self.size, self.images = size, []

    def query(self, images):
        out = []
        for image in images:
            if len(self.images) < self.size:
                self.images.append(image)
                out.append(image)
            elif random.uniform(0, 1) > 0.5:
                at = random.randint(0, self.size - 1)
                out.append(self.images[at].clone())
                self.images[at] = image
            else:
                out.append(image)
        return torch.stack(out)


def train(config, worker):
    critic, pool = nn.Linear(1, 1), ImagePool(10)
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=0.05)

    def loss(model, batch):
        inputs, real = batch
        fake = model(inputs)
        critic_optimizer.zero_grad()
        critic_loss = F.softplus(-critic(real)).mean() + F.softplus(critic(pool.query(fake.detach()))).mean()
        critic_loss.backward()
        critic_optimizer.step()
        return F.softplus(-critic(fake)).mean() + 0.1 * F.mse_loss(fake, real)

    return finish(Trainer(config, worker, mlp(), loss, data()))


start(train)
