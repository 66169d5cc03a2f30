//! pid_namespace and user_namespace: equal where shared, different after unshare.
//!
//! # Safety
//! unshare takes an integer and is called in a forked child with one thread.

use crate::child::{Child, fork};
use crate::sys::{check, is_root, skip};
use pidfd_sys::{Errno, Error, Step, pid_namespace, user_namespace};
use std::os::unix::fs::MetadataExt;

fn failed(errno: Errno) -> Error {
    Error { step: Step::ReadNamespace, errno }
}

#[test]
fn a_child_shares_both() {
    let child = Child::idle();
    assert_eq!(pid_namespace(Some(child.pid())), pid_namespace(None));
    assert_eq!(user_namespace(Some(child.pid())), user_namespace(None));
    assert_ne!(pid_namespace(None), user_namespace(None));
}

#[test]
fn the_inode_is_the_one_in_the_links_text() {
    for (name, inode) in [("pid", pid_namespace(None)), ("user", user_namespace(None))] {
        let text = std::fs::read_link(format!("/proc/self/ns/{name}")).expect("our own");
        assert_eq!(text.to_str(), Some(&*format!("{name}:[{}]", inode.expect("our own"))));
    }
}

#[test]
fn a_process_in_its_own_pid_namespace() {
    // Without root, a user namespace of one's own gives the right to make the other.
    let flags = if is_root() { libc::CLONE_NEWPID } else { libc::CLONE_NEWPID | libc::CLONE_NEWUSER };
    let child = Child::start(|link| {
        // SAFETY: integers only.
        let rc = unsafe { libc::unshare(flags) };
        // The caller of unshare stays where it is; its children are in the new namespace.
        match check(rc.into()).and_then(|_| fork()) {
            Err(errno) => link.send(-errno.0),
            Ok(0) => link.park(),
            Ok(grandchild) => link.send(grandchild),
        }
        link.park();
    });
    let grandchild = child.receive();
    if grandchild < 0 {
        skip(&format!("no PID namespace of one's own: {}", Errno(-grandchild)));
        return;
    }
    let inside = pid_namespace(Some(grandchild.cast_unsigned())).expect("our grandchild");
    assert_ne!(inside, pid_namespace(None).expect("our own"));
    assert_eq!(pid_namespace(Some(child.pid())), pid_namespace(None));
    // SAFETY: integers only; the parent of this process is parked, so the number is still its.
    unsafe { libc::kill(grandchild, libc::SIGKILL) };
}

#[test]
fn a_process_in_its_own_user_namespace() {
    let child = Child::start(|link| {
        // SAFETY: integers only.
        let rc = unsafe { libc::unshare(libc::CLONE_NEWUSER) };
        link.send(check(rc.into()).map_or_else(|errno| errno.0, |_| 0));
        link.park();
    });
    match child.receive() {
        0 => {
            assert_ne!(user_namespace(Some(child.pid())).expect("our child"), user_namespace(None).expect("our own"));
            assert_eq!(pid_namespace(Some(child.pid())), pid_namespace(None));
        }
        errno => skip(&format!("no user namespace of one's own: {}", Errno(errno))),
    }
}

#[test]
fn a_dead_process() {
    let mut child = Child::idle();
    child.kill();
    child.reap();
    assert_eq!(pid_namespace(Some(child.pid())), Err(failed(Errno::ENOENT)));
    assert_eq!(user_namespace(Some(child.pid())), Err(failed(Errno::ENOENT)));
}

#[test]
fn another_users_process_without_root() {
    let owner = std::fs::metadata("/proc/1").map(|process| process.uid());
    // SAFETY: no arguments, cannot fail.
    let uid = unsafe { libc::getuid() };
    if is_root() || owner.as_ref().is_ok_and(|owner| *owner == uid) {
        skip("process 1 belongs to this user or this user may do anything");
        return;
    }
    assert_eq!(pid_namespace(Some(1)), Err(failed(Errno::EACCES)));
    assert_eq!(user_namespace(Some(1)), Err(failed(Errno::EACCES)));
}
