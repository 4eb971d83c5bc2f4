"""How hosts are reached: the inventory, host keys, SSH, a connection to one host, a question to all at once.

Imports launch.cli and launch.files.
Documents: the cluster map, build/<inventory>/cluster.json, whose schema, writer and reader are clustermap.py; and the
known_hosts of an inventory, which trust.py writes and all logins read.
"""
