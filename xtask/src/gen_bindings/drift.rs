//! Compares what bindgen makes of two header versions, fact by fact, and the hand-written typedefs with the newer one.
//!
//! A fact is a type's text, a struct field's type, a size, alignment or offset, or an enum value. Whatever the base version says, the newer one
//! must say too, unless `accepted-drift.txt` has the fact with a reason.

use std::collections::BTreeMap;

/// `kind name` to text, white space removed.
type Facts = BTreeMap<String, String>;

/// Compares `newer` with `base`, and the typedefs of `compat` with `newer`. Gives one line a finding.
pub(super) fn compare(base: &str, newer: &str, compat: &str, accepted: &str) -> Vec<String> {
    let (base, newer, compat) = (facts(base), facts(newer), facts(compat));
    let mut findings = Vec::new();
    let mut accepted = Accepted::read(accepted, &mut findings);
    for (name, text) in &base {
        let found = newer.get(name);
        if found == Some(text) || accepted.take(name) {
            continue;
        }
        findings.push(match found {
            Some(found) => format!("{name}: the 13.x headers say `{found}`, the bindings `{text}`"),
            None => format!("{name}: the 13.x headers do not have it"),
        });
    }
    findings.extend(accepted.unused());
    for (name, text) in compat.iter().filter(|(name, _)| name.starts_with("type PFN_")) {
        if base.contains_key(name) {
            findings.push(format!("{name}: is in the bindings; remove it from compat.rs"));
        }
        match newer.get(name) {
            Some(found) if found == text => {}
            Some(found) => findings.push(format!("{name}: compat.rs says `{text}`, the 13.x headers `{found}`")),
            None => findings.push(format!("{name}: is in compat.rs, the 13.x headers do not have it")),
        }
    }
    findings
}

/// The names that neither version has: bindgen skips an unknown name silently.
pub(super) fn missing_names(names: &[String], base: &str, newer: &str) -> Vec<String> {
    let (base, newer) = (facts(base), facts(newer));
    let unknown = |name: &&String| !base.contains_key(&format!("type {name}")) && !newer.contains_key(&format!("type {name}"));
    names.iter().filter(unknown).map(|name| format!("typedefs.txt: no header has {name}")).collect()
}

/// The accepted differences and whether each was met.
struct Accepted(BTreeMap<String, bool>);

impl Accepted {
    fn read(text: &str, findings: &mut Vec<String>) -> Self {
        let mut names = BTreeMap::new();
        for (number, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty() && !line.starts_with('#')) {
            let name = match line.split_once(" | ") {
                Some((name, reason)) if !reason.trim().is_empty() => name.trim(),
                _ => {
                    findings.push(format!("accepted-drift.txt:{}: has no reason", number + 1));
                    continue;
                }
            };
            if ["size ", "align ", "type PFN_"].iter().any(|never| name.starts_with(never)) {
                findings.push(format!("accepted-drift.txt:{}: a size, an alignment or a signature is never accepted", number + 1));
            } else {
                names.insert(name.to_owned(), false);
            }
        }
        Self(names)
    }

    fn take(&mut self, name: &str) -> bool {
        self.0.get_mut(name).map(|met| *met = true).is_some()
    }

    fn unused(self) -> impl Iterator<Item = String> {
        self.0
            .into_iter()
            .filter(|(_, met)| !met)
            .map(|(name, _)| format!("accepted-drift.txt: {name} is no difference any more; remove the line"))
    }
}

/// Reads every fact from Rust text as bindgen and rustfmt write it.
fn facts(text: &str) -> Facts {
    let mut facts = Facts::new();
    for (start, _) in text.match_indices("pub type ") {
        let item = &text[start + "pub type ".len()..];
        if let Some((name, value)) = item[..end_of_item(item)].split_once('=') {
            facts.insert(format!("type {}", name.trim()), compact(value));
        }
    }
    for (start, _) in text.match_indices("pub const ") {
        let item = &text[start + "pub const ".len()..];
        // `NAME: TYPE = TYPE(5);`
        if let Some((name, value)) = item[..end_of_item(item)].split_once(':') {
            facts.insert(format!("const {}", name.trim()), compact(value));
        }
    }
    for keyword in ["pub struct ", "pub union "] {
        for (start, _) in text.match_indices(keyword) {
            let item = &text[start + keyword.len()..];
            let Some((name, body)) = item.split_once(" {").filter(|(name, _)| is_identifier(name)) else { continue };
            let body = body.split_once("\n}").map_or(body, |(body, _)| body);
            for field in
                compact(body).split(",pub").filter_map(|field| field.trim_start_matches("pub").trim_end_matches(',').split_once(':'))
            {
                facts.insert(format!("field {name}::{}", field.0), field.1.to_owned());
            }
        }
    }
    for (label, kind) in [("[\"Size of ", "size"), ("[\"Alignment of ", "align"), ("[\"Offset of field: ", "offset")] {
        for (start, _) in text.match_indices(label) {
            // `["Size of X"][size_of::<X>() - 88usize];`
            let item = &text[start + label.len()..];
            let Some((name, rest)) = item.split_once("\"]") else { continue };
            let number = rest.split_once("usize]").and_then(|(expression, _)| expression.rsplit_once("- "));
            if let Some((_, number)) = number {
                facts.insert(format!("{kind} {name}"), number.trim().to_owned());
            }
        }
    }
    facts
}

fn is_identifier(text: &str) -> bool {
    text.chars().all(|ch| ch.is_ascii_alphanumeric() || ch == '_')
}

/// Where the item's `;` is; one inside brackets belongs to an array type.
fn end_of_item(item: &str) -> usize {
    let mut depth = 0_i32;
    for (at, ch) in item.char_indices() {
        match ch {
            '[' | '(' => depth += 1,
            ']' | ')' => depth -= 1,
            ';' if depth == 0 => return at,
            _ => {}
        }
    }
    item.len()
}

/// Without white space and trailing commas, which depend on the line width.
fn compact(text: &str) -> String {
    let text: String = text.split_whitespace().collect();
    text.replace(",)", ")").replace(",>", ">")
}

#[cfg(test)]
mod tests {
    use super::{compare, facts, missing_names};

    const BASE: &str = r#"
pub type PFN_cuF_v1 = ::core::option::Option<
    unsafe extern "C" fn(a: *mut usize, b: [u8; 4usize]) -> CUresult,
>;
#[repr(C)]
pub struct P_st {
    pub kind: u32,
    pub reserved: [::core::ffi::c_uchar; 54usize],
}
const _: () = {
    ["Size of P_st"][::core::mem::size_of::<P_st>() - 88usize];
    ["Offset of field: P_st::reserved"]
        [::core::mem::offset_of!(P_st, reserved) - 34usize];
};
impl E_enum {
    pub const E_A: E_enum =
        E_enum(1);
}
pub struct E_enum(pub u32);
"#;

    #[test]
    fn facts_are_read() {
        let facts = facts(BASE);
        let expected = [
            ("const E_A", "E_enum=E_enum(1)"),
            ("field P_st::kind", "u32"),
            ("field P_st::reserved", "[::core::ffi::c_uchar;54usize]"),
            ("offset P_st::reserved", "34"),
            ("size P_st", "88"),
            ("type PFN_cuF_v1", "::core::option::Option<unsafeextern\"C\"fn(a:*mutusize,b:[u8;4usize])->CUresult>"),
        ];
        assert_eq!(facts.iter().map(|(name, text)| (name.as_str(), text.as_str())).collect::<Vec<_>>(), expected);
    }

    #[test]
    fn line_width_and_additions_are_no_drift() {
        let newer = BASE.replace("<\n    unsafe", "<unsafe").replace("CUresult,\n>", "CUresult>")
            + "impl E_enum { pub const E_B: E_enum = E_enum(2); }";
        assert_eq!(compare(BASE, &newer, "", ""), Vec::<String>::new());
    }

    #[test]
    fn changed_and_removed_facts_are_found() {
        let newer = BASE.replace("a: *mut usize", "a: *const usize").replace("E_A", "E_Z").replace("88usize", "96usize");
        let findings = compare(BASE, &newer, "", "");
        assert_eq!(findings.len(), 3, "{findings:?}");
        assert!(findings[0].starts_with("const E_A: the 13.x headers do not have it"), "{findings:?}");
        assert!(findings[1].starts_with("size P_st: the 13.x headers say `96`, the bindings `88`"), "{findings:?}");
        assert!(findings[2].contains("a:*constusize"), "{findings:?}");
    }

    #[test]
    fn an_accepted_difference_needs_a_reason_and_must_exist() {
        let newer = BASE.replace("34usize", "35usize");
        assert_eq!(compare(BASE, &newer, "", "offset P_st::reserved | a byte was taken\n"), Vec::<String>::new());
        assert_eq!(compare(BASE, &newer, "", "offset P_st::reserved |\n").len(), 2);
        assert_eq!(compare(BASE, BASE, "", "# text\n\noffset P_st::reserved | a byte was taken\n").len(), 1);
        assert_eq!(compare(BASE, &BASE.replace("88usize", "96usize"), "", "size P_st | no\n").len(), 2);
    }

    #[test]
    fn hand_written_typedefs_equal_the_newer_headers() {
        let added = "pub type PFN_cuG_v13 = ::core::option::Option<unsafe extern \"C\" fn(x: u32) -> CUresult>;";
        let newer = format!("{BASE}{added}");
        assert_eq!(compare(BASE, &newer, added, ""), Vec::<String>::new());
        assert_eq!(compare(BASE, &newer, &added.replace("u32", "u64"), "").len(), 1);
        assert_eq!(compare(BASE, BASE, added, "").len(), 1);
        assert_eq!(compare(&newer, &newer, added, "").len(), 1);
    }

    #[test]
    fn names_without_a_header_are_found() {
        let names = ["PFN_cuF_v1".to_owned(), "PFN_cuTypo_v1".to_owned()];
        assert_eq!(missing_names(&names, BASE, BASE), ["typedefs.txt: no header has PFN_cuTypo_v1"]);
    }
}
