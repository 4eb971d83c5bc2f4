"""`make deploy`: playbooks, detection, the choice of the network, the image on every host; and this machine made ready.

Imports launch.health, launch.network, containers and what those may import; never launch.run.
Document: it fills the cluster map; launch.hosts.clustermap writes and reads that.
"""
