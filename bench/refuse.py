"""Makes this process live as in a default container: the kernel refuses it pidfd_getfd, as Docker's system call filter does. x86-64 only."""

import ctypes
import errno
import struct

PIDFD_GETFD = 438
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
RET_ALLOW, RET_ERRNO = 0x7FFF0000, 0x00050000


def refuse_pidfd_getfd():
    """From here on, for this process and its children, pidfd_getfd fails with EPERM."""
    instructions = [
        (0x20, 0, 0, 0),  # load the number of the call
        (0x15, 0, 1, PIDFD_GETFD),  # another one: skip the next instruction
        (0x06, 0, 0, RET_ERRNO | errno.EPERM),
        (0x06, 0, 0, RET_ALLOW),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *one) for one in instructions))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(instructions), ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.c_void_p(ctypes.addressof(program)), 0, 0):
        raise OSError(ctypes.get_errno(), "installing the system call filter")
    if libc.syscall(PIDFD_GETFD, -1, -1, 0) != -1 or ctypes.get_errno() != errno.EPERM:
        raise OSError("the system call filter is not in effect")
