//! `list`: shows the drives of this machine.

use comfy_table::{Cell, CellAlignment, Color};
use serde_json::{Value, json};

use super::{Host, Reply};
use crate::drive::{self, Drive};
use crate::gpu::{self, Gpu};
use crate::journal::Record;
use crate::paths;
use crate::pci::{self, PciAddress, Root, Use};
use crate::report::{self, Paint, or_dash};
use crate::topology::{self, Distance};
use crate::usage::{Claims, Scene};

const HEADER: [&str; 10] = [
    "BDF",
    "DISK",
    "MODEL",
    "SERIAL",
    "SIZE",
    "DRIVER",
    "GROUP",
    "NUMA",
    "IN USE BY",
    "NEAREST GPU",
];
/// Column that is shown if it is asked for.
const SERIAL: usize = 3;

pub(crate) fn run(host: &Host<'_>, serials: bool, paint: Paint) -> Reply {
    let root = host.root;
    let scene = Scene::read(root);
    let gpus = gpu::gpus(root);
    let (records, _) = host.journal.read(root);
    let mut header = HEADER.to_vec();
    if !serials {
        header.remove(SERIAL);
    }
    let mut table = report::table(&header, paint);
    let mut drives = Vec::new();
    for drive in drive::drives(root) {
        let usage = scene.usage(root, &drive.function, Claims::Try);
        usage.blind.iter().for_each(|why| host.note(format!("not seen: {why}")));
        drive::offline(root, &drive).into_iter().for_each(|why| host.note(why));
        let near = topology::nearest(&drive.function, &gpus);
        let (mut cells, json) = row(root, &records, &drive, &usage.uses, near);
        if !serials {
            cells.remove(SERIAL);
        }
        table.add_row(cells);
        drives.push(json);
    }
    if drives.is_empty() {
        host.note("no NVMe drive on the PCI bus; `nvme-bind doctor` looks at the rest");
    }
    let text = if drives.is_empty() { String::new() } else { report::text(&table) };
    Reply::new(text, json!({ "drives": drives }))
}

/// Returns the row of a drive, and its JSON object.
fn row(
    root: &Root,
    records: &[Record],
    drive: &Drive,
    uses: &[Use],
    near: Option<(&Gpu, Distance)>,
) -> (Vec<Cell>, Value) {
    let function = &drive.function;
    let is_it = |record: &&Record| record.bdf == function.bdf && record.ids == function.ids();
    let record = records.iter().find(is_it);
    let model = drive.model.clone().or_else(|| record?.model.clone());
    let serial = drive.serial.clone().or_else(|| record?.serial.clone());
    let bytes = drive.bytes().or_else(|| record?.bytes);
    let disks: Vec<&str> = drive.disks.iter().map(|disk| disk.name.as_str()).collect();
    // Other functions and controllers that reach the same namespaces.
    let mut other_paths = paths::others(root, function.bdf, &drive.disks);
    other_paths.extend(paths::on_vfio(root, records, drive));
    // Other functions of the IOMMU group that keep VFIO from using it (not viable).
    let in_group = function.group.into_iter().flat_map(|n| pci::group_members(root, n));
    let others = in_group.filter(|other| other.bdf != function.bdf && !other.is_viable());
    let others: Vec<PciAddress> = others.map(|other| other.bdf).collect();
    let first = or_dash(disks.first().copied().or(drive.controller.as_deref()));
    let more = match disks.len() {
        0 | 1 => String::new(),
        count => format!(" +{}", count - 1),
    };
    let ways = match other_paths.len() {
        0 => String::new(),
        count => format!(" ({} paths)", count + 1),
    };
    let shared = match others.len() {
        0 => String::new(),
        count => format!(" (+{count})"),
    };
    let driver = Cell::new(or_dash(function.driver.as_ref()));
    let cells = vec![
        Cell::new(function.bdf),
        Cell::new(format!("{first}{more}{ways}")),
        Cell::new(model.clone().unwrap_or_else(|| function.ids())),
        Cell::new(or_dash(serial.as_ref())),
        Cell::new(or_dash(bytes.map(report::size))).set_alignment(CellAlignment::Right),
        if function.is_vfio() { driver.fg(Color::Green) } else { driver },
        Cell::new(or_dash(function.group) + &shared),
        Cell::new(or_dash(function.numa)),
        in_use(uses),
        Cell::new(or_dash(
            near.map(|(gpu, way)| format!("{} ({})", gpu.function.bdf, way.meeting.words())),
        )),
    ];
    let json = json!({
        "bdf": function.bdf,
        "controller": drive.controller,
        "disks": disks,
        "other_paths": other_paths,
        "model": model,
        "serial": serial,
        "bytes": bytes,
        "ids": function.ids(),
        "driver": function.driver,
        "group": function.group,
        "others_in_group": others,
        "numa": function.numa,
        "in_use": uses.iter().any(Use::is_active),
        "uses": uses,
        "nearest_gpu": near.map(|(gpu, way)| json!({
            "bdf": gpu.function.bdf,
            "name": gpu.name,
            "meeting": way.meeting,
            "hops": way.hops,
        })),
    });
    (cells, json)
}

fn in_use(uses: &[Use]) -> Cell {
    const SHOWN: usize = 2;
    let mut words: Vec<String> =
        uses.iter().filter(|found| found.is_active()).map(Use::short).collect();
    if words.is_empty() {
        // Harmless, but of interest before the drive is overwritten.
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
