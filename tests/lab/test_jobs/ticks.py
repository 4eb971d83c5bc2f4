"""A job that prints a numbered line now and then, to see whether any is lost or repeated."""

import time

for number in range(50):
    print(f"tick {number}")
    time.sleep(0.2)
