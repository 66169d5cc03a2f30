//! The program as its users meet it: arguments, exit codes, what goes to which output; and the demo on the fake driver.
//!
//! The fake driver's folder is in `CUDA_IPC_FAKE_DRIVER_DIR`, which `cargo xtask test` sets. Without it the tests that need a driver say so and pass.

mod support;

use core::time::Duration;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::Instant;

use serde_json::Value;

use support::{Fake, PROGRAM, program, run};

/// Hex digits of a golden file of cuda-ipc-core, without its comments.
fn golden(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../cuda-ipc-core/tests/golden").join(name);
    let text = std::fs::read_to_string(path).expect("a golden file");
    text.lines().map(|line| line.split('#').next().unwrap_or_default().trim()).collect::<Vec<_>>().join(" ")
}

#[test]
fn wrong_uses_exit_with_64_and_print_nothing() {
    let cases: &[&[&str]] = &[
        &[],
        &["nothing"],
        &["demo", "--chunks", "0"],
        &["demo", "--chunks", "many"],
        &["demo", "--size", "big"],
        &["demo", "--chunks", "26", "--size", "2M"],
        &["demo", "--kind", "unified"],
        &["demo", "--kind", "malloc", "--route", "broker"],
        &["demo", "--route", "sea"],
        &["inspect"],
        &["inspect", "0xzz"],
        &["inspect", "123"],
        &["bench"],
        &["bench", "import", "--reps", "0"],
        &["bench", "import", "--chunks", "1,,2"],
    ];
    for case in cases {
        let (code, out, err) = run(program(case));
        assert_eq!((code, out.as_str()), (64, ""), "{case:?}: {err}");
        assert!(!err.is_empty(), "{case:?}");
    }
}

#[test]
fn help_and_version_are_answers() {
    for case in [&["--help"][..], &["demo", "--help"], &["inspect", "-h"], &["bench", "import", "--help"], &["--version"]] {
        let (code, out, err) = run(program(case));
        assert_eq!((code, err.as_str()), (0, ""), "{case:?}");
        assert!(!out.is_empty(), "{case:?}");
        assert!(!out.contains("child"), "{case:?} shows what is not for users");
    }
}

#[test]
fn a_machine_without_a_driver_gets_a_way_out() {
    let folder = std::env::temp_dir().join(format!("cuda-ipc-cli-no-driver-{}", std::process::id()));
    std::fs::create_dir(&folder).expect("a folder");
    // A file that is no library keeps the loader from finding a real driver.
    std::fs::write(folder.join("libcuda.so.1"), "no library").expect("a file");
    let mut command = program(&["demo"]);
    command.env("LD_LIBRARY_PATH", &folder);
    let (code, out, err) = run(command);
    std::fs::remove_dir_all(&folder).expect("removed");
    assert_eq!((code, out.as_str()), (1, ""), "{err}");
    assert!(err.contains("opening the CUDA driver") && err.contains("cargo xtask demo"), "{err}");
}

#[test]
fn inspect_prints_every_field_of_a_key() {
    for hex in [golden("key_reservation.hex"), format!("0x{}", golden("key_reservation.hex").replace(' ', ":"))] {
        let (code, out, err) = run(program(&["inspect", &hex]));
        assert_eq!((code, err.as_str()), (0, ""), "{out}");
        let fields = [
            "version 1",
            "reservation",
            "0x7f1200000000 to 0x809200000000, 1.50 TiB (1649267441664 bytes)",
            "4242",
            "4026531897",
            "7 in that process",
            "1122334455667788",
            "99aabbccddeeff01, not this machine",
            "no: import of 0x7f1200000000 from process 4242 failed at reading the key: the key was made on another machine or before a reboot",
        ];
        for field in fields {
            assert!(out.contains(field), "no `{field}` in\n{out}");
        }
    }
}

#[test]
fn inspect_takes_the_digits_in_several_arguments() {
    let hex = golden("key_reservation.hex");
    let mut args = vec!["inspect", "--json"];
    args.extend(hex.split_whitespace());
    let (code, out, _) = run(program(&args));
    assert_eq!(code, 0);
    let report: Value = serde_json::from_str(&out).expect("JSON");
    assert_eq!(report["key"]["nonce"], "1122334455667788");
    assert_eq!(report["key"]["made_on_this_host"], false);
    assert_eq!(report["key"]["reach"]["reached"], false);
}

#[test]
fn inspect_prints_every_kind_of_rkey() {
    let cases = [
        ("rkey_posix.hex", "POSIX fd", "0x7f1200200000 to 0x7f1200600000, 4 MiB (4194304 bytes)"),
        ("rkey_legacy.hex", "legacy IPC", "01020304"),
        ("rkey_no_ipc.hex", "cannot be shared", "1 byte"),
        ("key_pool_allocation.hex", "pool allocation", "slot 4275878552"),
    ];
    for (name, kind, detail) in cases {
        let (code, out, err) = run(program(&["inspect", &golden(name)]));
        assert_eq!((code, err.as_str()), (0, ""), "{name}");
        assert!(out.contains(kind) && out.contains(detail), "{name}:\n{out}");
    }
}

#[test]
fn inspect_names_what_is_wrong_with_bytes() {
    let key = golden("key_reservation.hex").replace(' ', "");
    let cases = [
        (key[2..].to_owned(), "these are 63"),
        (key[..126].to_owned(), "a key has 64 bytes, these are 63"),
        (format!("{key}00"), "a key has 64 bytes, these are 65"),
        (format!("00{}", &key[2..]), "not a cuda-ipc key"),
        (format!("{}00", &key[..126]), "key damaged"),
        (key.replacen("01", "02", 1), "key version 2 is not 1"),
        (golden("rkey_posix.hex")[3..].to_owned(), "these are 107"),
        (format!("{} 00", golden("rkey_posix.hex")), "an rkey has 108 bytes, these are 109"),
    ];
    for (hex, error) in cases {
        let (code, out, err) = run(program(&["inspect", &hex]));
        assert_eq!((code, out.as_str()), (1, ""), "{hex}");
        assert!(err.contains(error), "no `{error}` in {err}");
    }
}

#[test]
fn the_demo_verifies_every_byte() {
    let Some(fake) = Fake::new("demo") else { return };
    for chunks in ["1", "2", "26"] {
        let (code, out, err) = fake.run(&["demo", "--chunks", chunks, "--size", "64M"]);
        assert_eq!(code, 0, "{err}");
        let start =
            format!("RESULT driver=fake kind=vmm chunks={chunks} bytes={} route=pidfd verified=true gbps=", (64 << 20) - 4352 - 4608);
        assert!(out.starts_with(&start) && out.lines().count() == 1, "{out}");
    }
}

#[test]
fn the_demo_takes_the_route_that_it_is_told() {
    let Some(fake) = Fake::new("route") else { return };
    for (asked, taken) in [("auto", "pidfd"), ("pidfd", "pidfd"), ("broker", "broker")] {
        let (code, out, err) = fake.run(&["demo", "--chunks", "26", "--size", "64M", "--route", asked]);
        assert_eq!(code, 0, "{err}");
        assert!(out.contains(&format!(" route={taken} verified=true ")), "{out}");
    }
}

#[test]
fn the_demo_shares_memory_of_every_kind() {
    let Some(fake) = Fake::new("kinds") else { return };
    let inner = (64 << 20) - 4352 - 4608;
    for (kind, asked, chunks, bytes, taken) in [
        ("vmm", "auto", 26, inner, "pidfd"),
        ("pool", "auto", 1, inner, "pidfd"),
        ("pool", "broker", 1, inner, "broker"),
        // A legacy handle stands for the whole allocation.
        ("malloc", "auto", 1, 64 << 20, "legacy"),
    ] {
        let (code, out, err) = fake.run(&["demo", "--kind", kind, "--size", "64M", "--route", asked]);
        assert_eq!(code, 0, "{kind}: {err}");
        let start = format!("RESULT driver=fake kind={kind} chunks={chunks} bytes={bytes} route={taken} verified=true gbps=");
        assert!(out.starts_with(&start) && out.lines().count() == 1, "{out}");
    }
}

#[test]
fn the_demo_reports_as_json() {
    let Some(fake) = Fake::new("json") else { return };
    let (code, out, err) = fake.run(&["demo", "--chunks", "3", "--json"]);
    assert_eq!(code, 0, "{err}");
    let report: Value = serde_json::from_str(&out).expect("one JSON object");
    assert_eq!(report["driver"], "fake");
    assert_eq!(report["chunks"], 3);
    assert_eq!(report["verified"], true);
    for number in ["bytes", "gbps", "export_us", "connect_us", "import_us"] {
        assert!(report[number].as_f64().is_some_and(|number| number > 0.0), "{number}: {out}");
    }
    assert!(report["gpu"].is_string() && report["cuda_version"].is_string(), "{out}");
}

#[test]
fn the_demo_copies_in_parts_where_memory_is_short() {
    let Some(fake) = Fake::new("short") else { return };
    let mut command = fake.program(&["demo", "--chunks", "4"]);
    command.env("FAKE_CUDA_MEMORY", "64M");
    let (code, out, err) = run(command);
    assert_eq!(code, 0, "{err}");
    assert!(out.contains("verified=true"), "{out}");
}

#[test]
fn a_failing_driver_call_is_named() {
    let Some(fake) = Fake::new("fault") else { return };
    let cases = [
        ("cuMemCreate#3=2", &["exporter", "creating chunk 2 of 4", "CUDA_ERROR_OUT_OF_MEMORY", "free on the device"][..]),
        ("cuMemExportToShareableHandle#2=304", &["exporter", "exporting the range", "CUDA_ERROR_OPERATING_SYSTEM"]),
        ("cuMemImportFromShareableHandle#2=999", &["demo-importer", "importing the range", "from process", "0x", "CUDA_ERROR_UNKNOWN"]),
        ("cuMemSetAccess#1=1", &["cuMemSetAccess", "CUDA_ERROR_INVALID_VALUE"]),
    ];
    for (fault, texts) in cases {
        let mut command = fake.program(&["demo", "--chunks", "4"]);
        command.env("FAKE_CUDA_FAULT", fault);
        let (code, out, err) = run(command);
        assert_eq!((code, out.as_str()), (1, ""), "{fault}: {err}");
        for text in texts {
            assert!(err.contains(text), "{fault}: no `{text}` in {err}");
        }
    }
}

#[test]
fn too_low_a_limit_of_open_files_is_named() {
    let Some(fake) = Fake::new("limit") else { return };
    let demo = |route: &str| {
        let mut command = Command::new("sh");
        command.args(["-c", "ulimit -n 300; exec \"$0\" demo --chunks 60 --size 120M --route $1", PROGRAM, route]);
        command.env("LD_LIBRARY_PATH", &fake.driver).env("FAKE_CUDA_DIR", &fake.machine).stdin(Stdio::null());
        run(command)
    };
    let (code, out, err) = demo("pidfd");
    assert_eq!((code, out.as_str()), (1, ""), "{err}");
    assert!(err.contains("the limit of open files, 300, leaves fds for 44 of 60 chunks"), "{err}");
    // The broker gives what is not held.
    let (code, out, err) = demo("auto");
    assert_eq!(code, 0, "{err}");
    assert!(out.contains(" chunks=60 ") && out.contains(" verified=true "), "{out}");
}

#[test]
fn a_silent_process_is_given_up() {
    let Some(fake) = Fake::new("silent") else { return };
    let mut command = fake.program(&["demo", "--chunks", "1", "--timeout", "1"]);
    command.env("FAKE_CUDA_FAULT", "cuMemImportFromShareableHandle#1~600000ms");
    let start = Instant::now();
    let (code, out, err) = run(command);
    assert_eq!((code, out.as_str()), (1, ""), "{err}");
    assert!(err.contains("nothing heard for 1 s"), "{err}");
    assert!(start.elapsed() < Duration::from_secs(60));
}

#[test]
fn a_process_that_dies_is_reported_with_its_status() {
    let Some(fake) = Fake::new("death") else { return };
    let mut command = fake.program(&["demo", "--chunks", "1"]);
    command.env("FAKE_CUDA_FAULT", "cuMemImportFromShareableHandle#1~600000ms").stdout(Stdio::piped()).stderr(Stdio::piped());
    let demo = command.spawn().expect("the program starts");
    let start = Instant::now();
    // The importer is killed when it is about to import: then the exporter has told all it has.
    let importer = loop {
        if let Some(pid) = child_in_role(demo.id(), "demo-importer") {
            break pid;
        }
        assert!(start.elapsed() < Duration::from_secs(60), "no importer");
        std::thread::sleep(Duration::from_millis(5));
    };
    std::thread::sleep(Duration::from_millis(200));
    let killed = Command::new("kill").args(["-9", &importer.to_string()]).status().expect("kill runs");
    assert!(killed.success());
    let Output { status, stdout, stderr } = demo.wait_with_output().expect("the demo ends");
    let err = String::from_utf8_lossy(&stderr);
    assert_eq!(status.code(), Some(1), "{err}");
    assert!(stdout.is_empty());
    assert!(err.contains("demo-importer") && err.contains("signal: 9"), "{err}");
    assert!(start.elapsed() < Duration::from_secs(60));
}

/// The pid of a child of `parent` that was started in this role.
fn child_in_role(parent: u32, role: &str) -> Option<u32> {
    let children = std::fs::read_to_string(format!("/proc/{parent}/task/{parent}/children")).ok()?;
    children.split_whitespace().filter_map(|pid| pid.parse().ok()).find(|pid| {
        let arguments = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        arguments.split(|byte| *byte == 0).any(|argument| argument == role.as_bytes())
    })
}

/// A child process of the program, talked to as the program does.
struct Child {
    process: std::process::Child,
    input: std::process::ChildStdin,
    output: BufReader<std::process::ChildStdout>,
}

impl Child {
    fn start(fake: &Fake, role: &str, settings: &str) -> Self {
        let mut command = fake.program(&["child", role]);
        let mut process = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("the program starts");
        let (input, output) = (process.stdin.take().expect("a pipe"), process.stdout.take().expect("a pipe"));
        let mut child = Self { process, input, output: BufReader::new(output) };
        child.send(settings);
        child
    }

    fn exporter(fake: &Fake, seed: &str) -> (Self, String) {
        Self::exporter_of(fake, "vmm", seed)
    }

    fn exporter_of(fake: &Fake, kind: &str, seed: &str) -> (Self, String) {
        let settings = format!(
            r#"{{"device":0,"kind":"{kind}","sizes":[2097152,20971520,2097152],"seed":{seed},"inside_chunks":true,"fd_each":true}}"#
        );
        let mut child = Self::start(fake, "exporter", &settings);
        let rkey = child.value()["rkey"].as_str().expect("an rkey").to_owned();
        (child, rkey)
    }

    fn send(&mut self, line: &str) {
        writeln!(self.input, "{line}").expect("written");
    }

    fn value(&mut self) -> Value {
        loop {
            let mut line = String::new();
            self.output.read_line(&mut line).expect("an answer");
            let mut message: Value = serde_json::from_str(&line).expect("JSON");
            if message.get("progress").is_none() {
                assert!(message.get("value").is_some(), "{line}");
                return message["value"].take();
            }
        }
    }

    fn end(mut self) {
        drop(self.input);
        assert!(self.process.wait().expect("it ends").success());
    }
}

#[test]
fn inspect_finds_a_pools_memory_and_its_fd() {
    let Some(fake) = Fake::new("inspect-pool") else { return };
    let (exporter, rkey) = Child::exporter_of(&fake, "pool", "1");
    let (code, out, err) = fake.run(&["inspect", &rkey]);
    assert_eq!(code, 0, "{err}");
    assert!(out.contains("1 here") && out.contains("1 chunks with an fd in the exporter, 0 without"), "{out}");
    exporter.end();
}

#[test]
fn wrong_bytes_are_found_and_named() {
    let Some(fake) = Fake::new("wrong") else { return };
    let (exporter, rkey) = Child::exporter(&fake, "1");
    for (seed, right) in [(1, true), (2, false)] {
        let mut importer = Child::start(&fake, "demo-importer", &format!(r#"{{"seed":{seed},"route":"auto"}}"#));
        importer.send(&format!("{rkey:?}"));
        let imported = importer.value();
        assert_eq!((imported["difference"].is_null(), imported["gbps"].is_number()), (right, right), "{imported}");
        if !right {
            let text = imported["difference"].as_str().expect("a text");
            assert!(text.starts_with("the byte at 0x") && text.contains("written was"), "{text}");
        }
        importer.end();
    }
    exporter.end();
}

#[test]
fn inspect_reaches_a_living_exporter() {
    let Some(fake) = Fake::new("inspect") else { return };
    let (exporter, rkey) = Child::exporter(&fake, "null");
    let (code, out, err) = run(program(&["inspect", "--json", &rkey]));
    assert_eq!((code, err.as_str()), (0, ""));
    let key = &serde_json::from_str::<Value>(&out).expect("JSON")["key"];
    assert_eq!(key["pid"], exporter.process.id());
    for this in ["made_on_this_host", "made_in_this_pid_namespace"] {
        assert_eq!(key[this], true, "{out}");
    }
    assert_eq!(key["process"]["exists"], true);
    let table = &key["reach"]["table"];
    for (field, value) in [("chunks", 3), ("bytes", 24 << 20), ("with_fd", 3), ("without_fd", 0)] {
        assert_eq!(table[field], value, "{out}");
    }
    assert_eq!(table["runs"].as_array().map(Vec::len), Some(1), "{out}");
    let (_, text, _) = run(program(&["inspect", &rkey]));
    assert!(text.contains("yes: the table is open") && text.contains("3 here, 24 MiB"), "{text}");

    exporter.end();
    let (code, out, _) = run(program(&["inspect", &rkey]));
    assert_eq!(code, 0);
    assert!(out.contains("no such process here") && (out.contains("ESRCH") || out.contains("has exited")), "{out}");
}
