"""What `make check` and `make deploy` ask of a host in one SSH call: its facts, and its part in measuring the links.

Sent to the host's own Python by launch/hostcall.py. Standard library alone, Python 3.8 and later.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def run(options: dict[str, Any]) -> dict[str, Any]:
    """{"began", "ended": unix seconds of this host, "survey": facts or None, "links": results or None}

    options: survey, the options of muster_survey.survey, or None; links, those of muster_links.measure, or None.
    A measurement of bandwidth waits for the survey, which takes some CPU; the quick form runs beside it.
    """
    began = time.time()
    survey, links = options.get("survey"), options.get("links")
    with ThreadPoolExecutor(max_workers=1) as pool:
        found = pool.submit(_survey, survey) if survey else None
        if found and links and links["seconds"]:
            found.exception()
        measured = _measure(links) if links else None
        facts = found.result() if found else None
    return {"began": began, "ended": time.time(), "survey": facts, "links": measured}


def _survey(options: dict[str, Any]) -> dict[str, Any]:
    from ansible.module_utils.muster_survey import survey

    return survey(options)


def _measure(options: dict[str, Any]) -> list[dict[str, Any]]:
    from ansible.module_utils.muster_links import measure

    return measure(options)
