"""A module that does not survive being imported."""

import os
import sys

print("libdevice.so: no such device", file=sys.stderr, flush=True)
os._exit(7)
