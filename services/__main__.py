"""Entry point of a fork server: `python -P -m penstock.services SERVICE ...` imports the services.

Each process that is forked from it runs one of them.
"""

import sys
from importlib import import_module

from penstock.protocol.transport.socket_pairs import serve_forks

mains = {name: import_module(f"penstock.services.{name}.__main__").main for name in sys.argv[1:]}
mains[serve_forks()]()
