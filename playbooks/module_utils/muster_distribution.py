"""A host's part in the distribution of an image, in one SSH call: what it lacks, getting that, the engine's reading it.

Sent to the host's own Python as root, like muster_answer. Standard library alone, Python 3.8 and later.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import select
import shutil
import sys
import time
from pathlib import Path
from typing import Any, Callable, Dict, Iterator

from ansible.module_utils import muster_image, muster_relay
from ansible.module_utils.muster_engines import noted

STILL_WAITING_SECONDS = 2.0  # between two signs of a host that waits for an earlier distribution to end


def run(options: dict[str, Any], say: Callable[[Any], None]) -> None:
    """Bring an image to this host.

    options: ref (the image's name), id (64 hexadecimal digits), index (text of an OCI index.json that names this image
    alone), blobs (digest, hexadecimal -> bytes of manifest, config and layers), relay (those of muster_relay.run, and
    secret, the key of this distribution in hexadecimal digits), built (the folder of the blobs, where the image was
    built on this host, which then serves others in any case; else null or not there).

    Says {"needed": nothing, name or pull (see muster_image), "lacks": bytes to come, "bz2": whether this Python
    can read it}, and waits for {"begin": true} on standard input: nothing is sent before every host was found to have
    room. What follows for pull: see muster_relay. At last {"holds": the id that has the name now, "seconds"}; then it
    serves other hosts until standard input ends. A failure is {"error": why}, with exit status 1.
    """
    try:
        _run(options, say)
    except (RuntimeError, OSError) as error:
        say({"error": str(error)})
        sys.exit(1)


def _run(options: dict[str, Any], say: Callable[[Any], None]) -> None:
    if not muster_image.POOL.is_dir():
        raise RuntimeError(f"{muster_image.POOL} is missing on this host. Fix: run make deploy")
    engine = noted()
    ref, identity, sizes, begun = options["ref"], options["id"], options["blobs"], time.monotonic()
    with alone(muster_image.LEDGER.with_name("lock"), say):
        built = options.get("built")
        if built:
            link(Path(built), muster_image.POOL, sizes)
        plan = muster_image.check(engine, ref, identity, sizes)
        lacks = sum(sizes[digest] for digest in plan["missing"])
        say({"needed": plan["needed"], "lacks": lacks, "bz2": muster_relay.bz2 is not None})
        if not may_begin():
            return
        serving = None
        if plan["needed"] == "pull" or built:
            serving = relay(muster_image.POOL, muster_relay.Store, sizes, options["relay"], say)
        if plan["needed"] != "nothing" or built:
            muster_image.bring(engine, ref, identity, options["index"], sizes)
        say({"holds": identity, "seconds": round(time.monotonic() - begun, 2)})
    if serving:
        os.waitpid(serving, 0)


def link(built: Path, pool: Path, sizes: dict[str, int]) -> None:
    """Take into the pool what it lacks of an image that was built on this host. Raises RuntimeError with words."""
    for digest in muster_image.missing_blobs(pool, sizes):
        draft = pool / f".{digest}.built"
        try:
            if draft.exists():
                draft.unlink()
            _link_or_copy(built / digest, draft)
            draft.replace(pool / digest)
        except OSError as error:
            what = f"a layer cannot be taken from {built}, where it was built: {error.strerror}"
            raise RuntimeError(f"{what}. Fix: see `df` there, then run the same command again") from None


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        shutil.copyfile(source, target)


@contextlib.contextmanager
def alone(path: Path, say: Callable[[Any], None]) -> Iterator[None]:
    """One distribution at a time changes what is on this host; one whose control machine has gone ends soon."""
    with open(path, "w", encoding="utf-8") as lock:
        said = time.monotonic()
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.1)
            if time.monotonic() - said > STILL_WAITING_SECONDS:
                said = time.monotonic()
                say({"waiting": "an earlier distribution has not ended there"})
        yield


def may_begin() -> bool:
    """Wait for the control machine's word; false where it has gone, or another host has no room."""
    line = b""
    while select.select([0], [], [], muster_relay.ABSENT_SECONDS)[0]:
        byte = os.read(0, 1)  # not a byte more: what follows is muster_relay's
        line += byte
        if not byte:
            break
        if byte == b"\n":
            if json.loads(line).get("begin"):
                return True
            line = b""
    return False


def relay(
    pool: Path,
    make: Callable[[Path, Dict[str, int], bytes], muster_relay.Store],
    sizes: dict[str, int],
    options: dict[str, Any],
    say: Callable[[Any], None],
) -> int:
    """Get what is missing, in a process of the pool's owner, as it listens on the network. It serves other hosts until
    standard input ends. Returns its id when everything is there; where it fails, it has said why, and this ends."""
    arrived, arriving = os.pipe()
    process = os.fork()
    if not process:
        try:
            os.close(arrived)
            give_up_root(pool)
            store = make(pool, sizes, bytes.fromhex(options["secret"]))
            muster_relay.run(store, options, say, lambda: os.write(arriving, b"."))
        except Exception as error:
            say({"error": f"{type(error).__name__}: {error}"})
        finally:
            os._exit(1)
    os.close(arriving)
    if not os.read(arrived, 1):
        sys.exit(1)
    return process


def give_up_root(pool: Path) -> None:
    """Become the owner of the pool: the SSH user."""
    owner = pool.stat()
    if os.getuid() != owner.st_uid:
        os.setgroups([])
        os.setgid(owner.st_gid)
        os.setuid(owner.st_uid)
    os.umask(0o022)
