"""Imported by a fork server alone, before all else: it and its workers leave the process group of their rank.

A signal for that group (Ctrl-C in a terminal, torchrun's SIGTERM) is the rank's to answer: its last step still needs
the workers. They end with the rank, however that ends (workers.end_with_parent).
"""

import os

os.setpgid(0, 0)
