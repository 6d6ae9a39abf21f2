//! Hints: requests that a server may carry out, in vLLM's form, each with an answer of its own.

use serde::{Deserialize, de::DeserializeOwned};

use super::{Blocks, Hint, HintAnswer, HintAnswers, Hints, Named, Outcome, PinAnswer};
use crate::{error::RefusalKind, refusal::Refusal, shared::Shared};

/// Hints of a request, at most.
const HINTS_MAX: usize = 64;

/// Arguments of `kv.deref`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Deref {
    pin: u64,
}

/// Answers hints, one after the other.
pub(crate) fn answer(shared: &Shared, hints: Hints) -> Result<HintAnswers, Refusal> {
    let Hints { message_id, actions, .. } = hints;
    if actions.len() > HINTS_MAX {
        let why = format!("{} hints were given; {HINTS_MAX} are possible", actions.len());
        return Err(Refusal::argument(why));
    }
    let answers = actions.into_iter().map(|hint| {
        let action_id = hint.action_id.clone();
        let PinAnswer { outcome, reason, pin } = match carry_out(shared, hint) {
            Ok(done) => done,
            Err(Refusal { kind, message }) => {
                let is_missing = kind == RefusalKind::Missing;
                let outcome = if is_missing { Outcome::Missing } else { Outcome::Rejected };
                PinAnswer { outcome, reason: Some(message), pin: None }
            }
        };
        if outcome == Outcome::Rejected {
            shared.log_refusal("a hint", &action_id, reason.as_deref().unwrap_or_default());
        }
        HintAnswer { action_id, outcome, reason, pin }
    });
    Ok(HintAnswers { message_id, answers: answers.collect() })
}

fn carry_out(shared: &Shared, hint: Hint) -> Result<PinAnswer, Refusal> {
    let Hint { action_type, action_version, payload, .. } = hint;
    if action_version.split('.').next() != Some("1") {
        let why = format!("version {action_version} of {action_type}; this server has 1");
        return Err(Refusal::argument(why));
    }
    match action_type.as_str() {
        "kv.pin" => shared.pin(arguments(payload)?),
        "kv.deref" => {
            shared.unpin(arguments::<Deref>(payload)?.pin)?;
            Ok(PinAnswer { outcome: Outcome::Accepted, reason: None, pin: None })
        }
        "kv.prefetch" => {
            let named = arguments::<Named>(payload)?;
            let (Blocks { blocks }, all) = (shared.prefetch(&named)?, named.keys.len() as u64);
            let outcome = match blocks {
                0 => Outcome::Missing,
                _ if blocks < all => Outcome::Clipped,
                _ => Outcome::Accepted,
            };
            let reason = (blocks < all).then(|| format!("{blocks} of {all} blocks"));
            Ok(PinAnswer { outcome, reason, pin: None })
        }
        "kv.demote" | "kv.fetch" => {
            let why = "blocks are always on the devices, and leave the DRAM cache by themselves: \
                       prefetch them into it";
            Err(Refusal::new(RefusalKind::Unsupported, why))
        }
        "kv.retain" => {
            let why = "the order of eviction is that of expected reuse; use kv.pin to keep a block";
            Err(Refusal::new(RefusalKind::Unsupported, why))
        }
        other => Err(Refusal::argument(format!("this server knows no hint {other}"))),
    }
}

fn arguments<T: DeserializeOwned>(payload: serde_json::Value) -> Result<T, Refusal> {
    serde_json::from_value(payload).map_err(|error| Refusal::argument(error.to_string()))
}
