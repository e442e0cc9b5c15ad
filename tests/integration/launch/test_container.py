"""What a container may lack, all at once: a home, a folder for temporary files, shared memory, a name, open files."""

import os
import subprocess
import sys
from pathlib import Path

import hosts_job
import pytest
from paths import ROOT
from two_hosts import CAN_HAVE_HOSTS

SHELL = """
mount -t tmpfs -o size=1M tmpfs /dev/shm
mkdir -p "$TMPDIR" && mount -t tmpfs -o ro tmpfs "$TMPDIR"
hostname nowhere
ip link set lo up
ulimit -n 64
exec "$@"
"""


@pytest.mark.nightly
@pytest.mark.alone
@pytest.mark.timeout(400)
@pytest.mark.skipif(not CAN_HAVE_HOSTS, reason="namespaces need root, ip and unshare")
def test_a_container_that_lacks_what_it_may_lack(tmp_path: Path) -> None:
    """The script is process 1, has no HOME, 64 open files, 1 MiB of /dev/shm, and a name that does not resolve."""
    container = [
        "unshare",
        "--mount",
        "--uts",
        "--net",
        "--ipc",
        "--pid",
        "--fork",
        "--mount-proc",
        "sh",
        "-c",
        SHELL,
        "sh",
    ]
    variables = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path / "read-only")}
    job = [sys.executable, hosts_job.__file__, "alone", "60", str(tmp_path)]
    ended = subprocess.run(
        [*container, *job], env=variables, cwd=tmp_path, capture_output=True, text=True, timeout=380, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "a script has ended" in ended.stdout
