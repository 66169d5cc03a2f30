//! `/proc/PID/stat`: state, thread count and start time of a process.

use crate::procfs::read_small;
use crate::{Errno, Error, Step};

/// 52 fields of at most 20 digits and a name fit well below this.
const STAT_MAX: usize = 2048;

/// What `/proc/PID/stat` says about a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ProcessStat {
    /// State of the first thread as the kernel's letter: `b'R'`, `b'S'`, `b'D'`, `b'T'`, `b'Z'` and others. `Z` is a process that has exited, or
    /// one whose first thread has while others run: `threads` then counts more than one.
    pub state: u8,
    /// Start time in clock ticks after boot, as the reader's time namespace shows it. exec does not change it.
    pub start_time_ticks: u64,
    /// Threads of the process, exited first thread included.
    pub threads: u64,
}

/// Reads the state of the process with number `pid` in the PID namespace of the mounted `/proc`.
///
/// Needs no right over the process unless `/proc` is mounted with `hidepid`.
/// Errors: `ENOENT` if there is no such process, or no `/proc`; `ESRCH` if it vanished while being read; `EBADMSG` if the text is not understood.
/// Source: proc_pid_stat(5), fields 3, 20 and 22.
pub fn process_stat(pid: u32) -> Result<ProcessStat, Error> {
    let mut buffer = [0; STAT_MAX];
    let text = read_small(&std::format!("/proc/{pid}/stat"), &mut buffer, Step::ReadStat)?;
    parse(text).ok_or(Step::ReadStat.failed(Errno::EBADMSG))
}

/// Parses the line. Field 2 is the name in parentheses; it may hold anything, so the last `)` ends it: all later fields are a letter or numbers.
fn parse(text: &[u8]) -> Option<ProcessStat> {
    let end_of_name = text.iter().rposition(|byte| *byte == b')')?;
    let rest = core::str::from_utf8(text.get(end_of_name + 1..)?).ok()?;
    let mut fields = rest.split_ascii_whitespace();
    let state = match fields.next()?.as_bytes() {
        [state] => *state,
        _ => return None,
    };
    // 3 is taken, so 20 is the 17th of the rest, counted from 0 as 16, and 22 the second after it.
    let threads = fields.nth(16)?.parse().ok()?;
    let start_time_ticks = fields.nth(1)?.parse().ok()?;
    Some(ProcessStat { state, start_time_ticks, threads })
}

#[cfg(test)]
mod tests {
    use super::{ProcessStat, parse};
    use std::{format, vec::Vec};

    fn line(name: &[u8]) -> Vec<u8> {
        let tail = ") S 1 4242 4242 0 -1 4194304 98 0 0 0 1 2 3 4 20 0 7 0 66713 3133440 381 18446744073709551615 0 0\n";
        [b"4242 (", name, tail.as_bytes()].concat()
    }

    #[test]
    fn a_name_may_hold_anything() {
        let want = Some(ProcessStat { state: b'S', start_time_ticks: 66713, threads: 7 });
        for name in [&b"cat"[..], b"a) (b c", b") R 1 2", b"", b"(((", b"\xff\xfe\n)"] {
            assert_eq!(parse(&line(name)), want, "{name:?}");
        }
    }

    #[test]
    fn a_cut_line_is_refused_and_never_panics() {
        let whole = line(b"x");
        let start_time_end = whole.windows(5).position(|part| part == b"66713").expect("it is in there");
        for len in 0..start_time_end {
            assert_eq!(parse(&whole[..len]), None, "{len}");
        }
        assert!(parse(b"1 (x) SS 1").is_none());
        assert!(parse(format!("1 (x) S {}", "-1 ".repeat(40)).as_bytes()).is_none());
    }
}
