"""Stands for a user's program in the commands of the documents: it ends well only under the preload library."""

import sys

with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
    sys.exit(not any("/libcuda_ipc_preload.so" in line for line in maps))
