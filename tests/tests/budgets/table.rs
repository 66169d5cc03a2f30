//! `calls.txt`: the budgets, as it says itself.

use core::fmt::Write;
use std::collections::BTreeMap;

/// The numbers of chunks that operations are counted for: the columns.
pub(crate) const CHUNKS: [usize; 3] = [1, 25, 400];
const TEXT: &str = include_str!("calls.txt");

/// Calls by function, for each number of chunks.
pub(crate) type Counts = BTreeMap<String, [u64; 3]>;

/// One function's budget.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Budget {
    /// Whether fewer are right too.
    at_most: bool,
    calls: [u64; 3],
}

impl Budget {
    fn allows(self, found: [u64; 3]) -> bool {
        if self.at_most { found.iter().zip(self.calls).all(|(found, most)| *found <= most) } else { found == self.calls }
    }

    /// The line that would allow what was found.
    fn line(self, function: &str, found: [u64; 3]) -> String {
        let mark = if self.at_most { "<=" } else { "" };
        let [one, some, many] = found;
        format!("    {function:34} {mark:>2} {one:>5} {some:>5} {many:>5}")
    }
}

/// The budgets by operation.
#[derive(Debug)]
pub(crate) struct Table(BTreeMap<String, BTreeMap<String, Budget>>);

impl Table {
    /// Reads the file. Panics where it is not as it says.
    pub(crate) fn read() -> Self {
        let (mut table, mut operation) = (BTreeMap::<String, BTreeMap<String, Budget>>::new(), String::new());
        for (number, line) in (1..).zip(TEXT.lines()).filter(|(_, line)| !line.starts_with('#') && !line.trim().is_empty()) {
            let Some(line) = line.strip_prefix("    ") else {
                line.clone_into(&mut operation);
                assert!(table.insert(operation.clone(), BTreeMap::new()).is_none(), "line {number}: {operation} is there twice");
                continue;
            };
            let mut words: Vec<&str> = line.split_whitespace().collect();
            let at_most = words.get(1) == Some(&"<=");
            if at_most {
                words.remove(1);
            }
            let [function, numbers @ ..] = words.as_slice() else { panic!("line {number} is empty") };
            let numbers: Vec<u64> = numbers.iter().map(|word| word.parse().unwrap_or_else(|_| panic!("line {number}: {word}"))).collect();
            let calls = numbers.try_into().unwrap_or_else(|_| panic!("line {number} has not three numbers"));
            let budgets = table.get_mut(&operation).unwrap_or_else(|| panic!("line {number} belongs to no operation"));
            assert!(
                budgets.insert((*function).to_owned(), Budget { at_most, calls }).is_none(),
                "line {number}: {function} is there twice"
            );
        }
        Self(table)
    }

    pub(crate) fn operations(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(String::as_str)
    }

    /// Everything in which what was found is not what is allowed; one line for each, with figure and budget. Empty if all is well.
    pub(crate) fn differences(&self, operation: &str, found: &Counts) -> String {
        let Some(budgets) = self.0.get(operation) else { return format!("calls.txt has no \"{operation}\"\n") };
        let none = Budget { at_most: false, calls: [0; 3] };
        let mut functions: Vec<&String> = budgets.keys().chain(found.keys()).collect();
        functions.sort_unstable();
        functions.dedup();
        let mut text = String::new();
        for function in functions {
            let budget = budgets.get(function).copied().unwrap_or(none);
            let found = found.get(function).copied().unwrap_or_default();
            if !budget.allows(found) {
                let way = if found.iter().zip(budget.calls).any(|(found, calls)| *found > calls) { "over" } else { "below" };
                let (calls, line) = (budget.calls, budget.line(function, found));
                let _ = writeln!(
                    text,
                    "{operation}: {function} {found:?} is {way} the budget {calls:?} for {CHUNKS:?} chunks; its line would be\n{line}"
                );
            }
        }
        text
    }
}

#[test]
fn a_difference_is_told_with_figure_and_budget() {
    let budget = |at_most, calls| Budget { at_most, calls };
    let of = |name: &str, budget| (name.to_owned(), budget);
    let budgets = [of("close", budget(false, [1, 2, 3])), of("poll", budget(true, [4, 4, 4])), of("gone", budget(false, [0, 0, 1]))];
    let table = Table([("op".to_owned(), budgets.into_iter().collect())].into_iter().collect());
    let counts = |list: &[(&str, [u64; 3])]| -> Counts { list.iter().map(|(name, calls)| ((*name).to_owned(), *calls)).collect() };
    let right = counts(&[("close", [1, 2, 3]), ("poll", [0, 4, 1]), ("gone", [0, 0, 1])]);
    assert_eq!(table.differences("op", &right), "");
    // Over, below and new.
    let wrong = counts(&[("close", [1, 2, 4]), ("poll", [0, 4, 5]), ("new", [0, 1, 0])]);
    let text = table.differences("op", &wrong);
    for line in [
        "op: close [1, 2, 4] is over the budget [1, 2, 3]",
        "op: gone [0, 0, 0] is below the budget [0, 0, 1]",
        "op: new [0, 1, 0] is over the budget [0, 0, 0]",
        "op: poll [0, 4, 5] is over the budget [4, 4, 4]",
    ] {
        assert!(text.contains(line), "{line} is not in\n{text}");
    }
    assert!(table.differences("no op", &right).contains("no op"));
}
