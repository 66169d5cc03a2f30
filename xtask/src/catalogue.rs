//! The table of `docs/bug-catalogue.md`: public bug reports, verdicts, and the tests that hold them.
//!
//! This file reads the table and turns its `file::test` into the names that the test runner knows. Whether the tests are there `tidy` checks; `test --bugs`
//! runs them.

/// Where the table is.
pub(crate) const PATH: &str = "docs/bug-catalogue.md";
/// How many entries it has at least: none is ever taken out.
pub(crate) const ENTRIES: usize = 53;
/// What a verdict may be.
pub(crate) const VERDICTS: [&str; 3] = ["covered", "in part", "does not apply"];

/// A row of the table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) line: usize,
    pub(crate) id: String,
    pub(crate) verdict: String,
    pub(crate) tests: Vec<Test>,
}

/// A test function and the file it stands in, by its path from the root.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Test {
    pub(crate) file: String,
    pub(crate) name: String,
}

/// The rows of the table. Errors: line and what is wrong there.
pub(crate) fn entries(text: &str) -> Result<Vec<Entry>, (usize, String)> {
    let rows = text.lines().zip(1..).filter(|(line, _)| line.starts_with("| A") || line.starts_with("| B"));
    rows.map(|(row, line)| entry(row, line).map_err(|why| (line, why))).collect()
}

fn entry(row: &str, line: usize) -> Result<Entry, String> {
    let cells: Vec<&str> = row.trim().trim_matches('|').split('|').map(str::trim).collect();
    let &[id, _, _, verdict, tests] = cells.as_slice() else { return Err(format!("{} cells, not 5", cells.len())) };
    let number = id.get(1..).unwrap_or_default();
    if number.is_empty() || !number.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(format!("`{id}` is no id"));
    }
    if !VERDICTS.contains(&verdict) {
        return Err(format!("`{verdict}` is none of: {}", VERDICTS.join(", ")));
    }
    let tests = tests.split_whitespace().map(Test::parse).collect::<Result<Vec<_>, _>>()?;
    if tests.is_empty() {
        return Err(format!("{id} names no test"));
    }
    Ok(Entry { line, id: id.to_owned(), verdict: verdict.to_owned(), tests })
}

impl Test {
    fn parse(word: &str) -> Result<Self, String> {
        let inner = word.strip_prefix('`').and_then(|word| word.strip_suffix('`'));
        let (file, name) = inner.and_then(|inner| inner.split_once("::")).ok_or_else(|| format!("{word} is not `file::test`"))?;
        Ok(Self { file: file.to_owned(), name: name.to_owned() })
    }

    /// Package, test binary (`None`: the package's own unit tests) and full name, as cargo's conventions make them of a path.
    pub(crate) fn address(&self) -> Option<(&str, Option<&str>, String)> {
        let path = self.file.strip_suffix(".rs")?;
        // Our packages have the names of their folders, but for one.
        let (folder, rest) = path.split_once('/')?;
        let package = if folder == "tests" { "cuda-ipc-tests" } else { folder };
        let (binary, modules) = match rest.split_once('/')? {
            ("src", modules) => (None, format!("{}::tests", modules.replace('/', "::"))),
            ("tests", file) => match file.split_once('/') {
                Some((binary, modules)) => (Some(binary), modules.replace('/', "::")),
                None => (Some(file), String::new()),
            },
            _ => return None,
        };
        let full = if modules.is_empty() || modules == "main" { self.name.clone() } else { format!("{modules}::{}", self.name) };
        Some((package, binary, full))
    }

    /// The filter of cargo-nextest that selects this test and no other.
    pub(crate) fn filter(&self) -> Option<String> {
        let (package, binary, name) = self.address()?;
        let binary = binary.map_or_else(|| "kind(=lib)".to_owned(), |binary| format!("binary(={binary})"));
        Some(format!("(package(={package}) and {binary} and test(={name}))"))
    }
}

#[cfg(test)]
mod tests {
    use super::{Test, entries};

    const ROW: &str = "| B1 | a/b#1 | must hold | covered | `tests/tests/cache/life.rs::x` `pidfd-sys/src/numbers.rs::y` |";

    #[test]
    fn rows_are_read() {
        let text = format!("# x\n| id | a | b | c | d |\n|---|---|---|---|---|\n{ROW}\n");
        let found = entries(&text).expect("a table");
        assert_eq!((found.len(), found[0].line, found[0].id.as_str(), found[0].verdict.as_str()), (1, 4, "B1", "covered"));
        assert_eq!(found[0].tests[1], Test { file: "pidfd-sys/src/numbers.rs".to_owned(), name: "y".to_owned() });
    }

    #[test]
    fn what_is_no_row_is_named() {
        for (from, to) in [("covered", "maybe"), ("B1", "Bx"), ("`tests", "tests"), ("::x", ""), ("a/b#1 |", "")] {
            assert!(entries(&ROW.replacen(from, to, 1)).is_err_and(|(line, _)| line == 1), "{to}");
        }
        assert!(entries("| B1 | a | b | covered |  |").is_err());
    }

    #[test]
    fn paths_become_names_of_tests() {
        let filter = |file: &str| Test { file: file.to_owned(), name: "x".to_owned() }.filter();
        assert_eq!(filter("tests/tests/a.rs").as_deref(), Some("(package(=cuda-ipc-tests) and binary(=a) and test(=x))"));
        assert_eq!(filter("pidfd-sys/tests/it/b.rs").as_deref(), Some("(package(=pidfd-sys) and binary(=it) and test(=b::x))"));
        assert_eq!(filter("core/tests/t/main.rs").as_deref(), Some("(package(=core) and binary(=t) and test(=x))"));
        assert_eq!(filter("core/src/a/b.rs").as_deref(), Some("(package(=core) and kind(=lib) and test(=a::b::tests::x))"));
        assert_eq!(filter("core/benches/a.rs"), None);
    }
}
