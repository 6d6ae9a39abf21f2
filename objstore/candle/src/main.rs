//! Answers a prompt with KV from a store, once more without it, and compares the answers.

#![allow(clippy::print_stdout, reason = "a command line tool: results go to stdout")]

use std::{path::PathBuf, process::ExitCode};

use anyhow::Result;
use clap::Parser;
use ripieno_candle::Engine;
use ripieno_stack::StackConfig;

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
    /// Every other layer has a sliding window, of which the store has only the end
    #[arg(long, conflicts_with = "top")]
    windows: bool,
    /// Decode with this many blocks of the prompt, read from the store when a layer chooses them,
    /// and compare the answer with that of the same blocks in memory
    #[arg(long, value_name = "BLOCKS")]
    top: Option<usize>,
    /// Blocks of each layer that stay in memory, with --top
    #[arg(long, value_name = "BLOCKS", default_value_t = 0, requires = "top")]
    room: usize,
}

/// Decodes with the best blocks from the store and from memory. Returns true if the tokens agree.
fn decode_offloaded(engine: &Engine, args: &Args, prompt: &[u32], top: usize) -> Result<bool> {
    let mut answers = Vec::new();
    for room in [args.room, usize::MAX] {
        let sequence = engine.prefill(prompt, true)?;
        let before = engine.store().stats()?.plane.retrieved_bytes;
        let mut offloaded = engine.offload(sequence, top, room)?;
        engine.decode_offloaded(&mut offloaded, args.tokens.saturating_sub(1))?;
        if room == args.room {
            let bytes = engine.store().stats()?.plane.retrieved_bytes - before;
            println!("read: {} blocks of a layer, {bytes} bytes", offloaded.read);
        }
        answers.push(offloaded.sequence.tokens);
    }
    Ok(answers[0] == answers[1])
}

fn main() -> Result<ExitCode> {
    let args = Args::parse();
    let prompt: Vec<u32> = args.prompt.bytes().map(u32::from).collect();
    let engine = Engine::open(StackConfig::at(&args.path), args.windows)?;

    let mut answer = engine.prefill(&prompt, true)?;
    println!("found: {} of {} tokens", answer.found, prompt.len());
    println!("stored: {} tokens", answer.stored);
    engine.decode(&mut answer, args.tokens.saturating_sub(1))?;
    println!("tokens: {:?}", &answer.tokens[prompt.len()..]);

    let mut again = engine.prefill(&prompt, false)?;
    engine.decode(&mut again, args.tokens.saturating_sub(1))?;
    println!(
        "first token: {:.1} ms; computed without the store: {:.1} ms",
        1e3 * answer.first_token.as_secs_f64(),
        1e3 * again.first_token.as_secs_f64(),
    );
    let mut is_right = answer.tokens == again.tokens;
    if let Some(top) = args.top {
        is_right &= decode_offloaded(&engine, &args, &prompt, top)?;
    }
    engine.close()?;
    println!("{}", if is_right { "the same tokens" } else { "OTHER TOKENS" });
    Ok(if is_right { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
