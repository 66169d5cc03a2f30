//! What keeps processes apart: namespaces, users, filters of system calls. Each is the kernel's own.
//!
//! # Safety
//! The unsafe here is: code between fork and exec, which makes only system calls and allocates nothing; and calls of prctl, one with the address of a filter
//! program that lives until it returns.

use std::os::unix::process::CommandExt;
use std::process::Command;

use nix::sched::{CloneFlags, unshare};

/// Runs `body` where processes that it starts have new namespaces of these kinds. Says why not, where that is not allowed.
///
/// On a thread of its own, because a thread that has gone there does not come back.
pub fn in_new_namespaces<T: Send>(kinds: CloneFlags, body: impl FnOnce() -> T + Send) -> Option<T> {
    std::thread::scope(|scope| {
        let inside = scope.spawn(|| match unshare(kinds) {
            Ok(()) => Some(body()),
            Err(error) => {
                println!("skipped: no namespaces of our own ({kinds:?}): {error}");
                None
            }
        });
        inside.join().expect("what is done in the namespaces")
    })
}

/// Gives the process a user namespace of its own in which no user exists.
pub fn without_users(command: &mut Command) {
    // SAFETY: see the module's chapter.
    unsafe { command.pre_exec(|| Ok(unshare(CloneFlags::CLONE_NEWUSER)?)) };
}

/// Gives the process another user and group, and a user namespace of its own in which that user is number 0 and the only one.
pub fn as_root_of_its_own(command: &mut Command, uid: u32) {
    let (users, groups) = (format!("0 {uid} 1"), format!("0 {uid} 1"));
    let become_root = move || {
        nix::unistd::setgroups(&[])?;
        nix::unistd::setresgid(uid.into(), uid.into(), uid.into())?;
        nix::unistd::setresuid(uid.into(), uid.into(), uid.into())?;
        // Taken away with the user; without it the files of the next lines belong to root.
        dumpable(true)?;
        unshare(CloneFlags::CLONE_NEWUSER)?;
        write(c"/proc/self/setgroups", b"deny")?;
        write(c"/proc/self/uid_map", users.as_bytes())?;
        write(c"/proc/self/gid_map", groups.as_bytes())
    };
    // SAFETY: see the module's chapter.
    unsafe { command.pre_exec(become_root) };
}

/// Gives the process another user and group.
pub fn as_user(command: &mut Command, uid: u32) {
    command.uid(uid).gid(uid);
}

/// Gives the process this soft and hard limit of open files.
pub fn with_files(command: &mut Command, limit: u64) {
    use nix::sys::resource::{Resource, setrlimit};
    // SAFETY: see the module's chapter.
    unsafe { command.pre_exec(move || Ok(setrlimit(Resource::RLIMIT_NOFILE, limit, limit)?)) };
}

fn write(path: &core::ffi::CStr, text: &[u8]) -> std::io::Result<()> {
    use nix::fcntl::{OFlag, open};
    let file = open(path, OFlag::O_WRONLY | OFlag::O_CLOEXEC, nix::sys::stat::Mode::empty())?;
    nix::unistd::write(file, text)?;
    Ok(())
}

/// Whether others of the same user may look into this process and fetch its fds.
pub fn dumpable(whether: bool) -> std::io::Result<()> {
    nix::sys::prctl::set_dumpable(whether)?;
    Ok(())
}

/// Takes CAP_SYS_PTRACE from the process, which stays root.
pub fn without_tracing(command: &mut Command) {
    const CAP_SYS_PTRACE: libc::c_ulong = 19;
    let drop = || {
        let zero: libc::c_ulong = 0;
        // SAFETY: see the module's chapter.
        match unsafe { libc::prctl(libc::PR_CAPBSET_DROP, CAP_SYS_PTRACE, zero, zero, zero) } {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        }
    };
    // SAFETY: see the module's chapter.
    unsafe { command.pre_exec(drop) };
}

/// Makes system call `number` fail with `errno` in the process, and in all that it starts.
pub fn refusing(command: &mut Command, number: libc::c_long, errno: i32) {
    let install = move || {
        refuse(number, errno);
        Ok(())
    };
    // SAFETY: see the module's chapter.
    unsafe { command.pre_exec(install) };
}

/// Makes pidfd_getfd fail with `errno` on this thread for every fd number but `i32::MAX`, which is none: so it looks as if other processes were closed to this
/// one, by a rule that does not hold for itself.
pub fn refuse_fds(errno: i32) {
    const SECOND_ARGUMENT: u32 = 24;
    let getfd = u32::try_from(pidfd_sys::numbers::PIDFD_GETFD).expect("a system call's number");
    install(&mut [
        libc::sock_filter { code: LOAD, jt: 0, jf: 0, k: 0 },
        libc::sock_filter { code: JUMP_IF_EQUAL, jt: 0, jf: 3, k: getfd },
        libc::sock_filter { code: LOAD, jt: 0, jf: 0, k: SECOND_ARGUMENT },
        libc::sock_filter { code: JUMP_IF_EQUAL, jt: 1, jf: 0, k: i32::MAX.cast_unsigned() },
        libc::sock_filter { code: RETURN, jt: 0, jf: 0, k: libc::SECCOMP_RET_ERRNO | errno.cast_unsigned() },
        libc::sock_filter { code: RETURN, jt: 0, jf: 0, k: libc::SECCOMP_RET_ALLOW },
    ]);
}

/// Kills the process, with SIGSYS, as soon as it names anybody who may look into it: prctl(PR_SET_PTRACER).
pub fn dying_of_ptracer(command: &mut Command) {
    const FIRST_ARGUMENT: u32 = 16;
    const PR_SET_PTRACER: u32 = 0x5961_6d61;
    let install = || {
        install(&mut [
            libc::sock_filter { code: LOAD, jt: 0, jf: 0, k: 0 },
            libc::sock_filter { code: JUMP_IF_EQUAL, jt: 0, jf: 3, k: u32::try_from(libc::SYS_prctl).expect("a system call's number") },
            libc::sock_filter { code: LOAD, jt: 0, jf: 0, k: FIRST_ARGUMENT },
            libc::sock_filter { code: JUMP_IF_EQUAL, jt: 0, jf: 1, k: PR_SET_PTRACER },
            libc::sock_filter { code: RETURN, jt: 0, jf: 0, k: libc::SECCOMP_RET_KILL_PROCESS },
            libc::sock_filter { code: RETURN, jt: 0, jf: 0, k: libc::SECCOMP_RET_ALLOW },
        ]);
        Ok(())
    };
    // SAFETY: see the module's chapter.
    unsafe { command.pre_exec(install) };
}

/// Makes system call `number` fail with `errno` on this thread from now on; all others pass.
///
/// Source: seccomp(2).
pub fn refuse(number: libc::c_long, errno: i32) {
    let number = u32::try_from(number).expect("a system call's number");
    install(&mut [
        libc::sock_filter { code: LOAD, jt: 0, jf: 0, k: 0 },
        libc::sock_filter { code: JUMP_IF_EQUAL, jt: 0, jf: 1, k: number },
        libc::sock_filter { code: RETURN, jt: 0, jf: 0, k: libc::SECCOMP_RET_ERRNO | errno.cast_unsigned() },
        libc::sock_filter { code: RETURN, jt: 0, jf: 0, k: libc::SECCOMP_RET_ALLOW },
    ]);
}

const LOAD: u16 = 0x20;
const JUMP_IF_EQUAL: u16 = 0x15;
const RETURN: u16 = 0x06;

fn install(filter: &mut [libc::sock_filter]) {
    let len = u16::try_from(filter.len()).expect("a short program");
    let program = libc::sock_fprog { len, filter: filter.as_mut_ptr() };
    let (mode, one, zero): (libc::c_ulong, libc::c_ulong, libc::c_ulong) = (libc::SECCOMP_MODE_FILTER.into(), 1, 0);
    // SAFETY: see the module's chapter.
    let rc = unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, one, zero, zero, zero) };
    assert_eq!(rc, 0, "{}", std::io::Error::last_os_error());
    // SAFETY: see the module's chapter.
    let rc = unsafe { libc::prctl(libc::PR_SET_SECCOMP, mode, &raw const program, zero, zero) };
    assert_eq!(rc, 0, "{}", std::io::Error::last_os_error());
}
