//! The load of a trace by the number of its sessions.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use rand::{Rng as _, SeedableRng as _, rngs::StdRng};
use ripieno_sim::Request;

use crate::contents::mix;

/// A block is shared by sessions, and not one of a session, if so many different ones follow it, in
/// at least one of so many requests.
const FOLLOWED_BY: usize = 4;
const ONE_OF: usize = 20;
/// Part of the trace's time by which a copy of a session comes later, at most.
const LATER: f64 = 0.02;

/// Session of each request, and how many leading blocks it shares with other sessions. A session is
/// what is linked by turns, or begins with the same block behind the shared ones.
fn sessions(requests: &[Request]) -> Vec<(u64, usize)> {
    let (mut through, mut pairs) = (HashMap::<u64, usize>::new(), HashSet::new());
    let mut followed = HashMap::<u64, usize>::new();
    for request in requests {
        for pair in request.blocks.windows(2) {
            if pairs.insert((pair[0], pair[1])) {
                *followed.entry(pair[0]).or_default() += 1;
            }
        }
        request.blocks.iter().for_each(|block| *through.entry(*block).or_default() += 1);
    }
    let is_shared = |block: &u64| {
        followed.get(block).is_some_and(|others| *others >= FOLLOWED_BY)
            && through[block] * ONE_OF >= requests.len()
    };
    let mut found = Vec::<(u64, usize)>::with_capacity(requests.len());
    for (number, request) in requests.iter().enumerate() {
        let shared = request.blocks.iter().rposition(is_shared).map_or(0, |at| at + 1);
        let session = match request.after {
            Some((before, _)) => found[before].0,
            None => request.blocks.get(shared).copied().unwrap_or(mix(number as u64)),
        };
        found.push((session, shared));
    }
    found
}

/// Takes each session `factor` times in the mean, at random: copies share with others what the
/// session does, and have the rest to themselves. Returns the number of sessions that there were.
pub(super) fn scale(requests: &mut Vec<Request>, factor: f64, seed: u64) -> usize {
    let sessions = sessions(requests);
    let span = requests.last().map_or(Duration::ZERO, |last| last.arrival).mul_f64(LATER);
    let part = |session: u64, what: u64| {
        StdRng::seed_from_u64(mix(session ^ mix(seed ^ mix(what)))).random_range(0.0..1.0)
    };
    let mut scaled = Vec::new();
    for copy in 0..factor.ceil() as u64 {
        let mut new = HashMap::new();
        for (number, (request, (session, shared))) in requests.iter().zip(&sessions).enumerate() {
            if part(*session, 2 * copy) >= factor - copy as f64 {
                continue;
            }
            let mut request = request.clone();
            if copy > 0 {
                request.arrival += span.mul_f64(part(*session, 2 * copy + 1));
                let own = request.blocks.iter_mut().skip(*shared);
                own.for_each(|block| *block = mix(*block ^ mix(copy)));
            }
            // Turns are taken with those before them.
            request.after = request.after.map(|(before, thinks)| (new[&before], thinks));
            new.insert(number, scaled.len());
            scaled.push(request);
        }
    }
    let mut order: Vec<usize> = (0..scaled.len()).collect();
    order.sort_by_key(|at| scaled[*at].arrival);
    let mut place = vec![0; order.len()];
    order.iter().enumerate().for_each(|(to, from)| place[*from] = to);
    for request in &mut scaled {
        request.after = request.after.map(|(before, thinks)| (place[before], thinks));
    }
    scaled.sort_by_key(|request| request.arrival);
    *requests = scaled;
    sessions.into_iter().map(|(session, _)| session).collect::<HashSet<_>>().len()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Conversations of five turns behind eight blocks of instructions, one every second.
    fn talks(count: u64) -> Vec<Request> {
        let turn = |at: u64| {
            let (talk, turn) = (at / 5, at % 5);
            let blocks: Vec<u64> =
                (0..8).chain((0..4 + 4 * turn).map(|block| (talk + 1) << 32 | block)).collect();
            let arrival = Duration::from_secs(talk + 100 * turn);
            let input = blocks.len() as u32 * 64;
            Request { arrival, input, output: 1, blocks, leaves: None, after: None }
        };
        let mut all: Vec<Request> = (0..count * 5).map(turn).collect();
        all.sort_by_key(|request| request.arrival);
        all
    }

    fn own(request: &Request) -> u64 {
        request.blocks[8]
    }

    #[test]
    fn sessions_are_taken_whole_or_not_at_all() {
        let all = talks(400);
        for (factor, sessions) in [(0.25, 70..130), (0.5, 160..240)] {
            let mut some = all.clone();
            assert_eq!(scale(&mut some, factor, 1), 400);
            let mut turns = HashMap::<u64, usize>::new();
            some.iter().for_each(|request| *turns.entry(own(request)).or_default() += 1);
            assert!(turns.values().all(|turns| *turns == 5), "{turns:?}");
            assert!(sessions.contains(&turns.len()), "{factor}: {}", turns.len());
            assert!(some.iter().all(|request| all.contains(request)));
            let mut other = all.clone();
            scale(&mut other, factor, 2);
            assert_ne!(some, other);
        }
    }

    #[test]
    fn copies_share_what_sessions_share_and_nothing_else() {
        let mut many = talks(400);
        many[1].after = Some((0, Duration::from_secs(7)));
        many[1].blocks = many[0].blocks.clone();
        scale(&mut many, 2.5, 1);
        assert!((4700..5300).contains(&many.len()), "{}", many.len());
        assert!(many.is_sorted_by_key(|request| request.arrival));
        let firsts: HashSet<u64> = many.iter().map(own).collect();
        assert!((940..1060).contains(&firsts.len()), "{}", firsts.len());
        assert!(many.iter().all(|request| request.blocks.starts_with(&[0, 1, 2, 3, 4, 5, 6, 7])));
        for request in &many {
            if let Some((before, _)) = request.after {
                assert_eq!(own(&many[before]), own(request));
            }
        }
        assert!(many.iter().filter(|request| request.after.is_some()).count() >= 2);
    }

    #[test]
    fn questions_about_a_document_are_one_session() {
        let ask = |at: u64| Request {
            arrival: Duration::from_secs(at),
            input: 640,
            output: 1,
            blocks: (0..9).map(|block| (at % 50 + 1) << 32 | block).chain([at << 16]).collect(),
            leaves: None,
            after: None,
        };
        let mut all: Vec<Request> = (0..1000).map(ask).collect();
        assert_eq!(scale(&mut all, 0.5, 1), 50);
    }
}
