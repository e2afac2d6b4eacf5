"""Makes system calls and allocations of the engine fail: the n-th call of one function, in one process."""

import ctypes
import errno
from pathlib import Path

# Errors that the system may return.
ERRORS = {
    "memfd_create": (errno.EMFILE, errno.ENOMEM),
    "ftruncate": (errno.EFBIG, errno.EINTR),
    "socket": (errno.EMFILE,),
    "bind": (errno.EADDRINUSE,),
    "listen": (errno.EADDRINUSE,),
    "accept4": (errno.EMFILE, errno.EINTR, errno.ECONNABORTED),
    "connect": (errno.ECONNREFUSED, errno.EAGAIN),
    "send": (errno.EPIPE,),
    "recv": (errno.ECONNRESET,),
    "sendmsg": (errno.ETOOMANYREFS,),
    "recvmsg": (errno.ENOMEM,),
    "getsockopt": (errno.ENOBUFS,),
    "mmap": (errno.ENOMEM,),
    "madvise": (errno.EAGAIN,),
    "pread": (errno.EIO,),
    "poll": (errno.EINTR,),
    "syscall": (errno.EMFILE, errno.ENOSYS, errno.EINTR),
    "fcntl": (errno.EPERM,),
    "_Znwm": (errno.ENOMEM,),
}


class Engine:
    """The engine of this process, whose calls can be counted and refused."""

    def __init__(self, library: str):
        from fsdp2x.base.native import _C

        self._library = ctypes.CDLL(library)
        self._library.name_of.restype = ctypes.c_char_p
        num = self._library.install(Path(_C.__file__).name.encode())
        assert num >= 10, f"only {num} of the engine's imports were found"
        self.names = [self._library.name_of(index).decode() for index in range(self._library.num_functions())]

    def count(self) -> None:
        self._library.arm(-1, 0, 0)

    def refuse(self, name: str, call: int, error: int) -> None:
        """The ``call``-th call of the function from now on, from 1, fails."""
        self._library.arm(self.names.index(name), call, error)

    def rest(self) -> dict[str, int]:
        """Nothing fails any more. Returns how often each function was called since."""
        self._library.disarm()
        return {name: self._library.num_calls(index) for index, name in enumerate(self.names)}
