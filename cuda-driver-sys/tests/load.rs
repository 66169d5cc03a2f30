//! Loading: what is refused and how it is named, and which of the two ways of lookup finds a function.
//!
//! The libraries are small C files compiled here, so these tests need `cc`. Each function in them returns a number that says how it was found.

use std::ffi::CString;
use std::path::PathBuf;
use std::process::Command;

use cuda_driver_sys::{CUresult, Driver, ENTRY_POINTS, EntryPoint, LoadError};

/// What a function returns that only `dlsym` gives.
const BY_SYMBOL: u32 = 1001;
/// What a function returns that only `cuGetProcAddress_v2` gives.
const BY_PROC_ADDRESS: u32 = 1002;
/// What the newest `cuMemcpyBatchAsync` returns that a 12.8 driver knows.
const BATCH_OF_12_8: u32 = 1003;

/// Compiles `source` into a shared object of this name and gives its path.
fn library(name: &str, source: &str) -> CString {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    // Tests may run at the same time in several processes; the name is each test's own.
    let (source_file, object) = (folder.join(format!("{name}.c")), folder.join(format!("{name}.so")));
    std::fs::write(&source_file, source).expect("write the C source");
    let status = Command::new("cc").args(["-shared", "-fPIC", "-o"]).arg(&object).arg(&source_file).status().expect("run cc");
    assert!(status.success(), "cc failed on {}", source_file.display());
    CString::new(object.into_os_string().into_encoded_bytes()).expect("a path without NUL")
}

/// C functions for these rows, reachable by `dlsym`; the version function says `driver_version`.
fn symbols(rows: impl Iterator<Item = &'static EntryPoint>, driver_version: i32) -> String {
    rows.map(|row| match row.symbol {
        "cuDriverGetVersion" => format!("int cuDriverGetVersion(int *version) {{ *version = {driver_version}; return 0; }}\n"),
        symbol => format!("int {symbol}(void) {{ return {BY_SYMBOL}; }}\n"),
    })
    .collect()
}

/// A `cuGetProcAddress_v2` with this body; `name`, `pfn`, `version`, `flags` and `status` are its arguments.
fn get_proc_address(body: &str) -> String {
    format!(
        "#include <string.h>\n\
         static int by_proc_address(void) {{ return {BY_PROC_ADDRESS}; }}\n\
         static int batch_of_12_8(void) {{ return {BATCH_OF_12_8}; }}\n\
         void *used[] = {{ (void *)by_proc_address, (void *)batch_of_12_8 }};\n\
         int cuGetProcAddress_v2(const char *name, void **pfn, int version, unsigned long long flags, int *status) {{ {body} }}\n"
    )
}

fn init(driver: &Driver) -> CUresult {
    // SAFETY: the test library's functions take what they are given and only return a number.
    unsafe { (driver.cuInit)(0) }
}

#[test]
fn a_missing_library_is_named() {
    let Err(LoadError::LibraryNotFound(text)) = Driver::load_from(c"libcuda-that-is-not-here.so.1") else {
        panic!("expected LibraryNotFound")
    };
    assert!(text.as_str().contains("libcuda-that-is-not-here.so.1"), "{text}");
    assert!(text.as_str().contains("cannot open shared object file"), "{text}");
}

#[test]
fn a_long_loader_text_is_cut_between_characters() {
    // Two-byte characters after an odd prefix: a cut by bytes would split one.
    let name = CString::new(format!("x{}", "é".repeat(300))).expect("no NUL");
    let Err(LoadError::LibraryNotFound(text)) = Driver::load_from(&name) else { panic!("expected LibraryNotFound") };
    assert!(text.as_str().starts_with("xéé"), "{text}");
    assert!(text.as_str().ends_with('é'), "{text}");
}

#[test]
fn errors_stay_small() {
    assert!(size_of::<LoadError>() <= 112);
}

#[test]
fn a_library_that_is_no_driver_is_refused_by_the_first_missing_name() {
    let file = library("no_driver", "int answer(void) { return 42; }\n");
    assert_eq!(Driver::load_from(&file).err(), Some(LoadError::MissingEntryPoint("cuInit")));
}

#[test]
fn one_missing_required_function_is_named_with_its_suffix() {
    let file = library("no_address_range", &symbols(ENTRY_POINTS.iter().filter(|row| row.base != "cuMemGetAddressRange"), 11020));
    let error = Driver::load_from(&file).err().expect("refused");
    assert_eq!(error, LoadError::MissingEntryPoint("cuMemGetAddressRange_v2"));
    assert!(error.to_string().contains("cuMemGetAddressRange_v2"), "{error}");
}

#[test]
fn without_get_proc_address_everything_comes_from_dlsym() {
    let file = library("dlsym_only", &symbols(ENTRY_POINTS.iter(), 11020));
    let driver = Driver::load_from(&file).expect("all symbols are there");
    assert_eq!(init(&driver), CUresult(BY_SYMBOL));
    assert!(driver.cuMemcpyBatchAsync_v13.is_some());
}

#[test]
fn missing_optional_functions_are_none() {
    let file = library("required_only", &symbols(ENTRY_POINTS.iter().filter(|row| row.required), 11020));
    let driver = Driver::load_from(&file).expect("all required symbols are there");
    assert!(driver.cuDeviceGetUuid_v2.is_none());
    assert!(driver.cuCtxGetId.is_none());
    assert!(driver.cuMemcpyBatchAsync.is_none());
    assert!(driver.cuMemcpyBatchAsync_v13.is_none());
}

#[test]
fn get_proc_address_comes_first_and_is_asked_for_base_name_and_version() {
    let questions: Vec<String> =
        ENTRY_POINTS.iter().map(|row| format!("(strcmp(name, \"{}\") == 0 && version == {})", row.base, row.version)).collect();
    let body = format!(
        "if (flags != 0 || !({})) {{ *pfn = 0; *status = 1; return 0; }} *pfn = used[0]; *status = 0; return 0;",
        questions.join(" || ")
    );
    // No driver function by dlsym at all, besides the version.
    let versions = ENTRY_POINTS.iter().filter(|row| row.symbol == "cuDriverGetVersion");
    let file = library("proc_address_only", &(symbols(versions, 13000) + &get_proc_address(&body)));
    let driver = Driver::load_from(&file).expect("every row is answered");
    assert_eq!(init(&driver), CUresult(BY_PROC_ADDRESS));
    assert!(driver.cuMemcpyBatchAsync_v13.is_some());
}

#[test]
fn a_get_proc_address_that_does_not_find_falls_back_to_dlsym() {
    for (name, body) in [
        ("an_error", "*pfn = used[0]; *status = 0; return 1;"),
        ("not_found_with_an_address", "*pfn = used[0]; *status = 1; return 0;"),
        ("version_not_sufficient", "*pfn = 0; *status = 2; return 0;"),
        ("success_without_an_address", "*pfn = 0; *status = 0; return 0;"),
        ("an_unknown_status", "*pfn = used[0]; *status = 77; return 0;"),
    ] {
        let file = library(name, &(symbols(ENTRY_POINTS.iter(), 13000) + &get_proc_address(body)));
        let driver = Driver::load_from(&file).expect("dlsym finds all");
        assert_eq!(init(&driver), CUresult(BY_SYMBOL), "{name}");
    }
}

/// A 12.8 driver, asked for 13.0's `cuMemcpyBatchAsync`, gives the one it has, which takes another number of arguments.
#[test]
fn a_function_of_a_version_above_the_drivers_is_not_taken() {
    let body = "*pfn = strcmp(name, \"cuMemcpyBatchAsync\") == 0 ? used[1] : used[0]; *status = 0; return 0;";
    let versions = ENTRY_POINTS.iter().filter(|row| row.symbol == "cuDriverGetVersion");
    let file = library("driver_12_8", &(symbols(versions, 12080) + &get_proc_address(body)));
    let driver = Driver::load_from(&file).expect("every row up to 12.8 is answered");
    assert!(driver.cuMemcpyBatchAsync.is_some());
    assert!(driver.cuMemcpyBatchAsync_v13.is_none());
}

#[test]
fn a_driver_that_does_not_tell_its_version_is_looked_up_by_dlsym() {
    let body = "*pfn = used[0]; *status = 0; return 0;";
    let others = ENTRY_POINTS.iter().filter(|row| row.symbol != "cuDriverGetVersion");
    let version = "int cuDriverGetVersion(int *version) { *version = 99999; return 3; }\n";
    let file = library("version_error", &(symbols(others, 0) + version + &get_proc_address(body)));
    let driver = Driver::load_from(&file).expect("dlsym finds all");
    assert_eq!(init(&driver), CUresult(BY_SYMBOL));
}
