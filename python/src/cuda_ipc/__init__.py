"""Where the files of this package are, and whether they are at work in this process."""

import os

__version__ = "0.1.0"
__all__ = ["is_active", "preload_path", "program_path"]

_HERE = os.path.dirname(os.path.abspath(__file__))
_LIBRARY = "libcuda_ipc_preload.so"


def program_path() -> str:
    """Path of the `cuda-ipc` program."""
    return os.path.join(_HERE, "bin", "cuda-ipc")


def preload_path() -> str:
    """Path of the preload library, for whoever sets LD_PRELOAD without `cuda-ipc run`."""
    return os.path.join(_HERE, "lib", _LIBRARY)


def is_active() -> bool:
    """Whether the preload library, of this package or another, is loaded in this process. It cannot be loaded later: it has to be there before UCX."""
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        return any(line.rstrip("\n").endswith("/" + _LIBRARY) for line in maps)
