//! The documents that are made from the registry of metrics: a table and a dashboard for Grafana.
//! `RIPIENO_WRITE_DOCS=1 cargo test -p ripieno-stack --test metrics` writes them.

use std::{collections::HashSet, fs, path::PathBuf};

use ripieno_stack::{METRICS, Metric, MetricKind};
use serde_json::{Value, json};

fn document(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../docs/reference").join(name)
}

/// Compares a document with what it should be, or writes it.
fn check(name: &str, expected: &str) {
    let path = document(name);
    if std::env::var_os("RIPIENO_WRITE_DOCS").is_some() {
        fs::write(&path, expected).expect("it can be written");
    }
    let found = fs::read_to_string(&path).expect("it is there");
    assert!(found == expected, "{name} is out of date: run this test with RIPIENO_WRITE_DOCS=1");
}

/// Returns the name with the prefix and the suffix of its samples.
fn sample(metric: &Metric, prefix: &str) -> String {
    let suffix = match metric.kind {
        MetricKind::Counter => "_total",
        MetricKind::Info => "_info",
        MetricKind::Gauge | MetricKind::Summary => "",
    };
    format!("{prefix}{}{suffix}", metric.name)
}

fn is_of_device(metric: &Metric) -> bool {
    metric.name.starts_with("device_")
}

#[test]
fn the_table_has_every_metric() {
    let path = document("metrics.md");
    let found = fs::read_to_string(path).expect("it is there");
    let end = found.find("\n| metric |").map_or(found.len(), |at| at + 1);
    let mut page = found[..end].trim_end().to_owned();
    page += "\n\n| metric | type | meaning |\n|---|---|---|\n";
    for metric in METRICS {
        let name = sample(metric, "ripieno_");
        let device = if is_of_device(metric) { "{device}" } else { "" };
        let only = if metric.is_of_connector() { " Only of the connector for vLLM." } else { "" };
        let (kind, help) = (metric.kind.name(), metric.help);
        page += &format!("| `{name}{device}` | {kind} | {help}{only} |\n");
    }
    check("metrics.md", &page);
}

fn panel(title: &str, help: &str, unit: &str, exprs: &[(String, &str)], at: usize) -> Value {
    let targets = exprs.iter().zip('A'..).map(|((expr, legend), id)| {
        json!({ "refId": id.to_string(), "expr": expr, "legendFormat": legend })
    });
    json!({
        "id": at + 1,
        "type": "timeseries",
        "title": title,
        "description": help,
        "datasource": { "type": "prometheus", "uid": "${datasource}" },
        "fieldConfig": { "defaults": { "unit": unit, "min": 0 }, "overrides": [] },
        "gridPos": { "x": 8 * (at % 3), "y": 7 * (at / 3), "w": 8, "h": 7 },
        "targets": targets.collect::<Vec<_>>(),
    })
}

/// Returns a selector of the instances that are chosen.
fn chosen(name: &str) -> String {
    format!("{name}{{instance=~\"$instance\"}}")
}

fn rate(name: &str) -> String {
    format!("rate({}[$__rate_interval])", chosen(&format!("${{prefix}}{name}")))
}

/// Returns the panels that answer a question of their own.
fn answers() -> Vec<Value> {
    let day =
        |name: &str| format!("86400 * rate({}[1d])", chosen(&format!("${{prefix}}{name}_total")));
    let hits = format!("{} / {}", rate("hit_tokens_total"), rate("lookup_tokens_total"));
    let worth = format!("{} / {}", rate("compute_saved_seconds_sum"), rate("load_seconds_sum"));
    let waits = ["load_wait", "save_wait", "slot_wait", "flush"]
        .map(|cause| (rate(&format!("{cause}_seconds_sum")), cause));
    let written = format!("{} + {}", day("written_bytes"), day("journal_bytes"));
    let saved = |name| (rate(name), "{{instance}}");
    vec![
        panel("Hit rate", "Tokens found of those looked up.", "percentunit", &[(hits, "hits")], 0),
        panel("Waits by cause", "Seconds a second, of all callers.", "s", &waits, 1),
        panel(
            "Was it worth it: times faster than computing",
            "Time that computing would have taken, for each second of loads.",
            "none",
            &[(worth, "{{instance}}")],
            2,
        ),
        panel("Bytes written a day", "With journal.", "bytes", &[(written, "{{instance}}")], 3),
        panel(
            "Computing saved",
            "Seconds a second.",
            "s",
            &[saved("compute_saved_seconds_sum")],
            4,
        ),
    ]
}

/// Returns the panel of a metric by itself.
fn of_metric(metric: &Metric, at: usize) -> Option<Value> {
    let Metric { name, kind, help, .. } = metric;
    let all = sample(metric, "");
    let legend = if is_of_device(metric) { "{{instance}} {{device}}" } else { "{{instance}}" };
    let (expr, unit) = match (kind, metric.unit()) {
        (MetricKind::Info, _) => return None,
        (MetricKind::Counter, "bytes") => (rate(&all), "Bps"),
        (MetricKind::Counter, _) => (rate(&all), "cps"),
        (MetricKind::Gauge, "bytes") => (chosen(&format!("${{prefix}}{all}")), "bytes"),
        (MetricKind::Gauge, "seconds") => (chosen(&format!("${{prefix}}{all}")), "s"),
        (MetricKind::Gauge, _) => (chosen(&format!("${{prefix}}{all}")), "short"),
        (MetricKind::Summary, _) => {
            let [sum, count] = ["sum", "count"].map(|part| rate(&format!("{all}_{part}")));
            (format!("{sum} / {count}"), "s")
        }
    };
    let title = match kind {
        MetricKind::Summary => format!("{name}, mean"),
        _ => (*name).to_owned(),
    };
    Some(panel(&title, help, unit, &[(expr, legend)], at))
}

fn dashboard() -> Value {
    let mut panels = answers();
    for metric in METRICS {
        panels.extend(of_metric(metric, panels.len()));
    }
    let prefixes = ["ripieno_", "vllm:ripieno_"];
    let option = |prefix: &str| {
        let is_first = prefix == prefixes[0];
        json!({ "text": prefix, "value": prefix, "selected": is_first })
    };
    json!({
        "title": "Ripieno",
        "uid": "ripieno",
        "schemaVersion": 39,
        "editable": true,
        "refresh": "10s",
        "time": { "from": "now-1h", "to": "now" },
        "tags": ["ripieno"],
        "panels": panels,
        "templating": { "list": [
            { "name": "datasource", "type": "datasource", "query": "prometheus" },
            {
                "name": "prefix",
                "type": "custom",
                "query": prefixes.join(","),
                "current": option(prefixes[0]),
                "options": prefixes.map(option),
            },
            {
                "name": "instance",
                "type": "query",
                "datasource": { "type": "prometheus", "uid": "${datasource}" },
                "query": "label_values(${prefix}healthy, instance)",
                "includeAll": true,
                "multi": true,
                "allValue": ".*",
                "current": { "text": "All", "value": "$__all" },
                "refresh": 2,
            },
        ] },
    })
}

/// Returns the names of metrics in an expression.
fn names(expr: &str) -> impl Iterator<Item = &str> {
    expr.split("${prefix}").skip(1).map(|rest| {
        let end = rest.find(|letter: char| !letter.is_ascii_lowercase() && letter != '_');
        &rest[..end.unwrap_or(rest.len())]
    })
}

#[test]
fn the_dashboard_has_every_metric_and_no_other() {
    let text = serde_json::to_string_pretty(&dashboard()).expect("it is JSON") + "\n";
    check("ripieno.grafana.json", &text);
    let mut known = HashSet::new();
    for metric in METRICS {
        match metric.kind {
            MetricKind::Summary => {
                known.extend(["sum", "count"].map(|part| format!("{}_{part}", metric.name)));
            }
            MetricKind::Info => {}
            _ => _ = known.insert(sample(metric, "")),
        }
    }
    let found: Value = serde_json::from_str(&text).expect("it is JSON");
    let panels = found["panels"].as_array().expect("panels");
    let targets = panels.iter().flat_map(|panel| panel["targets"].as_array().expect("targets"));
    let exprs = targets.map(|target| target["expr"].as_str().expect("an expression"));
    let named: HashSet<_> = exprs.flat_map(names).map(str::to_owned).collect();
    assert_eq!(named, known);
    let query = &found["templating"]["list"][2]["query"];
    assert!(known.contains(names(query.as_str().expect("a query")).next().expect("a name")));
}
