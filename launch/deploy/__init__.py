"""`make deploy`: playbooks, detection, the choice of the network, images on every host; and this machine made ready.

Imports launch.health, launch.network, containers and what those may import; never launch.run.
It fills the cluster map, which launch.hosts.clustermap writes and reads; deploy.json beside it, the deploy's times and
bytes, is for benchmarks/.
"""
