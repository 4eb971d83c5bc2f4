"""Benchmarks: each module is a command that measures Muster against a reference; its last line is JSON."""
