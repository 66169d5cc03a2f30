//! `public-api`: the list of what each library crate offers, from the pages that rustdoc makes of it; with `--check`, compares it with the tree.
//!
//! A name that goes or changes shows as a difference of `CRATE/public-api.txt`, so nobody takes one away unawares. The tools that compare public APIs read rustdoc's
//! JSON, which the stable toolchain does not write; its pages have the same facts: every item (`all.html`), and on an item's page fields, variants, methods and
//! traits, each under an anchor of its own. Left out are what every type has, and types that are generated (`gen-bindings --check` holds these).

use std::collections::BTreeSet;
use std::path::Path;
use std::process::ExitCode;

use crate::workspace::{Failure, Workspace};

pub(crate) const USAGE: &str = "[--check]";
/// The libraries that others write programs with. The C library has its header and its list of symbols.
const CRATES: [&str; 4] = ["cuda-driver-sys", "pidfd-sys", "cuda-ipc-core", "cuda-ipc-cache"];
const FIRST_LINE: &str = "# cargo xtask public-api\n";
/// Items that are generated.
const GENERATED: &str = "bindings/";
/// Anchors of what belongs to an item.
const PARTS: [&str; 7] = ["structfield.", "variant.", "method.", "tymethod.", "associatedconstant.", "associatedtype.", "impl-"];
/// Traits that a type has without a word of ours and may lose by a change of a private field.
const AUTO: [&str; 2] = ["impl-Send-for-", "impl-Sync-for-"];

/// Writes the lists, or compares them with `--check`.
pub(crate) fn run(workspace: &Workspace, args: &[String]) -> Result<ExitCode, Failure> {
    let check = match args {
        [] => false,
        [flag] if flag == "--check" => true,
        [other, ..] => return Err(Failure::unknown_argument(other)),
    };
    make_pages(workspace)?;
    let mut differences = Vec::new();
    for name in CRATES {
        let folder = workspace.target.join("doc").join(name.replace('-', "_"));
        let (path, list) = (format!("{name}/public-api.txt"), list(workspace, &folder)?);
        if check {
            differences
                .extend(difference(&workspace.read(&path).unwrap_or_default(), &list).into_iter().map(|line| format!("{path}: {line}")));
        } else {
            workspace.shell.write_file(workspace.root.join(&path), list)?;
            eprintln!("wrote {path}");
        }
    }
    if differences.is_empty() {
        return Ok(ExitCode::SUCCESS);
    }
    for line in &differences {
        println!("{line}");
    }
    let count = differences.len();
    Err(Failure::task(format!(
        "{count} differences in public names; if they are meant, run `cargo xtask public-api` and say so in CHANGELOG.md"
    )))
}

/// Lets rustdoc make the pages of the whole workspace; a warning is an error.
fn make_pages(workspace: &Workspace) -> Result<(), Failure> {
    Ok(workspace.cargo("doc --workspace --no-deps").env("RUSTDOCFLAGS", "-D warnings").run()?)
}

/// The list of a crate, from the folder of its pages.
fn list(workspace: &Workspace, folder: &Path) -> Result<String, Failure> {
    let all = workspace.shell.read_file(folder.join("all.html"))?;
    // Pages of items that are gone stay in the folder; this one names those that are there.
    let items: BTreeSet<&str> = between_all(&all, "href=\"", "\"").filter(|page| is_item(page) && !page.starts_with(GENERATED)).collect();
    if items.is_empty() {
        return Err(Failure::task(format!("{} names no item; rustdoc has changed its pages", folder.join("all.html").display())));
    }
    let mut list = FIRST_LINE.to_owned();
    for item in items {
        let page = workspace.shell.read_file(folder.join(item))?;
        let parts = parts(&page);
        list += &format!("{}\n", heading(item, &page));
        for part in parts {
            list += &format!("    {part}\n");
        }
    }
    Ok(list)
}

/// Whether a page is an item's: `module/struct.Name.html`.
fn is_item(page: &str) -> bool {
    let file = page.rsplit('/').next().unwrap_or_default();
    page.ends_with(".html") && file.matches('.').count() == 2 && !page.starts_with("..") && !page.contains(':')
}

/// Kind and path of an item; of a function or constant its declaration.
fn heading(item: &str, page: &str) -> String {
    let (modules, file) = item.rsplit_once('/').unwrap_or(("", item));
    let mut words = file.split('.');
    let (kind, name) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
    let modules: String = modules.split('/').filter(|module| !module.is_empty()).map(|module| format!("{module}::")).collect();
    let declaration = if matches!(kind, "fn" | "constant" | "type" | "macro") {
        between_all(page, "item-decl\"><code>", "</code></pre>").next().map_or_else(String::new, |code| format!(": {}", plain(code)))
    } else {
        String::new()
    };
    format!("{kind} {modules}{name}{declaration}")
}

/// What an item's page says belongs to it, in the order of the page.
fn parts(page: &str) -> Vec<String> {
    let (own, rest) = page.split_once("id=\"trait-implementations\"").unwrap_or((page, ""));
    let (own, more) = own.split_once("id=\"synthetic-implementations\"").unwrap_or((own, ""));
    let (traits, automatic) = rest.split_once("id=\"synthetic-implementations\"").unwrap_or((rest, more));
    let automatic = automatic.split("id=\"blanket-implementations\"").next().unwrap_or_default();
    let of = |text: &str, wanted: &dyn Fn(&str) -> bool| -> Vec<String> {
        text.split(" id=\"")
            .skip(1)
            .filter(|part| wanted(part))
            .filter_map(declared)
            .filter(|line| !line.contains(" StructuralPartialEq "))
            .collect()
    };
    let is_part = |part: &str| PARTS.iter().any(|kind| part.starts_with(kind));
    let mut found = of(own, &|part| is_part(part) && !part.starts_with("impl-"));
    found.extend(of(traits, &|part| part.starts_with("impl-")));
    found.extend(of(automatic, &|part| AUTO.iter().any(|kind| part.starts_with(kind))));
    found
}

/// The first declaration behind an anchor.
fn declared(part: &str) -> Option<String> {
    let heading = between_all(part, "class=\"code-header\">", "</h").next();
    let field = || between_all(part, "<code>", "</code>").next();
    heading.or_else(field).map(plain)
}

/// What stands between each `from` and the `to` that follows it.
fn between_all<'t>(text: &'t str, from: &'t str, to: &'t str) -> impl Iterator<Item = &'t str> {
    text.split(from).skip(1).filter_map(move |rest| rest.split(to).next())
}

/// Text of HTML: without tags, with any run of blanks as one.
fn plain(html: &str) -> String {
    let mut text = String::new();
    for part in html.split('<') {
        // In front of the first `<` there is no tag.
        text += if text.is_empty() && html.starts_with(part) { part } else { part.split_once('>').map_or("", |(_, text)| text) };
    }
    for (entity, meaning) in
        [("&lt;", "<"), ("&gt;", ">"), ("&quot;", "\""), ("&#39;", "'"), ("&nbsp;", " "), ("\u{a0}", " "), ("&amp;", "&")]
    {
        text = text.replace(entity, meaning);
    }
    text.split_whitespace().collect::<Vec<_>>().join(" ").replace("( ", "(").replace(",)", ")").replace(", )", ")")
}

/// What is in one list only, with a sign for which.
fn difference(tree: &str, sources: &str) -> Vec<String> {
    let marked = |tag, text: &str| -> Option<String> { (tag != similar::ChangeTag::Equal).then(|| format!("{tag}{}", text.trim_end())) };
    similar::TextDiff::from_lines(tree, sources).iter_all_changes().filter_map(|change| marked(change.tag(), change.value())).collect()
}

#[cfg(test)]
mod tests {
    use super::{difference, heading, is_item, parts, plain};

    const PAGE: &str = "<pre class=\"rust item-decl\"><code>pub struct S { <span class=\"x\"></span> }</code></pre>\
        <span id=\"structfield.a\" class=\"structfield\"><a href=\"#structfield.a\">§</a><code>a: <a href=\"u64\">u64</a></code></span>\
        <h2 id=\"implementations\">I</h2><section id=\"impl-S\" class=\"impl\"><h3 class=\"code-header\">impl S</h3></section>\
        <section id=\"method.f\" class=\"method\"><h4 class=\"code-header\">pub fn <a>f</a>(\n    &amp;self,\n    x: &amp;[<a>T</a>],\n) -&gt; u8</h4></section>\
        <h2 id=\"trait-implementations\">T</h2><section id=\"impl-Debug-for-S\"><h3 class=\"code-header\">impl Debug for S</h3></section>\
        <section id=\"method.fmt\"><h4 class=\"code-header\">fn fmt()</h4></section>\
        <h2 id=\"synthetic-implementations\">A</h2><section id=\"impl-Send-for-S\"><h3 class=\"code-header\">impl Send for S</h3></section>\
        <section id=\"impl-Unpin-for-S\"><h3 class=\"code-header\">impl Unpin for S</h3></section>\
        <h2 id=\"blanket-implementations\">B</h2><section id=\"impl-Any-for-T\"><h3 class=\"code-header\">impl Any for T</h3></section>";

    #[test]
    fn a_page_has_parts() {
        assert_eq!(parts(PAGE), ["a: u64", "pub fn f(&self, x: &[T]) -> u8", "impl Debug for S", "impl Send for S"]);
        assert_eq!(heading("a/b/struct.S.html", PAGE), "struct a::b::S");
        let function = "<pre class=\"rust item-decl\"><code>pub fn hold(a: <a>u8</a>)</code></pre>";
        assert_eq!(heading("fn.hold.html", function), "fn hold: pub fn hold(a: u8)");
    }

    #[test]
    fn pages_of_items_are_told_from_others() {
        assert!(is_item("struct.A.html") && is_item("a/enum.B.html"));
        for page in ["index.html", "../help.html", "a/index.html", "https://a.b/struct.C.html", "struct.A.css"] {
            assert!(!is_item(page), "{page}");
        }
    }

    #[test]
    fn text_is_what_is_no_tag() {
        assert_eq!(plain("a <b>&lt;T&gt;</b>\n   c"), "a <T> c");
        assert_eq!(plain("<i>x</i>"), "x");
    }

    #[test]
    fn what_has_gone_or_come_is_shown() {
        assert_eq!(difference("a\nb\n", "a\nb\n"), Vec::<String>::new());
        assert_eq!(difference("a\n    b\nc\n", "a\nc\nd\n"), ["-    b", "+d"]);
    }
}
