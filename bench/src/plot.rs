//! Plots as SVG.

use std::path::Path;

use anyhow::{Context as _, Result, anyhow};
use plotters::prelude::*;

/// A line: its name and its points.
pub struct Line<'a> {
    /// Legend.
    pub name: &'a str,
    /// Points in order of x.
    pub points: Vec<(f64, f64)>,
}

/// Draws lines over a logarithmic x axis.
///
/// # Errors
/// Returns an error if the file cannot be written.
pub fn lines(path: &Path, title: &str, x: &str, y: &str, lines: &[Line<'_>]) -> Result<()> {
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder)
            .with_context(|| format!("making the folder {}", folder.display()))?;
    }
    let all = || lines.iter().flat_map(|line| line.points.iter());
    let low = all().map(|p| p.0).fold(f64::INFINITY, f64::min);
    let high = all().map(|p| p.0).fold(0.0, f64::max);
    let top = all().map(|p| p.1).fold(0.0, f64::max) * 1.1;
    draw(path, title, [x, y], [low, high, top], lines)
        .map_err(|error| anyhow!("drawing {}: {error}", path.display()))
}

fn draw(
    path: &Path,
    title: &str,
    [x, y]: [&str; 2],
    [low, high, top]: [f64; 3],
    lines: &[Line<'_>],
) -> Result<(), Box<dyn std::error::Error>> {
    let root = SVGBackend::new(path, (800, 480)).into_drawing_area();
    root.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&root)
        .caption(title, ("sans-serif", 20))
        .margin(12)
        .x_label_area_size(44)
        .y_label_area_size(60)
        .build_cartesian_2d((low..high).log_scale().base(2.0), 0.0..top)?;
    chart.configure_mesh().max_light_lines(0).x_desc(x).y_desc(y).draw()?;
    for (index, line) in lines.iter().enumerate() {
        let color = Palette99::pick(index).stroke_width(2);
        chart
            .draw_series(LineSeries::new(line.points.iter().copied(), color))?
            .label(line.name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], color));
        chart.draw_series(line.points.iter().map(|p| Circle::new(*p, 3, color.filled())))?;
    }
    chart.configure_series_labels().border_style(BLACK).background_style(WHITE).draw()?;
    root.present()?;
    Ok(())
}
