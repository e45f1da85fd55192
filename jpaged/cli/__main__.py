"""Owns `python -m jpaged.cli`."""

from jpaged.cli import main

if __name__ == "__main__":
    main(prog_name="jpaged")
