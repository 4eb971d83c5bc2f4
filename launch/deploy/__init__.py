"""`make deploy`: playbooks, detection, the choice of the network, the image on every host; and this machine made ready.

Imports launch.health, launch.network, containers and what those may import; never launch.run.
It fills the cluster map; launch.hosts.clustermap holds that document's schema, writes and reads it.
"""
