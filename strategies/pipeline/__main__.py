"""A worker's process: ``python -m strategies.pipeline SESSION_DIRECTORY RANK DRIVER_PID``, or a fork of a fork server.

The worker ends with its driver from the first moment on: importing torch takes a second, or many on a loaded machine,
and joining the session waits in C++.
"""

import os
import select
import shutil
import signal
import sys
import threading

_LOOK_SECONDS = 0.5


def end_with_driver(directory: str, driver_pid: int) -> None:
    """Ends this process when the driver closes its standard input or ends.

    Args:
        directory: That of the session.
        driver_pid: The driver's process id.
    """
    # A process that the driver has forked (a data loader's) may hold the pipe open after the driver's death.
    try:
        watched = [sys.stdin, os.pidfd_open(driver_pid)]
    except ProcessLookupError:  # the driver has ended
        watched = []
    except (AttributeError, OSError):  # not on Linux, where this process is the driver's child
        watched = [sys.stdin]
        while os.getppid() == driver_pid and not select.select(watched, [], [], _LOOK_SECONDS)[0]:
            pass
    else:
        select.select(watched, [], [])
    # If the driver was killed nobody else is left to do it. Its end closes standard input before it makes this process
    # an orphan, so the two cannot be told apart here; a driver that lives does the same.
    shutil.rmtree(directory, ignore_errors=True)
    os._exit(0)  # without waiting for threads that compute, or wait for a neighbour


def main(directory: str, rank: int, driver_pid: int) -> None:
    """Joins the session and serves it to its end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the driver's; it ends its workers itself
    watch = threading.Thread(target=end_with_driver, args=(directory, driver_pid), name="relay-watch", daemon=True)
    watch.start()
    from strategies.pipeline.worker.process import join

    join(directory, rank)
    watch.join()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
