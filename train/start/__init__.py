"""How a rank comes to life: how it is started (agent with hooks, failures; spawn), its memory, place and device
(memory, group, devices), how it finds the others (rendezvous), and the proof that all ranks agree before the first
step.

May import: settings, whole_files, keeper. Files: agent writes failure.json, which the control side reads (launch);
rendezvous writes and reads the folder of `--init file://`.
"""
