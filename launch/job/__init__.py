"""What a training run and a probe share: the plan, whether hosts are ready, the queue, start, view, how it ended.

Imports launch.hosts and what that may import.
Document: the plan, made by plan.py; the hosts keep it, launch.run writes runs/<id>/plan.json, resume.py reads that.
"""
