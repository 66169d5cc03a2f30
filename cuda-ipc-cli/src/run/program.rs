//! The program to run: where it is, and whether the loader would preload anything into it.
//!
//! The dynamic loader leaves LD_PRELOAD aside in a program that runs with more rights than its caller, and a static program has no loader. Neither says so,
//! and then the lane is missing without a word; so such a program is refused here.

pub(super) mod elf;

use std::ffi::{OsStr, OsString};
use std::fs::Metadata;
use std::io::Read;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::{Access, StatVfsMountFlags};

use super::Refusal;
use super::library::Library;
use elf::Elf;

/// Where execvp(3) looks if PATH is not set.
const DEFAULT_PATH: &str = "/bin:/usr/bin";
/// Interpreters of interpreters that the kernel follows.
const MOST_SCRIPTS: usize = 5;
/// Bytes of a script's first line that the kernel reads (BINPRM_BUF_SIZE).
const FIRST_LINE: u64 = 256;

/// Finds `name` as execvp(3) does: in PATH, unless it has a slash.
pub(super) fn find(name: &OsStr) -> Result<PathBuf, Refusal> {
    let missing = || Refusal::new(Refusal::NOT_FOUND, format!("{}: there is no such program", name.display()));
    if name.is_empty() {
        return Err(missing());
    }
    let candidates: Vec<PathBuf> = if name.as_bytes().contains(&b'/') {
        vec![PathBuf::from(name)]
    } else {
        let path = std::env::var_os("PATH").unwrap_or_else(|| OsString::from(DEFAULT_PATH));
        // An empty part means the present folder; a bare name would be searched for again.
        std::env::split_paths(&path)
            .map(|folder| if folder.as_os_str().is_empty() { Path::new(".").join(name) } else { folder.join(name) })
            .collect()
    };
    let mut refused = None;
    for candidate in candidates {
        match executable(&candidate) {
            Ok(true) => return Ok(candidate),
            Ok(false) => {}
            // As execvp(3): another one may come later in PATH.
            Err(why) => refused = refused.or(Some(Refusal::new(Refusal::NOT_RUNNABLE, format!("{}: {why}", candidate.display())))),
        }
    }
    Err(refused.unwrap_or_else(missing))
}

/// Whether there is a file that may be executed; an error if it may not.
fn executable(path: &Path) -> Result<bool, String> {
    match std::fs::metadata(path) {
        Err(error) if matches!(error.kind(), std::io::ErrorKind::NotFound | std::io::ErrorKind::NotADirectory) => Ok(false),
        Err(error) => Err(error.to_string()),
        Ok(found) if found.is_dir() => Err("it is a directory".to_owned()),
        Ok(_) => rustix::fs::access(path, Access::EXEC_OK).map(|()| true).map_err(|errno| errno.to_string()),
    }
}

/// Refuses a program into which nothing would be preloaded. Follows the first line of scripts.
pub(super) fn check(program: &Path, library: &Library) -> Result<(), Refusal> {
    let mut path = program.to_owned();
    for _ in 0..MOST_SCRIPTS {
        let refuse = |why: &str| {
            let by = if path == program { String::new() } else { format!(", the interpreter of {}", program.display()) };
            Refusal::new(Refusal::NOT_RUNNABLE, format!("{}{by}: {why}", path.display()))
        };
        // What may be executed but not read is not judged; the kernel runs it, and the loader preloads into it.
        let Ok(elf) = Elf::read(&path) else { return Ok(()) };
        if let Some(elf) = elf {
            return judge(&path, &elf, library).map_err(|why| refuse(&why));
        }
        // The kernel refuses it, and execvp(3) then lets a shell run its bytes as a script, whatever they say.
        if Elf::is_damaged(&path) {
            return Err(refuse("a program that is damaged or cut off"));
        }
        match interpreter(&path) {
            Some(next) => {
                let runnable = executable(&next).and_then(|found| if found { Ok(()) } else { Err("it is not there".to_owned()) });
                runnable.map_err(|why| refuse(&format!("its interpreter {} cannot be run: {why}", next.display())))?;
                path = next;
            }
            // A file that is neither: execvp(3) gives it to /bin/sh.
            None => path = PathBuf::from("/bin/sh"),
        }
    }
    Ok(())
}

fn judge(path: &Path, elf: &Elf, library: &Library) -> Result<(), String> {
    if elf.is_static() && !is_loader(path) {
        return Err("it is a static program: no dynamic loader runs in it, so nothing can be preloaded".to_owned());
    }
    if !elf.runs_on(library.elf()) {
        return Err("it is a program for another architecture than the preload library".to_owned());
    }
    if elf.is_musl() {
        return Err("it is a program of musl, and the preload library is one of glibc".to_owned());
    }
    match more_rights(path) {
        Some(why) => Err(format!("{why}, so the dynamic loader ignores what is to be preloaded")),
        None => Ok(()),
    }
}

/// The loader itself has no interpreter, and does preload into the program that it is told to run.
fn is_loader(path: &Path) -> bool {
    let file = path.canonicalize().ok().and_then(|path| path.file_name().map(OsStr::to_owned)).unwrap_or_default();
    file.as_bytes().starts_with(b"ld-") || file.as_bytes().starts_with(b"ld.so")
}

/// What a script's first line names. Source: execve(2), "Interpreter scripts".
fn interpreter(script: &Path) -> Option<PathBuf> {
    let mut start = Vec::new();
    std::fs::File::open(script).ok()?.take(FIRST_LINE).read_to_end(&mut start).ok()?;
    let line = start.strip_prefix(b"#!")?.split(|&byte| byte == b'\n').next()?;
    let word = line.split(|byte| matches!(byte, b' ' | b'\t' | b'\0')).find(|word| !word.is_empty())?;
    Some(PathBuf::from(OsString::from_vec(word.to_vec())))
}

/// Why the kernel would start this file in secure mode (AT_SECURE), if it would.
///
/// Source: execve(2) and capabilities(7): setuid and setgid count if they change a user or group, file capabilities for all but root; none of it on a mount with
/// nosuid or in a process with no_new_privs.
fn more_rights(path: &Path) -> Option<String> {
    const SET_UID: u32 = 0o4000;
    const SET_GID: u32 = 0o2000;
    const GROUP_EXECUTES: u32 = 0o0010;
    let found: Metadata = std::fs::metadata(path).ok()?;
    let ignored = rustix::fs::statvfs(path).is_ok_and(|mount| mount.f_flag.contains(StatVfsMountFlags::NOSUID))
        || rustix::thread::no_new_privs().unwrap_or(false);
    if ignored {
        return None;
    }
    let (uid, gid) = (rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw());
    if found.mode() & SET_UID != 0 && found.uid() != uid {
        return Some(format!("it is set-user-ID and runs as user {}", found.uid()));
    }
    if found.mode() & SET_GID != 0 && found.mode() & GROUP_EXECUTES != 0 && found.gid() != gid {
        return Some(format!("it is set-group-ID and runs as group {}", found.gid()));
    }
    let mut value = [0_u8; 64];
    if uid != 0 && rustix::fs::getxattr(path, "security.capability", &mut value).is_ok() {
        return Some("it has file capabilities".to_owned());
    }
    None
}

#[cfg(test)]
mod tests {
    use super::interpreter;
    use std::path::PathBuf;

    #[test]
    fn the_first_line_of_a_script() {
        let of = |text: &str| {
            let path = std::env::temp_dir().join(format!("cuda-ipc-first-line-{}", std::process::id()));
            std::fs::write(&path, text).expect("a script");
            let found = interpreter(&path);
            std::fs::remove_file(&path).expect("our script");
            found
        };
        assert_eq!(of("#!/bin/sh\n"), Some(PathBuf::from("/bin/sh")));
        assert_eq!(of("#! \t/usr/bin/env  python3 -u\nx"), Some(PathBuf::from("/usr/bin/env")));
        assert_eq!(of("#!/no/newline"), Some(PathBuf::from("/no/newline")));
        assert_eq!(of("#!\n/bin/sh"), None);
        assert_eq!(of("echo\n#!/bin/sh"), None);
        assert_eq!(of(""), None);
    }
}
