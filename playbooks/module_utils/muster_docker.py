"""Docker on this machine: whether it answers, and how it gets an image from the pool of blobs.

Docker reads images from registries alone, so the pool is served to it as one, on the loopback address, while it pulls
(the part of the OCI distribution specification that `docker pull` uses, reading only). Docker speaks HTTP to 127.0.0.1
unless it is told otherwise, takes layers that it has by their digests, and verifies the others.
Tried with Docker 20.10 and 26.1, with both kinds of image stores. Standard library alone, Python 3.8 and later.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import shlex
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from ansible.module_utils.muster_engines import IMAGE_PREFIX, Docker
from ansible.module_utils.muster_host import run

OLDEST = (20, 10)
PULL_SECONDS = 1800.0
REQUEST_SECONDS = 60.0  # for a request of Docker's to be read, and its answer taken
MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
#: What Docker writes into chains that are not its own.
_OWN_RULES = (
    r"-A FORWARD (?:-o docker0 -m conntrack --ctstate RELATED,ESTABLISHED|-i docker0 (?:! )?-o docker0) -j ACCEPT"
    r"|-A POSTROUTING -s \S+ ! -o docker0 -j MASQUERADE"
)
_DIGESTS = re.compile(r"/(manifests|blobs)/sha256:([0-9a-f]{64})")


def complaint() -> str:
    """Why this machine's Docker cannot be used; empty where it can."""
    answer = run(Docker.about_words)
    try:
        about = Docker().read_about(answer.out)
    except (ValueError, KeyError) as error:
        return str(error) if answer.rc == 0 and isinstance(error, ValueError) else answer.complaint
    version = tuple(int(part) for part in re.findall(r"\d+", about.version)[:2])
    oldest = ".".join(map(str, OLDEST))
    return f"it is version {about.version}, and Muster needs {oldest} or later" if version < OLDEST else ""


def fix(said: str) -> str:
    """What to do about a complaint."""
    if "needs" in said:
        return "install a newer Docker, or set container_engine: podman for this host"
    return "`systemctl status docker` there says why; container_engine: podman leaves Docker alone"


def remove_rules(check_mode: bool) -> list[str]:
    """Removes the firewall's rules of a Docker that does not run any more. Returns what it removed.

    What it leaves: a policy of FORWARD, which somebody else may have set, and a DOCKER-USER with somebody's rules.
    """
    removed = []
    for program in ("iptables", "ip6tables"):
        for table in ("filter", "nat", "raw"):
            commands = rules_to_remove(run([f"{program}-save", "-t", table]).out)
            for words in [] if check_mode else commands:
                run([program, "--wait", "10", "-t", table, *words])
            removed += [f"Docker's rules in {program}'s table {table}"] if commands else []
    return removed


def rules_to_remove(saved: str) -> list[list[str]]:
    """The words of iptables by which one table is rid of Docker. saved: what iptables-save prints of it. Pure."""
    chains = re.findall(r"^:(DOCKER(?:-\S+)?) ", saved, re.MULTILINE)
    if re.search(r"^-A DOCKER-USER (?!-j RETURN$)", saved, re.MULTILINE) and "DOCKER-USER" in chains:
        chains.remove("DOCKER-USER")
    jumps = "|".join(map(re.escape, chains))
    if not jumps:
        return []
    outside = re.compile(rf"-A (?!(?:{jumps}) ).*-j (?:{jumps})|{_OWN_RULES}")
    rules = [shlex.split(line) for line in saved.splitlines() if outside.fullmatch(line)]
    empty = [[word, chain] for word in ("-F", "-X") for chain in chains]
    return [["-D", *rule[1:]] for rule in rules] + empty


def pull(layout: Path, identity: str, index: str) -> None:
    """Lets Docker read the image that an index.json names from the pool, and names it by its id.

    Raises RuntimeError with what Docker said.
    """
    manifest = json.loads(index)["manifests"][0]["digest"]
    with _served(layout / "blobs" / "sha256") as place:
        source = f"{place}@{manifest}"
        pulled = run(["docker", "pull", "--quiet", source], timeout=PULL_SECONDS)
    if pulled.rc != 0:
        raise RuntimeError(pulled.complaint)
    found = run(["docker", "image", "inspect", "--format", "{{.Id}}", source]).out.strip()
    tagged = run(["docker", "tag", source, Docker().image(identity)])
    run(["docker", "rmi", source])  # the name alone
    if tagged.rc != 0:
        raise RuntimeError(tagged.complaint)
    if found not in (f"sha256:{identity}", manifest):  # as containerd's image store names it
        raise RuntimeError(f"it made image {found} out of layers of {identity}")


@contextlib.contextmanager
def _served(pool: Path) -> Iterator[str]:
    """Yields the name of a repository on this machine whose blobs are those of the pool, for as long as it lasts.

    Who does not know the name gets nothing: other users of this machine can connect, too.
    """
    name = f"{IMAGE_PREFIX.split('/')[1]}/{secrets.token_hex(16)}"

    class Registry(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        # Docker tries TLS first in places, and goes on without when it is answered with a line of HTTP.
        default_request_version = "HTTP/1.0"
        timeout = REQUEST_SECONDS

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def _answer(self, with_body: bool) -> None:
            _, _, rest = self.path.partition(f"/v2/{name}")
            asked = _DIGESTS.fullmatch(rest)
            file = pool / asked.group(2) if asked else None
            if self.path == "/v2/":
                self._head(0, "application/json")
            elif asked is None or file is None or not file.is_file():
                self.send_error(404)
            else:
                kind = MANIFEST_TYPE if asked.group(1) == "manifests" else "application/octet-stream"
                self._head(file.stat().st_size, kind, f"sha256:{asked.group(2)}")
                if with_body:
                    with open(file, "rb") as content:
                        shutil.copyfileobj(content, self.wfile, 1 << 20)

        def _head(self, size: int, kind: str, digest: str = "") -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(size))
            self.send_header("Content-Type", kind)
            if digest:
                self.send_header("Docker-Content-Digest", digest)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Registry) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}/{name}"
        finally:
            server.shutdown()
            thread.join()


def layers(_storage: str) -> set[str]:
    """Digests of the layers that are unpacked, as far as Muster's images have them."""
    listed = run(["docker", "images", "--quiet", "--no-trunc", "--filter", f"reference={IMAGE_PREFIX}*"])
    names = sorted(set(listed.out.split()))
    printed = run(["docker", "image", "inspect", "--format", "{{json .RootFS.Layers}}", *names]).out if names else ""
    return {layer.split(":")[-1] for line in printed.splitlines() for layer in json.loads(line) or []}
