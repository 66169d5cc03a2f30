//! `cuda-ipc run` before programs that never load UCX's CUDA module: they ask the kernel for nothing that they would not ask for without it.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use cuda_ipc_tests::follow::{Followed, follow};

/// What loading one more library takes.
const LOADING: [i64; 10] = [
    libc::SYS_openat,
    libc::SYS_read,
    libc::SYS_pread64,
    libc::SYS_fstat,
    libc::SYS_newfstatat,
    libc::SYS_mmap,
    libc::SYS_mprotect,
    libc::SYS_munmap,
    libc::SYS_close,
    libc::SYS_brk,
];

/// A thing that cargo has built beside this test's folder.
fn built(name: &str) -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let path = test.ancestors().nth(2).unwrap().join(name);
    assert!(path.is_file(), "{} was not built: cargo build -p cuda-ipc-cli -p cuda-ipc-preload", path.display());
    path
}

fn prepared(mut command: Command) -> Command {
    for (name, _) in std::env::vars_os() {
        if ["UCX_", "CUDA_IPC_", "PYTHON"].iter().any(|start| name.to_string_lossy().starts_with(start)) {
            command.env_remove(name);
        }
    }
    // So that two runs of an interpreter are the same.
    command.env("PYTHONHASHSEED", "0").env("PYTHONDONTWRITEBYTECODE", "1").env_remove("LD_PRELOAD");
    command
}

/// The program alone, and by the command.
fn both(program: &[&str]) -> (Followed, Followed) {
    let mut alone = Command::new(program[0]);
    alone.args(&program[1..]);
    let mut with = Command::new(built("cuda-ipc"));
    with.args(["run", "--"]).args(program);
    // NVML is the command's business, and not of interest here.
    let with = {
        let mut with = prepared(with);
        with.env("UCX_CUDA_IPC_ENABLE_GET_ZCOPY", "y");
        with
    };
    (follow(prepared(alone), 1).unwrap(), follow(with, 2).unwrap())
}

fn without_loading(seen: &Followed) -> BTreeMap<i64, usize> {
    seen.calls.iter().filter(|(number, _)| !LOADING.contains(number)).map(|(&number, &count)| (number, count)).collect()
}

fn is_inert(program: &[&str]) {
    let library = built("libcuda_ipc_preload.so");
    let (alone, with) = both(program);
    assert_eq!((with.status, &with.output, &with.errors), (alone.status, &alone.output, &alone.errors), "{program:?}");
    // No thread, process, socket, memory file or anything else but what the loader does.
    assert_eq!(without_loading(&with), without_loading(&alone), "{program:?}: system calls, by number");
    let name = |path: &str| Path::new(path).file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    assert!(with.opened.contains(library.to_str().unwrap()), "{program:?}: the library was not loaded: {:?}", with.opened);
    // Itself, what it is linked with, and nothing of NVIDIA's.
    let more: Vec<String> = with.opened.difference(&alone.opened).map(|path| name(path)).collect();
    let allowed = ["libcuda_ipc_preload.so", "libgcc_s.so.1", "libc.so.6", "libm.so.6", "ld.so.cache"];
    assert!(more.iter().all(|name| allowed.contains(&name.as_str())), "{program:?}: {more:?}");
}

#[test]
fn a_program_that_does_nothing() {
    is_inert(&["/bin/true"]);
}

/// The interpreter itself: what is first in PATH may be a script that looks for it.
fn python() -> String {
    let output = Command::new("python3").args(["-c", "import os, sys; print(os.path.realpath(sys.executable))"]).output().unwrap();
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

#[test]
fn an_interpreter() {
    is_inert(&[&python(), "-c", "import os, sys; print(len(os.listdir('/proc/self/task')), sys.argv)"]);
}

#[test]
fn forked_workers_and_children_that_are_programs() {
    let script = "\
import os, subprocess, sys
for end in (os._exit, sys.exit):
    child = os.fork()
    if child == 0:
        print(len(os.listdir('/proc/self/task')), len(os.listdir('/proc/self/fd')), flush=True)
        end(5)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
print(subprocess.call(['/bin/sh', '-c', 'echo $0; exit 4']), flush=True)
";
    is_inert(&[&python(), "-c", script]);
}

/// The look itself: it sees what it is to see.
#[test]
fn what_is_not_inert_is_seen() {
    let script = "import socket, threading; socket.socket(socket.AF_UNIX); thread = threading.Thread(target=int); thread.start(); thread.join(); open('/dev/null')";
    let mut command = Command::new(python());
    command.args(["-c", script]);
    let seen = follow(prepared(command), 1).unwrap();
    let of = |numbers: &[i64]| numbers.iter().filter_map(|number| seen.calls.get(number)).sum::<usize>();
    assert_eq!((of(&[libc::SYS_socket]), of(&[libc::SYS_clone, libc::SYS_clone3]), seen.status), (1, 1, 0), "{}", seen.errors);
    assert!(seen.opened.contains("/dev/null"));
}
