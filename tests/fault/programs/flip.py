"""A snapshot with another bit in it whose digests are right, as one of another run has. Run in the program's folder."""

from __future__ import annotations

import json
from pathlib import Path

from dtctl.runtime.snapshot.format import headers, layout


def flip(part: str, number: int) -> None:
    """Flip a bit in the first tensor of a part in each snapshot."""
    for folder in Path("snapshots").glob("step-*"):
        manifest = folder / layout.MANIFEST
        document = json.loads(manifest.read_text())
        name = next(name for name in sorted(document["files"]) if name.startswith(part))
        content = bytearray((folder / name).read_bytes())
        header = headers.parse_header(memoryview(content))
        begin, end = next(iter(dict(header.tensors).values()))["data_offsets"]
        content[header.size_bytes + begin + number % (end - begin)] ^= 4
        (folder / name).write_bytes(content)
        document["files"][name]["digest"] = layout.compute_bytes_digest(memoryview(content), document["hash"])
        manifest.write_text(json.dumps(document))
        (folder / layout.COMMIT).write_bytes(layout.commit_record(manifest.read_bytes(), document["hash"]))
