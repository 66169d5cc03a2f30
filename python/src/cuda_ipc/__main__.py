"""`python -m cuda_ipc ARGS` is `cuda-ipc ARGS`."""

import os
import sys

from . import program_path


def main() -> None:
    """Becomes the program, so that signals and the exit status are its own."""
    program = program_path()
    os.execv(program, ["cuda-ipc", *sys.argv[1:]])


if __name__ == "__main__":
    main()
