//! The C ABI as C programs have it: they are compiled here, in each language that the header is for, linked both ways, and run on the fake driver.
//!
//! `cargo build -p cuda-ipc-ffi` makes the libraries; `cargo xtask test` does that first. The programs are the examples in `examples/c` and the C files beside
//! this one.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::os::unix::process::ExitStatusExt;

mod cc;
mod symbols;

use cc::{Bench, C11, C17, C99, CXX11, Link};

/// Runs the exporter example and a program that talks with it; both must end well.
#[track_caller]
fn share(bench: &Bench, exporter: &cc::Program, program: &cc::Program, says: &str) {
    let mut other = bench.start(exporter);
    let output = bench.run(program, &[bench.socket()]);
    assert!(output.status.success() && output.out.starts_with(says), "{output:?}");
    let output = other.finish();
    assert!(output.status.success() && output.out == "exported 5 chunks\n", "{output:?}");
}

#[test]
fn the_examples_share_memory_in_every_language_and_linked_both_ways() {
    let bench = Bench::new();
    let says = "verified 10485760 bytes of process ";
    for (language, link) in [
        (C99, Link::Dynamic),
        (C11, Link::Dynamic),
        (C17, Link::Dynamic),
        (CXX11, Link::Dynamic),
        (C11, Link::Static),
        (CXX11, Link::Static),
    ] {
        let [exporter, importer] = ["exporter", "importer"].map(|name| bench.example(name, language, link));
        share(&bench, &exporter, &importer, says);
    }
}

#[test]
fn a_program_that_is_linked_dynamically_asks_for_the_soname() {
    let bench = Bench::new();
    let importer = bench.example("importer", C11, Link::Dynamic);
    let needed = bench.tool("readelf", &["-d", importer.path()]);
    assert!(needed.contains("Shared library: [libcuda_ipc.so.0]"), "{needed}");
    let importer = bench.example("importer", C11, Link::Static);
    assert!(!bench.tool("readelf", &["-d", importer.path()]).contains("libcuda_ipc"));
}

#[test]
fn misuse_is_an_error_code() {
    let bench = Bench::new();
    let (exporter, misuse) = (bench.example("exporter", C99, Link::Dynamic), bench.program("misuse", C99, Link::Dynamic));
    share(&bench, &exporter, &misuse, "misuse: ");
}

#[test]
fn the_abi_does_what_its_header_says() {
    let bench = Bench::new();
    let (exporter, features) = (bench.example("exporter", C99, Link::Dynamic), bench.program("features", C99, Link::Dynamic));
    share(&bench, &exporter, &features, "features: ");
}

#[test]
fn memory_of_pools_and_of_cumemalloc_goes_by_the_same_calls() {
    both_ends("others", "verified both\n");
}

#[test]
fn a_lease_is_known_whatever_handle_it_was_taken_with() {
    both_ends("holding", "replaced under a lease\n");
}

/// Runs a program that is exporter or importer, as it is told.
fn both_ends(program: &str, says: &str) {
    let bench = Bench::new();
    let program = bench.program(program, C99, Link::Dynamic);
    let mut exporter = bench.start_with(&program, &["export", bench.socket()]);
    let output = bench.run(&program, &["import", bench.socket()]);
    assert!(output.status.success() && output.out == says, "{output:?}");
    let output = exporter.finish();
    assert!(output.status.success() && output.out == "exported\n", "{output:?}");
}

#[test]
fn a_hit_allocates_nothing_and_makes_no_system_call() {
    let bench = Bench::new();
    let (exporter, hit) = (bench.example("exporter", C11, Link::Dynamic), bench.program("hit", C11, Link::Dynamic));
    // First the proof that the rule forbids anything.
    let strict = bench.run(&hit, &["strict"]);
    let killed = strict.status.signal() == Some(libc::SIGKILL);
    assert!(killed || strict.out.starts_with("strict mode is not to be had"), "{strict:?}");
    if !killed {
        println!("skipped: seccomp's strict mode is not to be had here, so system calls are not looked for");
    }
    share(&bench, &exporter, &hit, if killed { "hits: 10000, no allocation, no system call\n" } else { "hits: 10000, no allocation" });
}

#[test]
fn address_sanitizer_finds_nothing_where_it_would_find_something() {
    let mut bench = Bench::new();
    bench.sanitize();
    // First the proof that it is in, for what the program writes and for what the library does.
    let overflow = bench.program("overflow", C11, Link::Dynamic);
    let mine = bench.run(&overflow, &["mine"]);
    assert!(mine.err.contains("AddressSanitizer: heap-buffer-overflow") && mine.err.contains("WRITE of size 1"), "{mine:?}");
    assert!(!mine.status.success() && mine.out.is_empty());
    let library = bench.run(&overflow, &["library"]);
    assert!(library.err.contains("heap-buffer-overflow") && library.err.contains("WRITE of size 108"), "{library:?}");
    assert!(library.err.contains("cuda_ipc_export_rkey") && library.out.is_empty());
    if bench.has_sanitized_library() {
        // Then every access of the library's own is looked at, not only what it has the C library do.
        let calls = bench.tool("nm", &["-D", bench.built().join("libcuda_ipc.so").to_str().unwrap()]);
        assert!(calls.contains("U __asan_report_load8"), "the library was not built with AddressSanitizer");
    }
    if !bench.run(&overflow, &["leak"]).err.contains("detected memory leaks") {
        println!("LeakSanitizer cannot work here (it wants ptrace): leaks are not looked for");
        bench.ignore_leaks();
    }

    for link in [Link::Dynamic, Link::Static] {
        let exporter = bench.example("exporter", C11, link);
        for (program, says) in [("misuse", "misuse: "), ("features", "features: ")] {
            share(&bench, &exporter, &bench.program(program, C11, link), says);
        }
        share(&bench, &exporter, &bench.example("importer", C11, link), "verified ");
    }
}

#[test]
#[ignore = "needs valgrind: cargo xtask test --stage valgrind"]
fn memcheck_finds_nothing_where_it_would_find_something() {
    let mut bench = Bench::new();
    bench.memcheck();
    // First the proof that it looks, at what the program writes and at what it does not give back.
    let overflow = bench.program("overflow", C11, Link::Dynamic);
    let mine = bench.run(&overflow, &["mine"]);
    assert!(mine.err.contains("Invalid write of size 1"), "{mine:?}");
    let leak = bench.run(&overflow, &["leak"]);
    assert!(leak.status.code() == Some(cc::MEMCHECK_FOUND) && leak.err.contains("definitely lost"), "{leak:?}");

    // Both processes of a share: memory that was never written or is not there any more, and what is lost at the end.
    let [exporter, importer] = ["exporter", "importer"].map(|name| bench.example(name, C11, Link::Dynamic));
    let mut other = bench.start(&exporter);
    let output = bench.run(&importer, &[bench.socket()]);
    assert!(output.status.success() && output.out.starts_with("verified "), "{output:?}");
    let exported = other.finish();
    assert!(exported.status.success(), "{exported:?}");
    if output.err.contains("syscall: 434") {
        println!("this valgrind knows no pidfds: the broker's route is looked at, and not that by pidfd");
        bench.set("NO_PIDFDS", "1");
    }
    share(&bench, &exporter, &bench.program("features", C11, Link::Dynamic), "features: ");
    let others = bench.program("others", C99, Link::Dynamic);
    let mut exporter = bench.start_with(&others, &["export", bench.socket()]);
    let output = bench.run(&others, &["import", bench.socket()]);
    assert!(output.status.success() && output.out == "verified both\n", "{output:?}");
    let output = exporter.finish();
    assert!(output.status.success() && output.out == "exported\n", "{output:?}");
}

#[test]
fn environment_variables_are_heard() {
    let mut bench = Bench::new();
    let (exporter, importer) = (bench.example("exporter", C11, Link::Dynamic), bench.example("importer", C11, Link::Dynamic));
    bench.set("CUDA_IPC_LOG", "debug");
    bench.set("CUDA_IPC_ROUTE", "broker");
    let mut other = bench.start(&exporter);
    let output = bench.run(&importer, &[bench.socket()]);
    assert!(output.status.success(), "{output:?}");
    assert!(output.err.contains("importer: level 4: cuda-ipc 0.") && output.err.contains("level 5: opened a window on "), "{output:?}");
    assert!(other.finish().err.contains("exporter: level 5: exported 0x"));

    // No broker to go by: the only route that is allowed leads nowhere, and that is said.
    bench.set("CUDA_IPC_BROKER", "n");
    let mut other = bench.start(&exporter);
    let output = bench.run(&importer, &[bench.socket()]);
    assert!(!output.status.success() && output.err.contains("(-109)"), "{output:?}");
    assert!(output.err.contains("level 3: ") && output.err.contains("broker"), "{output:?}");
    assert!(other.finish().status.success());

    bench.set("CUDA_IPC_ROUTE", "pigeon");
    let output = bench.run(&bench.program("overflow", C11, Link::Dynamic), &["library"]);
    assert!(output.err.contains("CUDA_IPC_ROUTE: an environment variable has a value that is not taken"), "{output:?}");
}
