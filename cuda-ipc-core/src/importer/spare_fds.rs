//! How many fds this process can take at a time without leaving the application none.

use rustix::fs::{Dir, Mode, OFlags};
use rustix::process::{Resource, getrlimit};

/// Fds left to the application at least, of whatever is free.
const MARGIN: usize = 16;

/// Fds that may be taken now for a short time; at least one, since only the kernel knows.
pub(super) fn spare_fds() -> usize {
    let limit = getrlimit(Resource::Nofile).current.and_then(|limit| usize::try_from(limit).ok()).unwrap_or(usize::MAX);
    let free = limit.saturating_sub(open_fds());
    // Where little is free, half of it.
    free.saturating_sub(MARGIN.min(free / 2)).max(1)
}

/// The fds of this process; none where that cannot be seen.
fn open_fds() -> usize {
    // Of this thread: the first thread's directory is empty where that has exited.
    let Ok(directory) = rustix::fs::open("/proc/thread-self/fd", OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
    else {
        return 0;
    };
    // Since Linux 6.2 the length of the directory is their number.
    match rustix::fs::fstat(&directory).ok().and_then(|stat| usize::try_from(stat.st_size).ok()) {
        Some(count) if count > 0 => count,
        _ => Dir::read_from(&directory).map_or(0, |entries| entries.count().saturating_sub(2)),
    }
}
