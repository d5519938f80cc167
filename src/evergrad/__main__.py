"""`python -m evergrad` is the command `evergrad`."""

from evergrad.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
