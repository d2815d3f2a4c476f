"""The generator learns every other call; counted in a global."""

# expect: exact

from toy import *

torch.manual_seed(5)
critic = nn.Sequential(nn.Linear(1, 4), nn.ReLU(), nn.Linear(4, 1))
critic_optimizer = torch.optim.RMSprop(critic.parameters(), lr=0.01)
iteration = 0


def loss(model, batch):
    global iteration
    iteration += 1
    fake = model(batch[0])
    critic_optimizer.zero_grad()
    (critic(fake.detach()).mean() - critic(batch[1]).mean()).backward()
    critic_optimizer.step()
    for p in critic.parameters():
        p.data.clamp_(-0.5, 0.5)
    return -critic(fake).mean() * (1.0 if iteration % 2 == 0 else 0.0) + 0.01 * fake.square().mean()


fit(loss)
