"""The page of a run, runs/<id>/report.html, and of all runs, runs/report.html, from what is in runs/ here.

Imports launch.health, launch.job, launch.page and what those may import; never launch.run, which writes the page of
each run that ends. Nothing is asked of hosts. From the bottom up: documents (reads runs/<id>/), words, timeline,
curves, ranks, advice, about (hosts, versions, the check before), run_page, ending, all_runs, __main__ (`make report`).
Writes the two pages; people alone read them.
"""
