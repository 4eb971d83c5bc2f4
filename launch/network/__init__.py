"""The links between hosts: who measures which pair when, what was measured, and which network ranks talk over.

Imports launch.hosts and what that may import. Whether a link is healthy is for launch.health to say.
Writes no document of its own; links are kept in the cluster map and in the records of checks.
"""
