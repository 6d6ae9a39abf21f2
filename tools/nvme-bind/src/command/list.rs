//! `list`: shows the drives of this machine.

use comfy_table::{Cell, CellAlignment, Color};
use serde::Serialize;
use serde_json::json;

use super::{Host, Reply};
use crate::drive::{self, Drive};
use crate::gpu;
use crate::paths::{self, OtherPath};
use crate::pci::{PciAddress, Use, VFIO};
use crate::report::{self, Paint, or_dash};
use crate::topology::{self, Distance};
use crate::usage::{Claims, Scene};

/// A row of the list.
#[derive(Debug, Serialize)]
pub(crate) struct Row {
    pub(crate) bdf: PciAddress,
    pub(crate) controller: Option<String>,
    pub(crate) disks: Vec<String>,
    /// Other functions and controllers that reach the same namespaces.
    pub(crate) other_paths: Vec<OtherPath>,
    pub(crate) model: Option<String>,
    pub(crate) serial: Option<String>,
    pub(crate) bytes: Option<u64>,
    pub(crate) ids: String,
    pub(crate) driver: Option<String>,
    pub(crate) group: Option<u32>,
    /// Other functions of the IOMMU group that keep VFIO from using it (not viable).
    pub(crate) others_in_group: Vec<PciAddress>,
    pub(crate) numa: Option<u32>,
    pub(crate) uses: Vec<Use>,
    pub(crate) in_use: bool,
    pub(crate) nearest_gpu: Option<Near>,
}

/// The nearest GPU.
#[derive(Debug, Serialize)]
pub(crate) struct Near {
    pub(crate) bdf: PciAddress,
    pub(crate) name: String,
    #[serde(flatten)]
    pub(crate) distance: Distance,
}

pub(crate) fn run(host: &Host<'_>, serials: bool, paint: Paint) -> Reply {
    let root = host.root;
    let scene = Scene::read(root);
    let gpus = gpu::gpus(root);
    let (records, _) = host.journal.read(root);
    let mut rows = Vec::new();
    for drive in drive::drives(root) {
        let usage = scene.usage(root, &drive.function, Claims::Try);
        usage.blind.iter().for_each(|why| host.note(format!("not seen: {why}")));
        let Drive { function, controller, model, serial, disks } = &drive;
        let record = records
            .iter()
            .find(|record| record.bdf == function.bdf && record.ids == function.ids());
        let uses = usage.uses;
        let mut other_paths = paths::others(root, function.bdf, disks);
        other_paths.extend(paths::on_vfio(root, &records, &drive));
        drive::offline(root, &drive).into_iter().for_each(|why| host.note(why));
        let near = topology::nearest(function, &gpus).map(|(gpu, distance)| Near {
            bdf: gpu.function.bdf,
            name: gpu.name.clone(),
            distance,
        });
        let others = function.group.into_iter().flat_map(|n| crate::pci::group_members(root, n));
        rows.push(Row {
            bdf: function.bdf,
            controller: controller.clone(),
            disks: disks.iter().map(|disk| disk.name.clone()).collect(),
            other_paths,
            model: model.clone().or_else(|| record?.model.clone()),
            serial: serial.clone().or_else(|| record?.serial.clone()),
            bytes: drive.bytes().or_else(|| record?.bytes),
            ids: function.ids(),
            driver: function.driver.clone(),
            group: function.group,
            others_in_group: others
                .filter(|other| other.bdf != function.bdf && !other.is_viable())
                .map(|other| other.bdf)
                .collect(),
            numa: function.numa,
            in_use: uses.iter().any(Use::is_active),
            uses,
            nearest_gpu: near,
        });
    }
    if rows.is_empty() {
        host.note("no NVMe drive on the PCI bus; `nvme-bind doctor` looks at the rest");
    }
    Reply::new(table(&rows, serials, paint), json!({ "drives": rows }))
}

/// Formats the drives.
fn table(rows: &[Row], serials: bool, paint: Paint) -> String {
    if rows.is_empty() {
        return String::new();
    }
    let mut header = vec!["BDF", "DISK", "MODEL"];
    if serials {
        header.push("SERIAL");
    }
    header.extend(["SIZE", "DRIVER", "GROUP", "NUMA", "IN USE BY", "NEAREST GPU"]);
    let mut table = report::table(&header, paint);
    for row in rows {
        let mut cells = vec![
            Cell::new(row.bdf),
            Cell::new(disk(row)),
            Cell::new(row.model.as_ref().unwrap_or(&row.ids)),
        ];
        if serials {
            cells.push(Cell::new(or_dash(row.serial.as_ref())));
        }
        let others = row.others_in_group.len();
        let shared = if others == 0 { String::new() } else { format!(" (+{others})") };
        let driver = Cell::new(or_dash(row.driver.as_ref()));
        let is_vfio = row.driver.as_deref() == Some(VFIO);
        cells.extend([
            Cell::new(or_dash(row.bytes.map(report::size))).set_alignment(CellAlignment::Right),
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
    report::text(&table)
}

/// Returns the first disk, how many more there are, and how many paths there are to them.
fn disk(row: &Row) -> String {
    let first = or_dash(row.disks.first().or(row.controller.as_ref()));
    let more = match row.disks.len() {
        0 | 1 => String::new(),
        disks => format!(" +{}", disks - 1),
    };
    let paths = match row.other_paths.len() {
        0 => String::new(),
        others => format!(" ({} paths)", others + 1),
    };
    format!("{first}{more}{paths}")
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
