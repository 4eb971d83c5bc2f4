"""What runs on every rank: the trainer (`python -m train`) and the thin wrapper that starts ranks
(`train.start.agent`).

Knows neither `launch` nor Ansible; it takes all it needs from torchrun's environment and its own command
line.
"""
