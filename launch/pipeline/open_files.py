"""Limit of open files that a pipeline needs."""

import resource

from penstock.launch.pipeline.errors import LaunchError

BASE, PER_PROCESS = 128, 6
"""descriptors of the supervisor, which has the most: sockets and connections of some clients; for
each process two pipes, a pidfd, a connection and kept memory"""


def check_open_files(num_processes: int) -> None:
    """Raise LaunchError if the limit of open files is too low for these processes."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = BASE + PER_PROCESS * num_processes
    if soft != resource.RLIM_INFINITY and soft < needed:
        raise LaunchError(
            f"open files: got a limit of {soft}, expected {needed} or more for {num_processes} "
            "processes; raise the hard limit (`ulimit -n`, LimitNOFILE= of systemd, --ulimit "
            "nofile= of Docker), or start fewer processes"
        )
