"""The first rank of each host prints numbered lines, each with the time of day: chatty.py LINES_A_SECOND SECONDS."""

import os
import sys
import time

rate, seconds = int(sys.argv[1]), int(sys.argv[2])
if os.environ["LOCAL_RANK"] == "0":
    begun, number = time.monotonic(), 0
    while number < rate * seconds:
        due = min(int((time.monotonic() - begun) * rate), rate * seconds)
        now = time.time()
        sys.stdout.write("".join(f"{now:.3f} line {one} of a chatty script\n" for one in range(number, due)))
        sys.stdout.flush()
        number = due
        time.sleep(0.01)
