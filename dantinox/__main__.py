"""`python -m dantinox <command>`."""

from dantinox.cli import entry

if __name__ == "__main__":  # a process of a sweep imports this file again
    entry()
