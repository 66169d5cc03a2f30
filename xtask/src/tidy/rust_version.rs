//! The oldest Rust that builds this: stated once for each workspace and in README, the same everywhere, and not older than what a dependency asks for.
//!
//! That no newer function of the standard library is used clippy tells (`incompatible_msrv`, an error in this workspace); a build with that very Rust is not
//! part of CI.

use serde_json::Value;

use super::{File, Finding, line_of};

const ROOT: &str = "Cargo.toml";
const README: &str = "README.md";
const KEY: &str = "rust-version = \"";

/// Compares the statements, and what cargo knows of the dependencies.
pub(super) fn check(files: &[File], metadata: &Value) -> Vec<Finding> {
    let stated = |file: &File| file.text.split(KEY).nth(1).and_then(|rest| rest.split('"').next()).map(str::to_owned);
    let Some(ours) = files.iter().find(|file| file.path == ROOT).and_then(stated) else {
        return vec![Finding::new(ROOT, 1, "states no rust-version")];
    };
    let mut findings = Vec::new();
    for file in files.iter().filter(|file| file.path.ends_with(ROOT)) {
        if let Some(other) = stated(file).filter(|other| *other != ours) {
            let line = line_of(&file.text, |line| line.starts_with(KEY));
            findings.push(Finding::new(&file.path, line, format!("rust-version is {other} here and {ours} in {ROOT}")));
        }
    }
    let words = format!("Rust {ours} or later");
    if let Some(readme) = files.iter().find(|file| file.path == README).filter(|readme| !readme.text.contains(&words)) {
        findings.push(Finding::new(README, line_of(&readme.text, |line| line.contains("Rust 1.")), format!("does not say `{words}`")));
    }
    for package in metadata["packages"].as_array().into_iter().flatten() {
        let text = |key: &str| package[key].as_str().unwrap_or_default();
        if numbers(text("rust_version")) > numbers(&ours) {
            findings.push(Finding::new(
                "Cargo.lock",
                1,
                format!("{} {} needs Rust {}, and {ROOT} says {ours}", text("name"), text("version"), text("rust_version")),
            ));
        }
    }
    findings
}

/// `1.88` and `1.88.0` are the same.
fn numbers(version: &str) -> [u32; 3] {
    let mut found = [0; 3];
    for (place, part) in found.iter_mut().zip(version.split('.')) {
        *place = part.parse().unwrap_or_default();
    }
    found
}

#[cfg(test)]
mod tests {
    use super::super::{Finding, file};
    use super::{check, numbers};
    use serde_json::json;

    #[test]
    fn one_version_is_stated_everywhere() {
        let files = |fuzz: &str, readme: &str| {
            [
                file("Cargo.toml", "[workspace.package]\nrust-version = \"1.88\"\n"),
                file("fuzz/Cargo.toml", &format!("[package]\nrust-version = \"{fuzz}\"\n")),
                file("a/Cargo.toml", "rust-version.workspace = true\n"),
                file("README.md", readme),
            ]
        };
        let none = json!({"packages": []});
        assert_eq!(check(&files("1.88", "| Rust 1.88 or later |"), &none), []);
        assert_eq!(
            check(&files("1.90", "\nRust 1.87 or later"), &none),
            [
                Finding::new("fuzz/Cargo.toml", 2, "rust-version is 1.90 here and 1.88 in Cargo.toml"),
                Finding::new("README.md", 2, "does not say `Rust 1.88 or later`")
            ]
        );
        let newer = json!({"packages": [
            {"name": "old", "version": "1.0.0", "rust_version": "1.88.0"},
            {"name": "silent", "version": "1.0.0", "rust_version": null},
            {"name": "new", "version": "2.0.0", "rust_version": "1.89"},
        ]});
        let findings = check(&files("1.88", "Rust 1.88 or later"), &newer);
        assert_eq!(findings, [Finding::new("Cargo.lock", 1, "new 2.0.0 needs Rust 1.89, and Cargo.toml says 1.88")]);
    }

    #[test]
    fn versions_are_compared_by_number() {
        assert!(numbers("1.100") > numbers("1.88.3") && numbers("1.88") == numbers("1.88.0") && numbers("") < numbers("1.0"));
    }
}
