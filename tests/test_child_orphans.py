"""Check that a process to which the kernel hands orphans collects them, and leaves its own children to their owner.

A child subreaper (prctl(2)) stands for the PID 1 of a container.
"""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import ctypes, os, signal, subprocess, sys, time
from inference_api.child import reap_orphans

PR_SET_CHILD_SUBREAPER = 36
ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)

def children():
    with open(f"/proc/{os.getpid()}/task/{os.getpid()}/children") as file:
        return {int(pid) for pid in file.read().split()}

def wait_ended(pid):
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)

# Spawned without an object that would collect it, if it has ended by then, with its parent.
orphaning = "import os; print(os.posix_spawnp('true', ['true'], os.environ))"
own = subprocess.Popen(["true"])
wait_ended(own.pid)
orphan = int(subprocess.run([sys.executable, "-c", orphaning], stdout=subprocess.PIPE, check=True).stdout)
wait_ended(orphan)
living = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
assert children() == {own.pid, orphan, living.pid}
reap_orphans([own.pid, living.pid])
assert own.pid in children() and living.pid in children(), "a child of its own is left to its owner"
assert own.wait() == 0
reap_orphans([living.pid])
assert children() == {living.pid}, "the orphan is gone, the living child is not waited for"
living.stdin.close()
assert living.wait() == 0
reap_orphans([])
assert children() == set(), "and no child at all is no fault"
"""


def test_orphans_are_collected_and_children_of_its_own_are_not() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=60)
