"""`make check`: what is wrong with hosts and links, and what a run will be like; its quick form before every run.

Imports launch.job, launch.network and what those may import; never launch.run.
Document: the record of a check, build/<inventory>/checks/<time>.json, written and read by records.py.
"""
