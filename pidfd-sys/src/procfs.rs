//! Reading a small file below `/proc` into a buffer on the stack, for the files that parse one.

use crate::{Errno, Error, Step};
use std::fs::File;
use std::io::{self, Read};

/// Reads the file at `path` into `buffer` and returns the part that was filled.
///
/// Errors: the errno of open or read; `EBADMSG` if the file does not fit.
pub(crate) fn read_small<'a>(path: &str, buffer: &'a mut [u8], step: Step) -> Result<&'a [u8], Error> {
    let mut file = File::open(path).map_err(|error| step.failed(errno_of(&error)))?;
    let mut len = 0;
    loop {
        let room = buffer.get_mut(len..).unwrap_or_default();
        if room.is_empty() {
            return Err(step.failed(Errno::EBADMSG));
        }
        match file.read(room).map_err(|error| step.failed(errno_of(&error)))? {
            0 => return Ok(buffer.get(..len).unwrap_or_default()),
            read => len += read,
        }
    }
}

/// Returns the errno in `error`; `EIO` stands for the ones that std makes up itself.
pub(crate) fn errno_of(error: &io::Error) -> Errno {
    error.raw_os_error().map_or(Errno::EIO, Errno)
}
