"""A worker process: ``python -m strategies.pipeline worker RANK DRIVER_PID DIRECTORY``, or a fork of a fork server.

The worker watches its driver from the start, before it imports torch and joins the session, so that it ends whenever
the driver ends. The import takes a second or more, and joining the session waits in C++.
"""

import shutil
import signal
import sys
from functools import partial

from strategies.launch.process_ends import Watchdog, wait_for_end


def main(rank: int, driver_pid: int, directory: str) -> None:
    """Join a session and serve it until the driver closes this process's standard input or ends.

    Args:
        rank: The rank of this process.
        driver_pid: The process id of the driver.
        directory: The directory of the session.
    """
    # Only the driver handles a signal to the whole process group (Ctrl-C, timeout, a scheduler). It may still need its
    # workers to save a checkpoint, and it ends them itself.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)

    def has_ended() -> bool:
        # A process that the driver forked (of a data loader) may hold the pipe open after the driver has ended.
        wait_for_end(driver_pid, or_readable=sys.stdin.fileno())
        return True

    # If the driver was killed, no other process removes the session's directory. Otherwise the driver removes it, too.
    remove = partial(shutil.rmtree, directory, ignore_errors=True)
    watchdog = Watchdog("relay-driver-watch", has_ended, status=0, clean_up=remove)
    watchdog.start()
    from strategies.pipeline.worker.process import join

    join(directory, rank)
    watchdog.join()


if __name__ == "__main__":
    main(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
