//! `cuda-ipc soak` on the fake driver: a short run of all kinds of memory, and leaks that it must find.

mod support;

use serde_json::Value;

use support::{Fake, program, run};

#[test]
fn wrong_uses_of_soak_exit_with_64() {
    for case in [
        &["soak", "--minutes", "0"][..],
        &["soak", "--minutes", "nan"],
        &["soak", "--minutes", "-1"],
        &["soak", "--kinds", "paper"],
        &["soak", "--seed", "x"],
    ] {
        let (code, out, err) = run(program(case));
        assert_eq!((code, out.as_str()), (64, ""), "{case:?}: {err}");
    }
}

#[test]
fn a_soak_compares_bytes_by_both_routes_and_finds_nothing_left() {
    let Some(fake) = Fake::new("soak") else { return };
    let (code, out, err) = fake.run(&["soak", "--minutes", "0.05", "--at-least", "150", "--seed", "7", "--json"]);
    assert_eq!(code, 0, "{out}{err}");
    let report: Value = serde_json::from_str(&out).expect("JSON");
    let number = |path: &str| report.pointer(path).and_then(Value::as_f64).unwrap_or_else(|| panic!("{path}: {report}"));
    assert_eq!(report["driver"], "fake");
    assert_eq!(report["findings"], Value::Array(Vec::new()));
    assert!(number("/seconds") >= 3.0 && number("/steps") >= 150.0 && number("/rests") >= 1.0, "{report}");
    for route in [0, 1] {
        for what in ["leases", "imported", "bytes"] {
            assert!(number(&format!("/routes/{route}/{what}")) > 0.0, "{what} by route {route}: {report}");
        }
    }
    for kind in ["vmm", "pool", "malloc"] {
        assert!(number(&format!("/kinds/{kind}")) > 0.0, "{kind}: {report}");
    }
    for what in ["made", "replaced", "used_again"] {
        assert!(number(&format!("/did/{what}")) > 0.0, "{what}: {report}");
    }
    // At rest nobody has anything of the driver's, and the caches are empty.
    for process in ["exporter", "second exporter", "importer by pidfd", "importer by broker"] {
        let state = &report["last"][process];
        assert_eq!(
            (&state["windows"], &state["peers"], &state["live"]["mappings"], &state["live"]["handles"]),
            (&0.into(), &0.into(), &0.into(), &0.into())
        );
    }
    assert!(err.contains("--seed"), "{err}");
}

#[test]
fn a_soak_finds_what_a_driver_does_not_take_back() {
    let Some(fake) = Fake::new("soak-leak") else { return };
    let mut command = fake.program(&["soak", "--minutes", "0.05", "--at-least", "30", "--seed", "7"]);
    command.env("FAKE_CUDA_FAULT", "cuMemAddressFree#*=999");
    let (code, out, err) = run(command);
    assert_eq!(code, 1, "{out}{err}");
    assert!(out.contains("findings"), "the report comes all the same: {out}");
    assert!(err.contains("looking for leaks") && err.contains("reservations grew from"), "{err}");
}

#[test]
fn a_soak_finds_a_failing_lease() {
    let Some(fake) = Fake::new("soak-fault") else { return };
    let mut command = fake.program(&["soak", "--minutes", "0.05", "--at-least", "30", "--seed", "7"]);
    command.env("FAKE_CUDA_FAULT", "cuMemImportFromShareableHandle#2=304");
    let (code, out, err) = run(command);
    assert_eq!((code, out.as_str()), (1, ""), "{err}");
    assert!(err.contains("leasing shared memory") && err.contains("CUresult 304"), "{err}");
}
