"""How every command talks with the person at the terminal: make's variables, refusals, exit statuses, signals, output.

Imports launch.files alone. Not for a command itself: fabfile.py lists those.
Writes and reads no document.
"""
