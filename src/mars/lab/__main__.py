"""`python -m mars.lab` is the command `mars`."""

from mars.lab.cli import command

command()
