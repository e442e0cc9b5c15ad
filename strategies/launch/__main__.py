"""A fork server process: ``python -m strategies.launch fork_server MODULES CONTROL DRIVER [LISTENER]``."""

import sys

from strategies.launch.fork_server import main

if __name__ == "__main__":
    sys.exit(main(*sys.argv[2:]))
