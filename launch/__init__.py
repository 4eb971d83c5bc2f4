"""The control side: read the cluster map, plan ranks, start, watch, stop, gather. Never imports torch."""
