//! Manifests of members: no dependency that nothing uses, and what a crate needs to be published.

use serde_json::Value;

use super::{File, Finding, line_of};

/// What a published crate says of itself, by cargo's name for it.
const WANTED: [&str; 4] = ["description", "license", "readme", "rust_version"];
/// crates.io takes no more.
const MOST_KEYWORDS: usize = 5;
/// Files that are in a crate's folder, for whoever gets the crate alone.
const LICENCES: [&str; 2] = ["LICENSE-MIT", "LICENSE-APACHE"];

/// Checks the members that cargo names.
pub(super) fn check(files: &[File], metadata: &Value) -> Vec<Finding> {
    let root = metadata["workspace_root"].as_str().unwrap_or_default();
    let mut findings = Vec::new();
    for package in metadata["packages"].as_array().into_iter().flatten().filter(|package| package["source"].is_null()) {
        let text = |key: &str| package[key].as_str().unwrap_or_default();
        let path = text("manifest_path").strip_prefix(root).unwrap_or_default().trim_start_matches('/');
        let folder = path.strip_suffix("Cargo.toml").unwrap_or_default();
        let manifest = files.iter().find(|file| file.path == path).map_or("", |file| file.text.as_str());
        for (dependency, kind) in unused(files, folder, package) {
            let line = line_of(manifest, |line| line.starts_with(&dependency));
            findings.push(Finding::new(path, line, format!("{dependency} is {kind}, and nothing here uses it")));
        }
        // An empty list is cargo's form of `publish = false`.
        if package["publish"].as_array().is_none_or(|registries| !registries.is_empty()) {
            findings.extend(lacking(files, folder, package).into_iter().map(|what| Finding::new(path, 1, what)));
        }
    }
    findings
}

/// Dependencies whose name does not stand in the code that may use them, each with what it is.
fn unused<'p>(files: &[File], folder: &str, package: &'p Value) -> Vec<(String, &'p str)> {
    let is_code = |file: &&File| file.has_extension("rs") && file.path.starts_with(folder);
    let under = |file: &File, part: &str| file.path.get(folder.len()..).is_some_and(|path| path.starts_with(part));
    let mut found = Vec::new();
    for dependency in package["dependencies"].as_array().into_iter().flatten() {
        let name = dependency["rename"].as_str().or(dependency["name"].as_str()).unwrap_or_default();
        let (kind, ident) = (dependency["kind"].as_str(), name.replace('-', "_"));
        let mut code = files.iter().filter(is_code).filter(|file| match kind {
            Some("build") => under(file, "build.rs"),
            Some("dev") => ["src/", "tests/", "benches/", "examples/"].iter().any(|part| under(file, part)),
            _ => under(file, "src/"),
        });
        // A model checker is a dependency where its own flag is given; a crate's tests may use what the crate uses.
        if !code.any(|file| names(&file.text, &ident)) {
            let kind = match kind {
                Some("build") => "a build dependency",
                Some("dev") => "a dev-dependency",
                _ => "a dependency",
            };
            found.push((name.to_owned(), kind));
        }
    }
    found
}

/// Whether the word stands in the text outside of comments.
fn names(text: &str, ident: &str) -> bool {
    let is_word = |ch: char| ch.is_ascii_alphanumeric() || ch == '_';
    text.lines().map(|line| line.split("//").next().unwrap_or_default()).any(|line| line.split(|ch| !is_word(ch)).any(|word| word == ident))
}

/// What a crate lacks to be published.
fn lacking(files: &[File], folder: &str, package: &Value) -> Vec<String> {
    let mut lacks: Vec<String> =
        WANTED.iter().filter(|key| package[**key].as_str().is_none_or(str::is_empty)).map(|key| format!("has no {key}")).collect();
    let count = |key: &str| package[key].as_array().map_or(0, Vec::len);
    if !(1..=MOST_KEYWORDS).contains(&count("keywords")) {
        lacks.push(format!("has {} keywords; 1 to {MOST_KEYWORDS} are taken", count("keywords")));
    }
    if count("categories") == 0 {
        lacks.push("has no category".to_owned());
    }
    for dependency in package["dependencies"].as_array().into_iter().flatten() {
        // A path is no requirement for others; dev-dependencies without one are left out when the crate is packed.
        if dependency["path"].is_string() && dependency["kind"] != "dev" && dependency["req"] == "*" {
            lacks.push(format!("depends on {} without a version", dependency["name"].as_str().unwrap_or_default()));
        }
    }
    let there = |name: &str| files.iter().any(|file| file.path == format!("{folder}{name}"));
    lacks.extend(LICENCES.iter().filter(|name| !there(name)).map(|name| format!("has no {name} beside it")));
    lacks
}

#[cfg(test)]
mod tests {
    use super::super::file;
    use super::{check, names};
    use serde_json::{Value, json};

    fn package(publish: &Value, dependencies: &Value) -> Value {
        json!({"workspace_root": "/w", "packages": [{
            "source": null, "manifest_path": "/w/a/Cargo.toml", "publish": publish, "dependencies": dependencies,
            "description": "x", "license": "MIT", "readme": "README.md", "rust_version": "1.88", "keywords": ["a"], "categories": ["b"],
        }]})
    }

    fn reasons(code: &str, dependencies: &Value) -> Vec<String> {
        let files = [file("a/Cargo.toml", "x-y = 1\n"), file("a/src/lib.rs", code), file("a/tests/t.rs", "use for_tests::x;\n")];
        check(&files, &package(&json!([]), dependencies))
            .into_iter()
            .map(|finding| format!("{}: {}", finding.line, finding.reason))
            .collect()
    }

    #[test]
    fn what_nothing_uses_is_found() {
        let dependencies = json!([{"name": "x-y", "kind": null}, {"name": "for-tests", "kind": "dev"}]);
        assert_eq!(reasons("use x_y::z;\n", &dependencies), Vec::<String>::new());
        assert_eq!(reasons("// x_y\n", &dependencies), ["1: x-y is a dependency, and nothing here uses it"]);
        let others = json!([{"name": "for-tests", "kind": null}, {"name": "x-y", "kind": "build"}, {"name": "long", "rename": "short", "kind": "dev"}]);
        assert_eq!(
            reasons("short::x();\n", &others),
            ["1: for-tests is a dependency, and nothing here uses it", "1: x-y is a build dependency, and nothing here uses it"]
        );
        assert!(names("a::libc::b", "libc") && !names("a::libc_b", "libc"));
    }

    #[test]
    fn a_published_crate_says_what_it_is() {
        let licences = [file("a/LICENSE-MIT", ""), file("a/LICENSE-APACHE", "")];
        assert_eq!(check(&licences, &package(&Value::Null, &json!([]))), []);
        let mut bare = package(&Value::Null, &json!([{"name": "b", "path": "/w/b", "req": "*", "kind": null}]));
        bare["packages"][0]["description"] = Value::Null;
        bare["packages"][0]["keywords"] = json!(["1", "2", "3", "4", "5", "6"]);
        let reasons: Vec<String> = check(&licences[..1], &bare).into_iter().map(|finding| finding.reason).collect();
        let expected = [
            "b is a dependency, and nothing here uses it",
            "has no description",
            "has 6 keywords; 1 to 5 are taken",
            "depends on b without a version",
            "has no LICENSE-APACHE beside it",
        ];
        assert_eq!(reasons, expected);
    }
}
