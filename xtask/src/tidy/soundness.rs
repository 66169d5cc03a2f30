//! `docs/soundness.md` lists exactly the files of the product that have unsafe code.

use std::collections::BTreeSet;

use super::{File, Finding, line_of, sources};

const LIST: &str = "docs/soundness.md";

/// Compares the list with the code. Without the document there is nothing to compare.
pub(super) fn check(files: &[File]) -> Vec<Finding> {
    let Some(document) = files.iter().find(|file| file.path == LIST) else { return Vec::new() };
    let listed: BTreeSet<&str> = document.text.split('`').skip(1).step_by(2).filter(|word| word.ends_with(".rs")).collect();
    let mut findings = Vec::new();
    for file in files.iter().filter(|file| sources::is_product_code(&file.path)) {
        let first = sources::code_lines(&file.text).find(|(_, code)| sources::has_unsafe(code));
        match (first, listed.contains(file.path.as_str())) {
            (Some((line, _)), false) => {
                findings.push(Finding::new(&file.path, line, format!("has unsafe code and is not listed in {LIST}")))
            }
            (None, true) => findings.push(Finding::new(
                LIST,
                line_of_path(document, &file.path),
                format!("lists {}, which has no unsafe code", file.path),
            )),
            _ => {}
        }
    }
    let gone = listed.iter().filter(|path| !files.iter().any(|file| file.path == **path));
    findings.extend(gone.map(|path| Finding::new(LIST, line_of_path(document, path), format!("lists {path}, which does not exist"))));
    findings
}

fn line_of_path(document: &File, path: &str) -> usize {
    line_of(&document.text, |line| line.contains(path))
}

#[cfg(test)]
mod tests {
    use super::super::{Finding, file};
    use super::{LIST, check};

    #[test]
    fn list_and_code_must_agree() {
        let unsafe_code = "//! doc\n#![allow(unsafe_code)]\nfn a() { unsafe { b() } }\n";
        let files = [
            file("cuda-ipc-core/src/a.rs", unsafe_code),
            file("cuda-ipc-core/src/b.rs", unsafe_code),
            file("cuda-ipc-core/src/c.rs", "// unsafe\n#![deny(unsafe_code)]\n"),
            file("tests/src/d.rs", unsafe_code),
            file(LIST, "# Soundness\n- `cuda-ipc-core/src/a.rs`: why\n- `cuda-ipc-core/src/c.rs`\n- `cuda-ipc-core/src/gone.rs`\n"),
        ];
        let expected = [
            Finding::new("cuda-ipc-core/src/b.rs", 3, "has unsafe code and is not listed in docs/soundness.md"),
            Finding::new(LIST, 3, "lists cuda-ipc-core/src/c.rs, which has no unsafe code"),
            Finding::new(LIST, 4, "lists cuda-ipc-core/src/gone.rs, which does not exist"),
        ];
        assert_eq!(check(&files), expected);
        assert_eq!(check(&files[..4]), []);
    }
}
