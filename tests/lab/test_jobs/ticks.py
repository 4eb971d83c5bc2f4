"""A job that prints a numbered line now and then, to see whether any is lost or repeated: 50, or as many as it is
told."""

import sys
import time

for number in range(int(sys.argv[1]) if len(sys.argv) > 1 else 50):
    print(f"tick {number}")
    time.sleep(0.2)
