//! Results as a self-contained HTML page.

use std::fmt::Write as _;

use plotters::{
    coord::{
        Shift,
        ranged1d::{AsRangedCoord, ValueFormatter},
    },
    prelude::*,
};

use crate::outcome::{Bar, Comparison, Gantt, Outcome, Plot, Table, number};

const STYLE: &str = ":root{color-scheme:light dark}\
    body{font:15px/1.5 sans-serif;max-width:80rem;margin:2rem auto;padding:0 1rem}\
    nav{columns:18rem 3}\
    .plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(30rem,100%),1fr))}\
    .wide{overflow-x:auto}table{border-collapse:collapse;margin:1rem 0}\
    caption{text-align:left;font-weight:bold}\
    td,th{border:1px solid #bbb;padding:.2rem .6rem;text-align:right;white-space:nowrap}\
    td:first-child,th:first-child,td.note{text-align:left}td.note{white-space:normal}\
    svg{max-width:100%;height:auto}\
    @media(prefers-color-scheme:dark){svg{filter:invert(.9) hue-rotate(180deg)}}";

/// Result of drawing.
type Drawn<T> = Result<T, Box<dyn std::error::Error>>;

/// Width and height of a plot, without its legend.
const PLOT: (u32, u32) = (640, 400);
/// Height of a line of a legend.
const KEY: u32 = 26;
/// Text that can be read when a page is 400 pixels wide.
const TEXT: (&str, i32) = ("sans-serif", 18);
/// Colors that can be told apart by most people, on white as well (Okabe and Ito).
const COLORS: [RGBColor; 7] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(230, 159, 0),
    RGBColor(86, 180, 233),
    RGBColor(0, 0, 0),
];

/// Renders all outcomes of `command` in order.
/// Returns an error if a plot cannot be drawn.
pub fn page(command: &str, outcomes: &[Outcome]) -> Result<String, String> {
    let mut page = format!(
        "<!doctype html><html lang=\"en\"><meta charset=\"utf-8\"><title>{command}</title>\
         <meta name=\"viewport\" content=\"width=device-width\"><style>{STYLE}</style>\
         <h1>{command}</h1>"
    );
    if outcomes.len() > 1 {
        page.push_str("<nav>");
        for outcome in outcomes {
            let (name, title) = (text(&outcome.name), text(&outcome.title));
            let _ = write!(page, "<a href=\"#{name}\">{name}</a>: {title}<br>");
        }
        page.push_str("</nav>");
    }
    for outcome in outcomes {
        let (name, title) = (text(&outcome.name), text(&outcome.title));
        let _ = write!(page, "<h2 id=\"{name}\">{name}: {title}</h2><ul>");
        for setting in &outcome.setting {
            let _ = write!(page, "<li>{}</li>", text(setting));
        }
        page.push_str("</ul><div class=\"plots\">");
        for plot in &outcome.plots {
            page.push_str(&svg(plot).map_err(|error| format!("{}: {error}", plot.title))?);
        }
        for gantt in &outcome.gantts {
            page.push_str(&bars(gantt).map_err(|error| format!("{}: {error}", gantt.title))?);
        }
        page.push_str("</div>");
        outcome.tables.iter().chain(&comparisons(outcome)).for_each(|it| table(&mut page, it));
        for note in &outcome.notes {
            let _ = write!(page, "<p>{}</p>", text(note));
        }
    }
    page.push_str("</html>\n");
    Ok(page)
}

/// Returns a table of the paper's numbers next to ours, or `None` if there are none.
pub fn comparisons(outcome: &Outcome) -> Option<Table> {
    if outcome.comparisons.is_empty() {
        return None;
    }
    let columns = ["", "unit", "paper", "ours", "difference", "", "why"];
    let row = |it: &Comparison| {
        let or_none = |number: Option<String>| number.unwrap_or_else(|| "none".to_owned());
        vec![
            it.what.clone(),
            it.unit.clone(),
            number(it.paper),
            or_none(it.ours.map(number)),
            or_none(it.difference().map(|part| format!("{:+.0} %", part * 100.0))),
            it.basis.name(),
            it.note.clone(),
        ]
    };
    Some(Table::new("Paper and simulation", columns, outcome.comparisons.iter().map(row)))
}

fn table(page: &mut String, table: &Table) {
    let _ =
        write!(page, "<div class=\"wide\"><table><caption>{}</caption><tr>", text(&table.title));
    for column in &table.columns {
        let _ = write!(page, "<th scope=\"col\">{}</th>", text(column));
    }
    page.push_str("</tr>");
    for row in &table.rows {
        page.push_str("<tr>");
        for cell in row {
            let class = if cell.len() > 24 { " class=\"note\"" } else { "" };
            let _ = write!(page, "<td{class}>{}</td>", text(cell));
        }
        page.push_str("</tr>");
    }
    page.push_str("</table></div>");
}

fn text(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('"', "&quot;")
}

/// Draws a plot as SVG. Axes are logarithmic if smaller values would lie together.
///
/// # Errors
/// Returns an error without two points.
pub fn svg(plot: &Plot) -> Drawn<String> {
    let points = || plot.lines.iter().flat_map(|line| &line.points);
    let range = |of: fn(&(f64, f64)) -> f64| {
        points().map(of).fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| {
            (low.min(value), high.max(value))
        })
    };
    let (left, right) = range(|point| point.0);
    let (low, high) = range(|point| point.1);
    if left >= right || high <= 0.0 {
        return Err("there is nothing to be drawn".into());
    }
    if left > 0.0 && right / left >= 16.0 {
        return above(plot, (left..right).log_scale().base(2.0), low, high);
    }
    above(plot, left..right, low, high)
}

fn above<X>(plot: &Plot, x: X, low: f64, high: f64) -> Drawn<String>
where
    X: AsRangedCoord<Value = f64>,
    X::CoordDescType: ValueFormatter<f64>,
{
    if low > 0.0 && high / low > 100.0 {
        lines(plot, x, (low * 0.8..high * 1.25).log_scale())
    } else {
        lines(plot, x, 0.0..high * 1.1)
    }
}

fn lines<X, Y>(plot: &Plot, x: X, y: Y) -> Drawn<String>
where
    X: AsRangedCoord<Value = f64>,
    X::CoordDescType: ValueFormatter<f64>,
    Y: AsRangedCoord<Value = f64>,
    Y::CoordDescType: ValueFormatter<f64>,
{
    // The legend is below, in two columns if all names fit.
    let longest = plot.lines.iter().map(|line| line.name.chars().count()).max().unwrap_or(0);
    let columns = if longest > 30 { 1 } else { 2 };
    let height = PLOT.1 + KEY * plot.lines.len().div_ceil(columns) as u32 + 8;
    drawn(&plot.title, (PLOT.0, height), |root| {
        let (root, below) = root.split_vertically(PLOT.1);
        let mut chart = ChartBuilder::on(&root)
            .caption(&plot.title, ("sans-serif", 22))
            .margin(12)
            .x_label_area_size(52)
            .y_label_area_size(84)
            .build_cartesian_2d(x, y)?;
        let mut mesh = chart.configure_mesh();
        mesh.max_light_lines(0).x_labels(8).x_desc(&plot.x).y_desc(&plot.y).label_style(TEXT);
        mesh.x_label_formatter(&label).y_label_formatter(&label).draw()?;
        for (index, line) in plot.lines.iter().enumerate() {
            let stroke = COLORS[index % COLORS.len()].stroke_width(2);
            chart.draw_series(LineSeries::new(line.points.iter().copied(), stroke))?;
            chart
                .draw_series(line.points.iter().map(|at| EmptyElement::at(*at) + marker(index)))?;
            let width = (PLOT.0 as usize / columns) as i32;
            let left = 24 + width * (index % columns) as i32;
            let middle = (KEY as usize * (index / columns)) as i32 + KEY as i32 / 2;
            below.draw(&PathElement::new([(left, middle), (left + 32, middle)], stroke))?;
            below.draw(&(EmptyElement::at((left + 16, middle)) + marker(index)))?;
            below.draw(&Text::new(line.name.clone(), (left + 42, middle - 9), TEXT))?;
        }
        Ok(())
    })
}

/// Returns the mark of a line's points: a shape of its own beside a color of its own.
fn marker<'a>(index: usize) -> DynElement<'static, SVGBackend<'a>, (i32, i32)> {
    let color = COLORS[index % COLORS.len()];
    match index % 4 {
        0 => Circle::new((0, 0), 4, color.filled()).into_dyn(),
        1 => TriangleMarker::new((0, 0), 6, color.filled()).into_dyn(),
        2 => Cross::new((0, 0), 5, color.stroke_width(2)).into_dyn(),
        _ => Circle::new((0, 0), 5, color.stroke_width(2)).into_dyn(),
    }
}

/// Returns what `draw` puts on white, as a picture with a name.
fn drawn(
    title: &str,
    size: (u32, u32),
    draw: impl FnOnce(&DrawingArea<SVGBackend<'_>, Shift>) -> Drawn<()>,
) -> Drawn<String> {
    let mut svg = String::new();
    {
        let root = SVGBackend::with_string(&mut svg, size).into_drawing_area();
        root.fill(&WHITE)?;
        draw(&root)?;
        root.present()?;
    }
    let (head, rest) = svg.split_once('>').ok_or("no picture")?;
    Ok(format!("{head} role=\"img\"><title>{}</title>{rest}", text(title)))
}

/// Formats a value of an axis.
#[expect(clippy::trivially_copy_pass_by_ref, reason = "as plotters calls it")]
fn label(value: &f64) -> String {
    if *value != 0.0 && value.abs() < 0.001 {
        return format!("{value:.0e}");
    }
    let text = format!("{value:.3}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

fn bars(gantt: &Gantt) -> Drawn<String> {
    let all = || gantt.bars.iter().flat_map(|(_, bars)| bars);
    let rows = all().map(|bar| bar.row + 1).max().ok_or("there is nothing to be drawn")?;
    let end = all().map(|bar| bar.to).fold(0.0, f64::max);
    drawn(&gantt.title, (760, 520), |root| {
        // The first row is at the top.
        let mut chart = ChartBuilder::on(root)
            .caption(&gantt.title, ("sans-serif", 18))
            .margin(12)
            .x_label_area_size(40)
            .y_label_area_size(60)
            .build_cartesian_2d(0.0..end, f64::from(rows)..0.0)?;
        let mut mesh = chart.configure_mesh();
        mesh.disable_y_mesh().max_light_lines(0).x_desc(&gantt.x).y_desc(&gantt.y);
        mesh.y_label_formatter(&|row| format!("{row:.0}")).draw()?;
        for (index, (work, bars)) in gantt.bars.iter().enumerate() {
            let color = COLORS[index % COLORS.len()].filled();
            // A third of the row for each kind of work.
            let thirds = |bar: &Bar| {
                let top = f64::from(bar.row) + index as f64 / 3.0;
                Rectangle::new([(bar.from, top), (bar.to, top + 0.33)], color)
            };
            chart
                .draw_series(bars.iter().map(thirds))?
                .label(work.name())
                .legend(move |(x, y)| Rectangle::new([(x, y - 4), (x + 18, y + 4)], color));
        }
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::LowerLeft)
            .border_style(BLACK)
            .background_style(WHITE)
            .draw()?;
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::outcome::Line;

    #[test]
    fn a_page_is_complete_in_itself() {
        let line = Line::new("a<b", [(0.0, 1.0), (2.0, 3.0)]);
        let outcome = Outcome {
            name: "one".to_owned(),
            title: "a & b".to_owned(),
            plots: vec![Plot::new("plot", "x", "y", [line])],
            ..Outcome::default()
        };
        let page = page("ripieno sim", std::slice::from_ref(&outcome)).unwrap();
        assert!(page.contains("one: a &amp; b") && page.contains("<svg"), "{page}");
        assert!(page.contains(" role=\"img\"><title>plot</title>"), "{page}");
        assert!(!page.contains("a<b") && !page.contains("src=") && !page.contains("href=\"h"));
        let empty = Outcome {
            plots: vec![Plot { lines: Vec::new(), ..outcome.plots[0].clone() }],
            ..outcome
        };
        assert!(super::page("ripieno sim", &[empty]).is_err());
    }
}
