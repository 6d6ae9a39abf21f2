//! Sizes of blocks (section 4.5), and workloads beside an oracle (section 4.7).

use std::time::Duration;

use super::{BLOCK_BYTES, NAMES, PROFILES, input, lru, median, ours, paper, predicted, setting};
use crate::{
    lane::LaneModel,
    outcome::{Outcome, Table, row},
    paging::{Decode, Hbm, LowerTiers},
    parallel::each,
    parameters::Parameters,
    workload::Profile,
};

const SIZES: [u32; 5] = [4, 8, 16, 32, 64];

/// Returns the paper's engine with blocks of this size and the same bytes of all memories. If
/// `is_alone`, a block takes the latency and its bytes, one after another (equation 1); else
/// latencies overlap.
fn with_blocks(parameters: &Parameters, tokens: u32, is_alone: bool) -> Decode<'static> {
    let usual = lru(parameters, 3.0);
    let LowerTiers { link, host_blocks, .. } = usual.lower;
    let link = if is_alone {
        LaneModel { set_up: link.latency, latency: Duration::from_nanos(1), ..link }
    } else {
        link
    };
    let scaled = |number: u64| number * u64::from(tokens) / 16;
    let lower = LowerTiers {
        block_bytes: scaled(BLOCK_BYTES),
        host_blocks: (u64::from(host_blocks) * 16 / u64::from(tokens)) as u32,
        link,
        ..usual.lower
    };
    Decode { block_tokens: tokens, lower, ..usual }
}

pub(in crate::scenario) fn blocks(parameters: &Parameters) -> Outcome {
    const EQUATION: &str = "equation 1 with 5 us and 50 GB/s: arithmetic, and only if no two \
        latencies overlap";
    const HALF: &str = "half a block of each request: 31 % takes requests of about 70 tokens in \
        the mean, and its uniform ones alone have 768";
    const LATENCY: &str = "the latency of each block costs more than what its last one lacks";
    const OVERLAP: &str = "where latencies overlap, smaller blocks only have fewer bytes";
    let mut outcome = Outcome::of(setting(parameters));
    outcome.setting.push(
        "3x, K = 4; the same bytes of memory with all sizes; one after another: a block takes 5 us \
         and its bytes (equation 1); overlapped: as in the other tables"
            .to_owned(),
    );
    let of = |tokens: &u32| {
        let alone = with_blocks(parameters, *tokens, true);
        let link = alone.lower.link;
        let bytes = alone.lower.block_bytes as f64 / link.read;
        let efficiency = bytes / (bytes + link.set_up.as_secs_f64());
        let prefetch = Decode { ahead: Some(paper(4)), ..alone };
        let overlapped = with_blocks(parameters, *tokens, false);
        let ours = Decode { ahead: Some(ours(4)), hbm: Hbm::Latest, ..overlapped };
        (efficiency, [alone, prefetch, ours].map(|it| median(&it)))
    };
    let found = each(&SIZES, of);
    let lost = |at: usize| (1.0 - found[at].0 / found[2].0).max(0.0) * 100.0;
    let unfilled = |at: usize| found[at].1[0].unfilled * 100.0;
    let rows = (0..SIZES.len()).map(|at| {
        let (efficiency, found) = &found[at];
        let first = [efficiency * 100.0, unfilled(at), lost(at) + unfilled(at)];
        let speeds = found.iter().map(|it| it.tokens_per_second);
        row(SIZES[at].to_string(), first.into_iter().chain(speeds))
    });
    let first = ["tokens", "link, % of its bandwidth", "memory without tokens, %"];
    let speeds = ["LRU, one after another, tokens/s", "TierKV-Prefetch", "ours, overlapped"];
    let columns = [&first[..], &["less than with 16, and without, %"], &speeds].concat();
    outcome.tables.push(Table::new("By tokens of a block", columns, rows));
    let best = |of: &dyn Fn(usize) -> f64| {
        let all = (0..SIZES.len()).max_by(|one, other| of(*one).total_cmp(&of(*other)));
        f64::from(SIZES[all.expect("there are sizes")])
    };
    let sum = best(&|at| -lost(at) - unfilled(at));
    let speed = best(&|at| found[at].1[1].tokens_per_second);
    let overlapped = best(&|at| found[at].1[2].tokens_per_second);
    outcome.comparisons.extend([
        input("4 tokens: link less than with 16", "%", 24.0, lost(0), EQUATION),
        predicted("64 tokens: memory without tokens", "%", 31.0, unfilled(4), HALF),
        predicted("least of both together", "tokens", 16.0, sum, ""),
        predicted(
            "most tokens/s, TierKV-Prefetch, one after another",
            "tokens",
            16.0,
            speed,
            LATENCY,
        ),
        predicted("most tokens/s, ours, overlapped", "tokens", 16.0, overlapped, OVERLAP),
    ]);
    outcome
}

pub(in crate::scenario) fn patterns(parameters: &Parameters) -> Outcome {
    const SHORT: &str = "a request that ran longest yields, whatever it does: what a turn needs \
        over the link counts, and that is least for short requests";
    let mut outcome = Outcome::of(setting(parameters));
    outcome.setting.push("3x, K = 4".to_owned());
    let mixed: &[Profile] = &PROFILES;
    let each = PROFILES.iter().map(std::slice::from_ref).chain([mixed]);
    let names = NAMES.into_iter().chain(["mixed"]);
    let mut rows = Vec::new();
    let (mut nearest, mut margins) = (0.0, Vec::new());
    for (name, profiles) in names.zip(each) {
        let late = Decode { profiles, ..lru(parameters, 3.0) };
        let oracle = median(&Decode { ahead: None, ..late }).tokens_per_second;
        let lfu = median(&Decode { hbm: Hbm::Lfu, ..late }).tokens_per_second / oracle;
        let prefetch = Decode { ahead: Some(paper(4)), ..late };
        let ours = Decode { ahead: Some(ours(4)), hbm: Hbm::Latest, ..late };
        let [late, prefetch, ours] =
            [late, prefetch, ours].map(|it| median(&it).tokens_per_second / oracle);
        rows.push(row(name, [late, lfu, late, prefetch, ours].map(|it| it * 100.0)));
        nearest += f64::from(u8::from(prefetch > late.max(lfu)));
        margins.push(prefetch / late);
    }
    outcome.tables.push(Table::new(
        "Tokens a second by those of the oracle, %",
        ["", "LRU", "Frequency", "TierKV-Static", "TierKV-Prefetch", "ours"],
        rows,
    ));
    let less = margins[1..].iter().filter(|margin| **margin < margins[0]).count() as f64;
    outcome.comparisons.extend([
        predicted("workloads with TierKV-Prefetch before LRU and LFU", "of 5", 5.0, nearest, ""),
        predicted("rank of chatbot's margin over Static", "of 5", 1.0, less + 1.0, SHORT),
    ]);
    outcome.notes.push(
        "An oracle has no waits and the same turns. Who runs when differs between the columns, and \
         with it a percent of the tokens."
            .to_owned(),
    );
    outcome
}

#[cfg(test)]
mod tests;
