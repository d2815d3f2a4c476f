"""Snapshots: all that resumes the same run. Format, writing, reading with verification, retention; usable alone.

    write.save(folder, step, {"model": model.state_dict()}, facts={"samples": 1200}, keep=2)
    found, rejected = read.newest_good(folder)

A folder per step, made elsewhere and renamed into place, so that it is there whole or not at all:

    step-00000100/
        model.pt, optimizer.pt, random.pt     one file per part: tensors in plain containers (torch.save)
        manifest.json                         step, facts of the loop, size and digest of every file
        COMMIT                                written last: the digest of manifest.json

Nothing is unpickled: parts are read with `weights_only`, and only after their digest was found right. No format of
torch notices a flipped byte by itself.
"""
