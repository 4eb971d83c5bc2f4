"""The links between hosts: which pairs are measured in which order, what was measured, which network ranks use.

Imports launch.hosts and what that may import. Whether a link is healthy is for launch.health to say.
Writes no document of its own; links are kept in the cluster map and in the records of checks.
"""
