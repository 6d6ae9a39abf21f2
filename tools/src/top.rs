//! `ripieno top`: a running store, by its metrics.

mod figures;
mod scrape;

use std::io::IsTerminal as _;
use std::net::SocketAddr;
use std::path::Path;
use std::time::{Duration, Instant};

use clap::Args;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use ripieno_stack::MetricsAddress;

use crate::problem::Problem;
use crate::terminal;

use figures::Figures;
pub(crate) use scrape::Scrape;

/// Time between two scrapes.
const EVERY: Duration = Duration::from_secs(1);

/// Flags of `ripieno top`.
#[derive(Debug, Args)]
pub(crate) struct TopFlags {
    /// Where a store serves its metrics: a port, IP:PORT, or a Unix socket's path
    #[arg(value_name = "ADDR", value_parser = address)]
    address: MetricsAddress,

    /// Show one second, and end
    #[arg(long)]
    once: bool,

    /// Print a JSON object on stdout, each second or with --once one
    #[arg(long)]
    json: bool,
}

/// Shows the store each second until it ends. Returns the exit code.
pub(crate) fn run(flags: &TopFlags) -> anyhow::Result<u8> {
    let TopFlags { address, once, json } = flags;
    let screen = (!json && !once).then(screen).flatten();
    let mut before = Scrape::read(address).map_err(|error| unreachable(address, &error))?;
    loop {
        let begun = Instant::now();
        std::thread::sleep(EVERY);
        let now = match Scrape::read(address) {
            Ok(now) => now,
            Err(error) if *once => return Err(unreachable(address, &error).into()),
            Err(_) => {
                screen.inspect(ProgressBar::abandon);
                terminal::say(format_args!("the store at {address} has ended"));
                return Ok(0);
            }
        };
        let figures = Figures::new(&before, &now, begun.elapsed());
        match &screen {
            Some(screen) => screen.set_message(figures.text(address)),
            None if *json => terminal::print(serde_json::to_string(&figures)?)?,
            None => terminal::print(figures.text(address) + "\n")?,
        }
        if *once {
            return Ok(0);
        }
        before = now;
    }
}

/// Returns an area of the terminal that is redrawn; `None` if stdout is no terminal.
fn screen() -> Option<ProgressBar> {
    let is_terminal = std::io::stdout().is_terminal();
    let screen =
        is_terminal.then(|| ProgressBar::with_draw_target(None, ProgressDrawTarget::stdout()))?;
    screen.set_style(ProgressStyle::with_template("{msg}").ok()?);
    Some(screen)
}

/// Parses the IP address or `localhost`, and the port, of a server.
pub(crate) fn socket_address(text: &str) -> Result<SocketAddr, String> {
    let found = text.replace("localhost:", "127.0.0.1:").parse();
    found.map_err(|_| {
        format!("{text:?}: give an IP address and a port, such as 127.0.0.1:9500 or [::1]:9500")
    })
}

/// Parses an address to read from: other than one to serve at, it may be any machine's, or a URL.
fn address(text: &str) -> Result<MetricsAddress, String> {
    let text =
        text.strip_prefix("http://").map_or(text, |url| url.split('/').next().unwrap_or(url));
    let host = text.strip_prefix("public:").unwrap_or(text);
    let is_file = || text.parse::<u16>().is_err() && Path::new(text).exists();
    match socket_address(host) {
        Ok(address) => Ok(MetricsAddress::Tcp(address)),
        Err(_) if is_file() => Ok(MetricsAddress::Unix(text.into())),
        Err(_) => text.parse(),
    }
}

fn unreachable(address: &MetricsAddress, error: &std::io::Error) -> Problem {
    let what = format!("no metrics of a store are at {address}: {error}");
    let hint = "ripieno serve has them at its socket, other stores if asked to: the option metrics \
                of an engine, or ripieno replay --metrics ADDR";
    Problem::new(what, hint)
}

#[cfg(test)]
mod tests;
