//! `ripieno doctor`: the machine checks of `nvme-bind doctor`, then which data paths work here, why
//! the others do not, and how to fix that. A failed check is a finding, not a program error. Each
//! finding is printed before the next check begins.

mod drives;
mod findings;
mod gpu;
mod trials;

use std::io::IsTerminal as _;

use gio_kernels::Lesser;
use nvme_bind::Paint;
use nvme_bind::doctor::{Finding, Report, Verdict, machine_checks};
use nvme_driver::remedy;
use ripieno_stack::{CudaChoice, Route};
use serde_json::{Map, json};

use crate::config::DoctorFlags;
use crate::problem::EXIT_FAILED;
use crate::terminal;

use findings::Findings;

/// Runs all checks and prints the findings. Returns the exit code.
pub(crate) fn run(flags: &DoctorFlags) -> anyhow::Result<u8> {
    let config = &flags.options.config;
    let (drives, mut choice) = (config.drives(), CudaChoice::new(config.gpu.unwrap_or(0)));
    choice.sms = config.io_sms.unwrap_or(choice.sms);
    // Each finding is written as it is made.
    terminal::set_printed();
    // No other thread has started yet.
    crate::gpu::set_environment();
    let mut out = std::io::stdout();
    let paint = Paint(out.is_terminal() && std::env::var_os("NO_COLOR").is_none());
    let report = Report::new(&mut out, flags.json, paint)?;
    let mut findings = Findings { report, all: Vec::new() };
    machine_checks(|finding| findings.add(finding))?;
    findings.add(io_uring())?;
    let gpu = gpu::examine(choice, &mut findings)?;
    match drives {
        [] => trials::try_all(config, choice, gpu.as_ref(), &mut findings)?,
        drives => drives::try_all(drives, choice, gpu.as_ref(), &mut findings)?,
    }
    let Findings { report, all } = findings;
    let works = works(&all);
    let best = match works.first() {
        None => "\nNo route works.".to_owned(),
        Some(&"host") => "\nBest route: host (the KV pool is in host memory)".to_owned(),
        Some(best) => format!("\nBest route: {best}, with --executor cuda"),
    };
    report.finish(Map::from_iter([("works".to_owned(), json!(works))]), &best)?;
    let answered = !all.iter().any(|finding| finding.id == drives::UNANSWERED);
    let enough = match config.route {
        Some(route) => works.contains(&route.name()),
        None => !works.is_empty(),
    };
    Ok(if answered && enough { 0 } else { EXIT_FAILED })
}

/// Checks how a store in files would be read and written.
fn io_uring() -> Finding {
    let finding = Finding::new("io-uring", "io_uring, for stores in files", &["io_uring_setup(2)"]);
    match Lesser::here() {
        Ok(None) => finding.says(Verdict::Ok, "allowed, with all that they use"),
        Ok(Some(Lesser { name, cause, remedy })) => {
            finding.says(Verdict::Warn, format!("executor {name} ({cause})")).fix(remedy)
        }
        Err(error) => {
            let fix = remedy(&error).unwrap_or("take --executor host");
            finding.says(Verdict::Fail, error.to_string()).fix(fix)
        }
    }
}

/// Returns the routes that work with any executor, best first.
fn works(findings: &[Finding]) -> Vec<&'static str> {
    let is_open = |route: &Route| {
        findings.iter().any(|finding| {
            let good = matches!(finding.verdict, Verdict::Ok | Verdict::Warn);
            good && finding.route == Some(route.name())
        })
    };
    let open = Route::ALL.iter().filter(|route| is_open(route));
    open.map(|route| route.name()).collect()
}

#[cfg(test)]
mod tests;
