"""A job that prints nothing, without torch, until it is stopped."""

import time

time.sleep(600)
