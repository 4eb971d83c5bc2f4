"""`make check`: what is wrong with hosts and links, and what a run will be like; its quick form before every run.

Imports launch.job, launch.network, launch.page and what those may import; never launch.run. From the bottom up:
verdicts (the words of all checks), the checks (host_checks, gpu_checks, link_statistics, link_checks, sameness, drift),
records, survey (asks the hosts), run_probe, forecast, rank_measurements (what ranks measure), report/, check (the
command).
Document: the record of a check, build/<inventory>/checks/<time>.json, written and read by records.py.
"""
