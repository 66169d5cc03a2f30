//! `cuda-ipc doctor` as its users meet it: verdicts, exit codes, remedies, and that text and JSON say the same.
//!
//! What is in the way is really in the way: filters of system calls, users, missing drivers. The fake driver's folder is in `CUDA_IPC_FAKE_DRIVER_DIR`, as for
//! `cli.rs`.

mod support;

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use cuda_ipc_core::key::{HostId, Key, KeyKind, Nonce};
use cuda_ipc_tests::apart::{as_user, in_new_namespaces, refusing};
use nix::sched::CloneFlags;
use pidfd_sys::numbers::PIDFD_GETFD;
use serde_json::Value;

use support::{Fake, PROGRAM, program, run};

/// The report as text and as JSON of the same command, which must end with `code` both times and say the same.
#[track_caller]
fn reports(code: i32, args: &[&str], command: impl Fn(&[&str]) -> Command) -> (String, Value) {
    let mut all = vec!["doctor"];
    all.extend(args);
    let (text_code, text, error) = run(command(&all));
    all.push("--json");
    let (json_code, json, _) = run(command(&all));
    println!("{text}");
    assert_eq!((text_code, json_code), (code, code), "{text}\n{json}\n{error}");
    assert_eq!(error, "");
    let json: Value = serde_json::from_str(&json).expect("JSON");
    let lane = ["The lane is available", "The lane is degraded", "There is no lane"];
    let names = ["available", "degraded", "none"];
    let verdict = usize::try_from(code).expect("a verdict");
    assert_eq!(json["lane"], names[verdict]);
    assert!(text.contains(lane[verdict]), "{text}");
    // What people read is what programs read.
    for finding in json["findings"].as_array().expect("findings") {
        for name in ["cause", "fact", "remedy"] {
            let said = finding[name].as_str().expect("a text");
            assert!(text.contains(said), "{name}: {said}\n{text}");
        }
        for command in finding["commands"].as_array().expect("commands") {
            assert!(text.contains(command.as_str().expect("a text")), "{command}\n{text}");
        }
    }
    for name in ["kernel", "uid", "open_files_soft", "pid_namespace", "user_namespace", "network_namespace"] {
        let said = json["node"][name].to_string();
        assert!(text.contains(said.trim_matches('"')), "{name}: {said}\n{text}");
    }
    for name in ["pidfd", "broker_name", "broker_file"] {
        let line = text.lines().find(|line| line.trim_start().starts_with(&name.replace('_', ", by "))).expect("a line");
        assert_eq!(line.ends_with("works"), json["routes"][name]["works"] == true, "{line}");
    }
    (text, json)
}

#[track_caller]
fn causes(json: &Value) -> Vec<&str> {
    json["findings"].as_array().expect("findings").iter().map(|finding| finding["cause"].as_str().expect("a name")).collect()
}

/// A file of this build beside the program.
fn built(name: &str) -> PathBuf {
    let file = Path::new(PROGRAM).with_file_name(name);
    assert!(file.exists(), "{} is not built: cargo build --workspace", file.display());
    file
}

/// A process that does nothing until it is killed, when this is dropped.
struct Sleeper(Child);

impl Sleeper {
    fn start(change: impl FnOnce(&mut Command)) -> Self {
        let mut command = Command::new("sleep");
        command.arg("600").stdin(Stdio::null());
        change(&mut command);
        let child = command.spawn().expect("sleep starts");
        // spawn returns after exec; the loader may still be at work.
        let deadline = std::time::Instant::now() + core::time::Duration::from_secs(10);
        while !in_sleep(child.id()) {
            assert!(std::time::Instant::now() < deadline, "sleep does not sleep");
            std::thread::yield_now();
        }
        Self(child)
    }

    fn pid(&self) -> String {
        self.0.id().to_string()
    }
}

/// Whether the process waits for a time to pass.
fn in_sleep(pid: u32) -> bool {
    let call = std::fs::read_to_string(format!("/proc/{pid}/syscall")).unwrap_or_default();
    let number = call.split(' ').next().and_then(|number| number.parse::<i64>().ok());
    matches!(number, Some(libc::SYS_clock_nanosleep | libc::SYS_nanosleep))
}

impl Drop for Sleeper {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A folder that goes with the test.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let folder = std::env::temp_dir().join(format!("cuda-ipc-doctor-{name}-{}", std::process::id()));
        std::fs::create_dir(&folder).expect("a folder");
        std::fs::set_permissions(&folder, PermissionsExt::from_mode(0o755)).expect("readable by all");
        Self(folder)
    }

    /// Compiles a library of this C text.
    fn library(&self, name: &str, text: &str) -> PathBuf {
        let (source, library) = (self.0.join("source.c"), self.0.join(name));
        std::fs::create_dir_all(library.parent().expect("a folder")).expect("a folder");
        std::fs::write(&source, text).expect("a source");
        let status = Command::new("cc").args(["-shared", "-fPIC", "-o"]).arg(&library).arg(&source).status().expect("a C compiler");
        assert!(status.success(), "cc: {status}");
        library
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// As UCX's module without the arm, and with it.
const WITHOUT_ARM: &str = "int uct_cuda(void) { return 1; }";
const WITH_ARM: &str = "#include <unistd.h>\n#include <sys/syscall.h>\n\
    const char *message = \"pidfd_getfd failed\";\nlong uct_cuda(int fd) { return syscall(438, fd, 3, 0); }";

#[test]
fn a_good_node_is_available() {
    let Some(fake) = Fake::new("doctor-fine") else { return };
    let (text, json) = reports(0, &[], |args| fake.program(args));
    assert_eq!(causes(&json), [""; 0]);
    for said in ["the fake driver", "POSIX fd: works", "legacy IPC: works", "CUDA_ERROR_NOT_PERMITTED", "although its attribute says yes"] {
        assert!(text.contains(said), "{said}\n{text}");
    }
    let trials = &json["gpus"]["devices"][0]["trials"];
    assert_eq!(
        (&trials["posix_fd"]["works"], &trials["fabric"]["works"], &trials["fabric"]["promised"]),
        (&true.into(), &false.into(), &true.into())
    );
    assert_eq!(json["node"]["seccomp"], false);
    assert!(text.contains("not tried: there is no socket directory"), "{text}");
}

#[test]
fn a_filter_leaves_a_degraded_lane() {
    let Some(fake) = Fake::new("doctor-seccomp") else { return };
    for errno in [libc::EPERM, libc::ENOSYS] {
        let (text, json) = reports(1, &[], |args| {
            let mut command = fake.program(args);
            refusing(&mut command, PIDFD_GETFD, errno);
            command
        });
        assert_eq!(causes(&json), ["seccomp"]);
        assert_eq!((&json["node"]["seccomp"], &json["routes"]["broker_name"]["works"]), (&true.into(), &true.into()));
        for said in [&format!("stops pidfd_getfd with errno {errno}"), "docker run --cap-add SYS_PTRACE", "no [seccomp]"] {
            assert!(text.contains(said), "{said}\n{text}");
        }
    }
    // No way at all.
    let (_, json) = reports(2, &[], |args| {
        let mut command = fake.program(args);
        refusing(&mut command, PIDFD_GETFD, libc::EPERM);
        refusing(&mut command, libc::SYS_socket, libc::EPERM);
        command
    });
    assert_eq!(causes(&json), ["seccomp", "no-abstract-socket"]);
}

#[test]
fn a_node_without_a_driver_has_no_lane_and_says_so() {
    let folder = Folder::new("no-driver");
    // A file that is no library keeps the loader from finding a real driver.
    std::fs::write(folder.0.join("libcuda.so.1"), "no library").expect("a file");
    let (text, json) = reports(2, &[], |args| {
        let mut command = program(args);
        command.env("LD_LIBRARY_PATH", &folder.0);
        command
    });
    assert_eq!(causes(&json), ["no-driver"]);
    assert!(text.contains("there is no usable CUDA driver") && text.contains("docker run --gpus all"), "{text}");
    // The rest of the node is looked at all the same.
    assert_eq!(json["routes"]["pidfd"]["works"], true);
}

#[test]
fn no_visible_gpu_is_no_lane() {
    let Some(fake) = Fake::new("doctor-no-gpu") else { return };
    let (text, json) = reports(2, &[], |args| {
        let mut command = fake.program(args);
        command.env("CUDA_VISIBLE_DEVICES", "-1");
        command
    });
    assert_eq!(causes(&json), ["no-gpu"]);
    assert!(text.contains("unset CUDA_VISIBLE_DEVICES"), "{text}");
    // One that makes no chunk.
    let (text, json) = reports(2, &[], |args| {
        let mut command = fake.program(args);
        command.env("FAKE_CUDA_FAULT", "cuMemCreate#*=2");
        command
    });
    assert_eq!(causes(&json), ["gpu-shares-nothing"]);
    assert!(text.contains("cuMemCreate failed with CUresult 2"), "{text}");
}

#[test]
fn a_socket_directory_is_tried() {
    let Some(fake) = Fake::new("doctor-dir") else { return };
    let folder = Folder::new("dir");
    let with = |args: &[&str], directory: &Path| {
        let mut command = fake.program(args);
        command.env("CUDA_IPC_SOCKET_DIR", directory);
        command
    };
    let mode = |mode| std::fs::set_permissions(&folder.0, PermissionsExt::from_mode(mode)).expect("a mode");
    mode(0o755);
    let (text, json) = reports(1, &[], |args| with(args, &folder.0));
    assert_eq!(causes(&json), ["no-socket-file"]);
    assert!(text.contains("others than its user may use it (mode 755)"), "{text}");
    mode(0o700);
    let (text, json) = reports(0, &[], |args| with(args, &folder.0));
    assert_eq!(json["routes"]["broker_file"]["works"], true, "{text}");
    assert_eq!(std::fs::read_dir(&folder.0).expect("the folder").count(), 0, "something was left behind");
    // Longer than a socket's path may be.
    let long = folder.0.join("a".repeat(120));
    std::fs::create_dir(&long).expect("a folder");
    std::fs::set_permissions(&long, PermissionsExt::from_mode(0o700)).expect("a mode");
    reports(0, &[], |args| with(args, &long));
    std::os::unix::fs::chown(&long, Some(20_001), None).expect("another user's");
    let (text, _) = reports(1, &[], |args| with(args, &long));
    assert!(text.contains("it belongs to user 20001"), "{text}");
    let (text, json) = reports(1, &[], |args| with(args, &folder.0.join("missing")));
    assert_eq!(causes(&json), ["no-socket-file"]);
    assert!(text.contains("mkdir -m 700 -p"), "{text}");
}

#[test]
fn a_process_with_the_preload_library_and_one_without() {
    let Some(fake) = Fake::new("doctor-pid") else { return };
    let folder = Folder::new("pid");
    let without_arm = folder.library("libuct_cuda.so.0", WITHOUT_ARM);
    let preload = built("libcuda_ipc_preload.so");
    let look = |code: i32, sleeper: &Sleeper| reports(code, &["--pid", &sleeper.pid()], |args| fake.program(args));

    let with = Sleeper::start(|command| {
        command.env("LD_PRELOAD", format!("{}:{}", preload.display(), without_arm.display()));
    });
    let (text, json) = look(0, &with);
    assert_eq!(json["process"]["preload_active"], true);
    assert_eq!((&json["process"]["reachable_by_pidfd"], &json["process"]["name"]), (&true.into(), &"sleep".into()));
    assert!(text.contains("preload library         active") && text.contains("built without the POSIX_FD arm"), "{text}");

    // UCX without the arm, and nothing that adds it.
    let without = Sleeper::start(|command| {
        command.env("LD_PRELOAD", &without_arm);
    });
    let (text, json) = look(1, &without);
    assert_eq!((causes(&json), &json["process"]["preload_active"]), (vec!["preload-not-active"], &false.into()));
    assert!(text.contains("preload library         not active") && text.contains("cuda-ipc run -- <the command>"), "{text}");
    // The loader's variable is `run`'s business: set by hand it lacks what `run` looks for.
    assert!(!text.contains("LD_PRELOAD"), "{text}");

    // UCX with it, and no UCX.
    let with_arm = folder.library("arm/libuct_cuda.so.0", WITH_ARM);
    let ucx = Sleeper::start(|command| {
        command.env("LD_PRELOAD", &with_arm);
    });
    let (text, json) = look(0, &ucx);
    assert_eq!(json["ucx"]["libraries"][0]["has_arm"], true, "{text}");
    let plain = Sleeper::start(|_| {});
    let (_, json) = look(0, &plain);
    assert_eq!(json["ucx"]["libraries"], Value::Array(Vec::new()));
}

#[test]
fn a_process_that_cannot_be_reached() {
    let Some(fake) = Fake::new("doctor-far") else { return };
    std::fs::set_permissions(&fake.machine, PermissionsExt::from_mode(0o777)).expect("a machine for all");
    let sleeper = Sleeper::start(|command| as_user(command, 20_001));
    let as_other = |uid: u32| {
        let fake = &fake;
        move |args: &[&str]| {
            let mut command = fake.program(args);
            as_user(&mut command, uid);
            command
        }
    };
    let pid = sleeper.pid();
    let (_, json) = reports(0, &["--pid", &pid], as_other(20_001));
    assert_eq!(json["process"]["same_user_and_group"], true);
    let (text, json) = reports(2, &["--pid", &pid], as_other(20_002));
    assert_eq!(causes(&json), ["other-uid"]);
    assert!(text.contains("Run both processes as the same user"), "{text}");
    assert_eq!(json["process"]["preload_active"], Value::Null);

    // In a PID namespace below this one the kernel would allow it, but keys have another number.
    let below = in_new_namespaces(CloneFlags::CLONE_NEWPID, || Sleeper::start(|_| {}));
    if let Some(below) = below {
        let (_, json) = reports(1, &["--pid", &below.pid()], |args| fake.program(args));
        assert_eq!((causes(&json), &json["process"]["same_pid_namespace"]), (vec!["other-pid-namespace"], &false.into()));
    }

    let pid = sleeper.pid();
    drop(sleeper);
    let (_, json) = reports(2, &["--pid", &pid], |args| fake.program(args));
    assert_eq!((causes(&json), &json["process"]["exists"]), (vec!["no-such-process"], &false.into()));
}

#[test]
fn libraries_and_wheels_of_the_environment_are_found() {
    let Some(fake) = Fake::new("doctor-ucx") else { return };
    let folder = Folder::new("ucx");
    folder.library("lib/ucx/libuct_cuda.so.0", WITH_ARM);
    folder.library("site-packages/libucx/lib/ucx/libuct_cuda.so.0", WITHOUT_ARM);
    std::fs::write(folder.0.join("lib/libuct_cuda.so.1"), "no library").expect("a file");
    // As wheels have it: the same under other names, and what is no library of the loader's.
    let wheel = folder.0.join("site-packages/libucx/lib/ucx");
    std::fs::copy(wheel.join("libuct_cuda.so.0"), wheel.join("libuct_cuda.so.0.0.0")).expect("a copy");
    std::fs::write(wheel.join("libuct_cuda.la"), "text").expect("a file");
    let packages = folder.0.join("site-packages");
    for (name, record) in [
        (
            "libucx_cu12-1.22.0",
            "libucx/lib/ucx/libuct_cuda.la,sha256=x,1\nlibucx/lib/ucx/libuct_cuda.so.0,sha256=x,1\n\
            libucx/lib/ucx/libuct_cuda.so.0.0.0,sha256=x,1\nlibucx/lib/libucp.so.0,sha256=x,1\n",
        ),
        ("nixl_cu12-1.5.1", ""),
        ("numpy-2.0.0", ""),
    ] {
        let info = packages.join(format!("{name}.dist-info"));
        std::fs::create_dir(&info).expect("a folder");
        std::fs::write(info.join("RECORD"), record).expect("a record");
    }
    let (text, json) = reports(0, &[], |args| {
        let mut command = fake.program(args);
        let search = std::env::join_paths([fake.driver.clone(), folder.0.join("lib")]).expect("paths");
        command.env("LD_LIBRARY_PATH", search).env("PYTHONPATH", &packages);
        command
    });
    let found: Vec<(String, Option<bool>)> = json["ucx"]["libraries"]
        .as_array()
        .expect("libraries")
        .iter()
        .map(|library| (library["path"].as_str().expect("a path").to_owned(), library["has_arm"].as_bool()))
        .filter(|(path, _)| Path::new(path).starts_with(&folder.0))
        .collect();
    let path = |name: &str| folder.0.join(name).display().to_string();
    assert_eq!(
        found,
        [
            (path("lib/libuct_cuda.so.1"), None),
            (path("lib/ucx/libuct_cuda.so.0"), Some(true)),
            (path("site-packages/libucx/lib/ucx/libuct_cuda.so.0"), Some(false)),
        ]
    );
    assert!(text.contains("cannot be read"), "{text}");
    let wheels = json["ucx"]["wheels"].to_string();
    assert!(wheels.contains(r#"{"name":"libucx_cu12","version":"1.22.0"}"#) && wheels.contains(r#""nixl_cu12""#), "{wheels}");
    assert!(!wheels.contains("numpy"), "{wheels}");
}

#[test]
fn wrong_uses_of_doctor_exit_with_64() {
    for args in [
        &["doctor", "--pid", "0"][..],
        &["doctor", "--pid", "x"],
        &["doctor", "--pid"],
        &["doctor", "now"],
        &["doctor", "--pid", "99999999"],
    ] {
        let (code, out, error) = run(program(args));
        assert_eq!((code, out.as_str()), (64, ""), "{args:?}: {error}");
    }
    let (code, out, _) = run(program(&["doctor", "--help"]));
    assert_eq!(code, 0);
    assert!(out.contains("0 the lane is available, 1 it is degraded, 2 there is none"), "{out}");
}

#[test]
fn a_failed_demo_says_cause_and_remedy() {
    let Some(fake) = Fake::new("doctor-demo") else { return };
    let mut command = fake.program(&["demo", "--chunks", "2", "--route", "pidfd"]);
    refusing(&mut command, PIDFD_GETFD, libc::EPERM);
    let (code, out, error) = run(command);
    assert_eq!((code, out.as_str()), (1, ""));
    for said in ["cause: a filter of system calls (seccomp)", "remedy: A container's default filter", "docker run --cap-add SYS_PTRACE"] {
        assert!(error.contains(said), "{said}\n{error}");
    }
    let (code, out, error) = fake.run(&["demo", "--chunks", "2"]);
    assert!(code == 0 && out.contains("route=pidfd verified=true"), "{out}{error}");
    // The broker needs none of it.
    let mut command = fake.program(&["demo", "--chunks", "2"]);
    refusing(&mut command, PIDFD_GETFD, libc::EPERM);
    let (code, out, error) = run(command);
    assert!(code == 0 && out.contains("route=broker verified=true"), "{out}{error}");
}

#[test]
fn inspect_says_cause_and_remedy() {
    let gone = Sleeper::start(|_| {});
    let pid = gone.0.id();
    drop(gone);
    let host = HostId::from_boot_id(pidfd_sys::boot_id().expect("a boot id"));
    let pid_namespace = u32::try_from(pidfd_sys::pid_namespace(None).expect("a namespace")).expect("32 bits");
    let key = Key { kind: KeyKind::Reservation, pid, table_fd: 9, nonce: Nonce(77), pid_namespace, host, base: 1 << 30, len: 2 << 20 };
    let hex: String = key.encode().iter().map(|byte| format!("{byte:02x}")).collect();
    let (code, json, _) = run(program(&["inspect", "--json", &hex]));
    let json: Value = serde_json::from_str(&json).expect("JSON");
    let finding = &json["key"]["reach"]["finding"];
    assert_eq!((code, finding["cause"].as_str()), (0, Some("exporter-gone")), "{json}");
    let (_, text, _) = run(program(&["inspect", &hex]));
    assert!(text.contains(finding["fact"].as_str().expect("a text")) && text.contains("remedy: Start it again"), "{text}");
}
