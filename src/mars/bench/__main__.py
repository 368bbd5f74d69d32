"""`python -m mars.bench`."""

from mars.bench.cli import main

if __name__ == "__main__":
    main()
