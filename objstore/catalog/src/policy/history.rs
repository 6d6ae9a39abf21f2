//! The store's history of reuse: how likely a block of some age is used again, and how soon.

use std::collections::BTreeMap;

/// Kinds of blocks: octaves of the number of their uses, the last one open.
pub const KINDS: usize = 6;

/// Ages are bucketed in quarters of an octave.
const BUCKETS: usize = 4 * 31;

/// Uses that are observed, at most.
const SPELLS: usize = 8192;

/// Spells between two computations of the rates.
const PERIOD: u32 = 64;

/// Blocks in a full history, for each file: what happens after an eviction must be seen, too.
const WINDOW: u64 = 16;

/// Blocks in a full history, at least: a small store observes all of its blocks.
const WINDOW_MIN: u64 = SPELLS as u64;

/// Spells of the kind below, used once less, that count for a kind of which little is known.
const PRIOR: f32 = 4.0;

/// Time from one use of a block to the next.
#[derive(Debug, Clone, Copy)]
struct Spell {
    hash: u64,
    kind: u8,
    start: u32,
    /// Age at the next use, if that has happened.
    used_at: Option<u32>,
}

/// Observes a sample of all blocks, stored or not, so that its rates do not depend on what was
/// kept. For a block of a kind and an age, the rate is the most uses per time that keeping it can
/// give: the largest quotient, over all times to keep it, of the likelihood that it is used by then
/// and the expected time until it is used or dropped. (Gittins' index. Hits per time are from LHD,
/// Beckmann et al., NSDI 2018; spells that have not ended count as in Kaplan and Meier's estimate.)
#[derive(Debug)]
pub struct History {
    /// One block in this many is observed.
    one_in: u64,
    /// The latest spells: a ring once there are [`SPELLS`].
    spells: Vec<Spell>,
    next: usize,
    /// The open spell of each observed block.
    open: BTreeMap<u64, usize>,
    rates: [[f32; BUCKETS]; KINDS],
    /// Spells since the rates were computed.
    fresh: u32,
}

fn bucket(age: u32) -> usize {
    let age = u64::from(age) + 4;
    let octave = age.ilog2();
    (octave as usize - 2) * 4 + (age >> (octave - 2)) as usize - 4
}

/// Returns the ages in a bucket.
fn width(bucket: usize) -> f32 {
    (1_u64 << (bucket / 4)) as f32
}

/// Returns the kind of a block that was used this often.
pub fn kind(uses: u8) -> usize {
    (uses.max(1).ilog2() as usize).min(KINDS - 1)
}

impl History {
    pub fn new(files: u32) -> Self {
        Self {
            one_in: (u64::from(files) * WINDOW).max(WINDOW_MIN) / SPELLS as u64,
            spells: Vec::new(),
            next: 0,
            open: BTreeMap::new(),
            rates: [[0.0; BUCKETS]; KINDS],
            fresh: 0,
        }
    }

    /// Returns the rate of a block of this kind that was used this long ago.
    pub fn rate(&self, kind: usize, age: u32) -> f32 {
        self.rates[kind][bucket(age)]
    }

    /// Records a use of a block, and reclassifies the block as this kind.
    pub fn used(&mut self, hash: u64, kind: usize, now: u32) {
        if !(hash.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32).is_multiple_of(self.one_in) {
            return;
        }
        if let Some(at) = self.open.insert(hash, self.next) {
            self.spells[at].used_at = Some(now.wrapping_sub(self.spells[at].start));
        }
        let spell = Spell { hash, kind: kind as u8, start: now, used_at: None };
        match self.spells.get_mut(self.next) {
            Some(oldest) => {
                let oldest = std::mem::replace(oldest, spell);
                if oldest.used_at.is_none() {
                    self.open.remove(&oldest.hash);
                }
            }
            None => self.spells.push(spell),
        }
        self.next = (self.next + 1) % SPELLS;
        self.fresh += 1;
        if self.fresh >= PERIOD {
            self.fresh = 0;
            self.learn(now);
        }
    }

    /// Corrects the kind of a block: it was used before it was observed.
    pub fn know(&mut self, hash: u64, kind: usize) {
        if let Some(at) = self.open.get(&hash) {
            self.spells[*at].kind = kind as u8;
        }
    }

    fn learn(&mut self, now: u32) {
        let mut used = [[0.0; BUCKETS]; KINDS];
        let mut ended = [[0.0; BUCKETS]; KINDS];
        for spell in &self.spells {
            let age = spell.used_at.unwrap_or(now.wrapping_sub(spell.start));
            let (kind, bucket) = (usize::from(spell.kind), bucket(age));
            ended[kind][bucket] += 1.0;
            used[kind][bucket] += if spell.used_at.is_some() { 1.0 } else { 0.0 };
        }
        let mut hazards = [0.0; BUCKETS];
        for kind in 0..KINDS {
            let mut reached = 0.0;
            for bucket in (0..BUCKETS).rev() {
                reached += ended[kind][bucket];
                let hazard = &mut hazards[bucket];
                *hazard = (used[kind][bucket] + PRIOR * *hazard) / (reached + PRIOR);
            }
            self.rates[kind] = rates(&hazards);
        }
    }
}

/// Returns the rates at the beginning of each bucket, for the likelihoods of a use in each.
fn rates(hazards: &[f32; BUCKETS]) -> [f32; BUCKETS] {
    // The expected time and uses until the end of each bucket, of blocks kept from the start.
    let mut points = [(0.0_f32, 0.0_f32); BUCKETS + 1];
    let mut left = 1.0;
    for bucket in 0..BUCKETS {
        let (time, uses) = points[bucket];
        let used = left * hazards[bucket];
        points[bucket + 1] = (time + width(bucket) * (left - used / 2.0), uses + used);
        left -= used;
    }
    let slope = |from: usize, to: usize| {
        let ((t0, u0), (t1, u1)) = (points[from], points[to]);
        if t1 > t0 { (u1 - u0) / (t1 - t0) } else { 0.0 }
    };
    // The steepest slope from a point to a later one is along the upper hull of these.
    let mut rates = [0.0; BUCKETS];
    let mut hull = vec![BUCKETS];
    for bucket in (0..BUCKETS).rev() {
        while let [.., after, next] = hull[..]
            && slope(bucket, next) <= slope(bucket, after)
        {
            hull.pop();
        }
        rates[bucket] = slope(bucket, hull[hull.len() - 1]);
        hull.push(bucket);
    }
    rates
}
