//! `test --bugs`: runs the tests of the bug catalogue and prints each entry with its verdict.
//!
//! The runner writes its results as JUnit XML, of which this file reads names and failures: what tests print can look like anything.

use std::collections::BTreeMap;
use std::process::ExitCode;

use crate::catalogue::{self, Entry};
use crate::driver::FakeDriver;
use crate::driver::Profile;
use crate::workspace::{Failure, Workspace};

/// The profile of `.config/nextest.toml` that writes the results, and where: its store is below the root, wherever cargo builds.
const PROFILE: &str = "bugs";
const RESULTS: &str = "target/nextest/bugs/junit.xml";

/// Runs all tests that the catalogue names, once each.
pub(super) fn run(workspace: &Workspace) -> Result<ExitCode, Failure> {
    let text = workspace.read(catalogue::PATH)?;
    let at = |(line, why)| Failure::task(format!("{}:{line}: {why}", catalogue::PATH));
    let entries = catalogue::entries(&text).map_err(at)?;
    if !workspace.has_program("cargo-nextest") {
        return Err(Failure::task(
            "the catalogue's tests are run by cargo-nextest, which is not installed: cargo install --locked cargo-nextest",
        ));
    }
    let mut filters: Vec<String> = entries.iter().flat_map(|entry| &entry.tests).filter_map(catalogue::Test::filter).collect();
    filters.sort();
    filters.dedup();
    workspace.cargo("build --workspace").run()?;
    let fake = FakeDriver::link(workspace, Profile::Debug)?;
    let results = workspace.root.join(RESULTS);
    // Results of an earlier run must not pass for this one's.
    let _ = std::fs::remove_file(&results);
    let status = workspace
        .cargo(&format!("nextest run --workspace --no-fail-fast --profile {PROFILE} --filterset"))
        .arg(filters.join(" or "))
        .envs(fake.environment())
        .ignore_status()
        .output()
        .map(|output| output.status);
    let outcomes = outcomes(&workspace.shell.read_file(&results).map_err(|_| match &status {
        Ok(status) => Failure::task(format!("cargo nextest has written no results ({status}); `cargo xtask test --stage tests` says why")),
        Err(error) => Failure::task(error.to_string()),
    })?);
    Ok(report(&entries, &outcomes))
}

/// Whether each test passed, by `package::binary` (`package` for unit tests) and full name.
fn outcomes(xml: &str) -> BTreeMap<(String, String), bool> {
    let mut found = BTreeMap::new();
    for case in xml.split("<testcase ").skip(1) {
        // Nothing of a case comes after its end; output in between is escaped.
        let case = case.split("</testcase>").next().unwrap_or_default();
        if let (Some(name), Some(binary)) = (attribute(case, "name"), attribute(case, "classname")) {
            let failed = ["<failure", "<error", "<skipped"].iter().any(|word| case.contains(word));
            found.insert((binary.to_owned(), name.to_owned()), !failed);
        }
    }
    found
}

/// An attribute of a tag whose beginning was cut off. Names of tests have nothing in them that XML escapes.
fn attribute<'a>(tag: &'a str, name: &str) -> Option<&'a str> {
    let start = format!("{name}=\"");
    let at = tag.match_indices(&start).find(|&(at, _)| at == 0 || tag[..at].ends_with(' ')).map(|(at, _)| at + start.len())?;
    tag[at..].split_once('"').map(|(value, _)| value)
}

fn report(entries: &[Entry], outcomes: &BTreeMap<(String, String), bool>) -> ExitCode {
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    let mut bad = 0;
    for entry in entries {
        let mut wrong = Vec::new();
        for test in &entry.tests {
            let outcome = test.address().and_then(|(package, binary, name)| {
                let class = binary.map_or_else(|| package.to_owned(), |binary| format!("{package}::{binary}"));
                outcomes.get(&(class, name)).copied()
            });
            match outcome {
                Some(true) => {}
                Some(false) => wrong.push(format!("{} failed", test.name)),
                None => wrong.push(format!("{} did not run", test.name)),
            }
        }
        if wrong.is_empty() {
            println!("{:5}{:16}tests passed: {}", entry.id, entry.verdict, entry.tests.len());
        } else {
            bad += 1;
            println!("{:5}{:16}{}", entry.id, "NOT HELD", wrong.join(", "));
        }
        *counts.entry(&entry.verdict).or_default() += 1;
    }
    let verdicts: Vec<String> = counts.iter().map(|(verdict, count)| format!("{count} {verdict}")).collect();
    println!("\nbug catalogue: {} entries ({}), {} tests run, {bad} entries not held", entries.len(), verdicts.join(", "), outcomes.len());
    if bad == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

#[cfg(test)]
mod tests {
    use super::outcomes;

    #[test]
    fn results_are_read() {
        let xml = r#"<testsuites name="nextest-run" tests="3"><testsuite name="p::b" tests="2">
            <testcase name="m::good" classname="p::b" timestamp="x" time="0.1"></testcase>
            <testcase name="bad" classname="p::b" time="0.1"><failure message="x" type="test failure">&lt;testcase </failure></testcase></testsuite>
            <testsuite name="p"><testcase name="unit" classname="p" time="1"/></testsuite></testsuites>"#;
        let found = outcomes(xml);
        let is = |binary: &str, name: &str| found.get(&(binary.to_owned(), name.to_owned())).copied();
        assert_eq!(
            (is("p::b", "m::good"), is("p::b", "bad"), is("p", "unit"), is("p", "bad")),
            (Some(true), Some(false), Some(true), None)
        );
    }
}
