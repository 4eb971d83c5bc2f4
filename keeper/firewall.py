"""Whom a run answers on a host: the hosts of the run, and nobody else. For the door, which is root; needs `nft`.

A table of nftables, `inet muster`, drops the answers (SYN, ACK) that sockets of USER_ID, which are those of a run, give
to a connection from anywhere else. So all ports of a run are closed to others, whichever they are and on whatever
address they listen, and the table concerns no other program of the host, sshd least of all. What ranks themselves
connect to, answers them: that is no SYN, ACK of theirs. No connections are tracked, which would cost training time.

It stays until the next run replaces it, as one table in the place of another, or until `make teardown`. Other tables
(firewalld's, ufw's, the user's own) decide as before: what one of them drops stays dropped. UDP, which nothing of ours
answers, and RDMA, which does not pass by there, are not concerned.
"""

from __future__ import annotations

import contextlib
from typing import Iterable

from keeper import USER_ID
from keeper.host import Refused, call

TABLE = "inet muster"


def rules(addresses: Iterable[str]) -> str:
    """What makes the table, for `nft -f`. addresses: all from which the run's hosts may call each other. Pure."""
    known = set(addresses)
    four, six = (sorted(one for one in known if (":" in one) == is_six) for is_six in (False, True))
    return f"""\
table {TABLE}
delete table {TABLE}
table {TABLE} {{
    set hosts4 {{ type ipv4_addr; {_elements(four)} }}
    set hosts6 {{ type ipv6_addr; {_elements(six)} }}
    chain answers {{
        type filter hook output priority 0; policy accept;
        tcp flags & (syn | ack) == (syn | ack) meta skuid {USER_ID} oifname != "lo" ip daddr != @hosts4 counter drop
        tcp flags & (syn | ack) == (syn | ack) meta skuid {USER_ID} oifname != "lo" ip6 daddr != @hosts6 counter drop
    }}
}}
"""


def _elements(addresses: Iterable[str]) -> str:
    listed = ", ".join(addresses)
    return f"elements = {{ {listed} }};" if listed else ""


def leave_open() -> None:
    """Remove the table that an earlier run may have left."""
    with contextlib.suppress(Refused, OSError):  # without nft, or a kernel that takes its rules, there is none
        call(["nft", "--", f"table {TABLE}\ndelete table {TABLE}"])


def close(addresses: Iterable[str]) -> None:
    """Have the host's runs answer these addresses alone. Raises Refused."""
    try:
        call(["nft", "--", rules(addresses)])
    except (Refused, OSError) as error:
        fix = "`firewall: false` in the inventory, and `make deploy`, leave them open"
        raise Refused(f"its ports cannot be closed to other machines: {error} ({fix})") from None
