//! Answers a prompt with KV from a store, once more without it, and compares the answers.

#![allow(clippy::print_stdout, reason = "a command line tool: results go to stdout")]

use std::{path::PathBuf, process::ExitCode};

use anyhow::Result;
use clap::Parser;
use ripieno_candle::Engine;

const SENTENCE: &str = "What was computed once is read and not computed again. ";

#[derive(Parser)]
struct Args {
    /// The store's directory; created if it does not exist
    #[arg(long)]
    path: PathBuf,
    /// The prompt to continue; each byte is a token
    #[arg(long, default_value_t = SENTENCE.repeat(30))]
    prompt: String,
    /// Tokens to generate
    #[arg(long, default_value_t = 32)]
    tokens: usize,
}

fn main() -> Result<ExitCode> {
    let Args { path, prompt, tokens } = Args::parse();
    let prompt: Vec<u32> = prompt.bytes().map(u32::from).collect();
    let engine = Engine::open(&path)?;

    let mut answer = engine.prefill(&prompt, true)?;
    println!("found: {} of {} tokens", answer.found, prompt.len());
    println!("stored: {} tokens", answer.stored);
    engine.decode(&mut answer, tokens.saturating_sub(1))?;
    println!("tokens: {:?}", &answer.tokens[prompt.len()..]);

    let mut again = engine.prefill(&prompt, false)?;
    engine.decode(&mut again, tokens.saturating_sub(1))?;
    println!(
        "first token: {:.1} ms; computed without the store: {:.1} ms",
        1e3 * answer.first_token.as_secs_f64(),
        1e3 * again.first_token.as_secs_f64(),
    );
    engine.close()?;
    let is_right = answer.tokens == again.tokens;
    println!("{}", if is_right { "the same tokens" } else { "OTHER TOKENS" });
    Ok(if is_right { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
