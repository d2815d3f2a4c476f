"""Hidden state of an LSTM carried over from batch to batch."""

# expect: exact

from toy import *


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head, self.hidden = nn.LSTM(1, 5, batch_first=True), nn.Linear(5, 1), None

    def forward(self, x):
        out, hidden = self.lstm(x[:, :, None], self.hidden)
        self.hidden = tuple(h.detach() for h in hidden)
        return self.head(out[:, -1])


fit(model=Recurrent)
