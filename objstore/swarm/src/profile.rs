//! Activations of entries in the last steps.

/// Index of an entry: the keys and values of one token in one layer, in order of the tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Entry(pub u32);

/// Activations without the other entry that a distance adds to those that it counts: few
/// activations prove little, and less about an entry that is activated often. Without it, a new
/// entry of several groups joins clusters by chance.
const DOUBT: u32 = 2;

/// Which entries were activated in each of the last steps.
#[derive(Debug, Clone)]
pub struct Profile {
    /// Entries of each step; the oldest is replaced.
    steps: Vec<Vec<Entry>>,
    next: usize,
    recorded: u32,
    /// A bit for each step, by entry.
    bits: Vec<u64>,
    activations: Vec<u32>,
}

impl Profile {
    /// Makes a profile of the last `steps` steps.
    ///
    /// # Panics
    /// Panics if `steps` is 0.
    #[must_use]
    pub fn new(steps: usize) -> Self {
        assert!(steps > 0, "a profile of no steps");
        let (bits, activations) = Default::default();
        Self { steps: vec![Vec::new(); steps], next: 0, recorded: 0, bits, activations }
    }

    /// Records the entries that a step activates, which replaces the oldest step.
    pub fn record(&mut self, active: &[Entry]) {
        let (at, words) = (self.next, self.words());
        self.next = (at + 1) % self.steps.len();
        self.recorded = (self.recorded + 1).min(self.steps.len() as u32);
        let (word, bit) = (at / 64, 1 << (at % 64));
        let mut step = std::mem::take(&mut self.steps[at]);
        for old in step.drain(..) {
            self.bits[old.0 as usize * words + word] &= !bit;
            self.activations[old.0 as usize] -= 1;
        }
        let entries = active.iter().map(|entry| entry.0 as usize + 1).max().unwrap_or(0);
        if entries > self.activations.len() {
            self.activations.resize(entries, 0);
            self.bits.resize(entries * words, 0);
        }
        for entry in active {
            let bits = &mut self.bits[entry.0 as usize * words + word];
            if *bits & bit == 0 {
                *bits |= bit;
                self.activations[entry.0 as usize] += 1;
                step.push(*entry);
            }
        }
        self.steps[at] = step;
    }

    /// Returns the number of steps that activated an entry.
    #[must_use]
    pub fn activations(&self, entry: Entry) -> u32 {
        self.activations.get(entry.0 as usize).copied().unwrap_or(0)
    }

    /// Returns the distance, at most 1: the fraction of the activations of `from` that lack `to`,
    /// by the fraction that would if both had nothing in common. Two more that lack it are added.
    ///
    /// It has a direction: an entry of several groups is near to the members of all of them, and
    /// they are far from it. So it is replicated, and represents none of them. The paper's
    /// equations 2 and 3 are symmetric, and do not allow for chance.
    #[must_use]
    pub fn distance(&self, from: Entry, to: Entry) -> f64 {
        let both = self.row(from).iter().zip(self.row(to));
        let together = both.map(|(from, to)| (from & to).count_ones()).sum();
        self.apart(from, to, together)
    }

    /// Returns all other entries that are closer than `radius`, and how far they are, in order of
    /// entries.
    #[must_use]
    pub fn neighbours(&self, from: Entry, radius: f64) -> Vec<(f64, Entry)> {
        let mut together = vec![0; self.activations.len()];
        for (at, step) in self.steps.iter().enumerate() {
            if self.row(from).get(at / 64).is_some_and(|word| word >> (at % 64) & 1 == 1) {
                step.iter().for_each(|other| together[other.0 as usize] += 1);
            }
        }
        let others = (0..).map(Entry).zip(together).filter(|(other, _)| *other != from);
        let distances = others.map(|(other, both)| (self.apart(from, other, both), other));
        distances.filter(|(distance, _)| *distance < radius).collect()
    }

    fn apart(&self, from: Entry, to: Entry, together: u32) -> f64 {
        let all = self.activations(from) + DOUBT;
        let [without, of] = [all - together, self.recorded - self.activations(to)];
        let expected = f64::from(of) / f64::from(self.recorded);
        (f64::from(without) / f64::from(all) / expected).min(1.0)
    }

    fn words(&self) -> usize {
        self.steps.len().div_ceil(64)
    }

    /// Returns the bits of an entry; none if it was never activated.
    fn row(&self, entry: Entry) -> &[u64] {
        let (words, at) = (self.words(), entry.0 as usize);
        self.bits.get(at * words..(at + 1) * words).unwrap_or_default()
    }
}
