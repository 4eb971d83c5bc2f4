"""Lets the tests import Muster's Ansible modules the way Ansible does: helpers as ansible.module_utils.*."""

from __future__ import annotations

import sys
from pathlib import Path

import torch._dynamo  # noqa: F401  first: Ansible replaces sys.intern, and this cannot be imported in a process after that

import ansible.module_utils  # isort: skip

PLAYBOOKS = Path(__file__).parents[2] / "playbooks"

ansible.module_utils.__path__.append(str(PLAYBOOKS / "module_utils"))
sys.path.append(str(PLAYBOOKS / "library"))
