//! `ripieno sim`: serving with tiers of KV cache, in virtual time.

use std::fs;
use std::path::PathBuf;

use anyhow::Context as _;
use clap::Args;
use comfy_table::{CellAlignment, ContentArrangement, Table, presets};
use ripieno_sim::{Outcome, Scenario, comparisons, page};

use crate::problem::Problem;
use crate::progress::Progress;
use crate::table::fold;
use crate::terminal;

/// Flags of `ripieno sim`.
#[derive(Debug, Args)]
pub(crate) struct SimFlags {
    /// Scenarios to simulate; without any, they are listed. "all" stands for all of them
    #[arg(value_name = "NAME")]
    names: Vec<String>,

    /// Write a page with tables and plots to this file
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,

    /// Print one JSON object on stdout instead of tables
    #[arg(long)]
    json: bool,
}

/// Simulates, and reports.
///
/// # Errors
/// [`Problem`] for a scenario that there is not; when the page cannot be written.
pub(crate) fn run(flags: &SimFlags) -> anyhow::Result<u8> {
    let scenarios = chosen(&flags.names)?;
    if scenarios.is_empty() {
        let list = Scenario::ALL.iter().map(|it| format!("{:14}{}", it.name, it.title));
        terminal::print(list.collect::<Vec<_>>().join("\n"))?;
        return Ok(0);
    }
    let mut outcomes = Vec::new();
    let progress = Progress::scenarios(scenarios.len());
    for (done, scenario) in scenarios.into_iter().enumerate() {
        progress.note(scenario.name);
        progress.advance(done, || scenario.name.to_owned());
        outcomes.push(scenario.run());
    }
    progress.finish();
    if let Some(file) = &flags.html {
        let page = page(&outcomes).map_err(anyhow::Error::msg).context("drawing the page")?;
        fs::write(file, page).map_err(|error| {
            let what = format!("--html {}: cannot be written: {error}", file.display());
            Problem::new(what, "name a file in a directory that you may write to")
        })?;
    }
    if flags.json {
        terminal::print(serde_json::to_string(&outcomes)?)?;
    } else {
        let shown: Vec<String> = outcomes.iter().map(show).collect();
        terminal::print(shown.join("\n").trim_end())?;
    }
    Ok(0)
}

fn chosen(names: &[String]) -> Result<Vec<&'static Scenario>, Problem> {
    if names.iter().any(|name| name == "all") {
        return Ok(Scenario::ALL.iter().collect());
    }
    let find = |name: &String| {
        Scenario::named(name).ok_or_else(|| {
            let known: Vec<&str> = Scenario::ALL.iter().map(|it| it.name).collect();
            let what = format!("{name}: no such scenario");
            Problem::new(what, format!("choose from {}, or all", known.join(", ")))
        })
    };
    names.iter().map(find).collect()
}

fn show(outcome: &Outcome) -> String {
    let mut text = format!("{}: {}\n", outcome.name, outcome.title);
    for line in &outcome.setting {
        text += &format!("  {}\n", fold(line).replace('\n', "\n    "));
    }
    for table in outcome.tables.iter().chain(&comparisons(outcome)) {
        let mut drawn = Table::new();
        drawn
            .load_preset(presets::UTF8_FULL_CONDENSED)
            .set_content_arrangement(ContentArrangement::Dynamic)
            .set_header(&table.columns)
            .add_rows(table.rows.iter().map(|row| row.iter().map(|cell| fold(cell))));
        let numbers = table.columns.len().min(5);
        for column in drawn.column_iter_mut().take(numbers).skip(1) {
            column.set_cell_alignment(CellAlignment::Right);
        }
        text += &format!("\n{}\n{drawn}\n", table.title);
    }
    outcome.notes.iter().for_each(|note| text += &format!("\n{}\n", fold(note)));
    text
}
