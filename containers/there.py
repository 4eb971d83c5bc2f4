"""The program that builds images on a host (inventory: `build_on`), as root, from sources that were brought there.

    python3 -m containers.there

reads one line, `muster:` and a request in JSON, and says `muster:` and JSON in lines: {"progress": words}, at last what
`_work` returns, or {"error", "where", "fix"} with exit status 1; {"alive": true} now and then. Who asks keeps standard
input open and writes to it now and then: when it ends, or nothing comes for ABSENT_SECONDS, the build is ended. Wheels
are never fetched here: they have been brought. Who asks: launch/deploy/build_host.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from containers import engine, image, workload_image
from containers.engine import BUILD, ContainersError
from containers.own_base import own_base

MARK = "muster:"
SIGN_OF_LIFE_SECONDS = 10.0  # between two signs of life
ABSENT_SECONDS = 60.0  # without a word from the control machine, after which it has gone

_said = threading.Lock()


def main() -> int:
    """Do what is asked; returns the exit status."""
    request = json.loads(next(line for line in sys.stdin if line.startswith(MARK))[len(MARK) :])
    os.environ.update(request["environment"])
    heard = [time.monotonic()]
    for work in (_listen, _look):
        threading.Thread(target=work, args=(heard,), daemon=True).start()
    try:
        _say(_work(request))
    except ContainersError as error:
        _say({"error": error.what, "where": error.where, "fix": error.fix})
        return 1
    return 0


def _work(request: dict[str, Any]) -> dict[str, Any]:
    """request: base_image (as in the inventory), and with `look` nothing else: {"base": own_base.Base}. Or horovod
    (bool), horovod_wheels (name of a folder in build/) and workload (a folder of the user's own, or null): {"image",
    "pool", "index", "blobs" (see image.OciExport), "sbom"}."""
    if request.get("look"):
        return {"base": asdict(own_base(request["base_image"], _progress))}
    wheels = BUILD / request["horovod_wheels"] if request["horovod"] else None
    kind = (request["horovod"], _progress, request["base_image"], wheels)
    if request["workload"]:
        folder = Path(request["workload"])
        found = workload_image.as_built(folder, request["horovod"], request["base_image"])
        built = found or workload_image.build(folder, *kind)
    else:
        built = image.build_training_image(_progress, request["horovod"], request["base_image"], wheels)
    export = image.export_oci(built, _progress)
    sbom = image.sbom_path(built.ref).read_text()
    pool = str(export.path.resolve())
    return {"image": asdict(built), "pool": pool, "index": export.index, "blobs": export.blobs, "sbom": sbom}


def _progress(line: str) -> None:
    _say({"progress": line})


def _say(words: dict[str, Any]) -> None:
    with _said:
        print(MARK + json.dumps(words), flush=True)


def _listen(heard: list[float]) -> None:
    for _ in sys.stdin:
        heard[0] = time.monotonic()
    heard[0] = float("-inf")


def _look(heard: list[float]) -> None:
    said = time.monotonic()
    while time.monotonic() - heard[0] < ABSENT_SECONDS:
        time.sleep(0.5)
        if time.monotonic() - said > SIGN_OF_LIFE_SECONDS:
            said = time.monotonic()
            with contextlib.suppress(OSError):  # nobody listens any more
                _say({"alive": True})
    engine.abort()
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
