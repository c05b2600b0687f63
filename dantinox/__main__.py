"""`python -m dantinox <command>`."""

from dantinox.cli import entry

# Worker processes of a sweep import this file, and must not run the command.
if __name__ == "__main__":
    entry()
