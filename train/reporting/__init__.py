"""What a run reports: the figures of each step (step_stats), and what rank 0 shows and writes.

May import: session, evaluate and all below. Writes settings.json and metrics.jsonl, TensorBoard's event files (or
what other --loggers make of the figures), profile/, curves.png, and last result.json, in the folder of the run;
launch and benchmarks read them.
"""
