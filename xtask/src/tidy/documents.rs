//! Documents describe the project, not one machine: no absolute paths of somebody's checkout or home.

use super::{File, Finding};

/// Folders that exist on some machine only.
const MACHINE_FOLDERS: [&str; 4] = ["/home/", "/root/", "/tmp/", "/Users/"];

/// Checks every Markdown file.
pub(super) fn check(files: &[File]) -> Vec<Finding> {
    let mut findings = Vec::new();
    for file in files.iter().filter(|file| file.has_extension("md")) {
        for (at, line) in file.text.lines().enumerate() {
            if let Some(folder) = MACHINE_FOLDERS.iter().find(|folder| names_path(line, folder)) {
                findings.push(Finding::new(
                    &file.path,
                    at + 1,
                    format!("{folder}… is a path of one machine; name it relative or by a variable"),
                ));
            }
        }
    }
    findings
}

/// Whether a path begins with `folder` somewhere in the line; `target/tmp/x` is another path.
fn names_path(line: &str, folder: &str) -> bool {
    line.match_indices(folder)
        .any(|(at, _)| line[..at].chars().next_back().is_none_or(|before| !before.is_ascii_alphanumeric() && !"._-/}".contains(before)))
}

#[cfg(test)]
mod tests {
    use super::super::file;
    use super::check;

    #[test]
    fn paths_of_one_machine_are_found() {
        let text = "see `/home/me/x`\nor target/tmp/x\n(/tmp/log)\nhttps://example.org/home/page\n$DIR/root/x ${DIR}/root/x\n";
        let lines: Vec<usize> = check(&[file("docs/a.md", text), file("a.rs", text)]).iter().map(|finding| finding.line).collect();
        assert_eq!(lines, [1, 3]);
    }
}
