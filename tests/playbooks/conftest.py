"""Lets the tests import Muster's Ansible modules the way Ansible does: helpers as ansible.module_utils.*."""

from __future__ import annotations

import sys
from pathlib import Path

intern = sys.intern
import ansible.module_utils.basic  # noqa: E402  it replaces sys.intern, after which nobody can import torch._dynamo

sys.intern = intern

PLAYBOOKS = Path(__file__).parents[2] / "playbooks"

ansible.module_utils.__path__.append(str(PLAYBOOKS / "module_utils"))
sys.path.append(str(PLAYBOOKS / "library"))
