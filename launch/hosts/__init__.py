"""One host and all hosts: the inventory, host keys, SSH, one connection, one question to all of them.

Imports launch.cli and launch.files.
Document: the cluster map, build/<inventory>/cluster.json, whose schema, writer and reader are clustermap.py.
"""
