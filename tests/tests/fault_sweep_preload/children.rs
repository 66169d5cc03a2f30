//! Children by fork, which tell their parent one text, and whose standard error is kept.
//!
//! # Safety
//! The unsafe here is a memory file that takes the place of a child's standard error.

use std::io::{BufRead, BufReader, Write};
use std::os::fd::FromRawFd;
use std::os::unix::fs::FileExt;

use cuda_ipc_tests::child;

/// The end of what a child tells.
const END: u8 = 0x1d;

/// Runs `body` in a child: what it tells. Panics with what the child has said if it panics.
pub(crate) fn hear(body: impl FnOnce(&Said) -> String) -> String {
    let (mut answer, teller) = std::io::pipe().expect("a pipe");
    let child = child::fork(move || {
        let said = Said::begin();
        let told = std::panic::catch_unwind(core::panic::AssertUnwindSafe(|| body(&said)));
        let mut teller = teller;
        let text = told.unwrap_or_else(|_| format!("{PANIC}{}", said.all()));
        teller.write_all(text.as_bytes()).and_then(|()| teller.write_all(&[END])).is_ok()
    });
    // Not to the end of the pipe: children that were forked meanwhile have it, too.
    let mut text = Vec::new();
    BufReader::new(&mut answer).read_until(END, &mut text).expect("what the child tells");
    text.pop();
    let text = String::from_utf8_lossy(&text).into_owned();
    child::wait(child, &text);
    assert!(!text.starts_with(PANIC), "{text}");
    text
}

const PANIC: &str = "a child panicked: ";

/// This process's standard error from now on.
pub(crate) struct Said(std::fs::File);

impl Said {
    fn begin() -> Self {
        let name = c"said";
        // SAFETY: a C string and a flag.
        let fd = unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC) };
        assert!(fd >= 0, "{}", std::io::Error::last_os_error());
        // SAFETY: made just now.
        let file = unsafe { std::fs::File::from_raw_fd(fd) };
        // SAFETY: two fds of this process; standard error is closed and is the file then.
        assert_eq!(unsafe { libc::dup2(fd, 2) }, 2);
        Self(file)
    }

    pub(crate) fn all(&self) -> String {
        let len = self.0.metadata().map_or(0, |metadata| metadata.len());
        let mut bytes = vec![0; usize::try_from(len).unwrap_or(0)];
        // Read at its place: the file's own is where the next line goes.
        let read = self.0.read_at(&mut bytes, 0).unwrap_or(0);
        bytes.truncate(read);
        String::from_utf8_lossy(&bytes).into_owned()
    }
}
