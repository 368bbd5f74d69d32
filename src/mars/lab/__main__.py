"""`python -m mars.lab` is the command `mars`."""

from mars.lab.cli import main

raise SystemExit(main())
