"""Exit statuses of every Muster command; the README lists the same table."""

SUCCEEDED = 0
FAILED = 1  # the run started and a rank failed
REFUSED = 2  # bad input or a failed check: nothing was started
UNREACHABLE = 3  # a host did not answer, or refused the login
DEPLOY_FAILED = 4  # provisioning, building or distributing failed
STOPPED = 75  # of the trainer and its agent alone: a signal stopped them, after they had saved a checkpoint
INTERRUPTED = 130  # Ctrl-C or `make stop`; a view of a run that is left by signal n ends with 128 + n, the run goes on
