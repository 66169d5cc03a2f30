//! The functions that are interposed.

use core::ffi::CStr;

use crate::entry::entries;

/// How a function says that it failed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Failure {
    /// It returns -1 and sets errno.
    Errno,
    /// It returns the error number.
    Returned,
}

/// One function.
pub(crate) struct Function {
    pub(crate) name: &'static CStr,
    pub(crate) failure: Failure,
}

entries! {
    // files
    open: Errno,
    open64: Errno,
    openat: Errno,
    openat64: Errno,
    close: Errno,
    read: Errno,
    pread: Errno,
    pread64: Errno,
    stat: Errno,
    stat64: Errno,
    statx: Errno,
    fstat: Errno,
    fstat64: Errno,
    fstatat: Errno,
    fstatat64: Errno,
    fstatfs: Errno,
    fstatfs64: Errno,
    ftruncate: Errno,
    ftruncate64: Errno,
    fcntl: Errno,
    fcntl64: Errno,
    dup: Errno,
    dup2: Errno,
    dup3: Errno,
    poll: Errno,
    memfd_create: Errno,
    // sockets
    socket: Errno,
    bind: Errno,
    listen: Errno,
    accept4: Errno,
    connect: Errno,
    sendmsg: Errno,
    recvmsg: Errno,
    getsockopt: Errno,
    ioctl: Errno,
    eventfd: Errno,
    // memory
    mmap: Errno,
    mmap64: Errno,
    munmap: Errno,
    mprotect: Errno,
    madvise: Errno,
    posix_madvise: Returned,
    // processes and the rest
    syscall: Errno,
    getrandom: Errno,
    getrlimit: Errno,
    getrlimit64: Errno,
    prlimit: Errno,
    prlimit64: Errno,
    pthread_create: Returned,
    __register_atfork: Returned,
}
