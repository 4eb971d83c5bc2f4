"""`make train`, and what is done about a run: followed, stopped, gathered, listed.

Imports every other room of launch.
Document: runs/<id>/summary.json, written by lifecycle.py; status and scripts read it.
"""
