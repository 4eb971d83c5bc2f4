"""How every command talks with the person at the terminal: make's variables, refusals, exit statuses, signals, output.

Imports launch.files alone. command.py takes a command from start to last message; fabfile.py lists the commands.
Writes and reads no document.
"""
