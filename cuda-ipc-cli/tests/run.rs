//! `cuda-ipc run` as its users meet it: what the program gets, what is refused and said, and that nothing of ours stays before it.
//!
//! The preload library is the one that cargo builds beside the program; `cargo xtask test` does, alone it is `cargo build -p cuda-ipc-preload`. It stays inert here,
//! as none of these programs uses UCX.

mod support;

use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::Command;

use support::{Fake, PROGRAM, program, run};

/// A user that is not this one.
const OTHER: u32 = 12345;

fn library() -> PathBuf {
    let library = Path::new(PROGRAM).with_file_name("libcuda_ipc_preload.so").canonicalize();
    library.expect("the preload library, from cargo build -p cuda-ipc-preload")
}

/// A folder of a test, on the disk that has the program: setuid means nothing on some others.
struct Folder(PathBuf);

impl Folder {
    fn new(test: &str) -> Self {
        library();
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("run-{test}-{}", std::process::id()));
        std::fs::create_dir(&folder).expect("a folder");
        Self(folder)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// A file of these bytes that may be executed.
    fn executable(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.path(name);
        std::fs::write(&path, bytes).expect("a file");
        mode(&path, 0o755);
        path
    }

    /// A program that a C compiler makes with these arguments.
    fn compiled(&self, name: &str, args: &[&str]) -> PathBuf {
        let (source, path) = (self.path("start.c"), self.path(name));
        std::fs::write(&source, "void _start(void) { for (;;) { } }\n").expect("a file");
        let status = Command::new("cc").args(args).arg(&source).arg("-o").arg(&path).status().expect("cc");
        assert!(status.success(), "cc {args:?}");
        path
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn mode(path: &Path, mode: u32) {
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).expect("permissions");
}

/// The command, where no NVML and no setting of the tester's is found.
fn quiet(args: &[&str]) -> Command {
    let mut command = program(&["run"]);
    command.args(args).env_remove("LD_PRELOAD");
    for (name, _) in std::env::vars_os() {
        if ["UCX_", "NIXL_", "CUDA_IPC_"].iter().any(|start| name.to_string_lossy().starts_with(start)) {
            command.env_remove(name);
        }
    }
    command.env("UCX_CUDA_IPC_ENABLE_GET_ZCOPY", "y");
    command
}

fn shell(script: &str) -> Command {
    quiet(&["--", "sh", "-c", script])
}

#[test]
fn the_program_gets_the_library_its_arguments_and_its_exit_code() {
    library();
    let ours = library().display().to_string();
    assert_eq!(run(shell("echo $LD_PRELOAD; exit 7")), (7, format!("{ours}\n"), String::new()));
    // Options after the program are the program's.
    assert_eq!(run(quiet(&["printf", "%s|", "--explain", "-x", "--", "a b"])), (0, "--explain|-x|--|a b|".to_owned(), String::new()));
    assert_eq!(run(shell("echo $0$CUDA_IPC_EXPLAIN$CUDA_IPC_LOG")), (0, "sh\n".to_owned(), String::new()));
    // Of all that run, the program itself says that there was nothing to explain.
    let script = "import os, subprocess; subprocess.call('true'); print(os.getpid(), os.environ['CUDA_IPC_EXPLAIN'], os.environ['CUDA_IPC_LOG']); exit(3)";
    let (code, out, err) = run(quiet(&["--explain", "--log", "debug", "python3", "-c", script]));
    let pid = out.split(' ').next().unwrap_or_default();
    assert_eq!((code, out.as_str()), (3, format!("{pid} {pid} debug\n").as_str()));
    assert_eq!(err, format!("cuda-ipc: EXPLAIN process {pid} never loaded UCX's CUDA module, so there was nothing to do\n"));
}

#[test]
fn the_process_becomes_the_program() {
    library();
    let mut command = shell("echo $$; kill -TERM $$");
    let child = command.stdout(std::process::Stdio::piped()).spawn().expect("it starts");
    let pid = child.id();
    let output = child.wait_with_output().expect("it ends");
    assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), pid.to_string());
    assert_eq!(output.status.signal(), Some(15), "the signal is the program's own end");
}

#[test]
fn what_was_preloaded_before_stays() {
    let mut command = shell("echo $LD_PRELOAD; cat /proc/$$/maps");
    command.env("LD_PRELOAD", "libm.so.6 libdl.so.2");
    let (code, out, err) = run(command);
    let first = out.lines().next().unwrap_or_default();
    assert_eq!((code, first, err.as_str()), (0, format!("{}:libm.so.6:libdl.so.2", library().display()).as_str(), ""));
    assert!(out.contains("/libm.so.6") && out.contains("/libcuda_ipc_preload.so"), "both are loaded: {out}");
    // A command inside of a command adds nothing.
    let (_, out, _) = run(quiet(&[PROGRAM, "run", "sh", "-c", "echo $LD_PRELOAD"]));
    assert_eq!(out.trim(), library().display().to_string());
}

#[test]
fn the_library_is_found_or_that_is_said() {
    let folder = Folder::new("library");
    let (bin, lib) = (folder.path("bin"), folder.path("lib"));
    std::fs::create_dir(&bin).expect("a folder");
    std::fs::create_dir(&lib).expect("a folder");
    let copy = bin.join("cuda-ipc");
    std::fs::copy(PROGRAM, &copy).expect("a copy");
    let preloaded = |set: &dyn Fn(&mut Command)| {
        let mut command = Command::new(&copy);
        command.args(["run", "sh", "-c", "echo $LD_PRELOAD"]).env("UCX_CUDA_IPC_ENABLE_GET_ZCOPY", "y");
        command.env_remove("LD_PRELOAD").env_remove("CUDA_IPC_PRELOAD");
        set(&mut command);
        let (code, out, err) = run(command);
        (code, out.trim().to_owned(), err)
    };
    let (code, out, err) = preloaded(&|_| {});
    assert_eq!((code, out.as_str()), (125, ""));
    assert!(err.contains("no preload library") && err.contains("CUDA_IPC_PRELOAD"), "{err}");

    let installed = lib.join("libcuda_ipc_preload.so");
    std::fs::copy(library(), &installed).expect("a copy");
    assert_eq!(preloaded(&|_| {}), (0, installed.display().to_string(), String::new()));
    // The variable goes before what is found.
    let elsewhere = folder.path("other.so");
    std::fs::copy(library(), &elsewhere).expect("a copy");
    let by_variable = preloaded(&|command| {
        command.env("CUDA_IPC_PRELOAD", &elsewhere);
    });
    assert_eq!(by_variable, (0, elsewhere.display().to_string(), String::new()));

    let spaced = folder.path("a b.so");
    std::fs::copy(library(), &spaced).expect("a copy");
    for (path, why) in [
        (folder.path("none.so"), "No such file"),
        (folder.path("bin"), "no ELF"),
        (spaced, "` `"),
        (PathBuf::from("/etc/passwd"), "no ELF"),
    ] {
        let (code, _, err) = preloaded(&|command| {
            command.env("CUDA_IPC_PRELOAD", &path);
        });
        assert!(code == 125 && err.contains(why), "{}: {code}: {err}", path.display());
    }
}

/// Exit code and error of running a program that must not run.
fn refused(path: &Path) -> (i32, String) {
    let (code, out, err) = run(quiet(&[path.to_str().expect("UTF-8")]));
    assert_eq!(out, "");
    (code, err)
}

#[test]
fn programs_that_are_not_there_or_no_programs() {
    let folder = Folder::new("none");
    assert_eq!(refused(Path::new("no-such-program")), (127, "cuda-ipc: no-such-program: there is no such program\n".to_owned()));
    assert_eq!(refused(&folder.path("none")).0, 127);
    assert_eq!(refused(Path::new("")).0, 127);
    let (code, err) = refused(&folder.0);
    assert!(code == 126 && err.contains("directory"), "{code}: {err}");
    let script = folder.executable("script", b"#!/no/such/interpreter\n");
    let (code, err) = refused(&script);
    assert!(code == 126 && err.contains("/no/such/interpreter"), "{code}: {err}");
    mode(&script, 0o644);
    // Root may do much, but not execute a file that nobody may.
    let (code, err) = refused(&script);
    assert!(code == 126 && err.contains("denied"), "{code}: {err}");
    // What has no first line is the shell's, as with execvp(3).
    let plain = folder.executable("plain", b"exit 9\n");
    assert_eq!(run(quiet(&[plain.to_str().expect("UTF-8")])).0, 9);
    // The first of PATH that can be executed.
    let mut command = quiet(&["script"]);
    command.env("PATH", folder.0.join("none").display().to_string() + ":" + &folder.0.display().to_string());
    assert_eq!(run(command).0, 126);
}

#[test]
fn programs_that_nothing_can_be_preloaded_into() {
    let folder = Folder::new("static");
    for (name, args) in [("static", &["-nostdlib", "-static", "-no-pie"][..]), ("static-pie", &["-nostdlib", "-static-pie"])] {
        let path = folder.compiled(name, args);
        let (code, err) = refused(&path);
        assert!(code == 126 && err.contains("static program"), "{name}: {code}: {err}");
        // Also behind a script.
        let script = folder.executable("script", format!("#!{} -x\n", path.display()).as_bytes());
        let (code, err) = refused(&script);
        assert!(code == 126 && err.contains("static program") && err.contains("script"), "{name}: {code}: {err}");
    }
    let foreign = std::fs::read("/bin/true").expect("a program");
    const MACHINE: usize = 18;
    let mut other = foreign.clone();
    other[MACHINE] = other[MACHINE].wrapping_add(1);
    let (code, err) = refused(&folder.executable("other", &other));
    assert!(code == 126 && err.contains("another architecture"), "{code}: {err}");
    // Cut off or damaged: the kernel would refuse it, and a shell take its bytes for a script.
    for (name, bytes) in [("cut", &foreign[..40]), ("damaged", b"\x7fELF\n>$0.ran\n")] {
        let (code, err) = refused(&folder.executable(name, bytes));
        assert!(code == 126 && err.contains("cut off"), "{name}: {code}: {err}");
    }
    assert!(!folder.path("damaged.ran").exists(), "a shell ran it");
}

/// Whether the kernel starts a program with more rights, as the loader is told: the key AT_SECURE of its auxiliary vector.
fn is_secure(mut command: Command) -> bool {
    // `true` ends at once; the loader prints the vector before.
    let output = command.env("LD_SHOW_AUXV", "1").output().expect("it runs");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    // The loader of a secure process ignores this variable too.
    !text.contains("AT_SECURE")
}

#[test]
fn programs_with_more_rights_than_their_user() {
    if !rustix::process::getuid().is_root() {
        println!("skipped: only root can make a program that runs as somebody else");
        return;
    }
    let folder = Folder::new("rights");
    let copy = |name: &str, uid: Option<u32>, gid: Option<u32>, bits: u32| {
        let path = folder.path(name);
        std::fs::copy("/bin/true", &path).expect("a copy");
        chown(&path, uid, gid).expect("root");
        mode(&path, bits);
        path
    };
    let cases = [
        ("plain", None, None, 0o755, None),
        ("setuid", Some(OTHER), None, 0o4755, Some("set-user-ID")),
        ("setgid", None, Some(OTHER), 0o2755, Some("set-group-ID")),
        // Nobody gets anything of these.
        ("own", None, None, 0o4755, None),
        ("no-group-execution", None, Some(OTHER), 0o2745, None),
    ];
    for (name, uid, gid, bits, why) in cases {
        let path = copy(name, uid, gid, bits);
        if is_secure(Command::new(&path)) != why.is_some() {
            println!("not tried: {name}: this file system or process gives no such rights");
            continue;
        }
        let (code, _, err) = run(quiet(&[path.to_str().expect("UTF-8")]));
        match why {
            None => assert_eq!((code, err.as_str()), (0, ""), "{name}"),
            Some(why) => assert!(code == 126 && err.contains(why) && err.contains("ignores"), "{name}: {code}: {err}"),
        }
    }

    // File capabilities: nothing for root, and secure for others. Version 2, effective, CAP_NET_RAW.
    let path = copy("capabilities", None, None, 0o755);
    let mut capability = [0_u8; 20];
    capability[..4].copy_from_slice(&0x0200_0001_u32.to_le_bytes());
    capability[4..8].copy_from_slice(&(1_u32 << 13).to_le_bytes());
    if let Err(error) = rustix::fs::setxattr(&path, "security.capability", &capability, rustix::fs::XattrFlags::empty()) {
        println!("not tried: file capabilities: {error}");
        return;
    }
    assert_eq!(refused(&path), (0, String::new()));
    let as_other = |mut command: Command| {
        command.uid(OTHER).gid(OTHER);
        command
    };
    if Command::new(&path).uid(OTHER).gid(OTHER).output().is_err() || !is_secure(as_other(Command::new(&path))) {
        println!("not tried: file capabilities of another user: the folder is closed to others, or the process has no such right to give");
        return;
    }
    let (code, _, err) = run(as_other(quiet(&[path.to_str().expect("UTF-8")])));
    assert!(code == 126 && err.contains("file capabilities"), "{code}: {err}");
}

#[test]
fn reading_is_switched_on_where_there_is_no_nvlink() {
    const SHOW: &str = "echo $UCX_CUDA_IPC_ENABLE_GET_ZCOPY";
    let Some(fake) = Fake::new("nvlink") else { return };
    let with = |links: &str, setting: Option<&str>, args: &[&str]| {
        let mut command = fake.program(&["run"]);
        command.args(args).args(["--", "sh", "-c", SHOW]).env("FAKE_NVML_LINKS", links).env_remove("UCX_CUDA_IPC_ENABLE_GET_ZCOPY");
        command.env_remove("UCX_TLS").env_remove("CUDA_IPC_LOG");
        command.envs(setting.map(|value| ("UCX_CUDA_IPC_ENABLE_GET_ZCOPY", value)));
        run(command)
    };
    let (code, out, err) = with("0", None, &[]);
    assert_eq!((code, out.as_str()), (0, "y\n"));
    assert_eq!(err.lines().count(), 1, "it is said once: {err}");
    assert!(err.contains("UCX_CUDA_IPC_ENABLE_GET_ZCOPY=y"), "{err}");
    assert_eq!(with("18", None, &[]), (0, "\n".to_owned(), String::new()), "UCX reads by NVLink of its own accord");
    assert_eq!(with("0", Some("y"), &[]), (0, "y\n".to_owned(), String::new()));
    let (_, out, err) = with("0", Some("n"), &[]);
    assert!(out == "n\n" && err.contains("WARN UCX_CUDA_IPC_ENABLE_GET_ZCOPY=n"), "{out}{err}");
    assert_eq!(with("0", None, &["--log", "error"]), (0, "y\n".to_owned(), String::new()), "silence was asked for");

    assert_eq!(fake.run(&["run", "--log", "off", "false"]), (1, String::new(), String::new()));

    // Without NVML it is set, and there is nothing to say.
    let folder = Folder::new("nvml");
    std::fs::write(folder.path("libnvidia-ml.so.1"), "no library").expect("a file");
    let mut command = quiet(&["sh", "-c", SHOW]);
    command.env("LD_LIBRARY_PATH", &folder.0).env_remove("UCX_CUDA_IPC_ENABLE_GET_ZCOPY");
    assert_eq!(run(command), (0, "y\n".to_owned(), String::new()));
}

#[test]
fn settings_that_cost_the_lane_are_named_and_kept() {
    library();
    let mut command = shell("echo $UCX_TLS $UCX_MEM_CUDA_HOOK_MODE");
    command.env("UCX_TLS", "rc,sm").env("UCX_MEM_CUDA_HOOK_MODE", "reloc");
    let (code, out, err) = run(command);
    assert_eq!((code, out.as_str()), (0, "rc,sm reloc\n"));
    let lines: Vec<&str> = err.lines().collect();
    assert!(lines.len() == 2 && lines[0].contains("WARN UCX_TLS=rc,sm") && lines[1].contains("WARN UCX_MEM_CUDA_HOOK_MODE=reloc"), "{err}");
}
