//! Which words may stand in which crate's code: the invariants of the layers that no visibility rule of the language can hold.

use super::{File, Finding};

/// Longer files are reported.
pub(super) const LONG: usize = 300;

/// Words that only some places may use, outside comments.
struct Rule {
    words: &'static [&'static str],
    /// Folders the rule is about; everything if empty.
    within: &'static [&'static str],
    /// Folders that may.
    allowed: &'static [&'static str],
    reason: &'static str,
}

/// Folders of code that proves, builds or shows and may do what the libraries may not.
const NOT_LIBRARIES: [&str; 4] = ["tests/", "xtask/", "fuzz/", "examples/"];

const RULES: &[Rule] = &[
    Rule {
        words: &["libcuda.so"],
        within: &[],
        allowed: &["cuda-driver-sys/", "tests/", "xtask/", "fuzz/"],
        reason: "only cuda-driver-sys names the driver's library; use cuda_driver_sys::LIBRARY",
    },
    Rule {
        words: &["libc::syscall"],
        within: &[],
        allowed: &["pidfd-sys/", "tests/", "xtask/", "fuzz/"],
        reason: "only pidfd-sys makes raw system calls",
    },
    Rule {
        words: &["catch_unwind", "no_mangle", "export_name"],
        within: &[],
        allowed: &["cuda-ipc-ffi/", "cuda-ipc-preload/", "tests/", "xtask/", "fuzz/"],
        reason: "only the C ABI and the preload library export functions and stop unwinding",
    },
    Rule {
        words: &["println!", "print!", "eprintln!", "eprint!", "dbg!"],
        within: &["cuda-driver-sys/", "pidfd-sys/", "cuda-ipc-core/", "cuda-ipc-cache/", "cuda-ipc-ffi/", "cuda-ipc-preload/"],
        allowed: &[],
        reason: "a library does not print; log with tracing or return it",
    },
    Rule {
        // In halves, so that a search for what is unfinished does not find this table.
        words: &[concat!("to", "do!"), concat!("unimple", "mented!")],
        within: &[],
        allowed: &[],
        reason: "finish it or leave it out",
    },
];

/// Marks of unfinished work; these stand in comments. In halves, as above.
const MARKS: [&str; 2] = [concat!("TO", "DO"), concat!("FIX", "ME")];

/// Applies the rules to all Rust and C code; in-file unit tests, test folders and build scripts, which talk to cargo by printing, aside.
pub(super) fn check(files: &[File]) -> Vec<Finding> {
    let mut findings = Vec::new();
    for file in files.iter().filter(|file| ["rs", "c", "h"].iter().any(|extension| file.has_extension(extension))) {
        for (at, line) in file.text.lines().enumerate() {
            if let Some(mark) = MARKS.iter().find(|mark| contains_word(line, mark)) {
                findings.push(Finding::new(&file.path, at + 1, format!("{mark}: finish it or leave it out")));
            }
        }
        let rules: Vec<&Rule> = RULES.iter().filter(|rule| rule.applies_to(&file.path)).collect();
        for (number, code) in code_lines(&file.text) {
            for rule in &rules {
                if let Some(word) = rule.words.iter().find(|word| contains_word(code, word)) {
                    findings.push(Finding::new(&file.path, number, format!("{word}: {}", rule.reason)));
                }
            }
        }
    }
    findings
}

impl Rule {
    fn applies_to(&self, path: &str) -> bool {
        let is = |folders: &[&str]| folders.iter().any(|folder| path.starts_with(folder));
        (self.within.is_empty() || is(self.within)) && !is(self.allowed) && !is_test_code(path) && !path.ends_with("/build.rs")
    }
}

/// Whether this is an integration test, benchmark or example of a crate.
pub(super) fn is_test_code(path: &str) -> bool {
    ["/tests/", "/benches/", "/examples/"].iter().any(|part| path.contains(part))
}

/// Whether this code is part of what users link or run.
pub(super) fn is_product_code(path: &str) -> bool {
    path.ends_with(".rs") && path.contains("/src/") && !NOT_LIBRARIES.iter().any(|folder| path.starts_with(folder)) && !is_test_code(path)
}

/// The lines that are code, with their numbers: comments are left out, and all from `#[cfg(test)] mod` on.
pub(super) fn code_lines(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut lines = text.lines().enumerate().peekable();
    std::iter::from_fn(move || {
        loop {
            let (at, line) = lines.next()?;
            if line == "#[cfg(test)]" && lines.peek().is_some_and(|(_, next)| next.starts_with("mod ")) {
                return None;
            }
            let code = without_comment(line);
            if !code.trim().is_empty() {
                return Some((at + 1, code));
            }
        }
    })
}

/// The line up to a `//` that is not inside a string literal, as far as one line tells.
fn without_comment(line: &str) -> &str {
    let comment = line.match_indices("//").find(|(at, _)| line[..*at].matches('"').count().is_multiple_of(2));
    comment.map_or(line, |(at, _)| &line[..at])
}

/// Whether `word` occurs, not as the end of a longer word (`print!` in `println!` and `eprint!` is none).
fn contains_word(code: &str, word: &str) -> bool {
    let in_word = |ch: char| ch.is_ascii_alphanumeric() || ch == '_';
    let ends_in_word = word.chars().next_back().is_some_and(in_word);
    code.match_indices(word).any(|(at, _)| {
        let before = code[..at].chars().next_back().is_some_and(in_word);
        let after = ends_in_word && code[at + word.len()..].chars().next().is_some_and(in_word);
        !before && !after
    })
}

/// Whether the code has the keyword `unsafe`, in a block, function or attribute.
pub(super) fn has_unsafe(code: &str) -> bool {
    contains_word(code, "unsafe")
}

/// Hand-written Rust files that are longer than [`LONG`] lines.
pub(super) fn long_files(files: &[File]) -> impl Iterator<Item = (&str, usize)> {
    files
        .iter()
        .filter(|file| file.has_extension("rs") && !file.text.starts_with("// cargo xtask"))
        .map(|file| (file.path.as_str(), file.text.lines().count()))
        .filter(|(_, lines)| *lines > LONG)
}

#[cfg(test)]
mod tests {
    use super::super::file;
    use super::{check, code_lines, contains_word, is_product_code, long_files, without_comment};

    fn reasons(path: &str, text: &str) -> Vec<usize> {
        check(&[file(path, text)]).iter().map(|finding| finding.line).collect()
    }

    #[test]
    fn words_are_found_where_they_may_not_stand() {
        assert_eq!(reasons("cuda-ipc-core/src/a.rs", "//! libcuda.so.1\nlet x = \"libcuda.so.1\";\n"), [2]);
        assert_eq!(reasons("cuda-driver-sys/src/a.rs", "let x = \"libcuda.so.1\";\n"), Vec::<usize>::new());
        assert_eq!(reasons("cuda-ipc-core/src/a.rs", "unsafe { libc::syscall(1) }\n"), [1]);
        assert_eq!(reasons("cuda-ipc-core/tests/a.rs", "unsafe { libc::syscall(1) }\n"), Vec::<usize>::new());
        assert_eq!(reasons("cuda-ipc-cli/src/a.rs", "#[unsafe(no_mangle)]\nprintln!();\n"), [1]);
        assert_eq!(reasons("cuda-ipc-ffi/build.rs", "println!();\n"), Vec::<usize>::new());
        assert_eq!(reasons("cuda-ipc-cache/src/a.rs", "\nprintln!();\nformat!();\ndbg!(1);\n"), [2, 4]);
    }

    #[test]
    fn unit_tests_in_a_file_may() {
        let text = "fn a() {}\n\n#[cfg(test)]\nmod tests {\n    println!();\n}\n";
        assert_eq!(reasons("cuda-ipc-core/src/a.rs", text), Vec::<usize>::new());
        assert_eq!(code_lines(text).map(|(number, _)| number).collect::<Vec<_>>(), [1]);
    }

    #[test]
    fn comments_are_no_code() {
        assert_eq!(without_comment("let a = 1; // libcuda.so"), "let a = 1; ");
        assert_eq!(without_comment("let a = \"//x\"; // y"), "let a = \"//x\"; ");
        assert_eq!(without_comment("let a = \"https://x\";"), "let a = \"https://x\";");
    }

    #[test]
    fn words_are_whole() {
        assert!(!contains_word("eprint!(1)", "print!"));
        assert!(contains_word("std::print!(1)", "print!"));
        assert!(!contains_word("unsafe_code", "unsafe"));
        assert!(contains_word("#[unsafe(no_mangle)]", "unsafe"));
        assert!(contains_word("unsafe", "unsafe"));
    }

    #[test]
    fn product_code_is_what_users_get() {
        assert!(is_product_code("cuda-ipc-core/src/sys/driver.rs"));
        for path in [
            "tests/src/lib.rs",
            "tests/fake-cuda/src/lib.rs",
            "xtask/src/main.rs",
            "cuda-ipc-core/tests/key.rs",
            "cuda-ipc-core/Cargo.toml",
        ] {
            assert!(!is_product_code(path), "{path}");
        }
    }

    #[test]
    fn long_hand_written_files_are_reported() {
        let long = "x\n".repeat(301);
        let files = [file("a.rs", &long), file("b.rs", &format!("// cargo xtask gen\n{long}")), file("c.rs", "x\n"), file("d.md", &long)];
        assert_eq!(long_files(&files).collect::<Vec<_>>(), [("a.rs", 301)]);
    }
}
