"""Brings the small model into the user's cache, once, and prints its path."""

import sys

from jpaged.small_model import small_model_path

if __name__ == "__main__":
    try:
        print(small_model_path())
    except OSError as error:
        sys.exit(str(error))
