//! `status`: shows bound drives, interrupted operations, and the effect of the next boot.

use comfy_table::{Cell, Color};
use serde::Serialize;
use serde_json::json;

use super::{Host, Reply};
use crate::journal::{Phase, Record};
use crate::pci::{self, Function, PciAddress, Use};
use crate::problem::Kind;
use crate::report::{self, Paint, or_dash};
use crate::usage::Scene;

/// A row of the status.
#[derive(Debug, Serialize)]
pub(crate) struct Row {
    pub(crate) bdf: PciAddress,
    pub(crate) state: State,
    pub(crate) driver: Option<String>,
    /// The driver that `restore` would bind.
    pub(crate) former: Option<String>,
    pub(crate) group: Option<u32>,
    pub(crate) node: Option<Node>,
    pub(crate) steps_done: usize,
    pub(crate) steps: usize,
    /// The next step, if it was interrupted.
    pub(crate) next_step: Option<String>,
    pub(crate) persist: Vec<String>,
    pub(crate) users: Vec<Use>,
}

/// The device node of a group.
#[derive(Debug, Serialize)]
pub(crate) struct Node {
    pub(crate) path: String,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    /// In octal, as for chmod.
    pub(crate) mode: String,
}

/// State of a drive.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum State {
    Bound,
    /// On VFIO, but bound by another program.
    BoundByOthers,
    HalfBound,
    HalfReleased,
    Released,
    /// Recorded as bound, but no longer on VFIO.
    TakenAway,
    /// Recorded in an earlier boot; its binding is gone.
    Stale,
    Gone,
}

impl State {
    pub(crate) fn words(self) -> &'static str {
        match self {
            State::Bound => "bound",
            State::BoundByOthers => "bound, not by nvme-bind",
            State::HalfBound => "half-done bind",
            State::HalfReleased => "half-done release",
            State::Released => "released until the next boot",
            State::TakenAway => "no longer bound",
            State::Stale => "from an earlier boot",
            State::Gone => "the drive is gone",
        }
    }

    pub(crate) fn is_half_done(self) -> bool {
        matches!(self, State::HalfBound | State::HalfReleased)
    }
}

pub(crate) fn run(host: &Host<'_>, paint: Paint) -> Reply {
    let root = host.root;
    let (records, wrong) = host.journal.read(root);
    host.warn_about(&wrong);
    let scene = Scene::read(root);
    let mut rows: Vec<Row> =
        records.iter().map(|record| row(host, &scene, record.bdf, Some(record))).collect();
    let unknown = pci::functions(root).into_iter().filter(|function| {
        function.is_nvme() && function.is_vfio() && !rows.iter().any(|row| row.bdf == function.bdf)
    });
    let unknown: Vec<Row> = unknown.map(|function| row(host, &scene, function.bdf, None)).collect();
    rows.extend(unknown);
    rows.sort_by_key(|row| row.bdf);
    let half_done = rows.iter().any(|row| row.state.is_half_done());
    let mut reply = Reply::new(
        table(&rows, paint),
        json!({ "drives": rows, "half_done": half_done, "unreadable": wrong }),
    );
    if half_done {
        host.note("`nvme-bind restore` puts what is half-done back as it was");
        reply.code = Kind::HalfDone.exit_code();
    }
    if rows.is_empty() {
        host.note("nothing is bound, and nothing is recorded");
    }
    reply
}

fn row(host: &Host<'_>, scene: &Scene, bdf: PciAddress, record: Option<&Record>) -> Row {
    let root = host.root;
    let function = Function::read(root, bdf);
    let state = state(host, function.as_ref(), record);
    let group = function.as_ref().and_then(|function| function.group);
    let group = group.filter(|_| function.as_ref().is_some_and(Function::is_vfio));
    let path = group.map(|group| format!("/dev/vfio/{group}"));
    let node = path.and_then(|path| {
        let (uid, gid, mode) = root.owner(&path)?;
        Some(Node { path, uid, gid, mode: format!("{mode:04o}") })
    });
    let stopped = record.filter(|_| state.is_half_done());
    Row {
        bdf,
        state,
        driver: function.as_ref().and_then(|function| function.driver.clone()),
        former: record.and_then(|record| record.former.as_ref()?.driver.clone()),
        group,
        node,
        steps_done: record.map_or(0, |record| record.done),
        steps: record.map_or(0, |record| record.steps.len()),
        next_step: stopped.and_then(|record| Some(record.steps.get(record.done)?.line())),
        persist: record.map(Record::kept).unwrap_or_default(),
        users: function
            .iter()
            .flat_map(|function| scene.users.of_function(root, function.bdf))
            .collect(),
    }
}

fn state(host: &Host<'_>, function: Option<&Function>, record: Option<&Record>) -> State {
    let Some(record) = record else { return State::BoundByOthers };
    let Some(function) = function.filter(|function| function.ids() == record.ids) else {
        return State::Gone;
    };
    if !record.is_current(host.root) {
        return State::Stale;
    }
    match record.phase {
        Phase::Binding => State::HalfBound,
        Phase::Releasing => State::HalfReleased,
        Phase::Released => State::Released,
        Phase::Bound if function.is_vfio() => State::Bound,
        Phase::Bound => State::TakenAway,
    }
}

/// Formats the bound and recorded drives.
fn table(rows: &[Row], paint: Paint) -> String {
    if rows.is_empty() {
        return String::new();
    }
    let mut table =
        report::table(&["BDF", "STATE", "DRIVER", "FORMER", "NODE", "USED BY", "AT BOOT"], paint);
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
    let mut parts = vec![report::text(&table)];
    parts.extend(stopped);
    parts.join("\n")
}
