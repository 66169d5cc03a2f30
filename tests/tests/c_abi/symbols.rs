//! What the libraries export, and under which version.

use std::collections::BTreeSet;

use crate::cc::{Bench, root};

fn listed() -> BTreeSet<String> {
    std::fs::read_to_string(root().join("cuda-ipc-ffi/include/symbols.txt")).unwrap().lines().map(str::to_owned).collect()
}

/// Names of the symbols that a library defines for others.
fn defined(bench: &Bench, library: &str, options: &[&str]) -> BTreeSet<String> {
    let path = bench.built().join(library);
    let text = bench.tool("nm", &[options, &["--defined-only", path.to_str().unwrap()]].concat());
    text.lines().filter_map(|line| line.split_whitespace().nth(2)).map(str::to_owned).collect()
}

#[test]
fn the_shared_library_exports_the_list_and_nothing_else() {
    let bench = Bench::new();
    let exported = defined(&bench, "libcuda_ipc.so", &["-D"]);
    assert_eq!(exported, listed());
    // A transport that links it must get its own driver: nothing here may look like one.
    assert!(exported.iter().all(|name| name.starts_with("cuda_ipc_")));
}

#[test]
fn the_static_library_defines_no_other_c_name_that_begins_with_cu() {
    let bench = Bench::new();
    let defined = defined(&bench, "libcuda_ipc.a", &["-g"]);
    assert!(listed().is_subset(&defined));
    let like_a_driver: Vec<&String> = defined.iter().filter(|name| name.starts_with("cu") && !name.starts_with("cuda_ipc_")).collect();
    assert!(like_a_driver.is_empty(), "{like_a_driver:?}");
}

#[test]
fn header_and_soname_have_the_manifests_version() {
    let bench = Bench::new();
    let header = std::fs::read_to_string(root().join("cuda-ipc-ffi/include/cuda_ipc.h")).unwrap();
    let number = |part: &str| {
        let line = header.lines().find_map(|line| line.strip_prefix(&format!("#define CUDA_IPC_VERSION_{part} ")));
        line.unwrap_or_else(|| panic!("the header has no CUDA_IPC_VERSION_{part}")).to_owned()
    };
    // This package has the workspace's version, as the library has.
    assert_eq!([number("MAJOR"), number("MINOR"), number("PATCH")].join("."), env!("CARGO_PKG_VERSION"));
    let dynamic = bench.tool("readelf", &["-d", bench.built().join("libcuda_ipc.so").to_str().unwrap()]);
    assert!(dynamic.contains("Library soname: [libcuda_ipc.so.0]") && dynamic.contains("NODELETE"), "{dynamic}");
}
