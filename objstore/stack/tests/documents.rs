//! The documents that are made from the registries of metrics and of options: tables, and a
//! dashboard for Grafana. `RIPIENO_WRITE_DOCS=1 cargo test -p ripieno-stack --test documents`
//! writes them.

use std::{
    collections::HashSet,
    ffi::OsString,
    fs,
    io::{self, Read as _, Write as _},
    os::unix::net::UnixStream,
    path::PathBuf,
    process::{Command, Stdio},
};

use objstore::{BlockId, BlockKey, KvShape};
use ripieno_stack::{
    Builder, METRICS, Metric, MetricKind, MetricsAddress, OPTIONS, StackConfig, StackOption,
};
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
        MetricKind::Gauge | MetricKind::Histogram => "",
    };
    format!("{prefix}{}{suffix}", metric.name)
}

fn is_of_device(metric: &Metric) -> bool {
    metric.name.starts_with("device_")
}

/// Returns a page up to its last table, and the header of that.
fn page(name: &str, header: &str) -> String {
    let found = fs::read_to_string(document(name)).expect("it is there");
    let end = found.find(&format!("\n{header}\n")).unwrap_or(found.len());
    let columns = header.matches('|').count() - 1;
    format!("{}\n\n{header}\n|{}\n", found[..end].trim_end(), "---|".repeat(columns))
}

/// A crate beside the repository that depends on this one as docs/start/rust.md says.
#[test]
fn a_crate_depends_on_this_one_as_the_page_says() {
    let place = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
    let (engine, clone) = (place.path().join("engine"), place.path().join("ripieno"));
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().expect("it");
    std::os::unix::fs::symlink(&root, clone).expect("a link");
    fs::create_dir_all(engine.join("src")).expect("a directory");
    fs::write(engine.join("src/main.rs"), include_str!("../examples/hello.rs")).expect("written");
    // With the same versions of other crates, which a machine without a network has.
    fs::copy(root.join("Cargo.lock"), engine.join("Cargo.lock")).expect("copied");
    let page = fs::read_to_string(document("../start/rust.md")).expect("it is there");
    let (_, lines) = page.split_once("```toml\n").expect("the lines of Cargo.toml");
    let (lines, _) = lines.split_once("```").expect("their end");
    let manifest =
        format!("{lines}\n[package]\nname = \"engine\"\nedition = \"2024\"\n[workspace]\n");
    fs::write(engine.join("Cargo.toml"), manifest).expect("written");
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["tree", "--offline", "--depth", "1"]).current_dir(&engine);
    let output = cargo.output().expect("cargo runs");
    let found = String::from_utf8_lossy(&output.stdout);
    assert!(
        found.contains("ripieno-stack v"),
        "{found}{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

#[test]
fn the_table_has_every_option() {
    let mut page = page("options.md", "| option | value | default | meaning |");
    for option in OPTIONS {
        let StackOption { name, value, default, .. } = option;
        let value = value.replace('|', ", ");
        page += &format!("| `{name}` | {value} | {default} | {} |\n", option.help());
    }
    check("options.md", &page);
}

#[test]
fn the_table_has_every_metric() {
    let mut page = page("metrics.md", "| metric | type | meaning |");
    for metric in METRICS {
        let name = sample(metric, "ripieno_");
        let device = if is_of_device(metric) { "{device}" } else { "" };
        let only = if metric.is_of_connector() { " Only of the connector for vLLM." } else { "" };
        let (kind, help) = (metric.kind.name(), metric.help);
        page += &format!("| `{name}{device}` | {kind} | {help}{only} |\n");
    }
    check("metrics.md", &page);
}

/// Returns a panel without a place.
fn panel(title: &str, help: &str, unit: &str, exprs: &[(String, &str)]) -> Value {
    let targets = exprs.iter().zip('A'..).map(|((expr, legend), id)| {
        json!({ "refId": id.to_string(), "expr": expr, "legendFormat": legend })
    });
    json!({
        "type": "timeseries",
        "title": title,
        "description": help,
        "datasource": { "type": "prometheus", "uid": "${datasource}" },
        "fieldConfig": { "defaults": { "unit": unit, "min": 0 }, "overrides": [] },
        "targets": targets.collect::<Vec<_>>(),
    })
}

/// Colours a panel red from `limit`, or up to it.
fn limited(mut panel: Value, limit: f64, is_upper: bool) -> Value {
    let colors = if is_upper { ["green", "red"] } else { ["red", "green"] };
    let defaults = &mut panel["fieldConfig"]["defaults"];
    defaults["thresholds"] = json!({ "mode": "absolute", "steps": [
        { "color": colors[0], "value": null },
        { "color": colors[1], "value": limit },
    ] });
    defaults["custom"] = json!({ "thresholdsStyle": { "mode": "area" } });
    panel
}

/// Returns a selector of the instances that are chosen.
fn chosen(name: &str) -> String {
    format!("{name}{{instance=~\"$instance\"}}")
}

fn rate(name: &str) -> String {
    format!("rate({}[$__rate_interval])", chosen(&format!("${{prefix}}{name}")))
}

/// Returns the durations of a histogram over time, as colours.
fn heatmap(title: &str, name: &str) -> Value {
    let expr = format!("sum by (le) ({})", rate(&format!("{name}_bucket")));
    let mut made = panel(title, "Operations a second, by duration.", "s", &[(expr, "{{le}}")]);
    made["type"] = json!("heatmap");
    made["targets"][0]["format"] = json!("heatmap");
    made["options"] = json!({ "calculate": false, "yAxis": { "unit": "s" } });
    made
}

/// Returns the panels that answer a question of their own: the first are always open.
fn answers() -> Vec<Value> {
    let gauge = |name: &str| chosen(&format!("${{prefix}}{name}"));
    let day =
        |name: &str| format!("86400 * rate({}[1d])", chosen(&format!("${{prefix}}{name}_total")));
    let hits = format!("{} / {}", rate("hit_tokens_total"), rate("lookup_tokens_total"));
    let used = format!("{} / {}", gauge("used_blocks"), gauge("capacity_blocks"));
    let worth = format!("{} / {}", rate("compute_saved_seconds_sum"), rate("load_seconds_sum"));
    let moved = [("loaded_bytes_total", "loaded"), ("stored_bytes_total", "stored")];
    let moved = moved.map(|(name, legend)| (rate(name), legend));
    let failures = ["command_errors", "late_completions", "recoveries", "load_failures"]
        .map(|name| (rate(&format!("{name}_total")), name));
    let waits = ["load_wait", "save_wait", "slot_wait", "flush"]
        .map(|cause| (rate(&format!("{cause}_seconds_sum")), cause));
    let written = format!("{} + {}", day("written_bytes"), day("journal_bytes"));
    let saved = |name| (rate(name), "{{instance}}");
    let each = "{{instance}}";
    vec![
        limited(
            panel("Healthy", "0: takes no writes.", "short", &[(gauge("healthy"), each)]),
            1.0,
            false,
        ),
        panel("Hit rate", "Tokens found of those looked up.", "percentunit", &[(hits, "hits")]),
        panel("Bandwidth", "Without padding.", "Bps", &moved),
        panel("Used", "Blocks held of those with room.", "percentunit", &[(used, each)]),
        heatmap("Loads by duration", "load_seconds"),
        heatmap("Waits for loads by duration", "load_wait_seconds"),
        panel("Waits by cause", "Seconds a second, of all callers.", "s", &waits),
        limited(panel("Failures", "A second.", "short", &failures), 0.001, true),
        panel(
            "Was it worth it: times faster than computing",
            "Time that computing would have taken, for each second of loads.",
            "none",
            &[(worth, each)],
        ),
        panel("Bytes written a day", "With journal.", "bytes", &[(written, each)]),
        panel("Computing saved", "Seconds a second.", "s", &[saved("compute_saved_seconds_sum")]),
    ]
}

/// Number of the [`answers`] that are open.
const OPEN: usize = 8;

/// Returns the panel of a metric by itself.
fn of_metric(metric: &Metric) -> Option<Value> {
    let Metric { name, kind, help, .. } = metric;
    let all = sample(metric, "");
    let legend = match metric.name {
        _ if is_of_device(metric) => "{{instance}} {{device}}",
        "missed_tokens" => "{{instance}} {{reason}}",
        _ => "{{instance}}",
    };
    if *kind == MetricKind::Histogram {
        let quantile = |part: f64, legend| {
            let rate = rate(&format!("{all}_bucket"));
            (format!("histogram_quantile({part}, sum by (le) ({rate}))"), legend)
        };
        let [sum, count] = ["sum", "count"].map(|part| rate(&format!("{all}_{part}")));
        let mean = (format!("{sum} / {count}"), "mean {{instance}}");
        return Some(panel(name, help, "s", &[quantile(0.5, "p50"), quantile(0.99, "p99"), mean]));
    }
    let (expr, unit) = match (kind, metric.unit()) {
        (MetricKind::Info, _) => return None,
        (MetricKind::Counter, "bytes") => (rate(&all), "Bps"),
        (MetricKind::Counter, _) => (rate(&all), "cps"),
        (_, unit) => {
            let unit = if unit == "seconds" { "s" } else { unit };
            (chosen(&format!("${{prefix}}{all}")), if unit.is_empty() { "short" } else { unit })
        }
    };
    let made = panel(name, help, unit, &[(expr, legend)]);
    Some(match *name {
        "device_wear_percent" => limited(made, 90.0, true),
        "device_spare_percent" => limited(made, 10.0, false),
        _ => made,
    })
}

/// Returns the row of a metric.
fn row_of(metric: &Metric) -> &'static str {
    let begins = |start| metric.name.starts_with(start);
    match metric.kind {
        _ if metric.is_of_connector() => "Connector for vLLM",
        MetricKind::Histogram => "Times",
        _ if begins("dram_") => "DRAM cache",
        _ if begins("device_") => "Devices",
        _ if metric.name.ends_with("_blocks") || begins("lookup") || begins("hit") => "Contents",
        _ => "Transfers and state",
    }
}

fn dashboard() -> Value {
    let mut open = answers();
    let mut rows = vec![("Worth and wear", open.split_off(OPEN))];
    for metric in METRICS {
        let name = row_of(metric);
        let at = rows.iter().position(|row| row.0 == name).unwrap_or_else(|| {
            rows.push((name, Vec::new()));
            rows.len() - 1
        });
        rows[at].1.extend(of_metric(metric));
    }
    let mut next = 0;
    let mut place = |panel: &mut Value, at: usize, width: usize, top: usize| {
        next += 1;
        panel["id"] = json!(next);
        let (x, y) = (width * (at % (24 / width)), top + 7 * (at / (24 / width)));
        panel["gridPos"] = json!({ "x": x, "y": y, "w": width, "h": 7 });
    };
    open.iter_mut().enumerate().for_each(|(at, panel)| place(panel, at, 6, 0));
    let mut panels = open;
    for (number, (title, mut inside)) in rows.into_iter().enumerate() {
        let top = 14 + number;
        inside.iter_mut().enumerate().for_each(|(at, panel)| place(panel, at, 8, top + 1));
        let mut row = json!({ "type": "row", "title": title, "collapsed": true, "panels": inside });
        place(&mut row, 0, 24, top);
        row["gridPos"]["h"] = json!(1);
        panels.push(row);
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

/// Returns the queries of panels, and of those in rows.
fn exprs(of: &Value) -> Vec<String> {
    let panels = of["panels"].as_array().into_iter().flatten();
    let own = of["targets"].as_array().into_iter().flatten();
    let own = own.map(|target| target["expr"].as_str().expect("an expression").to_owned());
    own.chain(panels.flat_map(exprs)).collect()
}

/// Returns Prometheus' checker, or says that a test is skipped: `RIPIENO_PROMTOOL`, which has to
/// work, or the one of this machine.
fn promtool(test: &str) -> Option<OsString> {
    let given = std::env::var_os("RIPIENO_PROMTOOL");
    let program = given.clone().unwrap_or_else(|| "promtool".into());
    let works =
        Command::new(&program).arg("--version").output().is_ok_and(|it| it.status.success());
    let why = match std::env::var_os("RIPIENO_SKIP_PROMTOOL") {
        Some(value) if value == "1" => "RIPIENO_SKIP_PROMTOOL=1",
        _ if works => return Some(program),
        _ => "this machine has no promtool (Debian's prometheus)",
    };
    assert!(given.is_none() || why.starts_with("RIPIENO"), "{program:?} does not work");
    writeln!(io::stdout(), "SKIPPED {test}: {why}").expect("stdout");
    None
}

/// Runs it with this input. Returns true if it finds nothing, and its output.
fn checked(promtool: &OsString, arguments: &[&str], input: &str) -> (bool, String) {
    let mut command = Command::new(promtool);
    command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("promtool");
    child.stdin.take().expect("a pipe").write_all(input.as_bytes()).expect("it reads");
    let output = child.wait_with_output().expect("it ends");
    let text = [output.stdout, output.stderr].concat();
    (output.status.success(), String::from_utf8_lossy(&text).into_owned())
}

#[test]
fn promtool_accepts_every_query_of_the_dashboard() {
    let Some(promtool) = promtool("promtool_accepts_every_query_of_the_dashboard") else { return };
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("rules.yml");
    let check = |exprs: &[String]| {
        let rule = |expr: &String| json!({ "record": "panel", "expr": expr });
        let rules: Vec<_> = exprs.iter().map(rule).collect();
        let groups = json!({ "groups": [{ "name": "dashboard", "rules": rules }] });
        fs::write(&path, groups.to_string()).expect("written");
        let lint = "--lint=none";
        checked(&promtool, &["check", "rules", lint, path.to_str().expect("UTF-8")], "")
    };
    let dashboard = dashboard();
    for prefix in ["ripieno_", "vllm:ripieno_"] {
        let given = [("${prefix}", prefix), ("$__rate_interval", "1m"), ("$instance", ".*")];
        let query = |expr: String| given.iter().fold(expr, |it, (a, b)| it.replace(a, b));
        let queries: Vec<String> = exprs(&dashboard).into_iter().map(query).collect();
        let (is_good, said) = check(&queries);
        let count = format!("SUCCESS: {} rules found", queries.len());
        assert!(is_good && said.contains(&count), "{said}");
    }
    assert!(!check(&["rate(".to_owned()]).0, "promtool accepts anything");
}

#[test]
fn promtool_accepts_what_a_store_serves() {
    let Some(promtool) = promtool("promtool_accepts_what_a_store_serves") else { return };
    let dir = tempfile::tempdir().expect("a directory");
    let socket = dir.path().join("metrics.sock");
    let shape = KvShape { layers: 2, segments: 2, object_bytes: 4096, block_tokens: 16 };
    let metrics = Some(MetricsAddress::Unix(socket.clone()));
    let (path, capacity) = (Some(dir.path().join("store")), Some(64 << 20));
    let config = StackConfig { path, capacity, metrics, ..StackConfig::default() };
    let stack = Builder::new(config, shape).open().expect("open");
    let (keys, blocks) = ([BlockKey([1; 32])], [BlockId(0)]);
    stack.save(&keys, &blocks).expect("saved");
    stack.load(&keys, &blocks).expect("loaded");
    let mut client = UnixStream::connect(&socket).expect("somebody listens");
    client.write_all(b"GET /metrics HTTP/1.1\r\nAccept: text/plain\r\n\r\n").expect("it reads");
    let mut answer = String::new();
    client.read_to_string(&mut answer).expect("it answers");
    let (_, text) = answer.split_once("\r\n\r\n").expect("a head");
    let (is_good, said) = checked(&promtool, &["check", "metrics"], text);
    assert!(is_good && said.is_empty(), "{said}");
    let (is_good, said) = checked(&promtool, &["check", "metrics"], "# TYPE a counter\na 1\n");
    assert!(!is_good && said.contains("_total"), "promtool accepts anything: {said}");
}

#[test]
fn the_dashboard_has_every_metric_and_no_other() {
    let text = serde_json::to_string_pretty(&dashboard()).expect("it is JSON") + "\n";
    check("ripieno.grafana.json", &text);
    let mut known = HashSet::new();
    for metric in METRICS {
        match metric.kind {
            MetricKind::Histogram => {
                known.extend(
                    ["bucket", "sum", "count"].map(|part| format!("{}_{part}", metric.name)),
                );
            }
            MetricKind::Info => {}
            _ => _ = known.insert(sample(metric, "")),
        }
    }
    let found: Value = serde_json::from_str(&text).expect("it is JSON");
    let named: HashSet<_> =
        exprs(&found).iter().flat_map(|it| names(it)).map(str::to_owned).collect();
    assert_eq!(named, known);
    let query = &found["templating"]["list"][2]["query"];
    assert!(known.contains(names(query.as_str().expect("a query")).next().expect("a name")));
}

/// Series of [`RULES`] that have to raise their alert: metric, labels, values a minute apart.
const RULES: &str = "ripieno.rules.yml";
const RAISED: &[(&str, &str, &str)] = &[
    ("RipienoStoreFailed", "ripieno_healthy", "1 0x29"),
    ("RipienoStoreFailed", "vllm:ripieno_healthy", "1 0x29"),
    ("RipienoWrongBytes", "vllm:ripieno_checksum_mismatches_total", "0x20 1x9"),
    ("RipienoCommandErrors", "ripieno_device_command_errors_total", "0x20 1x9"),
    ("RipienoBlocksLost", "ripieno_lost_blocks_total", "0x20 1x9"),
    ("RipienoControllerRecoveries", "ripieno_recoveries_total", "0+1x30"),
    ("RipienoLoadsFail", "vllm:ripieno_load_failures_total", "0x20 1x9"),
    ("RipienoLoadsFail", "vllm:ripieno_save_failures_total", "0x20 1x9"),
    ("RipienoDriveWornOut", "ripieno_device_wear_percent", "90x30"),
    ("RipienoDriveSpareLow", "ripieno_device_spare_percent", "9x30"),
    ("RipienoMediaErrors", "ripieno_device_media_errors_total", "0x20 1x9"),
];

/// Series that must not raise any.
const QUIET: &[(&str, &str)] = &[
    ("ripieno_healthy", "1x30"),
    ("ripieno_device_command_errors_total", "7x30"),
    ("ripieno_recoveries_total", "0x20 2x9"),
    ("ripieno_device_wear_percent", "89x30"),
    ("ripieno_device_spare_percent", "10x30"),
];

#[test]
fn alerts_name_metrics_that_exist() {
    let text = fs::read_to_string(document(RULES)).expect("it is there");
    let parts: Vec<&str> = text.split("ripieno_").skip(1).collect();
    assert!(parts.len() > 10);
    for part in parts {
        let end = part.find(|letter: char| !letter.is_ascii_lowercase() && letter != '_');
        let name = &part[..end.unwrap_or(part.len())];
        let is_it = |metric: &Metric| {
            sample(metric, "") == name || format!("{}_bucket", metric.name) == name
        };
        assert!(METRICS.iter().any(is_it), "no metric ripieno_{name}");
    }
    for (alert, ..) in RAISED {
        assert!(text.contains(&format!("- alert: {alert}\n")), "{alert}");
    }
}

/// Returns a test of alerts for promtool.
fn test(series: Vec<Value>, checks: Vec<Value>) -> Value {
    json!({ "interval": "1m", "input_series": series, "promql_expr_test": checks })
}

#[test]
fn alerts_are_raised_and_only_by_what_they_say() {
    let Some(promtool) = promtool("alerts_are_raised_and_only_by_what_they_say") else { return };
    let dir = tempfile::tempdir().expect("a directory");
    fs::copy(document(RULES), dir.path().join(RULES)).expect("copied");
    let path = dir.path().join("test.yml");
    let file = |name: &str| dir.path().join(name).to_str().expect("UTF-8").to_owned();
    let run = |tests: &[Value]| {
        let all = json!({ "rule_files": [RULES], "evaluation_interval": "1m", "tests": tests });
        fs::write(&path, all.to_string()).expect("written");
        checked(&promtool, &["test", "rules", &file("test.yml")], "")
    };
    let series = |(name, values): (&str, &str)| {
        let name = format!("{name}{{instance=\"a\", device=\"0\"}}");
        json!({ "series": name, "values": values })
    };
    let count = |alert: &str, expected: u32| {
        let firing = format!("ALERTS{{alertname=\"{alert}\", alertstate=\"firing\"}}");
        json!({
            "expr": format!("count({firing}) or vector(0)"),
            "eval_time": "28m",
            "exp_samples": [{ "labels": "{}", "value": expected }],
        })
    };
    for &(alert, name, values) in RAISED {
        let raised = test(vec![series((name, values))], vec![count(alert, 1)]);
        let (is_good, said) = run(&[raised]);
        assert!(is_good, "{alert} by {name}: {said}");
    }
    let bucket = |(le, values): (&str, &str)| {
        let name = format!("ripieno_load_wait_seconds_bucket{{instance=\"a\", le=\"{le}\"}}");
        json!({ "series": name, "values": values })
    };
    for (fast, expected) in [("0+1x30", 1), ("0+100x30", 0)] {
        let all = [("1.0", fast), ("3.0", "0+100x30"), ("+Inf", "0+100x30")].map(bucket);
        let (is_good, said) = run(&[test(all.to_vec(), vec![count("RipienoSlowLoads", expected)])]);
        assert!(is_good, "{said}");
    }
    let alerts = || RAISED.iter().map(|&(alert, ..)| count(alert, 0));
    let (is_good, said) =
        run(&[test(QUIET.iter().copied().map(series).collect(), alerts().collect())]);
    assert!(is_good, "{said}");
    let lint = checked(&promtool, &["check", "rules", &file(RULES)], "");
    assert!(lint.0 && lint.1.contains("SUCCESS: 10 rules found"), "{}", lint.1);
}
