//! Values by number.

use std::collections::BTreeMap;

/// Values by number, in order of their numbers.
#[derive(Debug)]
pub(crate) struct Numbered<T> {
    next: u64,
    values: BTreeMap<u64, T>,
}

impl<T> Numbered<T> {
    pub(crate) const fn new() -> Self {
        Self { next: 0, values: BTreeMap::new() }
    }

    pub(crate) fn push(&mut self, value: T) -> u64 {
        self.values.insert(self.next, value);
        self.next += 1;
        self.next - 1
    }

    pub(crate) fn get_mut(&mut self, number: u64) -> Option<&mut T> {
        self.values.get_mut(&number)
    }

    pub(crate) fn numbers(&self, is_one: impl Fn(&T) -> bool) -> Vec<u64> {
        self.values.iter().filter(|(_, it)| is_one(it)).map(|(number, _)| *number).collect()
    }

    pub(crate) fn remove(&mut self, number: u64) -> Option<T> {
        self.values.remove(&number)
    }
}
