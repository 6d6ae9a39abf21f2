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
        MetricKind::Gauge | MetricKind::Summary => "",
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

/// Returns the queries of a dashboard.
fn exprs(dashboard: &Value) -> impl Iterator<Item = &str> {
    let panels = dashboard["panels"].as_array().expect("panels");
    let targets = panels.iter().flat_map(|panel| panel["targets"].as_array().expect("targets"));
    targets.map(|target| target["expr"].as_str().expect("an expression"))
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
        let query = |expr: &str| given.iter().fold(expr.to_owned(), |it, (a, b)| it.replace(a, b));
        let queries: Vec<String> = exprs(&dashboard).map(query).collect();
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
            MetricKind::Summary => {
                known.extend(["sum", "count"].map(|part| format!("{}_{part}", metric.name)));
            }
            MetricKind::Info => {}
            _ => _ = known.insert(sample(metric, "")),
        }
    }
    let found: Value = serde_json::from_str(&text).expect("it is JSON");
    let named: HashSet<_> = exprs(&found).flat_map(names).map(str::to_owned).collect();
    assert_eq!(named, known);
    let query = &found["templating"]["list"][2]["query"];
    assert!(known.contains(names(query.as_str().expect("a query")).next().expect("a name")));
}
