"""A worker that takes the place of another one waits until that one has exited."""

import subprocess
import threading

import psutil

from penstock.services.worker.process import wait_for_ends


def test_it_waits_for_the_end_of_a_process() -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        threading.Thread(target=process.kill).start()
        wait_for_ends([process.pid])
        assert psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE


def test_a_process_that_is_gone_is_not_waited_for() -> None:
    with subprocess.Popen(["true"]) as process:
        process.wait()
    wait_for_ends([process.pid])
