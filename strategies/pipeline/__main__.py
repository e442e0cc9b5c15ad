"""A worker's process: ``python -m strategies.pipeline SESSION_DIRECTORY RANK DRIVER_PID``, or a fork of a fork server.

The worker ends with its driver from the first moment on: importing torch takes a second, or many on a loaded machine,
and joining the session waits in C++.
"""

import shutil
import signal
import sys
from functools import partial

from strategies.launch.supervision import Watchdog, wait_for_end


def main(directory: str, rank: int, driver_pid: int) -> None:
    """Joins the session and serves it until the driver closes this process's standard input or ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the driver's; it ends its workers itself

    def has_ended() -> bool:
        # A process that the driver has forked (a data loader's) may hold the pipe open after the driver's death.
        wait_for_end(driver_pid, or_readable=sys.stdin.fileno())
        return True

    # If the driver was killed, no other process removes the session's directory. A driver that lives does the same.
    remove = partial(shutil.rmtree, directory, ignore_errors=True)
    watchdog = Watchdog("relay-driver-watch", has_ended, status=0, clean_up=remove)
    watchdog.start()
    from strategies.pipeline.worker.process import join

    join(directory, rank)
    watchdog.join()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
