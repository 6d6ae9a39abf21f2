//! `ripieno sim`: serving with a tiered KV cache, in virtual time.

mod cluster;
mod machine;
mod plan;
pub(crate) mod workload;

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use clap::parser::ValueSource;
use clap::{ArgMatches, Args, Subcommand};
use ripieno_sim::{Machine, Outcome, PARAMETERS, POLICIES, Scenario, compare, comparisons, page};

use crate::file;
use crate::problem::{Problem, nearest, none_of};
use crate::progress::Progress;
use crate::size;
use crate::table::{fitted, fold};
use crate::terminal;
use cluster::ClusterFlags;
use machine::{MachineFlags, check_fit};
use plan::PlanFlags;
use workload::{Workload, WorkloadFlags};

/// Reason to refuse flags for a scenario.
const OWN: &str = "a scenario has its own machine and requests";

/// Flags of `ripieno sim`.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct SimFlags {
    #[command(subcommand)]
    command: Option<SimCommand>,

    /// Scenarios, workloads, or traces (- is stdin), such as Mooncake's, Bailian's, aiperf's or
    /// Azure's; without any, scenarios and workloads are listed. "all" stands for all scenarios
    #[arg(value_name = "NAME|FILE")]
    names: Vec<String>,

    #[command(flatten)]
    tiers: TierFlags,

    #[command(flatten)]
    serving: ServingFlags,
}

/// Tiers of an engine.
#[derive(Debug, Args)]
struct TierFlags {
    /// Host memory for KV cache [default: 256GiB]
    #[arg(long, value_name = "SIZE", value_parser = size::memory, help_heading = "Machine")]
    dram: Option<u64>,

    /// Number of drives
    #[arg(long, value_name = "COUNT", default_value_t = 2, help_heading = "Machine",
        value_parser = size::count::<u32>(1..=256))]
    drives: u32,
}

/// Other simulations.
#[derive(Debug, Subcommand)]
enum SimCommand {
    /// Find the tiers to buy for a workload, by TTFT and cost
    #[command(after_help = PLAN_HELP)]
    Plan(Box<PlanFlags>),
    /// Serve a workload with engines on several machines
    #[command(after_help = CLUSTER_HELP)]
    Cluster(Box<ClusterFlags>),
    /// Print the parameters as JSON, each with its source
    Parameters,
}

const PLAN_HELP: &str = "\
Examples:
  ripieno sim plan conversation_trace.jsonl --rate 0.5 --ttft-p99 12
  ripieno sim plan loogle --rate 1 --dram 128GiB,512GiB --drives 2,4,8 --json

All combinations of host memory and drives are simulated, and none of either, with several seeds
where requests are random; and more GPUs without tiers. The recommended one is the cheapest by
tokens that serves what arrives and keeps --ttft-p99 with any seed.";

const CLUSTER_HELP: &str = "\
Examples:
  ripieno sim cluster chat --rate 8 --engines 2,4,8
  ripieno sim cluster conversation_trace.jsonl --rate 2 --link 15,50,200 --json

Each engine has GPUs, host memory and drives of its own. A router hands it requests: in turns, by
load, or by the blocks that a directory says it has. Blocks of another engine are fetched if that is
sooner than to compute them. A link of 15 Gbps is written 15.";

/// Flags of the workload, the machine and the report.
#[derive(Debug, Args)]
pub(crate) struct ServingFlags {
    #[command(flatten)]
    workload: WorkloadFlags,

    #[command(flatten)]
    machine: MachineFlags,

    #[command(flatten)]
    report: ReportFlags,
}

/// Flags of the report.
#[derive(Debug, Args)]
pub(crate) struct ReportFlags {
    /// Write a page with tables and plots to this file
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,

    /// Print one JSON object on stdout instead of tables
    #[arg(long)]
    json: bool,
}

/// A simulation to run.
enum Task {
    Scenario(&'static Scenario),
    /// A comparison of tiers: the name of a workload or file, and the workload.
    Compare(String, Workload),
}

/// Simulates and reports. `matches` has the flags that were given.
pub(crate) fn run(flags: &SimFlags, matches: &ArgMatches) -> anyhow::Result<u8> {
    let serving = match &flags.command {
        Some(SimCommand::Plan(plan)) => &plan.serving,
        Some(SimCommand::Cluster(cluster)) => &cluster.serving,
        Some(SimCommand::Parameters) => {
            terminal::print(PARAMETERS.trim_end())?;
            return Ok(0);
        }
        None => &flags.serving,
    };
    let page = serving.report.html.as_deref();
    if let Some(page) = page {
        file::check_output("--html", page)?;
    }
    let outcomes = match &flags.command {
        Some(SimCommand::Plan(flags)) => vec![plan::outcome(flags)?],
        Some(SimCommand::Cluster(flags)) => vec![cluster::outcome(flags)?],
        _ if flags.names.is_empty() => {
            let report = [("--json", flags.serving.report.json), ("--html", page.is_some())];
            let hint = "name a scenario, a workload or a trace; ripieno sim lists them";
            none_of(&report, "there is nothing to report", hint)?;
            terminal::print(list())?;
            return Ok(0);
        }
        _ => outcomes(flags, matches)?,
    };
    let wide = match &flags.command {
        Some(SimCommand::Plan(plan)) => Some(plan.wide),
        _ => None,
    };
    report(&outcomes, &serving.report, wide)?;
    Ok(0)
}

/// Runs scenarios, and compares the policies for workloads.
fn outcomes(flags: &SimFlags, matches: &ArgMatches) -> anyhow::Result<Vec<Outcome>> {
    let of = &flags.serving.machine;
    let files = of.files()?;
    let machine = of.machine(flags.tiers.dram, flags.tiers.drives, &files)?;
    let tasks = tasks(flags, matches, &machine)?;
    let runs = |task: &Task| match task {
        Task::Scenario(_) => 1,
        Task::Compare(..) => POLICIES.len(),
    };
    let progress = Progress::new("simulations", tasks.iter().map(runs).sum(), true);
    let mut next = progress.steps();
    let run = |task: Task| match task {
        Task::Scenario(scenario) => {
            next(&scenario.name);
            scenario.run(&files.parameters)
        }
        Task::Compare(name, Workload { setting, counted, .. }) => {
            let found = compare(&machine, &counted, &mut next);
            named(found, "all policies beside each other", &name, &setting)
        }
    };
    let outcomes = tasks.into_iter().map(run).collect();
    progress.finish();
    Ok(outcomes)
}

fn list() -> String {
    let width = Scenario::all().iter().map(|it| it.name.len()).max().unwrap_or(0) + 2;
    let scenarios = Scenario::all().iter().map(|it| format!("{:width$}{}", it.name, it.title));
    let names: Vec<&str> = workload::names().collect();
    let more =
        format!("\nworkloads, and traces, with all policies: {}, or a file", names.join(", "));
    scenarios.chain([more]).collect::<Vec<_>>().join("\n")
}

fn tasks(
    flags: &SimFlags,
    matches: &ArgMatches,
    machine: &Machine<'_>,
) -> Result<Vec<Task>, Problem> {
    let is_scenario = |name: &String| name == "all" || Scenario::named(name).is_some();
    if flags.names.iter().any(is_scenario) {
        let command = SimFlags::augment_args(clap::Command::new("sim"));
        let is_refused = |arg: &&clap::Arg| {
            let (id, heading) = (arg.get_id().as_str(), arg.get_help_heading());
            matches!(heading, Some("Machine" | "Workload"))
                && id != "parameters"
                && matches.value_source(id) == Some(ValueSource::CommandLine)
        };
        if let Some(flag) = command.get_arguments().find(is_refused) {
            let what = format!("--{}: {OWN}", flag.get_long().unwrap_or_default());
            let hint = "leave it out; flags of a drive, prices and --parameters do act";
            return Err(Problem::new(what, hint));
        }
    }
    if flags.names.iter().any(|name| name == "all") {
        return Ok(Scenario::all().iter().map(Task::Scenario).collect());
    }
    let task = |name: &String| match Scenario::named(name) {
        Some(scenario) => Ok(Task::Scenario(scenario)),
        None => {
            let of = &flags.serving.workload;
            Ok(Task::Compare(name.clone(), read(name, of, of.seed, machine)?))
        }
    };
    flags.names.iter().map(task).collect()
}

/// Returns the requests of a workload, all of which can be served.
fn read(
    name: &str,
    flags: &WorkloadFlags,
    seed: u64,
    machine: &Machine<'_>,
) -> Result<Workload, Problem> {
    // A misspelt name is not taken for a file; - is stdin.
    let is_name = !name.contains(['/', '.']) && name != "-" && !Path::new(name).exists();
    if is_name && !workload::names().any(|known| known == name) {
        if Scenario::named(name).is_some() {
            let why = format!("{name}: {OWN}");
            return Err(Problem::new(why, format!("use ripieno sim {name}, or name a workload")));
        }
        let scenarios = Scenario::all().iter().map(|it| it.name.as_str());
        let nearest = nearest(name, workload::names().chain(scenarios));
        return Err(Problem::new(
            format!("{name}: no such scenario, workload or file{nearest}"),
            "ripieno sim lists them",
        ));
    }
    let workload = Workload::read(name, flags, seed, machine.setup().block_tokens)?;
    check_fit(machine, &workload.counted.requests)?;
    Ok(workload)
}

/// Adds a title, the workload's name and the origin of its requests to an outcome.
fn named(mut outcome: Outcome, title: &str, name: &str, setting: &[String]) -> Outcome {
    outcome.title = title.to_owned();
    outcome.setting.splice(0..0, setting.iter().cloned());
    let stem = Path::new(name).file_stem().map_or(name.into(), |name| name.to_string_lossy());
    outcome.name = stem.into_owned();
    outcome
}

/// Reports the outcomes: of a plan, also what does not decide if `wide` is true.
fn report(outcomes: &[Outcome], flags: &ReportFlags, wide: Option<bool>) -> anyhow::Result<()> {
    if let Some(path) = &flags.html {
        write_page(path, "ripieno sim", outcomes)?;
    }
    if flags.json {
        terminal::print(serde_json::to_string(outcomes)?)?;
    } else {
        let shown: Vec<String> = outcomes.iter().map(|it| show(it, wide)).collect();
        terminal::print_text(shown.join("\n").trim_end())?;
    }
    Ok(())
}

/// Writes the page of a command's results.
pub(crate) fn write_page(path: &Path, command: &str, outcomes: &[Outcome]) -> anyhow::Result<()> {
    let page = page(command, outcomes).map_err(anyhow::Error::msg).context("drawing the page")?;
    Ok(file::write("--html", path, &page)?)
}

fn show(outcome: &Outcome, wide: Option<bool>) -> String {
    let head = format!("{}: {}\n", outcome.name, outcome.title);
    let line = |line: &String| format!("  {}\n", fold(line, 4).replace('\n', "\n    "));
    let setting: String = outcome.setting.iter().map(line).collect();
    let note = |note: &String| format!("\n{}\n", fold(note, 0));
    let notes: String = outcome.notes.iter().map(note).collect();
    let mut text = String::new();
    let tables = outcome.tables.iter().enumerate();
    // A plan's second table is what does not decide.
    let tables = tables.filter(|(at, _)| wide != Some(false) || *at != 1).map(|(_, table)| table);
    for table in tables.chain(&comparisons(outcome)) {
        let header: Vec<&str> = table.columns.iter().map(String::as_str).collect();
        let rows = table.rows.iter().map(|row| row.iter().map(|cell| fold(cell, 0)).collect());
        let is_number = |cell: &String| cell.len() < 2 || cell.parse::<f64>().is_ok();
        let is_text = |at: &usize| table.rows.iter().any(|row| !is_number(&row[*at]));
        let right = 1..(5..header.len()).find(is_text).unwrap_or(header.len());
        let drawn = fitted(&header, rows.collect(), right, 1);
        text += &format!("\n{}\n{drawn}\n", table.title);
    }
    match wide {
        None => head + &setting + &text + &notes,
        // The advice comes first.
        Some(_) => format!("{head}{notes}{text}\n{setting}"),
    }
}
