"""A settings file of one's own, read at the start into a global."""

# expect: exact
# change file: python open("settings.json", "w").write('{"gain": 2.0}')

import json
from pathlib import Path
from toy import *

FILE = Path("settings.json")
settings = json.loads(FILE.read_text()) if FILE.exists() else {"gain": 1.0}


def loss(model, batch):
    return mse(model, batch) * settings["gain"]


fit(loss)
