"""`make train`, and what is done about a run: watched, stopped, gathered, listed.

Imports every other room of launch.
Document: runs/<id>/summary.json, written when a run is gathered; status and scripts read it.
"""
