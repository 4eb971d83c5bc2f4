"""Writes a text to a file on the control machine, at once whole. Arguments: dest, text. Never counts as a change.

For the document that playbooks/distribute.yml hands to `make deploy`. ansible.builtin.copy does the same in 1.2 s (it
runs modules as if the control machine were a remote one); an action that writes the file itself takes 0.1 s.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ansible.plugins.action import ActionBase


class ActionModule(ActionBase):
    """The action; there is no module of this name, since nothing runs on a host."""

    _requires_connection = False
    TRANSFERS_FILES = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result: dict[str, Any] = super().run(tmp, task_vars)
        _, arguments = self.validate_argument_spec(
            {"dest": {"type": "str", "required": True}, "text": {"type": "str", "required": True}}
        )
        dest = Path(arguments["dest"])
        temporary = dest.with_name(f".{dest.name}.{os.getpid()}")
        temporary.write_text(arguments["text"], encoding="utf-8")
        os.replace(temporary, dest)
        return result | {"changed": False, "dest": str(dest)}
