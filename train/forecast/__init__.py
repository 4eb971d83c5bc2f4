"""What `make check` measures with the ranks of a run, and what a forecast of a training is made of.

May import: session, step, reporting and all below. `probe` is the command, and writes probe.json; launch reads it.
step_times measures the part of it that a forecast needs.
"""
