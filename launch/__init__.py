"""The control side: what runs where make is typed. Never imports torch: it has to start fast on a laptop.

From the bottom up: files, cli, page, hosts, network, job, health, report, deploy, run, packages; then the commands that
stand beside them (demo, local, horovod, tensorboard; bootstrap, which runs before anything is installed). A room may
import rooms before it in this list alone; tests/test_rooms.py holds that. Pictures, the ways of data: ARCHITECTURE.md.
"""
