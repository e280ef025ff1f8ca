"""Becomes the command that it is given, as a child that cannot outlive its parent.

Run as a script by ``infra.process``: drops to an account, sets the niceness, asks the kernel for a signal when the
parent dies, then executes. A script of its own, because Python code between fork and exec deadlocks in a program
with threads; and no ``setpriv``, because not every image has it. Everything is imported before the change of
account, which may cut the way to the standard library.
"""

import ctypes
import os
import sys

PR_SET_PDEATHSIG = 1


def main(argv: list[str]) -> None:
    """``PARENT SIGNAL NICE UID:GID|- PROGRAM [ARGUMENT]...``; the program by its path."""
    parent, signal_number, nice = map(int, argv[:3])
    account, command = argv[3], argv[4:]
    if nice:
        os.nice(nice)
    if account != "-":
        uid, gid = map(int, account.split(":"))
        os.setgroups([])
        os.setgid(gid)
        os.setuid(uid)
    # After the change of account: that clears the setting.
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal_number, 0, 0, 0):
        sys.exit(f"prctl: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent:  # it died before the line above
        sys.exit("parent is gone")
    try:
        os.execv(command[0], command)
    except OSError as error:
        sys.exit(f"{command[0]}: {error.strerror}")


if __name__ == "__main__":
    main(sys.argv[1:])
