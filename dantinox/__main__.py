"""`python -m dantinox <command>`."""

from dantinox.cli import entry

entry()
