//! Lines and documents of JSON.

use std::collections::{BTreeMap, HashMap};
use std::io::BufRead;
use std::sync::Arc;
use std::time::Duration;

use serde::Deserialize;
use serde::de::{DeserializeOwned, Deserializer as _, SeqAccess, Visitor};
use serde_json::value::RawValue;
use serde_json::{Deserializer, Error};

use super::{Failed, Form, ITEM_BYTES_MAX, Place, Reading, Request};
use crate::contents::mix;
use crate::model::TRACE_BLOCK_TOKENS;
use crate::problem::Problem;
use crate::size::grouped;

/// Fields of an object.
type Fields<'a> = BTreeMap<String, &'a RawValue>;

/// Sessions of which a turn was read.
#[derive(Default)]
pub(super) struct Sessions {
    /// Index of the request of each of Bailian's chats.
    chats: HashMap<i64, usize>,
    named: HashMap<Name, Session>,
    /// Number of conversations.
    count: u64,
}

/// A session after a turn.
struct Session {
    last: usize,
    /// Tokens of prompt and answer.
    context: u64,
    /// IDs of the full blocks of its first turn.
    hash_ids: Arc<[u64]>,
    own: u64,
}

/// A name, or a number for one.
#[derive(PartialEq, Eq, Hash, Deserialize)]
#[serde(untagged)]
enum Name {
    Text(String),
    Number(i64),
}

/// A conversation of `weka_trace`. Its IDs are its own.
#[derive(Deserialize)]
struct Weka {
    block_size: u32,
    requests: Vec<WekaEntry>,
}

/// A request, or a sub-agent with several.
#[derive(Deserialize)]
struct WekaEntry {
    /// Seconds since the conversation began.
    t: f64,
    #[serde(rename = "in", default)]
    input: u64,
    #[serde(rename = "out", default)]
    output: u64,
    #[serde(default)]
    hash_ids: Vec<u64>,
    /// Seconds until it had ended.
    api_time: Option<f64>,
    requests: Option<Vec<WekaEntry>>,
}

/// A request of a conversation that was added, and when it had ended.
#[derive(Clone, Copy)]
struct Turn {
    index: usize,
    end: f64,
}

#[derive(Deserialize)]
struct ShareGpt {
    conversations: Vec<Message>,
}

#[derive(Deserialize)]
struct Message {
    from: String,
    value: String,
}

/// Bytes of text that count as a token.
const TOKEN_BYTES: usize = 4;
/// Tokens of a block whose IDs do not come from Mooncake.
const SMALL_BLOCK: u32 = 16;

/// Reads objects over several lines, one after the other.
pub(super) fn objects(
    reader: &mut impl BufRead,
    found: &mut Reading,
    at: &mut Place<'_>,
) -> Result<(), Failed> {
    at.unit = " object ";
    let mut all = Deserializer::from_reader(reader).into_iter::<Box<RawValue>>();
    while !found.is_full() {
        at.number += 1;
        let Some(next) = all.next() else { break };
        item(next.map_err(|error| broken(error, at))?.get(), found, at)?;
    }
    Ok(())
}

/// Reads the elements of an array.
pub(super) fn array(
    reader: &mut impl BufRead,
    found: &mut Reading,
    at: &mut Place<'_>,
) -> Result<(), Failed> {
    /// Adds elements until there are enough, or one is wrong.
    struct Elements<'a, 'b>(&'a mut Reading, &'a mut Place<'b>, Option<Failed>);

    impl<'de> Visitor<'de> for &mut Elements<'_, '_> {
        type Value = ();

        fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("an array")
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut all: A) -> Result<(), A::Error> {
            while let Some(next) = all.next_element::<Box<RawValue>>()? {
                self.1.number += 1;
                self.2 = item(next.get(), self.0, self.1).err();
                if self.2.is_some() || self.0.is_full() {
                    return Err(serde::de::Error::custom("no more is needed"));
                }
            }
            Ok(())
        }
    }

    at.unit = " element ";
    let mut elements = Elements(found, at, None);
    let read = Deserializer::from_reader(reader).deserialize_seq(&mut elements);
    match (read, elements.2.take()) {
        (_, Some(failed)) => Err(failed),
        (Err(error), None) if !elements.0.is_full() => Err(broken(error, elements.1)),
        _ => Ok(()),
    }
}

/// Converts an error of the parser of documents.
fn broken(error: Error, at: &Place<'_>) -> Failed {
    if error.is_io() {
        return Failed::Unreadable(error.into());
    }
    at.problem(&format!("not a JSON object: {error}")).into()
}

/// Adds the requests of a line, which may have several objects.
pub(super) fn line(line: &[u8], found: &mut Reading, at: &Place<'_>) -> Result<(), Failed> {
    let wrong = |error: Error| {
        // The parser counts lines within its input, which is one line.
        let text = error.to_string();
        let text = text.split(" at line ").next().unwrap_or_default();
        at.problem(&format!("not a JSON object: {text} (column {})", error.column()))
    };
    for value in Deserializer::from_slice(line).into_iter::<&RawValue>() {
        if found.is_full() {
            break;
        }
        let value = value.map_err(|error| {
            let is_csv = line.contains(&b',') && !line.contains(&b'{') && line.is_ascii();
            let problem = wrong(error);
            if is_csv { problem.with_hint(CSV) } else { problem }
        })?;
        item(value.get(), found, at)?;
    }
    Ok(())
}

const CSV: &str = "a CSV must begin with the names of Azure's columns (TIMESTAMP, ContextTokens, \
    GeneratedTokens) or BurstGPT's (Timestamp, Request tokens, Response tokens): name yours so";

/// Adds the requests of an object.
fn item(text: &str, found: &mut Reading, at: &Place<'_>) -> Result<(), Failed> {
    if text.len() > ITEM_BYTES_MAX {
        return Err(at.problem("the conversation is longer than 64 MiB").into());
    }
    let Ok(fields) = serde_json::from_str::<Fields<'_>>(text) else {
        return Err(at.problem("expected a JSON object").into());
    };
    let form = *found.form.get_or_insert_with(|| {
        let has = |name: &str| fields.contains_key(name);
        let form = match () {
            () if has("conversations") => Form::ShareGpt,
            () if has("requests") && has("block_size") => Form::Weka,
            () if has("chat_id") && has("parent_chat_id") => Form::Bailian,
            () => Form::Mooncake,
        };
        found.lacks_times = !has("timestamp");
        found.lacks_ids = form == Form::Mooncake && !has("hash_ids");
        form
    });
    match form {
        Form::Weka => found.weka(&whole(text, at)?, at)?,
        Form::ShareGpt => found.share_gpt(&whole(text, at)?, at)?,
        _ => found.request(form, &fields, at)?,
    }
    Ok(())
}

fn whole<T: DeserializeOwned>(text: &str, at: &Place<'_>) -> Result<T, Problem> {
    serde_json::from_str(text).map_err(|error| {
        Problem::new(format!("{at}: {error}"), "correct the conversation, or leave it out")
    })
}

fn optional<T: DeserializeOwned>(
    fields: &Fields<'_>,
    name: &str,
    at: &Place<'_>,
) -> Result<Option<T>, Problem> {
    let Some(found) = fields.get(name) else { return Ok(None) };
    let read = serde_json::from_str(found.get()).map_err(|error| {
        let text = error.to_string();
        let text = text.split(" at line ").next().unwrap_or_default();
        at.problem(&format!("field `{name}`: {text}"))
    });
    read.map(Some)
}

fn field<T: DeserializeOwned>(
    fields: &Fields<'_>,
    name: &str,
    at: &Place<'_>,
) -> Result<T, Problem> {
    let found = optional(fields, name, at)?;
    found.ok_or_else(|| at.problem(&format!("field `{name}` is missing")))
}

/// Checks that there is an ID for each block of the prompt: with blocks of another size all hits
/// would be wrong.
fn check_blocks(
    ids: u64,
    (tokens, block_tokens): (u64, u32),
    at: &Place<'_>,
) -> Result<(), Problem> {
    let expected = tokens.div_ceil(block_tokens.into());
    if ids == expected {
        return Ok(());
    }
    let what = format!(
        "{at}: {} `hash_ids` for an `input_length` of {} tokens; expected {}, one for each block \
         of {block_tokens} tokens, the last of which may be partial",
        grouped(ids),
        grouped(tokens),
        grouped(expected)
    );
    let hint = match (0..=12).map(|power| 1 << power).find(|it| tokens.div_ceil(*it) == ids) {
        Some(size) => format!(
            "blocks of {size} tokens? Then each line needs \"block_size\": {size}, and times in \
             milliseconds; Bailian's traces, with blocks of 16 and seconds, are known by their \
             `chat_id` and `parent_chat_id`"
        ),
        None => "no usual size of a block fits both numbers: one of them is wrong".to_owned(),
    };
    Err(Problem::new(what, hint))
}

impl Reading {
    /// Returns a request with the lengths and IDs of a line.
    fn prompt(&self, form: Form, fields: &Fields<'_>, at: &Place<'_>) -> Result<Request, Problem> {
        let tokens = |name: &str| at.limit(&format!("field `{name}`"), field(fields, name, at)?);
        let [input_tokens, output_tokens] = [tokens("input_length")?, tokens("output_length")?];
        let block_tokens = match form {
            Form::Bailian => SMALL_BLOCK,
            _ => optional(fields, "block_size", at)?.unwrap_or(TRACE_BLOCK_TOKENS),
        };
        at.block(block_tokens)?;
        let ids: Vec<u64> = match self.lacks_ids {
            true => optional(fields, "hash_ids", at)?.unwrap_or_default(),
            false => field(fields, "hash_ids", at)?,
        };
        if !(self.lacks_ids && ids.is_empty()) {
            check_blocks(ids.len() as u64, (input_tokens, block_tokens), at)?;
        }
        let (hash_ids, own) = (ids.into(), 2 * self.requests.len() as u64);
        Ok(Request {
            input_tokens,
            output_tokens,
            block_tokens,
            hash_ids,
            own,
            ..Request::default()
        })
    }

    /// Adds a line of Mooncake's or Bailian's form.
    fn request(&mut self, form: Form, fields: &Fields<'_>, at: &Place<'_>) -> Result<(), Problem> {
        let session: Option<Name> = optional(fields, "session_id", at)?;
        let before = session.as_ref().and_then(|name| self.json.named.get(name));
        let mut request = self.prompt(form, fields, at)?;
        let time: Option<f64> = match before {
            None if !self.lacks_times => Some(field(fields, "timestamp", at)?),
            None if fields.contains_key("timestamp") => {
                return Err(at.problem("field `timestamp`: the first line has none"));
            }
            _ => optional(fields, "timestamp", at)?,
        };
        let is_part = |time: f64| form == Form::Mooncake && time % 1.0 != 0.0;
        self.fractions += usize::from(time.is_some_and(is_part));
        request.arrival = at.time("timestamp", time.unwrap_or(0.0), form)?;
        if let Some(it) = before {
            let thinks = at.time("delay", optional(fields, "delay", at)?.unwrap_or(0.0), form)?;
            request.after = Some((it.last, thinks));
            request.arrival = request.arrival.max(self.requests[it.last].arrival + thinks);
            // If the session's first block is there again, the line has the whole prompt.
            let is_whole =
                request.hash_ids.first().is_some_and(|id| it.hash_ids.first() == Some(id));
            if !is_whole {
                request.input_tokens += it.context;
                (request.hash_ids, request.own) = (Arc::clone(&it.hash_ids), it.own);
            }
        }
        if form == Form::Bailian {
            let parent: i64 = field(fields, "parent_chat_id", at)?;
            request.after = self.json.chats.get(&parent).map(|before| (*before, Duration::ZERO));
        }
        let context = request.input_tokens + request.output_tokens;
        let full = (request.input_tokens / u64::from(request.block_tokens)) as usize;
        let (hash_ids, own) = match before {
            Some(it) => (Arc::clone(&it.hash_ids), it.own),
            None => (request.hash_ids.iter().take(full).copied().collect(), request.own + 1),
        };
        let last = self.push(request, at)?;
        if form == Form::Bailian {
            self.json.chats.insert(field(fields, "chat_id", at)?, last);
        }
        if let Some(name) = session {
            self.json.named.insert(name, Session { last, context, hash_ids, own });
        }
        Ok(())
    }

    /// Adds a conversation of agents. A request comes after the one of its agent, or of one that
    /// this agent started, which had ended last before it.
    fn weka(&mut self, it: &Weka, at: &Place<'_>) -> Result<(), Problem> {
        self.json.count += 1;
        let mut before = Vec::new();
        for entry in &it.requests {
            let Some(inner) = &entry.requests else {
                let turn = self.weka_request(entry, entry.t, it.block_size, &before, at)?;
                before = turn.into_iter().collect();
                continue;
            };
            let mut last: Vec<Turn> = before.first().copied().into_iter().collect();
            for request in inner {
                // Some count from the sub-agent's start.
                let t = if request.t + 1e-6 < entry.t { entry.t + request.t } else { request.t };
                let turn = self.weka_request(request, t, it.block_size, &last, at)?;
                last = turn.into_iter().collect();
            }
            before.extend(last);
        }
        Ok(())
    }

    /// Adds a request that came `t` seconds after its conversation began, after one of `before`.
    fn weka_request(
        &mut self,
        it: &WekaEntry,
        t: f64,
        block_tokens: u32,
        before: &[Turn],
        at: &Place<'_>,
    ) -> Result<Option<Turn>, Problem> {
        if self.is_full() {
            return Ok(None);
        }
        at.block(block_tokens)?;
        at.time("t", t, Form::Weka)?;
        let [input_tokens, output_tokens] =
            [at.limit("field `in`", it.input)?, at.limit("field `out`", it.output)?];
        let most = input_tokens.div_ceil(block_tokens.into());
        if it.hash_ids.len() as u64 > most {
            check_blocks(it.hash_ids.len() as u64, (input_tokens, block_tokens), at)?;
        }
        let latest = |it: &&Turn| it.end <= t + 1e-6;
        let last = before.iter().filter(latest).max_by(|one, other| one.end.total_cmp(&other.end));
        let after = last.or(before.first()).map(|turn| {
            let thinks = (t - turn.end).max(0.0);
            (turn.index, Duration::from_secs_f64(thinks))
        });
        let arrival =
            after.map_or(Duration::ZERO, |(of, thinks)| self.requests[of].arrival + thinks);
        // IDs are numbers of this conversation.
        let own = mix(self.json.count);
        let hash_ids = it.hash_ids.iter().map(|id| mix(own ^ mix(*id))).collect();
        let request =
            Request { arrival, input_tokens, output_tokens, block_tokens, hash_ids, own, after };
        let index = self.push(request, at)?;
        let takes = it.api_time.filter(|takes| (0.0..=1e9).contains(takes)).unwrap_or(0.0);
        Ok(Some(Turn { index, end: t + takes }))
    }

    /// Adds a request for each answer of a conversation, with all that was said before it.
    fn share_gpt(&mut self, it: &ShareGpt, at: &Place<'_>) -> Result<(), Problem> {
        self.json.count += 1;
        let own = mix(self.json.count);
        let said: String = it.conversations.iter().map(|message| message.value.as_str()).collect();
        let block = said.as_bytes().chunks_exact(SMALL_BLOCK as usize * TOKEN_BYTES).map(|block| {
            block.chunks(8).fold(0, |id, word| {
                mix(id ^ u64::from_le_bytes(word.try_into().expect("a block has whole words")))
            })
        });
        let hash_ids: Arc<[u64]> = block.collect();
        let (mut before, mut last) = (0, None);
        for Message { from, value } in &it.conversations {
            let is_answer = matches!(from.as_str(), "gpt" | "chatgpt" | "assistant");
            if is_answer && before >= TOKEN_BYTES && !self.is_full() {
                let request = Request {
                    input_tokens: (before / TOKEN_BYTES) as u64,
                    output_tokens: (value.len() / TOKEN_BYTES).max(1) as u64,
                    block_tokens: SMALL_BLOCK,
                    hash_ids: Arc::clone(&hash_ids),
                    own,
                    after: last.map(|last| (last, Duration::ZERO)),
                    ..Request::default()
                };
                at.limit("an answer", request.output_tokens)?;
                last = Some(self.push(request, at)?);
            }
            before += value.len();
        }
        Ok(())
    }
}
