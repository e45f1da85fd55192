"""The parts of `scripts/make_references.py`, one module for each kind of stored reference."""
