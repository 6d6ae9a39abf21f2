//! `status`: shows bound drives, interrupted operations, and the effect of the next boot.

use comfy_table::{Cell, Color};
use serde::Serialize;
use serde_json::{Value, json};

use super::{Host, Reply};
use crate::journal::{Phase, Record};
use crate::pci::{self, Function, PciAddress, Root};
use crate::problem::Kind;
use crate::report::{self, Paint, or_dash};
use crate::usage::Scene;

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

    fn is_half_done(self) -> bool {
        matches!(self, State::HalfBound | State::HalfReleased)
    }
}

pub(crate) fn run(host: &Host<'_>, paint: Paint) -> Reply {
    let root = host.root;
    let (records, wrong) = host.journal.read(root);
    host.warn_about(&wrong);
    let scene = Scene::read(root);
    let on_vfio = pci::functions(root).into_iter().filter(|it| it.is_nvme() && it.is_vfio());
    let others = on_vfio.map(|function| (function.bdf, None));
    let mut known: Vec<_> = records.iter().map(|record| (record.bdf, Some(record))).collect();
    known.extend(others);
    // Stable: of two with one address, the recorded one stays.
    known.sort_by_key(|it| it.0);
    known.dedup_by_key(|it| it.0);
    let mut table =
        report::table(&["BDF", "STATE", "DRIVER", "FORMER", "NODE", "USED BY", "AT BOOT"], paint);
    let (mut drives, mut stopped, mut half_done) = (Vec::new(), Vec::new(), false);
    for (bdf, record) in known {
        let function = Function::read(root, bdf);
        let state = state(host, function.as_ref(), record);
        half_done |= state.is_half_done();
        let (cells, json) = row(root, &scene, bdf, record, (state, function));
        table.add_row(cells);
        let step = json["next_step"].as_str();
        stopped.extend(step.map(|step| format!("{bdf} stopped before: {step}")));
        drives.push(json);
    }
    let mut text = Vec::new();
    if drives.is_empty() {
        host.note("nothing is bound, and nothing is recorded");
    } else {
        text.push(report::text(&table));
    }
    text.extend(stopped);
    let json = json!({ "drives": drives, "half_done": half_done, "unreadable": wrong });
    let mut reply = Reply::new(text.join("\n"), json);
    if half_done {
        host.note("`nvme-bind restore` puts what is half-done back as it was");
        reply.code = Kind::HalfDone.exit_code();
    }
    reply
}

/// Returns the row of a drive, and its JSON object.
fn row(
    root: &Root,
    scene: &Scene,
    bdf: PciAddress,
    record: Option<&Record>,
    (state, function): (State, Option<Function>),
) -> ([Cell; 7], Value) {
    let driver = function.as_ref().and_then(|function| function.driver.clone());
    let group = function.as_ref().filter(|it| it.is_vfio()).and_then(|it| it.group);
    let node = group.map(|group| format!("/dev/vfio/{group}"));
    let owner = node.as_ref().and_then(|node| root.owner(node));
    // The driver that `restore` would bind.
    let former = record.and_then(|record| record.former.as_ref()?.driver.clone());
    let (steps_done, steps) = record.map_or((0, 0), |record| (record.done, record.steps.len()));
    let next_step =
        record.filter(|_| state.is_half_done()).and_then(|it| Some(it.steps.get(it.done)?.line()));
    let persist = record.map(Record::kept).unwrap_or_default();
    let users = function.map(|_| scene.users.of_function(root, bdf)).unwrap_or_default();

    let mut words = state.words().to_owned();
    if state.is_half_done() {
        words += &format!(" ({steps_done} of {steps} steps)");
    }
    let words = Cell::new(words);
    let by: Vec<&str> = users.iter().map(|user| user.by.as_str()).collect();
    let shown = node.as_ref().zip(owner);
    let shown = shown.map(|(node, (uid, gid, mode))| format!("{node} {uid}:{gid} {mode:04o}"));
    let cells = [
        Cell::new(bdf),
        if state.is_half_done() { words.fg(Color::Red) } else { words },
        Cell::new(or_dash(driver.as_ref())),
        Cell::new(or_dash(former.as_ref())),
        Cell::new(or_dash(shown)),
        Cell::new(if by.is_empty() { "-".into() } else { by.join(", ") }),
        Cell::new(if persist.is_empty() { "-" } else { "bound again" }),
    ];
    let json = json!({
        "bdf": bdf,
        "state": state,
        "driver": driver,
        "former": former,
        "group": group,
        // The mode in octal, as for chmod.
        "node": owner.map(|(uid, gid, mode)| {
            json!({ "path": node, "uid": uid, "gid": gid, "mode": format!("{mode:04o}") })
        }),
        "steps_done": steps_done,
        "steps": steps,
        "next_step": next_step,
        "persist": persist,
        "users": users,
    });
    (cells, json)
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
