"""`python -m dantinox <command>`."""

from dantinox.cli import entry

if (
    __name__ == "__main__"
):  # worker processes of a sweep import this file, and must not run the command
    entry()
