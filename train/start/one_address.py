"""torch's TCPStore on one address of its host: by itself it listens on all of them."""

from __future__ import annotations

import socket
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]


def listen(host: str, port: int) -> socket.socket:
    """A socket listening at this address only. Raises OSError."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(address[:2], family=family)


def store(
    host_name: str, port: int, world_size: int | None = None, is_master: bool = False, *more: Any, **named: Any
) -> Any:
    """As TCPStore, whose first parameters these are. Raises OSError where the master cannot listen at `host_name`."""
    if is_master:
        named["master_listen_fd"] = listen(host_name, port).detach()
    return TCPStore(host_name, port, world_size, is_master, *more, **named)
