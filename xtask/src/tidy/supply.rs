//! Dependencies: their licences, where they come from, and whether one is there twice. What is allowed stands in `deny.toml`.
//!
//! cargo-deny reads the same file and knows advisories too, but its database is a git repository that a CI without internet cannot reach.

use std::collections::BTreeMap;

use serde_json::Value;

use super::{Finding, line_of};

/// Checks the packages that cargo has resolved for `lock`.
pub(super) fn check(lock: &str, metadata: &Value, deny: &str) -> Vec<Finding> {
    let licences = strings(deny, "licenses", "allow");
    let exceptions = exceptions(deny);
    let twice = strings(deny, "bans", "skip");
    let mut findings = Vec::new();
    let mut versions: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    let mut registry = None;
    for package in metadata["packages"].as_array().into_iter().flatten() {
        let text = |key: &str| package[key].as_str().unwrap_or_default();
        let (name, version) = (text("name"), text("version"));
        let mut find = |reason: String| findings.push(Finding::new(lock, 1, format!("{name} {version}: {reason}")));
        match text("license") {
            "" => find("has no licence expression".to_owned()),
            licence if is_allowed(licence, &licences) => {}
            licence if exceptions.iter().any(|(of, more)| of == name && is_allowed(licence, &[&licences[..], &more[..]].concat())) => {}
            licence => find(format!("its licence `{licence}` is not allowed by deny.toml")),
        }
        if package["source"].is_null() {
            continue;
        }
        versions.entry(name).or_default().push(version);
        // One registry for all, whichever name it has here; no git repository.
        let source = text("source");
        if !source.starts_with("registry+") || *registry.get_or_insert(source) != source {
            find(format!("comes from {source}, not from the registry"));
        }
    }
    for (name, versions) in versions.iter().filter(|(_, versions)| versions.len() > 1) {
        for version in &versions[..versions.len() - 1] {
            if !twice.iter().any(|skip| skip == name || *skip == format!("{name}@{version}")) {
                let all = versions.join(", ");
                findings.push(Finding::new(
                    lock,
                    1,
                    format!("{name} is there twice ({all}); update one of its users, or list {name}@{version} in deny.toml"),
                ));
            }
        }
    }
    // An allowance that nothing needs any more is said only where all dependencies are seen.
    if lock == "Cargo.lock" {
        for skip in &twice {
            let (name, version) = skip.split_once('@').unwrap_or((skip, ""));
            let needed = versions.get(name).is_some_and(|found| found.len() > 1 && (version.is_empty() || found.contains(&version)));
            if !needed {
                findings.push(Finding::new(
                    "deny.toml",
                    line_of(deny, |line| line.contains(skip.as_str())),
                    format!("{skip} is not there twice any more"),
                ));
            }
        }
    }
    findings
}

/// Whether an SPDX expression can be met with the allowed licences. `/` is the old way to write OR.
fn is_allowed(expression: &str, allowed: &[String]) -> bool {
    let spaced = expression.replace('/', " OR ").replace('(', " ( ").replace(')', " ) ");
    let mut tokens: Vec<&str> = spaced.split_whitespace().rev().collect();
    any_of(&mut tokens, allowed) && tokens.is_empty()
}

// `tokens` is a stack: the next one is the last.
fn any_of(tokens: &mut Vec<&str>, allowed: &[String]) -> bool {
    let mut met = all_of(tokens, allowed);
    while tokens.last() == Some(&"OR") {
        tokens.pop();
        met |= all_of(tokens, allowed);
    }
    met
}

fn all_of(tokens: &mut Vec<&str>, allowed: &[String]) -> bool {
    let mut met = one(tokens, allowed);
    while tokens.last() == Some(&"AND") {
        tokens.pop();
        met &= one(tokens, allowed);
    }
    met
}

fn one(tokens: &mut Vec<&str>, allowed: &[String]) -> bool {
    match tokens.pop() {
        Some("(") => {
            let met = any_of(tokens, allowed);
            tokens.pop() == Some(")") && met
        }
        Some(licence) => {
            let mut licence = licence.to_owned();
            if tokens.last() == Some(&"WITH") {
                tokens.pop();
                licence += &format!(" WITH {}", tokens.pop().unwrap_or_default());
            }
            allowed.contains(&licence)
        }
        None => false,
    }
}

/// Crates that may have licences which others may not, with these.
fn exceptions(toml: &str) -> Vec<(String, Vec<String>)> {
    let quoted = |text: &str| -> Vec<String> { text.split('"').skip(1).step_by(2).map(str::to_owned).collect() };
    let lines = array(toml, "licenses", "exceptions");
    let after = |line: &str, key: &str| line.split_once(key).map(|(_, rest)| quoted(rest.split(']').next().unwrap_or(rest)));
    lines.iter().filter_map(|line| Some((after(line, "crate =")?.into_iter().next()?, after(line, "allow =")?))).collect()
}

/// The strings of an array in a TOML section, or, of tables in it, the string after `crate =`.
fn strings(toml: &str, section: &str, key: &str) -> Vec<String> {
    let mut found = Vec::new();
    for line in array(toml, section, key) {
        match line.split_once("crate =") {
            Some((_, rest)) => found.extend(rest.split('"').nth(1).map(str::to_owned)),
            None => found.extend(line.split('"').skip(1).step_by(2).map(str::to_owned)),
        }
    }
    found
}

/// The lines of an array in a TOML section, without comments.
///
/// Reads what `deny.toml` has, not all of TOML: a section, a key at the start of a line, an array of strings or of one-line tables.
fn array<'a>(toml: &'a str, section: &str, key: &str) -> Vec<&'a str> {
    let header = format!("[{section}]");
    let lines = toml.lines().skip_while(|line| line.trim() != header).skip(1).take_while(|line| !line.starts_with('['));
    let from_key = lines.skip_while(|line| line.split('=').next().map(str::trim) != Some(key));
    let mut found = Vec::new();
    for (at, line) in from_key.enumerate() {
        let line = if at == 0 { line.split_once('=').map_or("", |(_, value)| value) } else { line };
        let line = line.split('#').next().unwrap_or_default();
        found.push(line);
        if line.trim_end().ends_with(']') {
            break;
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::{check, exceptions, is_allowed, strings};
    use serde_json::json;

    const DENY: &str = "[licenses]\nallow = [\n    \"MIT\", # comment\n    \"Apache-2.0\",\n    \"Apache-2.0 WITH LLVM-exception\",\n]\n\n[bans]\n\
        multiple-versions = \"deny\"\nskip = [\n    { crate = \"syn@2.0.1\", reason = \"two users, \\\"x\\\"\" },\n]\n";

    #[test]
    fn lists_are_read() {
        assert_eq!(strings(DENY, "licenses", "allow"), ["MIT", "Apache-2.0", "Apache-2.0 WITH LLVM-exception"]);
        assert_eq!(strings(DENY, "bans", "skip"), ["syn@2.0.1"]);
        assert_eq!(strings("[bans]\nskip = []\n[other]\nallow = [\"x\"]\n", "bans", "skip"), Vec::<String>::new());
        assert_eq!(strings("[a]\nallow = [\"x\", \"y\"]\n", "a", "allow"), ["x", "y"]);
    }

    #[test]
    fn expressions_are_met_or_not() {
        let allowed = strings(DENY, "licenses", "allow");
        for expression in [
            "MIT",
            "MIT OR GPL-3.0",
            "MIT/Apache-2.0",
            "(GPL-3.0 OR MIT) AND Apache-2.0",
            "Apache-2.0 WITH LLVM-exception OR GPL-3.0",
            "MIT AND Apache-2.0",
        ] {
            assert!(is_allowed(expression, &allowed), "{expression}");
        }
        for expression in ["GPL-3.0", "MIT AND GPL-3.0", "(MIT", "MIT Apache-2.0", "", "MIT WITH x", "(GPL-3.0 OR MIT) AND NCSA"] {
            assert!(!is_allowed(expression, &allowed), "{expression}");
        }
    }

    #[test]
    fn licences_sources_and_duplicates_are_found() {
        let package = |name: &str, version: &str, license: &str, source: &str| json!({"name": name, "version": version, "license": license, "source": source});
        let metadata = json!({"packages": [
            {"name": "ours", "version": "0.1.0", "license": "MIT OR Apache-2.0", "source": null},
            package("a", "1.0.0", "GPL-3.0", "registry+one"),
            package("b", "1.0.0", "MIT", "git+two"),
            package("c", "1.0.0", "MIT", "registry+three"),
            package("d", "1.0.0", "MIT", "registry+one"),
            package("d", "2.0.0", "MIT", "registry+one"),
            package("syn", "2.0.1", "MIT", "registry+one"),
            package("syn", "3.0.0", "MIT", "registry+one"),
        ]});
        let reasons: Vec<String> = check("Cargo.lock", &metadata, DENY).into_iter().map(|finding| finding.reason).collect();
        let expected = [
            "a 1.0.0: its licence `GPL-3.0` is not allowed by deny.toml",
            "b 1.0.0: comes from git+two, not from the registry",
            "c 1.0.0: comes from registry+three, not from the registry",
            "d is there twice (1.0.0, 2.0.0); update one of its users, or list d@1.0.0 in deny.toml",
        ];
        assert_eq!(reasons, expected);
    }

    #[test]
    fn an_exception_is_for_its_crate_only() {
        let deny = "[licenses]\nallow = [\"MIT\"]\nexceptions = [\n    { crate = \"tool\", allow = [\"MPL-2.0\", \"X\"] },\n]\n";
        assert_eq!(exceptions(deny), [("tool".to_owned(), vec!["MPL-2.0".to_owned(), "X".to_owned()])]);
        assert_eq!(exceptions(DENY), []);
        let package = |name: &str, license: &str| json!({"name": name, "version": "1.0.0", "license": license, "source": "registry+one"});
        let metadata = json!({"packages": [package("tool", "MPL-2.0 AND MIT"), package("other", "MPL-2.0"), package("tool", "GPL-3.0")]});
        let reasons: Vec<String> = check("Cargo.lock", &metadata, deny).into_iter().map(|finding| finding.reason).collect();
        assert!(reasons.iter().filter(|reason| reason.contains("licence")).eq([
            "other 1.0.0: its licence `MPL-2.0` is not allowed by deny.toml",
            "tool 1.0.0: its licence `GPL-3.0` is not allowed by deny.toml"
        ]));
    }

    #[test]
    fn an_allowance_that_is_not_needed_is_found() {
        let findings = check("Cargo.lock", &json!({"packages": []}), DENY);
        assert_eq!(findings.len(), 1);
        assert_eq!((findings[0].path.as_str(), findings[0].line), ("deny.toml", 11));
    }
}
