"""What a training run and a probe share: the plan, whether hosts are ready for it, its containers, how it ended.

Imports launch.hosts and what that may import.
Document: the plan, runs/<id>/plan.json, made by plan.py; launch.run writes it, resume.py reads it.
"""
