"""Snapshots: all that resumes the same run. Format, writing, reading with verification, retention; usable alone.

    write.save(folder, step, {"model": model.state_dict()}, facts={"samples": 1200}, keep=2)
    found, rejected = read.newest_good(folder)

A folder per step, made elsewhere and renamed into place, so that it is there whole or not at all:

    step-00000100/
        model.safetensors, optimizer.safetensors, random.safetensors    one file per part (packing.py)
        manifest.json                         step, facts of the loop, size and digest of every file
        COMMIT                                written last: the digest of manifest.json

Nothing is pickled, and nothing is used before its digest was found right: no format of torch notices a flipped byte by
itself. `saver.Saver` does the same beside training, which stops for a copy only.
"""
