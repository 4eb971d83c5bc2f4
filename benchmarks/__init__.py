"""What is measured against what; each module is one command whose last line is one line of JSON."""
