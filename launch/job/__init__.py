"""What a run and a probe share: plan, the user's project, whether hosts are ready, queue, start, view, how it ended.

Imports launch.hosts and what that may import.
Document: the plan, made by plan.py; the hosts keep it, launch.run writes runs/<id>/plan.json, resume.py reads that.
"""
