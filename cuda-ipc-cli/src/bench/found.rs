//! What a bench has found: one report, as JSON and as text, and where its plots go.

use comfy_table::{Table, presets};
use serde::Serialize;
use serde_json::Value;

use super::machine::Machine;
use super::{Common, plot};
use crate::failure::Failure;
use crate::gpu::GpuFacts;
use crate::output;

/// Tables with their titles.
pub(super) type Tables = Vec<(&'static str, Table)>;

/// See the module's documentation.
pub(super) struct Found {
    report: Value,
    text: String,
}

#[derive(Serialize)]
struct Report<'a, B> {
    bench: &'static str,
    /// This program's version.
    program: &'static str,
    #[serde(flatten)]
    facts: GpuFacts,
    #[serde(flatten)]
    machine: Machine,
    reps: u32,
    #[serde(flatten)]
    body: &'a B,
}

impl Found {
    /// `about` says how it was measured. Without `facts` nothing has been.
    pub(super) fn new<B: Serialize>(
        bench: &'static str,
        facts: Option<GpuFacts>,
        reps: u32,
        about: &str,
        body: &B,
        tables: Tables,
    ) -> Result<Self, Failure> {
        let facts = facts.ok_or_else(|| Failure::new("measuring", "there was nothing to measure"))?;
        let report = Report { bench, program: env!("CARGO_PKG_VERSION"), facts, machine: Machine::of_this_process(), reps, body };
        let GpuFacts { driver, gpu, cuda_version, driver_version, kernel, .. } = &report.facts;
        let version = driver_version.as_ref().map_or_else(String::new, |version| format!(" {version}"));
        let (machine, program) = (report.machine.line(), report.program);
        let mut text = format!(
            "bench {bench}: driver={driver}{version} (CUDA {cuda_version}), {gpu}, {machine}, Linux {kernel}, cuda-ipc {program}, {about}"
        );
        for (title, table) in tables {
            text += &format!("\n\n{title}\n\n{table}");
        }
        let report = serde_json::to_value(&report).map_err(Failure::at("writing the report"))?;
        Ok(Self { report, text })
    }

    /// The report, for a report of several.
    pub(super) fn into_report(self) -> Value {
        self.report
    }

    /// Draws its plots, where plots are wanted.
    pub(super) fn draw(&self, common: &Common) -> Result<(), Failure> {
        common.svg.as_ref().map_or(Ok(()), |folder| plot::draw(&self.report, folder))
    }

    /// Prints it the way that was asked for.
    pub(super) fn print(&self, common: &Common) -> Result<(), Failure> {
        if common.json { output::json(&self.report) } else { output::text(&self.text) }
    }
}

/// An empty table that can be pasted into a document.
pub(super) fn table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::ASCII_MARKDOWN).set_header(header);
    table
}
