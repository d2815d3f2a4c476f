"""A CSV writer over an open file."""

# expect: exact

import csv
from toy import *

file = open("log.csv", "a")
writer = csv.writer(file)


def loss(model, batch):
    value = mse(model, batch)
    writer.writerow([value.item()])
    file.flush()
    return value


fit(loss)
