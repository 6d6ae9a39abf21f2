//! Values by number.

use std::collections::VecDeque;

/// Values by number; roughly the oldest are removed first.
#[derive(Debug)]
pub(crate) struct Numbered<T> {
    /// Number of the first value.
    first: u64,
    values: VecDeque<Option<T>>,
}

impl<T> Numbered<T> {
    pub(crate) const fn new() -> Self {
        Self { first: 0, values: VecDeque::new() }
    }

    pub(crate) fn push(&mut self, value: T) -> u64 {
        self.values.push_back(Some(value));
        self.first + self.values.len() as u64 - 1
    }

    pub(crate) fn get_mut(&mut self, number: u64) -> Option<&mut T> {
        let at = number.checked_sub(self.first)?;
        self.values.get_mut(at as usize)?.as_mut()
    }

    pub(crate) fn numbers(&self, is_one: impl Fn(&T) -> bool) -> Vec<u64> {
        let all = (self.first..).zip(&self.values);
        all.filter(|(_, it)| it.as_ref().is_some_and(&is_one)).map(|(number, _)| number).collect()
    }

    pub(crate) fn remove(&mut self, number: u64) -> Option<T> {
        let at = number.checked_sub(self.first)?;
        let value = self.values.get_mut(at as usize)?.take();
        while let Some(None) = self.values.front() {
            self.values.pop_front();
            self.first += 1;
        }
        value
    }
}
