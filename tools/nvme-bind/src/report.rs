//! Tables and lines for people.

use comfy_table::presets::NOTHING;
use comfy_table::{Attribute, Cell, CellAlignment, Color, ContentArrangement, Table};

use crate::command::list;
use crate::command::status;
use crate::doctor::{Finding, Verdict};
use crate::usage::Use;

/// Whether escape sequences are wanted; a value and no global, so that tests see what files see.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Paint(pub(crate) bool);

impl Paint {
    fn bold(self, text: &str, colour: u8) -> String {
        if self.0 { format!("\x1b[1;{colour}m{text}\x1b[0m") } else { text.to_owned() }
    }

    fn dim(self, text: &str) -> String {
        if self.0 { format!("\x1b[2m{text}\x1b[0m") } else { text.to_owned() }
    }
}

/// A terminal that is narrower does not know its width: a serial line says 0.
const TERMINAL_COLUMNS_MIN: u16 = 60;

fn table(header: &[&str], paint: Paint) -> Table {
    let mut table = Table::new();
    table.load_preset(NOTHING);
    if paint.0 {
        table.enforce_styling();
    } else {
        table.force_no_tty();
    }
    // Lines of a pipe are never wrapped: a script reads them.
    if paint.0 && table.width().is_some_and(|columns| columns >= TERMINAL_COLUMNS_MIN) {
        table.set_content_arrangement(ContentArrangement::Dynamic);
    }
    table.set_header(header.iter().map(|text| Cell::new(text).add_attribute(Attribute::Bold)));
    for column in table.column_iter_mut() {
        column.set_padding((0, 2));
    }
    table
}

fn text(table: &Table) -> String {
    let lines: Vec<String> = table.lines().map(|line| line.trim_end().to_owned()).collect();
    lines.join("\n")
}

fn or_dash(value: Option<impl ToString>) -> String {
    value.map_or_else(|| "-".into(), |value| value.to_string())
}

/// 1.92 TB, as drives are sold.
pub(crate) fn size(bytes: u64) -> String {
    let units = [(1_000_000_000_000, "TB"), (1_000_000_000, "GB"), (1_000_000, "MB")];
    let unit = units.into_iter().find(|&(unit, _)| bytes >= unit);
    let Some((unit, name)) = unit else { return format!("{bytes} B") };
    let hundredths = bytes / (unit / 100);
    let (whole, rest) = (hundredths / 100, hundredths % 100);
    if rest == 0 { format!("{whole} {name}") } else { format!("{whole}.{rest:02} {name}") }
}

/// 128 GiB, as address windows are made.
pub(crate) fn binary_size(bytes: u64) -> String {
    let units = [(40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")];
    let unit = units.into_iter().find(|&(shift, _)| bytes >> shift > 0);
    unit.map_or_else(|| format!("{bytes} B"), |(shift, name)| format!("{} {name}", bytes >> shift))
}

/// The drives.
pub(crate) fn list(rows: &[list::Row], serials: bool, paint: Paint) -> String {
    if rows.is_empty() {
        return String::new();
    }
    let mut header = vec!["BDF", "DISK", "MODEL"];
    if serials {
        header.push("SERIAL");
    }
    header.extend(["SIZE", "DRIVER", "GROUP", "NUMA", "IN USE BY", "NEAREST GPU"]);
    let mut table = table(&header, paint);
    for row in rows {
        let mut cells = vec![
            Cell::new(row.bdf),
            Cell::new(or_dash(row.disks.first().or(row.controller.as_ref()))),
            Cell::new(row.model.as_ref().unwrap_or(&row.ids)),
        ];
        if serials {
            cells.push(Cell::new(or_dash(row.serial.as_ref())));
        }
        let others = row.others_in_group.len();
        let shared = if others == 0 { String::new() } else { format!(" (+{others})") };
        let driver = Cell::new(or_dash(row.driver.as_ref()));
        let is_vfio = row.driver.as_deref() == Some(crate::pci::VFIO);
        cells.extend([
            Cell::new(or_dash(row.bytes.map(size))).set_alignment(CellAlignment::Right),
            if is_vfio { driver.fg(Color::Green) } else { driver },
            Cell::new(format!("{}{shared}", or_dash(row.group))),
            Cell::new(or_dash(row.numa)),
            in_use(&row.uses),
            Cell::new(row.nearest_gpu.as_ref().map_or_else(
                || "-".into(),
                |near| format!("{} ({})", near.bdf, near.distance.meeting.words()),
            )),
        ]);
        table.add_row(cells);
    }
    text(&table)
}

fn in_use(uses: &[Use]) -> Cell {
    const SHOWN: usize = 2;
    let mut words: Vec<String> =
        uses.iter().filter(|found| found.is_active()).map(Use::short).collect();
    if words.is_empty() {
        // Of no danger, but of interest to whoever is about to write over it.
        let idle: Vec<String> = uses.iter().map(Use::short).collect();
        let idle = idle.into_iter().min().map(|text| format!("- ({text})"));
        return Cell::new(idle.unwrap_or_else(|| "-".into()));
    }
    words.dedup();
    let more = words.len().saturating_sub(SHOWN);
    words.truncate(SHOWN);
    let more = if more == 0 { String::new() } else { format!(" +{more}") };
    Cell::new(format!("{}{more}", words.join(", "))).fg(Color::Yellow)
}

/// What is bound and recorded.
pub(crate) fn status(rows: &[status::Row], paint: Paint) -> String {
    if rows.is_empty() {
        return String::new();
    }
    let mut table =
        table(&["BDF", "STATE", "DRIVER", "FORMER", "NODE", "USED BY", "AT BOOT"], paint);
    for row in rows {
        let mut state = row.state.words().to_owned();
        if row.state.is_half_done() {
            state.push_str(&format!(" ({} of {} steps)", row.steps_done, row.steps));
        }
        let state = Cell::new(state);
        let node = row
            .node
            .as_ref()
            .map(|node| format!("{} {}:{} {}", node.path, node.uid, node.gid, node.mode));
        let users: Vec<&str> = row.users.iter().map(|user| user.by.as_str()).collect();
        table.add_row([
            Cell::new(row.bdf),
            if row.state.is_half_done() { state.fg(Color::Red) } else { state },
            Cell::new(or_dash(row.driver.as_ref())),
            Cell::new(or_dash(row.former.as_ref())),
            Cell::new(or_dash(node)),
            Cell::new(if users.is_empty() { "-".into() } else { users.join(", ") }),
            Cell::new(if row.persist.is_empty() { "-" } else { "bound again" }),
        ]);
    }
    let stopped = rows
        .iter()
        .filter_map(|row| Some(format!("{} stopped before: {}", row.bdf, row.next_step.as_ref()?)));
    let mut parts = vec![text(&table)];
    parts.extend(stopped);
    parts.join("\n")
}

/// The findings, each with what to do about it.
pub(crate) fn doctor(findings: &[Finding], paint: Paint) -> String {
    let mut lines = Vec::new();
    for finding in findings {
        let mark = match finding.verdict {
            Verdict::Ok => paint.bold("ok  ", 32),
            Verdict::Warn => paint.bold("warn", 33),
            Verdict::Fail => paint.bold("FAIL", 31),
            Verdict::Skip => paint.dim("skip"),
        };
        lines.push(format!("{mark}  {}", paint.bold(finding.title, 39)));
        let looked = format!("looked at  {}", finding.looked_at.join(", "));
        lines.extend(wrapped(&looked, 17).into_iter().map(|line| paint.dim(&line)));
        lines.extend(wrapped(&format!("found      {}", finding.found), 17));
        if let Some(mend) = &finding.mend {
            lines.extend(wrapped(&format!("mend       {mend}"), 17));
        }
    }
    let count = |verdict| findings.iter().filter(|finding| finding.verdict == verdict).count();
    lines.push(String::new());
    lines.push(format!(
        "{} ok, {} to look at, {} failed, {} skipped",
        count(Verdict::Ok),
        count(Verdict::Warn),
        count(Verdict::Fail),
        count(Verdict::Skip)
    ));
    lines.join("\n")
}

/// Lines of at most 100 columns, the first indented by 6 and the others by `indent`.
fn wrapped(text: &str, indent: usize) -> Vec<String> {
    const COLUMNS: usize = 100;
    let mut lines = Vec::new();
    let mut line = " ".repeat(6);
    let mut is_fresh = true;
    for word in text.split(' ') {
        if !is_fresh && line.chars().count() + 1 + word.chars().count() > COLUMNS {
            lines.push(std::mem::replace(&mut line, " ".repeat(indent)));
            is_fresh = true;
        }
        if !is_fresh {
            line.push(' ');
        }
        line.push_str(word);
        is_fresh = false;
    }
    lines.push(line);
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_in_the_units_of_their_trade() {
        assert_eq!(size(1_920_383_410_176), "1.92 TB");
        assert_eq!(size(2_000_000_000_000), "2 TB");
        assert_eq!(size(12), "12 B");
        assert_eq!(binary_size(128 << 30), "128 GiB");
        assert_eq!(binary_size(0), "0 B");
    }

    #[test]
    fn long_lines_are_wrapped_below_themselves() {
        let lines = wrapped(&"word ".repeat(40), 17);
        assert!(lines.len() > 1 && lines.iter().all(|line| line.len() <= 100), "{lines:#?}");
        assert!(lines[1].starts_with(&" ".repeat(17)) && !lines[1].starts_with(&" ".repeat(18)));
    }
}
