"""What the control machine asks of a host in one SSH call: its facts, which hosts it reaches, how fast its links are.

Sent to the host's own Python, which reads it from standard input. Standard library alone, Python 3.8 and later.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any, Callable

from ansible.module_utils.muster_host import busy_part, read_stat
from ansible.module_utils.muster_links import measure
from ansible.module_utils.muster_meeting import Meeting, reach

DIRECTORY_BYTES = 1 << 24


def run(options: dict[str, Any], say: Callable[[dict[str, Any]], None]) -> None:
    """Do what is asked, and say the answer: {"began", "ended": unix seconds of this host, "survey", "reach", "links"}.

    options: survey, the options of muster_survey.survey; meeting, those of muster_meeting.Meeting; reach, the candidate
    addresses of the other hosts {name: [address]}; links, the options of muster_links.measure. What is None is not
    done, and is None in the answer (survey or meeting must be given). seconds: how long it may take in all.
    busy, in the answer: the share of the processor time in use while links were measured, 0 to 1.

    With a meeting it says {"listening": ...} first and reads the directory of all hosts, one line of JSON on standard
    input; it says {"pairs": 1} for each pair measured, and goes on answering the other hosts until standard input
    ends. If that ends early, the control machine has gone, and this ends too. So nothing stays behind.
    """
    try:
        asyncio.run(asyncio.wait_for(_run(options, say), options["seconds"]))
    except asyncio.TimeoutError:
        sys.exit(f"not finished within {options['seconds']:.0f} s")
    except (RuntimeError, ValueError) as error:
        sys.exit(str(error))


async def _run(options: dict[str, Any], say: Callable[[dict[str, Any]], None]) -> None:
    began, loop = time.time(), asyncio.get_running_loop()
    asked = options["survey"]
    facts = None if asked is None else loop.run_in_executor(None, _survey, asked)
    if not options["meeting"]:
        say({"began": began, "survey": await facts, "reach": None, "links": None, "busy": None, "ended": time.time()})
        return
    meeting = Meeting(options["meeting"])
    try:
        await meeting.listen()
        say({"listening": meeting.listening})
        lines = asyncio.StreamReader(limit=DIRECTORY_BYTES)
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
        meeting.directory = json.loads(await lines.readline() or "{}")
        work = asyncio.ensure_future(_answer(meeting, options, facts, say))
        gone = asyncio.ensure_future(lines.read())
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            say({"began": began, **work.result(), "ended": time.time()})
            await gone
        work.cancel()
    finally:
        meeting.close()


def _survey(asked: dict[str, Any]) -> dict[str, Any]:
    from ansible.module_utils.muster_survey import survey  # here: it is read while the hosts meet

    return survey(asked)


async def _answer(
    meeting: Meeting, options: dict[str, Any], facts: Any, say: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    reached = await reach(meeting, options["reach"]) if options["reach"] else None
    links = options["links"]
    if facts and links and links["seconds"]:
        await facts  # the survey takes some CPU, which a measurement of bandwidth would miss
    before = read_stat()
    measured = await measure(meeting, links, lambda: say({"pairs": 1})) if links else None
    busy = busy_part(before, read_stat()) if links and links["seconds"] else None
    return {"survey": await facts if facts else None, "reach": reached, "links": measured, "busy": busy}
