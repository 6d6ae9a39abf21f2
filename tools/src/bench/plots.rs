//! Measurements as a page: the table, and plots over depth or size.

use ripieno_sim::{Line, Outcome, Plot, Table};

use super::report::{COLUMNS, Figures, Point, Report};
use super::rows::listed;
use crate::size::Size;

/// Parameter on the x axis, and the measurements' value of it.
type Axis = (&'static str, fn(&Point) -> f64);

/// Returns the first parameter of which there are several values.
fn axis(points: &[Point]) -> Option<Axis> {
    let depth: Axis = ("depth of a queue", |point| f64::from(point.iodepth));
    let size: Axis = ("KiB of a transfer", |point| f64::from(point.bs_bytes) / 1024.0);
    [depth, size].into_iter().find(|(_, of)| points.iter().any(|it| of(it) != of(&points[0])))
}

/// Returns a plot of `y` with a line for each combination of the other parameters.
fn plot(points: &[Point], (x, of): Axis, y: &str, figure: fn(&Figures) -> f64) -> Plot {
    let mut lines: Vec<Line> = Vec::new();
    for point in points {
        let Some(figures) = &point.figures else { continue };
        let other = match x.starts_with("depth") {
            true => Size(point.bs_bytes.into()).to_string(),
            false => format!("depth {}", point.iodepth),
        };
        let name = format!("{} {other}", point.pattern());
        let at = (of(point), figure(figures));
        match lines.iter_mut().find(|line| line.name == name) {
            Some(line) => line.points.push(at),
            None => lines.push(Line { name, points: vec![at] }),
        }
    }
    lines.iter_mut().for_each(|line| line.points.sort_by(|a, b| a.0.total_cmp(&b.0)));
    lines.retain(|line| line.points.len() > 1);
    Plot { title: format!("{y}, by {x}"), x: x.to_owned(), y: y.to_owned(), lines }
}

impl Report {
    /// Returns the report as a page's content.
    pub(super) fn outcome(&self) -> Outcome {
        let points = &self.points;
        let plots = axis(points).into_iter().flat_map(|axis| {
            [
                plot(points, axis, "1000 IOPS", |it| it.iops / 1e3),
                plot(points, axis, "MiB/s", |it| it.bytes_s / f64::from(1 << 20)),
                plot(points, axis, "p99, us", |it| it.latency_us.p99),
            ]
        });
        Outcome {
            name: "raw".to_owned(),
            title: "transfers of one size in flight on every queue".to_owned(),
            setting: listed(&self.setting.rows()),
            plots: plots.filter(|plot| !plot.lines.is_empty()).collect(),
            tables: vec![Table {
                title: "Measurements".to_owned(),
                columns: COLUMNS.map(str::to_owned).to_vec(),
                rows: points.iter().map(Point::row).collect(),
            }],
            notes: self.summary().into_iter().chain(self.notes()).collect(),
            ..Outcome::default()
        }
    }
}
