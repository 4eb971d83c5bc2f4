"""Plants deliberate faults and finds the tests that notice them. Usage: __main__.py."""
