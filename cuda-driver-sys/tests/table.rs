//! The table, the typedefs it names and the list the bindings are generated from agree.

use std::collections::{BTreeMap, BTreeSet};

use cuda_driver_sys::ENTRY_POINTS;

/// Used by the loader itself, so it has no row.
const LOADER_ONLY: &str = "PFN_cuGetProcAddress_v12000";

/// One line of `table.rs`, as text: the macro does not keep the typedef's name.
struct Row<'a> {
    need: &'a str,
    field: &'a str,
    typedef: &'a str,
    base: &'a str,
    version: i32,
    symbol: &'a str,
}

fn rows() -> Vec<Row<'static>> {
    include_str!("../src/table.rs").lines().filter_map(|line| row(line.trim())).collect()
}

/// Reads `need field: typedef = ("base", version, "symbol");`.
fn row(line: &str) -> Option<Row<'_>> {
    let (head, tail) = line.strip_suffix(");")?.split_once(" = (")?;
    let (need_and_field, typedef) = head.split_once(": ")?;
    let (need, field) = need_and_field.split_once(' ')?;
    let mut strings = tail.split(", ").map(|part| part.trim_matches('"'));
    let (base, version, symbol) = (strings.next()?, strings.next()?.parse().ok()?, strings.next()?);
    Some(Row { need, field, typedef, base, version, symbol })
}

#[test]
fn the_text_is_the_table() {
    let rows = rows();
    assert_eq!(rows.len(), ENTRY_POINTS.len());
    for (row, entry) in rows.iter().zip(ENTRY_POINTS) {
        assert_eq!((row.base, row.version, row.symbol), (entry.base, entry.version, entry.symbol));
        assert_eq!(row.need == "required", entry.required, "{}", row.field);
    }
}

#[test]
fn versions_are_the_typedef_suffixes() {
    for row in rows() {
        assert_eq!(row.typedef, format!("PFN_{}_v{}", row.base, row.version), "field {}", row.field);
    }
}

#[test]
fn symbols_are_the_base_name_and_its_abi_version() {
    for entry in ENTRY_POINTS {
        let suffix = entry.symbol.strip_prefix(entry.base).unwrap_or_else(|| panic!("{} does not start with {}", entry.symbol, entry.base));
        assert!(matches!(suffix, "" | "_v2" | "_v3"), "{}", entry.symbol);
        // The longest name must fit the loader's buffer, else its row would never be found.
        assert!(entry.symbol.len() < 64, "{}", entry.symbol);
    }
}

#[test]
fn every_typedef_has_exactly_one_row() {
    let wanted: BTreeSet<&str> =
        include_str!("../bindgen/typedefs.txt").lines().map(str::trim).filter(|line| line.starts_with("PFN_")).collect();
    let mut count: BTreeMap<&str, usize> = wanted.iter().map(|&typedef| (typedef, 0)).collect();
    for row in rows() {
        match count.get_mut(row.typedef) {
            Some(count) => *count += 1,
            None => panic!("{} is in the table and not in typedefs.txt", row.typedef),
        }
    }
    assert_eq!(count.remove(LOADER_ONLY), Some(0));
    for (typedef, count) in count {
        assert_eq!(count, 1, "{typedef}");
    }
}
