//! The tests that documents name are there; in the bug catalogue each id stands once, and no entry has gone.

use super::{File, Finding};
use crate::catalogue::{ENTRIES, PATH, Test, entries};

/// Checks the catalogue, and every `file::test` in a document.
pub(super) fn check(files: &[File]) -> Vec<Finding> {
    let Some(document) = files.iter().find(|file| file.path == PATH) else {
        return vec![Finding::new(PATH, 1, "is not there")];
    };
    let entries = match entries(&document.text) {
        Ok(entries) => entries,
        Err((line, why)) => return vec![Finding::new(PATH, line, why)],
    };
    let mut findings = Vec::new();
    if entries.len() < ENTRIES {
        findings.push(Finding::new(PATH, 1, format!("has {} entries, and had {ENTRIES}", entries.len())));
    }
    for (at, entry) in entries.iter().enumerate() {
        if entries.iter().take(at).any(|other| other.id == entry.id) {
            findings.push(Finding::new(PATH, entry.line, format!("{} stands here twice", entry.id)));
        }
        for test in entry.tests.iter().filter(|test| test.filter().is_none()) {
            findings.push(Finding::new(PATH, entry.line, format!("{}: {} is no file of tests", entry.id, test.file)));
        }
    }
    for document in files.iter().filter(|file| file.has_extension("md")) {
        for (line, number) in document.text.lines().zip(1..) {
            for test in named(line).filter(|test| !is_there(test, files)) {
                findings.push(Finding::new(&document.path, number, format!("there is no test {} in {}", test.name, test.file)));
            }
        }
    }
    findings
}

/// The tests that a line names, as code.
fn named(line: &str) -> impl Iterator<Item = Test> {
    let code = line.split('`').skip(1).step_by(2);
    code.filter_map(|code| {
        let (file, name) = code.split_once("::")?;
        let is_test = file.ends_with(".rs") && file.contains('/');
        is_test.then(|| Test { file: file.to_owned(), name: name.to_owned() })
    })
}

/// Whether the file has a function of this name that is a test.
fn is_there(test: &Test, files: &[File]) -> bool {
    let Some(file) = files.iter().find(|file| file.path == test.file) else { return false };
    let start = format!("fn {}(", test.name);
    let mut attributed = false;
    for line in file.text.lines().map(str::trim_start) {
        if attributed && line.starts_with(&start) {
            return true;
        }
        // Other attributes and comments may stand between.
        attributed = line == "#[test]" || (attributed && (line.starts_with("#[") || line.starts_with("//")));
    }
    false
}

#[cfg(test)]
mod tests {
    use super::super::file;
    use super::{ENTRIES, PATH, check};

    fn table(test: &str) -> String {
        (0..ENTRIES).map(|number| format!("| B{number} | a | b | covered | `{test}` |\n")).collect()
    }

    #[test]
    fn tests_have_to_be_there() {
        let tests = file("a/tests/b.rs", "#[test]\n// why\nfn x() {}\n\nfn y() {}\n");
        let lines = |test: &str| check(&[file(PATH, &table(test)), file("a/tests/b.rs", &tests.text)]).len();
        assert_eq!(lines("a/tests/b.rs::x"), 0);
        assert_eq!(lines("a/tests/b.rs::y"), ENTRIES, "no test");
        assert_eq!(lines("a/tests/b.rs::z"), ENTRIES, "no function");
        assert_eq!(lines("a/tests/c.rs::x"), ENTRIES, "no file");
    }

    #[test]
    fn any_document_may_name_tests() {
        let files =
            |text: &str| [file(PATH, &table("a/tests/b.rs::x")), file("docs/c.md", text), file("a/tests/b.rs", "#[test]\nfn x() {}\n")];
        assert_eq!(check(&files("`a/tests/b.rs::x` and `std::mem`, `b.rs::y`")).len(), 0);
        assert_eq!(check(&files("\n`z` `a/tests/b.rs::y`"))[0].line, 2);
    }

    #[test]
    fn no_entry_goes_or_comes_twice() {
        let tests = "#[test]\nfn x() {}\n";
        let findings = |text: &str| check(&[file(PATH, text), file("a/tests/b.rs", tests)]).len();
        let whole = table("a/tests/b.rs::x");
        assert_eq!(findings(&whole), 0);
        assert_eq!(findings(whole.split_once('\n').expect("lines").1), 1);
        assert_eq!(findings(&whole.replace("| B1 |", "| B2 |")), 1);
        assert_eq!(check(&[]).len(), 1);
    }
}
