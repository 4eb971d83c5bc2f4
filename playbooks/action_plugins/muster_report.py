"""Writes what playbooks/distribute.yml did on each host to the file `dest` on the control machine, for `make deploy`.

ansible.builtin.copy does the same in 1.2 s (it runs modules as if the control machine were a remote one); an action
that writes the file itself takes 0.1 s.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from ansible.plugins.action import ActionBase


class ActionModule(ActionBase):
    """The action; there is no module of this name, since nothing runs on a host. Never counts as a change."""

    _requires_connection = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result: dict[str, Any] = super().run(tmp, task_vars)
        _, arguments = self.validate_argument_spec({"dest": {"type": "str", "required": True}})
        known = task_vars or {}
        hosts = {str(name): record(known["hostvars"][name]) for name in known["ansible_play_hosts"]}
        draft = Path(f"{arguments['dest']}.new")  # Ansible does not find the project's own writer
        draft.write_text(json.dumps({"hosts": hosts}), encoding="utf-8")
        draft.replace(arguments["dest"])
        return result


def record(host: Any) -> dict[str, Any]:
    """From what the tasks have registered on a host."""
    check, brought = host["distribute_check"], host["distribute_brought"]
    done = brought if "ended" in brought else check
    sent = re.search(r"Total bytes sent: (\d+)", host["distribute_sent"].get("msg", ""))
    return {
        "id": str(done["id"]),
        "bytes_sent": int(sent.group(1)) if sent else 0,
        "changed": check["needed"] != "nothing",
        "seconds": round(float(done["ended"]) - float(check["started"]), 2),
    }
